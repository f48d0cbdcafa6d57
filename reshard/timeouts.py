"""Checks of timeouts that users pass, and calls that end at a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from numbers import Real
from typing import Any

from reshard.errors import ArgumentError
from reshard.formatting import brief
from reshard.threads import start_thread

DEFAULT_TIMEOUT_SECONDS = 300.0
#: How long ranks of other jobs may take to connect.
DEFAULT_JOIN_SECONDS = 30.0


def check_timeout(timeout_seconds: Any) -> float:
    """Return the timeout as a float.

    Raises:
        ArgumentError: the timeout is not a number of seconds above 0 and at most a million.
    """
    is_number = isinstance(timeout_seconds, Real) and not isinstance(timeout_seconds, bool)
    if not is_number or not 0 < timeout_seconds <= 1e6:
        is_finite = is_number and abs(timeout_seconds) < 1e300
        shown = format(timeout_seconds, ".6g") if is_finite else brief(timeout_seconds)
        raise ArgumentError(f"timeout_seconds is {shown}; it must be above 0 and at most a million seconds")
    return float(timeout_seconds)


def check_wait_timeout(timeout_seconds: Any) -> float | None:
    """Return the timeout of a wait: None (no limit), 0.0 (do not wait), or a float.

    Raises:
        ArgumentError: see :func:`check_timeout`.
    """
    if timeout_seconds is None:
        return None
    if isinstance(timeout_seconds, Real) and not isinstance(timeout_seconds, bool) and timeout_seconds == 0:
        return 0.0
    return check_timeout(timeout_seconds)


class PendingCall:
    """A call that another thread makes, and its result or error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Make the call."""
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.done.set()


def run_with_timeout(function: Callable[[], Any], seconds: float) -> Any:
    """Call ``function`` on a new thread; returns its result or raises its exception.

    Raises:
        RuntimeError: it did not return in time. Its thread keeps running.
        ResourceError: the system allows no further thread.
    """
    pending = PendingCall(function)
    start_thread(threading.Thread(target=pending.run, name="reshard-timeout", daemon=True))
    if not pending.done.wait(seconds):
        raise RuntimeError(f"timed out after {seconds:g} s")
    if pending.error is not None:
        raise pending.error
    return pending.result
