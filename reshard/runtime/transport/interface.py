"""The interface of a transport, and waiting for its operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from reshard.errors import TransferTimeoutError

#: A wait may time out this much before its deadline, because transports count whole milliseconds.
ROUNDING_SECONDS = 0.02


class Work(Protocol):
    """An operation that was posted."""

    def wait(self, timeout: timedelta) -> Any:
        """Block until it is finished; raise if it failed or ``timeout`` passed."""


class _Works:
    """Several operations that finish together."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta) -> None:
        """Wait for all of them."""
        deadline = time.monotonic() + timeout.total_seconds()
        for work in self._works:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


def join(works: Sequence[Work]) -> Work:
    """One operation that finishes when all of these have finished."""
    return works[0] if len(works) == 1 else _Works(works)


class Transport(Protocol):
    """Moves flat uint8 buffers between ranks. Messages of one pair of ranks and one tag arrive in the order sent."""

    def send(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start sending a buffer, which must not change until the work is finished."""
        ...

    def recv(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start receiving exactly ``buffer.numel()`` bytes."""
        ...

    def abort(self) -> None:
        """Close the connections, so that operations in progress fail and nothing writes into a buffer any more."""
        ...


class BrokenConnectionError(ConnectionError):
    """The connection to rank ``peer`` broke."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


def wait_for(work: Work, deadline: float, check: Callable[[], None], rank: int, peer: int, what: str) -> None:
    """Wait for an operation.

    Args:
        deadline: a value of ``time.monotonic()``.
        check: function that is called before the wait and when it fails. It raises an error that another rank reported.
        rank, peer: this rank and the other end.
        what: name of the operation in errors.

    Raises:
        TransferTimeoutError: the deadline passed. BrokenConnectionError: the transport failed. Or as ``check``.
    """
    check()
    try:
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except Exception as error:
        check()
        if time.monotonic() >= deadline - ROUNDING_SECONDS:
            raise TransferTimeoutError(f"rank {rank}: {what} did not finish in time") from error
        raise BrokenConnectionError(peer, f"{what} failed: {error}") from error
