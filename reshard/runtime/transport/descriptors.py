"""Check that the file descriptor limit leaves room for the descriptors that this process is about to open."""

from __future__ import annotations

import errno
import math
import resource
from pathlib import Path

from reshard.errors import ResourceError

#: Number of descriptors to leave for other code in the process, such as module imports. Gloo aborts a process that has
#: run out of descriptors.
SPARE_DESCRIPTORS = 8


def has_descriptors(needed: int) -> bool:
    """Whether the process may open ``needed`` more descriptors with :data:`SPARE_DESCRIPTORS` left."""
    num_open, limit = _count_open()
    return num_open + needed + SPARE_DESCRIPTORS <= limit


def check_descriptors(rank: int, needed: int, purpose: str) -> None:
    """Raise an error unless :func:`has_descriptors`.

    Args:
        rank, purpose: for the error text; ``purpose`` is a noun phrase.
        needed: number of descriptors.

    Raises:
        ResourceError: the limit is too low.
    """
    if not has_descriptors(needed):
        num_open, limit = _count_open()
        raise _describe(rank, num_open, limit, f"{purpose} needs {needed} more plus {SPARE_DESCRIPTORS} spare")


def is_descriptor_shortage(error: OSError) -> bool:
    """Whether an error means that the process or the system has no free file descriptor."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def out_of_descriptors(rank: int, purpose: str) -> ResourceError:
    """The error to raise after the system refused to open a descriptor."""
    return _describe(rank, *_count_open(), f"{purpose} needs one more")


def _describe(rank: int, num_open: int, limit: float, need: str) -> ResourceError:
    return ResourceError(
        f"rank {rank} has {num_open} of {limit} file descriptors open, and {need}: close unused groups "
        "(group.close(), reshard.close_group) or raise the limit (ulimit -n)"
    )


def _count_open() -> tuple[int, float]:
    """The number of open descriptors and the limit. The number is 0 if it is unknown or if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 0, math.inf
    try:
        # Descriptors at or above the limit were opened before it was lowered. One descriptor is that of this listing.
        return sum(int(path.name) < limit for path in Path("/dev/fd").iterdir()) - 1, limit
    except OSError as error:
        return limit if is_descriptor_shortage(error) else 0, limit
