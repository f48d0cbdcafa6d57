"""Checks that this process may open the file descriptors that it is about to need."""

from __future__ import annotations

import errno
import math
import resource
from pathlib import Path

from reshard.errors import ResourceError

#: Descriptors kept free for other code in the process, such as module imports. Gloo aborts the process when it runs
#: out of descriptors.
SPARE = 8


def has_room(needed: int) -> bool:
    """Whether the process may open ``needed`` more descriptors and keep :data:`SPARE` free."""
    found, limit = _count_open()
    return found + needed + SPARE <= limit


def check_room(rank: int, needed: int, purpose: str) -> None:
    """Raise unless the process may open ``needed`` more descriptors and keep :data:`SPARE` free.

    Args:
        rank: named in the error. needed: number of descriptors. purpose: what they are for, as a noun phrase.

    Raises:
        ResourceError: the limit is too low.
    """
    if not has_room(needed):
        found, limit = _count_open()
        raise _describe(rank, found, limit, f"{purpose} needs {needed} more plus {SPARE} spare")


def is_shortage(error: OSError) -> bool:
    """Whether an error means that no file descriptor was available."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def out_of_descriptors(rank: int, purpose: str) -> ResourceError:
    """The error to raise after the system refused a descriptor."""
    return _describe(rank, *_count_open(), f"{purpose} needs one more")


def _describe(rank: int, found: int, limit: float, need: str) -> ResourceError:
    return ResourceError(
        f"rank {rank} has {found} of {limit} file descriptors open, and {need}: close unused groups "
        "(group.close(), reshard.close_group) or raise the limit (ulimit -n)"
    )


def _count_open() -> tuple[int, float]:
    """The number of open descriptors (0 if unknown) and the limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 0, math.inf
    try:
        # Descriptors at or above the limit were opened before it was lowered. One belongs to this listing.
        return sum(int(each.name) < limit for each in Path("/dev/fd").iterdir()) - 1, limit
    except OSError as error:
        return limit if is_shortage(error) else 0, limit
