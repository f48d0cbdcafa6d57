"""Host copies of CUDA tensors, for transfers that run on the CPU only.

Such a transfer copies each source to the host and each result to the device, takes pinned host memory for both, and
goes over Gloo.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from reshard.errors import ResourceError

#: Types of devices whose tensors are copied.
COPIED_DEVICE_TYPES = {"cuda"}

_T = TypeVar("_T", bound="torch.Tensor | None")


def is_copied(device_type: str, needs_cpu: bool) -> bool:
    """Whether a transfer between tensors on this type of device runs on copies in host memory.

    Args:
        needs_cpu: whether an option of the transfer is for the CPU only.
    """
    return needs_cpu and device_type in COPIED_DEVICE_TYPES


def to_host(array: _T) -> _T:
    """A pinned copy of a CUDA tensor in host memory. A CPU tensor is returned as it is, and None for None.

    Blocks the host until the current stream has computed the tensor.

    Raises:
        ResourceError: CUDA or the host has too little memory, for example.
    """
    if array is None or array.device.type not in COPIED_DEVICE_TYPES:
        return array
    pinned = array.device.type == "cuda"
    try:
        host: Any = torch.empty(array.shape, dtype=array.dtype, device="cpu", pin_memory=pinned)
        with torch.no_grad():
            host.copy_(array)
    except RuntimeError as error:
        raise ResourceError(f"cannot copy a tensor of {array.nbytes} bytes to host memory: {error}") from error
    return host


def to_device(host: torch.Tensor, device: torch.device, out: torch.Tensor | None) -> torch.Tensor:
    """A copy of a host tensor on ``device``, or ``out`` with its values if that is given.

    Raises:
        ResourceError: CUDA cannot copy.
    """
    try:
        if out is None:
            return host.to(device)
        with torch.inference_mode(out.is_inference()), torch.no_grad():
            out.copy_(host)
    except RuntimeError as error:
        raise ResourceError(f"received {host.nbytes} bytes, but cannot copy them to {device}: {error}") from error
    return out
