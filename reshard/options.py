"""What callers may choose beside layouts and arrays, checked."""

from __future__ import annotations

from typing import Any

import torch

from reshard.arrays import DEVICE_TYPES
from reshard.errors import ArgumentError

DEFAULT_TIMEOUT_SECONDS = 300.0
#: What a call does when ranks are lost in it: an error, an error with an offer, or go on without them.
ON_LOSS = ("raise", "offer", "carry_on")


def check_device_type(device: Any) -> None:
    """Raise ArgumentError unless arrays travel between devices of that type."""
    if device not in DEVICE_TYPES:
        raise ArgumentError(f"device is {device!r}; it must be one of {', '.join(DEVICE_TYPES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device is 'cuda', but this process has no CUDA device")


def check_verify(verify: Any, device: str) -> None:
    """Raise ArgumentError unless digests can be compared between devices of a type."""
    if not isinstance(verify, bool):
        raise ArgumentError(f"verify is {verify!r}; it must be True or False")
    if verify and device != "cpu":
        raise ArgumentError(f"verify=True compares digests of CPU tensors; these are on {device}")


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


def check_on_loss(on_loss: Any, device: str) -> None:
    """Raise ArgumentError unless it is one of :data:`ON_LOSS` and possible between devices of a type."""
    if not isinstance(on_loss, str) or on_loss not in ON_LOSS:
        raise ArgumentError(f"on_loss is {on_loss!r}; it must be one of {', '.join(map(repr, ON_LOSS))}")
    if on_loss != "raise" and device != "cpu":
        raise ArgumentError(f"on_loss={on_loss!r} is for CPU tensors; these are on {device}")
