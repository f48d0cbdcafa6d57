"""Queues of the CPU executor: each holds the operations of one kind, in the plan's order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.runtime.cpu.staging import Pool
from reshard.runtime.program import Event
from reshard.runtime.transport import Work


@dataclass(frozen=True)
class Notification:
    """A byte that rank ``sender`` sends when message ``id`` has finished on ``sender``; ``event`` names that end."""

    id: int
    sender: int
    event: Event


class OperationQueue:
    """Operations of one kind, in the plan's order.

    Attributes:
        ops: all operations.
        next: index of the first operation that is not posted.
        posted: posted and unfinished operations, each with its work and its staging slot (None if it needs none), or
            its byte for a notification.
        pool: staging slots; None for notifications.
        changed: condition that wakes the queue's thread.
        sleeping: whether the queue's thread waits for ``changed`` because nothing is posted.
    """

    def __init__(self, lock: threading.Lock, ops: Sequence[Any], pool: Pool | None = None) -> None:
        self.ops, self.next = ops, 0
        self.pool: Any = pool
        self.posted: deque[tuple[Any, Work, torch.Tensor | None]] = deque()
        self.changed = threading.Condition(lock)
        self.sleeping = False

    @property
    def is_finished(self) -> bool:
        """Whether all operations are done."""
        return self.next == len(self.ops) and not self.posted
