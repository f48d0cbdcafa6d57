"""Errors of the collectives of a grid, on this rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from reshard.errors import RemoteError, ReshardError


class Peers(Protocol):
    """Ranks that may wait for this one."""

    def mark_failed(self) -> None:
        """Tell these ranks that this rank will start no more collectives."""


class Failures:
    """The first error on this rank, shared by the axes of a grid. After it, no collective starts.

    Attributes:
        report: publishes an error for all ranks of the grid.
    """

    def __init__(self, report: Callable[[ReshardError], Any] = lambda error: None) -> None:
        self.report = report
        self._first: ReshardError | None = None
        self._peers: weakref.WeakSet[Peers] = weakref.WeakSet()

    def watch(self, peers: Peers) -> None:
        """Tell some ranks when a collective fails."""
        self._peers.add(peers)

    def add(self, error: ReshardError) -> ReshardError:
        """Note an error, and return it."""
        self._first = self._first or error
        for peers in list(self._peers):
            peers.mark_failed()
        return error

    def check(self) -> None:
        """Raise RemoteError after a failure: ranks may wait in different collectives, which must not meet."""
        if self._first is not None:
            raise RemoteError(
                f"an earlier collective of this grid failed; make a new grid. It failed so: {self._first}"
            )
