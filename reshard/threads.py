"""Start threads, whose number and memory the system limits."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from typing import Any

from reshard.errors import ResourceError

#: How often to look whether a thread that does not begin has ended.
BEGIN_CHECK_SECONDS = 0.1


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ResourceError: the system allows no further thread. The other ranks do not know of it yet.
    """
    thread._started = _Beginning(thread)  # type: ignore[attr-defined]
    try:
        thread.start()
    except RuntimeError as error:
        threading._limbo.pop(thread, None)  # type: ignore[attr-defined]
        refused = ResourceError(
            f"cannot start the thread {thread.name} beside {threading.active_count()} others: {error}; raise the limit "
            "of threads (ulimit -u, or that of the container) or of memory (ulimit -v)"
        )
        refused.is_published_by_reshard = False
        raise refused from error


def has_started(thread: threading.Thread | None) -> bool:
    """Whether a thread exists and its start did not fail. An interrupt may come while a thread starts."""
    return thread is not None and thread.ident is not None


class _Beginning(threading.Event):
    """The event for which ``Thread.start()`` waits.

    With too little memory, a thread ends before its first line, and Python waits for ever. So the wait also ends when
    the interpreter drops the function of the thread. Code written in Python could not run in such a thread.
    """

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread = thread
        self._ended: deque[Any] = deque()
        function = functools.partial(thread._bootstrap)  # type: ignore[attr-defined]
        self._watch = weakref.ref(function, self._ended.append)
        thread._bootstrap = function  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None) -> bool:
        """See the class."""
        vars(self._thread).pop("_bootstrap", None)  # from here on, only the interpreter holds it
        while timeout is None and not super().wait(BEGIN_CHECK_SECONDS):
            if self._ended and not self.is_set():
                raise RuntimeError("it ended before it began, for lack of memory")
        return super().wait(timeout)
