"""Checks of the arrays of a transfer: kind, shape, dtype, device and memory overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.runtime.torch_compat import is_transformed

#: Supported device types. All arrays of one transfer must have the same device type.
DEVICE_TYPES = ("cpu", "cuda")

#: ``max_work`` for ``np.shares_memory``: its exact search can take exponential time for unusual strides.
_MAX_WORK = 100_000


def check_array(
    array: Any,
    shape: tuple[int, ...] | None,
    dtype: str,
    role: str,
    name: str | None,
    rank: int,
    device_type: str = "cpu",
) -> torch.Tensor | None:
    """Return the array after checking that it matches this rank's shard; None if the rank has no shard.

    Args:
        shape: shape of the shard; None if the rank has no shard, so ``array`` must be None.
        role: ``"the source"`` or ``"the destination"``, for the error.
        name: name of the tensor; None if the plan has one unnamed tensor.

    Raises:
        ArgumentError: the array is missing, not expected on this rank, or has the wrong kind, shape, dtype or device.
    """
    what = f"tensor {name!r}" if name is not None else "the tensor"
    if role == "the destination":
        what = f"out of {what}"
    if shape is None:
        if array is not None:
            raise ArgumentError(f"{what}: rank {rank} is not in {role} layout and must pass None")
        return None
    if array is None:
        raise ArgumentError(f"{what}: rank {rank} is in {role} layout, but passes None")
    check_movable(array, what, rank)
    if tuple(array.shape) != shape or dtype_name(array.dtype) != dtype:
        raise ArgumentError(
            f"{what}: rank {rank} passes {dtype_name(array.dtype)} {list(array.shape)}, "
            f"but its shard in {role} is {dtype} {list(shape)}"
        )
    if array.device.type != device_type:
        raise ArgumentError(
            f"{what}: rank {rank} passes a tensor on {array.device}, but this transfer moves {device_type} tensors"
        )
    return array


def detach_source(source: torch.Tensor | None) -> torch.Tensor | None:
    """Detach a source from autograd. A tensor with a lazy conjugation or negation is copied.

    Call this function after :func:`check_no_aliasing`, because that check needs the caller's memory, not a copy.
    """
    return None if source is None else source.detach().resolve_conj().resolve_neg()


def wait_for_collective(array: Any) -> Any:
    """Wait for an ``AsyncCollectiveTensor``, such as tensor parallelism returns. Return other arrays as they are."""
    return array.trigger_wait() if hasattr(array, "trigger_wait") else array


def check_movable(array: Any, what: str, rank: int) -> None:
    """Raise ArgumentError unless the array is a dense torch tensor with storage, on the CPU or the current GPU."""
    if not isinstance(array, torch.Tensor):
        raise ArgumentError(f"{what}: rank {rank} passes {type(array).__name__}, not a torch tensor")
    check_dense(array, what, rank)
    device = array.device
    if device.type not in DEVICE_TYPES:
        kinds = " and ".join(DEVICE_TYPES)
        raise ArgumentError(f"{what}: rank {rank} passes a tensor on {device}; only {kinds} are supported")
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ArgumentError(
            f"{what}: rank {rank} passes a tensor on {device}, but its current device is "
            f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first"
        )
    if problem := find_storage_problem(array):
        raise ArgumentError(f"{what}: rank {rank} passes a {problem}")


def find_storage_problem(array: torch.Tensor) -> str:
    """The reason why the elements of a dense tensor are not in memory; empty if they are."""
    if not array.numel():
        return ""
    storage = array.untyped_storage()
    if storage.device.type == "meta" or not _has_memory(storage):
        return f"{type(array).__name__} that has no storage"
    needed = _address_range(array)[1] - storage.data_ptr()
    if needed > storage.nbytes():
        return f"tensor that ends at byte {needed} of a storage of {storage.nbytes()} bytes"
    return ""


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether a storage has an address; that of a subclass which wraps other tensors, such as DTensor, has none."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        return False


def check_dense(array: torch.Tensor, what: str, rank: int) -> None:
    """Raise ArgumentError unless a torch tensor is dense and outside of transforms."""
    if is_transformed(array):
        raise ArgumentError(f"{what}: rank {rank} passes a tensor inside a torch.func transform, such as vmap or grad")
    if getattr(array, "is_nested", False):
        raise ArgumentError(f"{what}: rank {rank} passes a nested tensor; only dense tensors are supported")
    if array.layout is not torch.strided or array.is_quantized:
        raise ArgumentError(
            f"{what}: rank {rank} passes a sparse or quantized tensor; only dense tensors are supported"
        )


def check_base(base: Any, source: torch.Tensor | None, what: str, rank: int) -> None:
    """Raise ArgumentError unless the base of a delta has dtype, shape and device of the source shard.

    Args:
        what: name of the tensor in the error.
    """
    if source is None:
        raise ArgumentError(
            f"{what}: rank {rank} is not in the source layout and must pass base=None; "
            "a destination rank passes the base as out"
        )
    check_movable(base, f"base of {what}", rank)
    given, needed = ((dtype_name(item.dtype), list(item.shape), item.device.type) for item in (base, source))
    if given != needed:
        raise ArgumentError(
            f"{what}: rank {rank} passes a base of {given[0]} {given[1]} on {given[2]}, but the source shard is "
            f"{needed[0]} {needed[1]} on {needed[2]}"
        )


def check_no_aliasing(
    src: Sequence[torch.Tensor | None],
    dst: Sequence[torch.Tensor | None],
    names: Sequence[str | None],
    role: str = "a source",
) -> None:
    """Raise ArgumentError if a destination overlaps a source, another destination or itself, or is a lazy view.

    Args:
        names: names of the tensors; None or "" for a single unnamed tensor.
        role: what ``src`` is, for the error.
    """
    filled = [array for array in src if array is not None and array.numel()]
    src_storages = {array.untyped_storage().data_ptr() for array in filled}
    src_ranges = [_address_range(array) for array in filled]
    outs: list[tuple[int, int, torch.Tensor, str]] = []  # start address, end address, array, name in the error
    for array, name in zip(dst, names, strict=True):
        if array is None:
            continue
        what = f"out of {name!r}" if name else "out"
        if array.is_conj() or array.is_neg():  # also without elements: such a view has no bytes to write
            raise ArgumentError(f"{what} is a conjugated or negated view; pass out.resolve_conj().resolve_neg()")
        if not array.numel():
            continue
        if array.untyped_storage().data_ptr() in src_storages:
            raise ArgumentError(f"{what} shares storage with {role}; pass separate storage")
        start, stop = _address_range(array)
        if any(start < last and first < stop for first, last in src_ranges):
            raise ArgumentError(f"{what} shares memory with {role}; pass separate memory")
        if has_overlapping_elements(array):
            raise ArgumentError(f"{what} has overlapping elements: its strides are {array.stride()}")
        outs.append((start, stop, array, what))
    outs.sort(key=lambda one: one[:2])
    active: list[tuple[int, int, torch.Tensor, str]] = []  # earlier outs whose address range overlaps the next one
    for out in outs:
        active = [other for other in active if other[1] > out[0]]
        for other in active:
            if MemoryExtent(other[2]).may_overlap(MemoryExtent(out[2])):
                raise ArgumentError(
                    f"{other[3]} and {out[3]} share memory, as tied tensors do; move one of them, or pass separate "
                    "memory for each"
                )
        active.append(out)


class MemoryExtent:
    """The memory of an array, without a reference to it. NumPy reads the address and strides, never the elements."""

    def __init__(self, array: torch.Tensor) -> None:
        self.start, self.stop = _address_range(array)
        self._address, self._shape, self._strides = array.data_ptr(), array.shape, array.stride()
        self._itemsize = array.element_size()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self._address, False),
            "shape": tuple(self._shape),
            "strides": tuple(stride * self._itemsize for stride in self._strides),
            "typestr": f"|V{self._itemsize}",
            "version": 3,
        }

    def may_overlap(self, other: MemoryExtent) -> bool:
        """Whether two arrays share a byte; also True if NumPy reaches its work limit before it knows."""
        if self.stop <= other.start or other.stop <= self.start:
            return False
        try:
            return np.shares_memory(self, other, max_work=_MAX_WORK)  # type: ignore[arg-type,call-overload]
        except np.exceptions.TooHardError:
            return True


def _address_range(array: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of an array, and the address after its last byte."""
    if array.is_contiguous():
        return array.data_ptr(), array.data_ptr() + array.nbytes
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
    return array.data_ptr(), array.data_ptr() + (last + 1) * array.element_size()


def has_overlapping_elements(array: torch.Tensor) -> bool:
    """Whether two elements may share memory: some stride does not exceed the span of all dims with smaller strides."""
    if array.is_contiguous():
        return False
    span = 0
    for stride, size in sorted(zip(array.stride(), array.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return True
            span += (size - 1) * stride
    return False
