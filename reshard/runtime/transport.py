"""Messages under way: what a transport gives, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from reshard.errors import TransferTimeoutError

#: How much earlier than asked a wait may run out, which counts whole milliseconds.
ROUNDING_SECONDS = 0.02


class Work(Protocol):
    """An operation under way."""

    def wait(self, timeout: timedelta) -> Any:
        """Block until done; raise if it failed or ``timeout`` passed."""


class Transport(Protocol):
    """Moves flat byte buffers between ranks; messages of one pair and tag arrive in the order of sending."""

    def send(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start sending a buffer, which must not change until the work is done."""
        ...

    def recv(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start receiving exactly ``buffer.numel()`` bytes."""
        ...


class BrokenConnectionError(ConnectionError):
    """The connection to rank ``peer`` broke."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


def wait_for(work: Work, deadline: float, check: Callable[[], None], rank: int, peer: int, what: str) -> None:
    """Wait on ``rank`` for a work that ``peer`` has the other side of; ``what`` names it.

    Raises:
        TransferTimeoutError: the deadline passed. BrokenConnectionError: the transport failed. What ``check`` raises.
    """
    check()
    try:
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except Exception as error:
        check()
        if time.monotonic() >= deadline - ROUNDING_SECONDS:
            raise TransferTimeoutError(f"rank {rank}: {what} did not finish in time") from error
        raise BrokenConnectionError(peer, f"{what} failed: {error}") from error
