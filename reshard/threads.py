"""Start threads, whose number and memory the system limits."""

from __future__ import annotations

import threading

from reshard.errors import ResourceError


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ResourceError: the system allows no further thread. The other ranks do not know of it yet.
    """
    try:
        thread.start()
    except RuntimeError as error:
        refused = ResourceError(
            f"cannot start the thread {thread.name} beside {threading.active_count()} others: {error}; raise the limit "
            "of threads (ulimit -u, or that of the container) or of memory (ulimit -v)"
        )
        refused.is_published_by_reshard = False
        raise refused from error


def has_started(thread: threading.Thread | None) -> bool:
    """Whether a thread exists and its start did not fail. An interrupt may come while a thread starts."""
    return thread is not None and thread.ident is not None
