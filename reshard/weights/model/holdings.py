"""The tensors of a model, and the regions of them that this rank holds."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from reshard.api.arrays.dtensors import is_dtensor
from reshard.api.arrays.tensor_checks import find_storage_problem
from reshard.errors import ArgumentError, LayoutError
from reshard.sharding import Box, Layout, Mesh, RegionLayout, check_shape

#: Values of a nested state dict that are not tensors.
Value = bool | int | float | str | None
#: Types of plain tensors, which are no DTensors.
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Holding:
    """The local shard of one tensor on this rank.

    Attributes:
        array: the local shard, detached; its memory is that of the model.
        shape: the global shape.
        boxes: the regions of the tensor in ``array``, joined along one dim in this order; none are empty.
    """

    array: torch.Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class ModelState:
    """The state of a model on this rank.

    Attributes:
        holdings: what this rank holds, by name. Tied tensors have one entry, under the first of their names.
        tied: other names of tied tensors, each with the first one.
        values: numbers, strings and None of a nested state dict, by name.
    """

    holdings: dict[str, Holding]
    tied: dict[str, str]
    values: dict[str, Value]


#: Global shape of a plain tensor that is a shard, and the regions of it that are joined in the tensor.
ShardRegions = tuple[Sequence[int], Sequence[Box]]


def read_state(model: Any, shards: Mapping[str, ShardRegions] | None = None) -> ModelState:
    """The state of a module, or of a nested mapping of tensors. Names of nested tensors are joined by dots.

    Args:
        shards: what plain tensors hold, by name. Other plain tensors are whole.

    Raises:
        ArgumentError: the model is neither, or an entry is of a kind that cannot be moved; the text names it.
        PartialError: a DTensor has a pending reduction.
    """
    holdings: dict[str, Holding] = {}
    tied: dict[str, str] = {}
    values: dict[str, Value] = {}
    first_name: dict[Any, str] = {}
    shards = shards or {}
    for name, value in _entries(model):
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, (bool, int, float, str, type(None))):
                raise ArgumentError(f"{name!r} is a {type(value).__name__}; weights are tensors, numbers and strings")
            values[name] = value
            continue
        holding = _read_tensor(name, value, shards.get(name))
        array = holding.array
        memory = array.data_ptr(), array.device, array.dtype, array.shape, array.stride(), holding.boxes
        if array.numel() and memory in first_name:
            tied[name] = first_name[memory]
            continue
        first_name[memory] = name
        holdings[name] = holding
    unknown = [name for name in shards if name not in holdings and name not in tied]
    if unknown:
        raise ArgumentError(f"shards names {unknown[0]!r}, which the model does not have")
    return ModelState(holdings, tied, values)


class StateReader:
    """Reads the state of one model again and again. Tensors in the same memory as before cost little.

    Args:
        model, shards: see :func:`read_state`.
    """

    def __init__(self, model: Any, shards: Mapping[str, ShardRegions] | None) -> None:
        self._model, self._shards = model, shards
        self._memory: list[Any] = []
        self._state: ModelState | None = None

    def read(self) -> ModelState:
        """The state of the model: the same object as before, unless a tensor or a value is new."""
        memory = [(name, _find_memory(value)) for name, value in _entries(self._model)]
        if self._state is None or memory != self._memory:
            self._state = read_state(self._model, self._shards)
            self._memory = memory
        return self._state


def _find_memory(value: Any) -> Any:
    """A key that changes when a value is replaced. For a tensor: its address and form, not its elements."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    array, layout = value, None
    if type(value) not in _PLAIN and is_dtensor(value):
        array, layout = value.to_local(), (value.shape, value.placements, value.device_mesh)  # type: ignore[attr-defined]
    return type(array), array.data_ptr(), array.shape, array.stride(), array.dtype, array.device, layout


def _entries(model: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(model, torch.nn.Module):
        yield from _flatten(model.state_dict(keep_vars=True), "")
    elif isinstance(model, Mapping):
        yield from _flatten(model, "")
    else:
        raise ArgumentError(f"a model is a torch.nn.Module or a mapping of tensors, not {type(model).__name__}")


def _flatten(entries: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in entries.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):  # most are, and this is the fastest question
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            yield from _flatten(dict(enumerate(value)), f"{name}.")
        else:
            yield name, value


def write_values(model: Any, values: Mapping[str, Value]) -> None:
    """Write numbers and strings into a nested mapping or list, by their names in :func:`read_state`."""
    if not isinstance(model, (MutableMapping, list)):
        return
    items = model.items() if isinstance(model, MutableMapping) else enumerate(model)
    for key, value in list(items):
        inner = {name.removeprefix(f"{key}."): new for name, new in values.items() if name.startswith(f"{key}.")}
        if isinstance(value, (Mapping, list)):
            write_values(value, inner)
        elif str(key) in values:
            model[key] = values[str(key)]


def synchronize(arrays: Iterable[torch.Tensor]) -> None:
    """Wait for the work on the GPUs of some arrays, because another thread uses them next, on another stream."""
    if torch.cuda.is_initialized():
        for device in {array.device for array in arrays if array.device.type == "cuda"}:
            torch.cuda.synchronize(device)


def _read_tensor(name: str, tensor: torch.Tensor, shard: ShardRegions | None) -> Holding:
    shape = tuple(tensor.shape)
    if shard is not None:
        array = tensor.detach()
        shape, boxes = _read_shard(name, array, shard)
    elif is_dtensor(tensor):
        array = tensor.to_local().detach()  # type: ignore[attr-defined]
        boxes = _find_regions(tensor.device_mesh, tuple(tensor.placements), shape, dist.get_rank())  # type: ignore[attr-defined]
    else:
        array = tensor.detach()
        boxes = (tuple((0, size) for size in shape),) if tensor.numel() else ()
    if array.is_meta:
        raise ArgumentError(f"{name!r} is on the meta device: give it memory first (model.to_empty)")
    if type(array) not in _PLAIN or array.layout is not torch.strided:
        raise ArgumentError(f"{name!r} is a {type(array).__name__} of layout {array.layout}; weights are plain tensors")
    if problem := find_storage_problem(array):
        raise ArgumentError(f"{name!r} is a {problem}: wait until its weights are gathered or loaded")
    return Holding(array, shape, boxes)


@functools.lru_cache(maxsize=4096)
def _find_regions(device_mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], rank: int) -> tuple[Box, ...]:
    """The regions of a DTensor that a rank of the world holds."""
    layout = Layout(Mesh.from_device_mesh(device_mesh), list(placements))
    return tuple(layout.regions(shape, rank)) if rank in layout.ranks else ()


def _read_shard(name: str, array: torch.Tensor, shard: ShardRegions) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """The global shape and the regions of a plain tensor, from what the user states."""
    try:
        given, regions = shard
        shape, boxes = check_shape(given), tuple(tuple((index(lo), index(hi)) for lo, hi in box) for box in regions)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"shards[{name!r}] must be (global shape, [region, ...]), for example ((16, 8), [((0, 8), (0, 8))]) for "
            f"the first 8 rows of 16: {error}"
        ) from None
    if is_dtensor(array):
        raise ArgumentError(f"shards names {name!r}, a DTensor, which has its own layout")
    _check_shard(name, tuple(array.shape), shape, boxes)
    return shape, boxes


@functools.lru_cache(maxsize=4096)
def _check_shard(name: str, local_shape: tuple[int, ...], shape: tuple[int, ...], boxes: tuple[Box, ...]) -> None:
    """Raise ArgumentError unless a local array holds these regions of a tensor."""
    if not boxes and 0 in local_shape:
        return
    try:
        layout = RegionLayout({0: boxes}, join_dim=join_dim(boxes), ndim=len(shape))
        layout.check_fits(shape)
    except LayoutError as error:  # of rank 0 of this layout, whatever the rank of the caller
        raise LayoutError(f"shards[{name!r}]: {str(error).removeprefix('rank 0: ')}") from None
    if local_shape != layout.joined_shape(0):
        raise ArgumentError(
            f"shards[{name!r}] has regions of shape {list(layout.joined_shape(0))}, but the tensor has shape "
            f"{list(local_shape)}"
        )


def join_dim(boxes: Sequence[Box]) -> int:
    """The dim along which the regions of a rank are joined in its local array: the first dim in which they differ."""
    for dim in range(len(boxes[0]) if boxes else 0):
        if any(box[dim] != boxes[0][dim] for box in boxes):
            return dim
    return 0
