"""File descriptors: whether this process may open as many as it is about to."""

from __future__ import annotations

import errno
import math
import resource
from pathlib import Path

from reshard.errors import ResourceError

#: What to leave for whatever else the process opens meanwhile, modules that it imports among them. Gloo ends its
#: process where it runs out of descriptors.
SPARE = 8


def has_room(needed: int) -> bool:
    """Whether the process may open ``needed`` descriptors, and has :data:`SPARE` ones left then."""
    found, limit = _count_open()
    return found + needed + SPARE <= limit


def check_room(rank: int, needed: int, purpose: str) -> None:
    """Raise unless the process may open ``needed`` descriptors and some more.

    Raises:
        ResourceError: it may not; the text begins with ``rank`` and names what they are for.
    """
    if not has_room(needed):
        found, limit = _count_open()
        raise _describe(rank, found, limit, f"{purpose} takes {needed} more and {SPARE} to spare")


def is_shortage(error: OSError) -> bool:
    """Whether the system refused a descriptor for want of more."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def out_of_descriptors(rank: int, purpose: str) -> ResourceError:
    """The error where the system has just refused a descriptor."""
    return _describe(rank, *_count_open(), f"{purpose} takes one more")


def _describe(rank: int, found: int, limit: float, need: str) -> ResourceError:
    return ResourceError(
        f"rank {rank} has {found} of {limit} file descriptors open, and {need}: close groups that are not used any "
        "more (group.close(), reshard.close_group), or raise the limit (ulimit -n)"
    )


def _count_open() -> tuple[int, float]:
    """How many descriptors are open, 0 where the system does not say, and how many may be."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 0, math.inf
    try:
        # Numbers from the limit on are of before it was lowered. One is of the listing itself.
        return sum(int(each.name) < limit for each in Path("/dev/fd").iterdir()) - 1, limit
    except OSError as error:
        return limit if is_shortage(error) else 0, limit
