"""Control connections of one set of ranks: a star with the first member as the hub."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

from reshard.coordination.hub_and_spokes import Hub, Spoke
from reshard.forks import call_at_exit


class ControlConnections:
    """Control connections of one rank: ``hub`` on the first member only, ``spoke`` on all others only.

    Both are None before the rank's first round. ``reason`` is the class and text of the error that ended the last call
    of this rank, if one did.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.hub: Hub | None = None
        self.spoke: Spoke | None = None
        self.reason: tuple[str, str] | None = None

    def reaches(self, rank: int) -> bool:
        """Whether this rank has an open connection to ``rank``, which shows that its process is alive."""
        if self.hub is not None:
            return self.hub.is_alive(rank)
        return self.spoke is not None and rank == self.members[0] and not self.spoke.is_lost()

    def find_lost(self) -> int | None:
        """A member whose connection closed without a goodbye, if any."""
        if self.hub is not None:
            return self.hub.find_lost()
        if self.spoke is not None and self.spoke.is_lost():
            return self.members[0]
        return None

    def find_left(self) -> int | None:
        """A member that closed its connection with a goodbye, if any."""
        if self.hub is not None:
            with contextlib.suppress(OSError, ValueError):  # ValueError: another thread has closed this end
                self.hub.drain()
            return self.hub.find_left()
        if self.spoke is not None:
            with contextlib.suppress(EOFError, OSError):
                self.spoke.pump(0.0)
            return self.members[0] if self.spoke.has_left else None
        return None

    def find_reason(self) -> Sequence[str] | None:
        """Class and text of the error that a member gave when it said goodbye, if any."""
        self.find_left()
        return next((end.reason for end in (self.hub, self.spoke) if end is not None and end.reason), None)

    def close(self) -> None:
        """Send a goodbye and close. The other ranks then know that this rank left on purpose, and after which error."""
        for end in (self.hub, self.spoke):
            if end is not None:
                end.close(self.reason)

    def close_at_exit(self) -> None:
        """Say goodbye and close when the process ends."""
        _open.add(self)
        call_at_exit(_close_all, priority=10)


_open: weakref.WeakSet[ControlConnections] = weakref.WeakSet()


def _close_all() -> None:
    for links in list(_open):
        links.close()
