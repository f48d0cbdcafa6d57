"""Which arrays a transfer takes: what fits its layout, and lies apart in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError

#: Types of devices between which arrays travel; those of one transfer are all of one type.
DEVICE_TYPES = ("cpu", "cuda")

#: Of NumPy's search for a common byte, which may take time without bound for odd strides.
_MOST_WORK = 100_000


def check_array(
    array: Any,
    shape: tuple[int, ...] | None,
    dtype: str,
    role: str,
    name: str | None,
    rank: int,
    device_type: str = "cpu",
) -> torch.Tensor | None:
    """The array if it is what the layout gives this rank, on a device of the type that all use.

    Raises:
        ArgumentError: it is missing, given where none belongs, or of the wrong kind, shape or dtype.
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
            f"{what}: rank {rank} passes a tensor on {array.device}, but this moves {device_type} tensors"
        )
    return array


def as_plain(source: torch.Tensor | None) -> torch.Tensor | None:
    """A source as plain memory, without autograd; a lazily conjugated or negated one is copied.

    Only after :func:`check_apart`, which must see the memory that the caller passed.
    """
    return None if source is None else source.detach().resolve_conj().resolve_neg()


def waited_for(array: Any) -> Any:
    """An array as it is; of the ``AsyncCollectiveTensor`` that tensor parallelism gives, what the collective gave."""
    return array.trigger_wait() if hasattr(array, "trigger_wait") else array


def check_movable(array: Any, what: str, rank: int) -> None:
    """Raise ArgumentError unless the array is a dense tensor whose elements travel as bytes."""
    if not isinstance(array, torch.Tensor):
        raise ArgumentError(f"{what}: rank {rank} passes {type(array).__name__}, not a torch tensor")
    if array.layout is not torch.strided or array.is_quantized:
        raise ArgumentError(f"{what}: rank {rank} passes a sparse or quantized tensor; only dense ones can travel")
    if getattr(array, "is_nested", False):
        raise ArgumentError(f"{what}: rank {rank} passes a nested tensor; only dense ones can travel")
    if array.device.type not in DEVICE_TYPES:
        kinds = " and ".join(DEVICE_TYPES)
        raise ArgumentError(f"{what}: rank {rank} passes a tensor on {array.device}; {kinds} tensors can travel")
    if array.device.type == "cuda" and array.device.index != torch.cuda.current_device():
        raise ArgumentError(
            f"{what}: rank {rank} passes a tensor on {array.device}, but its current device is "
            f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first"
        )
    storage = array.untyped_storage()
    if array.numel() and (storage.device.type == "meta" or storage.data_ptr() == 0):
        raise ArgumentError(f"{what}: rank {rank} passes a {type(array).__name__} that has no memory of its own")


def check_apart(
    src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None], names: Sequence[str | None]
) -> None:
    """Raise ArgumentError if a destination shares storage with a source, or its elements with another or itself.

    Args:
        names: of the tensors, None or "" where there is one.
    """
    filled = [array for array in src if array is not None and array.numel()]
    sources = {array.untyped_storage().data_ptr() for array in filled}
    reaches = [_reach(array) for array in filled]
    outs: list[tuple[int, int, torch.Tensor, str]] = []
    for array, name in zip(dst, names, strict=True):
        if array is None or not array.numel():
            continue
        what = f"out of {name!r}" if name else "out"
        if array.untyped_storage().data_ptr() in sources:
            raise ArgumentError(f"{what} shares storage with a source; they must be apart")
        start, stop = _reach(array)
        if any(start < last and first < stop for first, last in reaches):
            raise ArgumentError(f"{what} shares memory with a source; they must be apart")
        if shares_with_itself(array):
            raise ArgumentError(f"{what} has overlapping elements: its strides are {array.stride()}")
        if array.is_conj() or array.is_neg():
            raise ArgumentError(f"{what} is a conjugated or negated view; pass out.resolve_conj().resolve_neg()")
        outs.append((start, stop, array, what))
    outs.sort(key=lambda one: one[:2])
    reaching: list[tuple[int, int, torch.Tensor, str]] = []  # of those before, what may share memory with the next
    for out in outs:
        reaching = [other for other in reaching if other[1] > out[0]]
        for other in reaching:
            if _share(other[2], out[2]):
                raise ArgumentError(
                    f"{other[3]} and {out[3]} share memory, as tied tensors do; move one of them, or give each its own"
                )
        reaching.append(out)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two arrays have a byte in common; what is too hard to tell counts as such."""
    try:
        return np.shares_memory(_Memory(a), _Memory(b), max_work=_MOST_WORK)  # type: ignore[arg-type,call-overload]
    except np.exceptions.TooHardError:
        return True


class _Memory:
    """Where the elements of an array lie, for NumPy, which does not touch them."""

    def __init__(self, array: torch.Tensor) -> None:
        size = array.element_size()
        self.__array_interface__ = {
            "data": (array.data_ptr(), False),
            "shape": tuple(array.shape),
            "strides": tuple(stride * size for stride in array.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def _reach(array: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte of an array to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
    return array.data_ptr(), array.data_ptr() + (last + 1) * array.element_size()


def shares_with_itself(array: torch.Tensor) -> bool:
    """Whether two elements may be one place in memory: a stride does not step over what smaller strides span."""
    span = 0
    for stride, size in sorted(zip(array.stride(), array.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return True
            span += (size - 1) * stride
    return False
