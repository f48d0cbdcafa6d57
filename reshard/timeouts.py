"""Time-outs that callers give, checked."""

from __future__ import annotations

from typing import Any

from reshard.errors import ArgumentError

DEFAULT_TIMEOUT_SECONDS = 300.0


def check_timeout(timeout_seconds: Any) -> float:
    """Raise ArgumentError unless it is a number of seconds above 0 and at most a million."""
    number = isinstance(timeout_seconds, (int, float)) and not isinstance(timeout_seconds, bool)
    if not number or not 0 < timeout_seconds <= 1e6:
        said = format(timeout_seconds, ".6g") if number and abs(timeout_seconds) < 1e300 else _name(timeout_seconds)
        raise ArgumentError(f"timeout_seconds is {said}; it must be above 0 and at most a million seconds")
    return float(timeout_seconds)


def check_patience(timeout_seconds: Any) -> float | None:
    """Raise ArgumentError unless it is None, for ever, or a number of seconds from 0 on."""
    if timeout_seconds is None or (timeout_seconds == 0 and not isinstance(timeout_seconds, bool)):
        return None if timeout_seconds is None else 0.0
    return check_timeout(timeout_seconds)


def _name(value: Any) -> str:
    """What a value is, for a message; some cannot even be printed."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
