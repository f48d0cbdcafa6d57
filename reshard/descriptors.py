"""File descriptors: whether this process may open as many as it is about to."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from reshard.errors import ResourceError

#: What to leave for whatever else the process opens meanwhile. Gloo ends the process where it runs out of descriptors.
SPARE = 8


def check_room(rank: int, needed: int, purpose: str, spare: int = 0) -> None:
    """Raise unless the process may open ``needed`` descriptors, and has ``spare`` ones left then.

    Raises:
        ResourceError: it may not; the text begins with ``rank`` and names what they are for.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    found = _count_open()
    if found is not None and found + needed + spare > limit:
        raise describe_shortage(rank, min(found, limit), limit, f"{purpose} takes {needed} more")


def is_shortage(error: OSError) -> bool:
    """Whether the system refused a descriptor for want of more."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def out_of_descriptors(rank: int, purpose: str) -> ResourceError:
    """The error where the system has just refused a descriptor."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = _count_open()
    return describe_shortage(rank, limit if found is None else min(found, limit), limit, f"{purpose} takes one more")


def describe_shortage(rank: int, found: int, limit: int, need: str) -> ResourceError:
    """The error of a rank that has ``found`` descriptors open of ``limit``."""
    return ResourceError(
        f"rank {rank} has {found} of {limit} file descriptors open, and {need}: close groups that are not used any "
        "more (group.close(), reshard.close_group), or raise the limit (ulimit -n)"
    )


def _count_open() -> int | None:
    """How many descriptors are open; None where the system does not say."""
    try:
        return sum(1 for _ in Path("/dev/fd").iterdir()) - 1  # one is of the listing itself
    except OSError as error:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if is_shortage(error) else None
