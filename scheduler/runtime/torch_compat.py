"""Parts of torch that are not public, or that differ between versions. All other modules use public names only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "fake_mode", "keep_rng"]


def fake_mode() -> Any:
    """A mode in which tensors have shapes, dtypes and devices, but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def keep_rng(device_type: str) -> Iterator[None]:
    """Restore the states of the random number generators at the end."""
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        yield
