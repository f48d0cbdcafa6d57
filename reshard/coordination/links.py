"""The connections of one set of ranks: the first rank has one to each of the others, which have one to it alone."""

from __future__ import annotations

import contextlib
import weakref

from reshard.coordination.control_channel import Hub, Spoke
from reshard.coordination.liveness.heartbeat import call_at_exit


class Links:
    """The connections of this rank. ``hub`` is set on the first member only, ``spoke`` on the others only.

    Both are None until the first round that this rank takes part in.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.hub: Hub | None = None
        self.spoke: Spoke | None = None

    def reaches(self, rank: int) -> bool:
        """Whether a connection to ``rank`` is open, so that its process is alive."""
        if self.hub is not None:
            return self.hub.reaches(rank)
        return self.spoke is not None and rank == self.members[0] and not self.spoke.is_lost()

    def find_ended(self) -> int | None:
        """A member whose process has ended, if this rank's connections show one."""
        if self.hub is not None:
            return self.hub.lost()
        if self.spoke is not None and self.spoke.is_lost():
            return self.members[0]
        return None

    def find_left(self) -> int | None:
        """A member that closed its connection in order, if this rank's connections show one."""
        if self.hub is not None:
            with contextlib.suppress(OSError):
                self.hub.drain()
            return self.hub.left()
        if self.spoke is not None:
            with contextlib.suppress(EOFError):
                self.spoke.pump(0.0)
            return self.members[0] if self.spoke.has_left else None
        return None

    def close(self) -> None:
        """Close in order, so that the other ranks know that this one left on purpose."""
        for end in (self.hub, self.spoke):
            if end is not None:
                end.close()

    def close_at_exit(self) -> None:
        """Close in order when the process ends."""
        _open.add(self)
        call_at_exit(_close_all, priority=10)


_open: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_all() -> None:
    for links in list(_open):
        links.close()
