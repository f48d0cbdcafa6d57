"""Host copies of CUDA tensors, for transfers that run on the CPU only.

They cost a copy of each source to the host and of each result to the device, memory of the host for both, and the
transfer goes over Gloo. Copies are in pinned memory.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

#: Types of devices whose tensors are copied.
COPIED_DEVICE_TYPES = {"cuda"}

_T = TypeVar("_T", bound="torch.Tensor | None")


def is_copied(device_type: str, needs_cpu: bool) -> bool:
    """Whether a transfer between tensors on this type of device runs on copies in host memory.

    Args:
        needs_cpu: an option of the transfer is for the CPU only.
    """
    return needs_cpu and device_type in COPIED_DEVICE_TYPES


def to_host(array: _T) -> _T:
    """A pinned copy of a CUDA tensor in host memory. A CPU tensor is returned as it is, and None for None.

    Blocks the host until the current stream has computed the tensor.
    """
    if array is None or array.device.type not in COPIED_DEVICE_TYPES:
        return array
    pinned = array.device.type == "cuda"
    host: Any = torch.empty(array.shape, dtype=array.dtype, device="cpu", pin_memory=pinned)
    with torch.no_grad():
        host.copy_(array)
    return host


def to_device(host: torch.Tensor, device: torch.device, out: torch.Tensor | None) -> torch.Tensor:
    """A copy of a host tensor on ``device``, or ``out`` with its values if that is given."""
    if out is None:
        return host.to(device)
    with torch.no_grad():
        out.copy_(host)
    return out
