"""What callers may choose beside layouts and arrays, checked."""

from __future__ import annotations

from typing import Any

import torch

from reshard.api.tensor_checks import DEVICE_TYPES
from reshard.errors import ArgumentError

#: What a call does when ranks are lost in it: an error, an error with an offer, or go on without them.
ON_LOSS = ("raise", "offer", "recover")


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


def check_on_loss(on_loss: Any, device: str) -> None:
    """Raise ArgumentError unless it is one of :data:`ON_LOSS` and possible between devices of a type."""
    if not isinstance(on_loss, str) or on_loss not in ON_LOSS:
        raise ArgumentError(f"on_loss is {on_loss!r}; it must be one of {', '.join(map(repr, ON_LOSS))}")
    if on_loss != "raise" and device != "cpu":
        raise ArgumentError(f"on_loss={on_loss!r} is for CPU tensors; these are on {device}")
