"""Traces of the loader of an engine: its use of each tensor of a checkpoint, found on tensors without storage.

The tensors that the loader gets lie on the meta device. Their views share a storage, so size, strides and offset tell
which region of which tensor a view shows. A dispatch mode sees each operation: it notes copies into the parameters of
the engine, lets views pass, and refuses operations that compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import ArgumentError
from reshard.runtime.torch_compat import TorchDispatchMode, tree_leaves
from reshard.weights.mapping.parts import ComposedTensor, compose_parts, join_tensors
from reshard.weights.mapping.strided import view_of_tensor
from reshard.weights.model.pieces import Side

_aten = torch.ops.aten
#: Parameters and buffers of an engine by name.
NamedTensors = Mapping[str, torch.Tensor]
#: Shape and dtype of a tensor of the checkpoint.
Given = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class ParameterRegion:
    """A region of a parameter, in its memory.

    Attributes:
        name: name of the parameter.
        shape: shape of the region.
        strides: strides of the region, in elements.
        offset: elements from the start of the parameter to the start of the region.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The region of a parameter."""
        return parameter.detach().as_strided(self.shape, self.strides, parameter.storage_offset() + self.offset)


@dataclass(frozen=True)
class TracedCopy:
    """A region of a tensor of the checkpoint that a loader copies into a parameter."""

    source: Side
    target: ParameterRegion


@dataclass(frozen=True)
class Fill:
    """A region of a parameter that a loader fills with a number, such as the padding of a vocabulary."""

    target: ParameterRegion
    value: float


@dataclass(frozen=True)
class _Root:
    """A tensor without storage, of which the loader sees views.

    Attributes:
        tensor: the tensor, which is contiguous.
        made: the regions of the checkpoint that it consists of.
        dtypes: the dtype in the checkpoint, then the dtypes to which the loader has cast it, in order.
    """

    tensor: torch.Tensor
    made: ComposedTensor
    dtypes: tuple[torch.dtype, ...]

    def view(self, tensor: torch.Tensor) -> ComposedTensor:
        """The regions of the checkpoint that a view consists of."""
        shown = view_of_tensor("", self.tensor.shape, tensor.shape, tensor.stride(), tensor.storage_offset())
        return compose_parts(shown, self.made)


def trace_loader(load_weights: Any, tensors: NamedTensors, given: Mapping[str, Given]) -> list[TracedCopy | Fill]:
    """The copies and fills of a loader, in order. Parameters do not change.

    Args:
        load_weights: takes an iterable of ``(name, tensor)`` pairs.
        tensors: the parameters and buffers of the engine, with memory.
        given: shape and dtype of each tensor of the checkpoint.

    Raises:
        ArgumentError: the loader computes, or it fails; the text names the operation and the tensor.
    """
    trace = _Trace(tensors)
    before = {name: (_memory_of(tensor), tensor.data) for name, tensor in tensors.items()}
    try:
        with torch.no_grad(), trace:
            load_weights(trace.make_tensors(given))
    except ArgumentError:
        raise
    except Exception as error:
        what = f"load_weights fails at {trace.last!r} without storage, so it cannot be recorded"
        raise ArgumentError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        changed = [name for name, (memory, _) in before.items() if _memory_of(tensors[name]) != memory]
        for name in changed:
            tensors[name].data = before[name][1]
    if changed:
        raise ArgumentError(f"load_weights gives {changed[0]!r} other memory, so it cannot be recorded")
    return trace.found


class _Trace(TorchDispatchMode):
    def __init__(self, tensors: NamedTensors) -> None:
        super().__init__()
        self.found: list[TracedCopy | Fill] = []
        self.last = ""
        self._roots: dict[int, _Root] = {}
        self._parameters: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            self._parameters.setdefault(_storage_of(tensor), []).append((name, tensor.detach()))

    def make_tensors(self, given: Mapping[str, Given]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the checkpoint."""
        for name, (shape, dtype) in given.items():
            self.last = name
            yield name, self._add(ComposedTensor.of(name, shape), (dtype,))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        roots = [root for leaf in tree_leaves((args, kwargs)) if (root := self._find_root(leaf)) is not None]
        if not roots:
            return self._run_without_roots(func, args, kwargs)
        if func is _aten.copy_.default:
            return self._note_copy(*args[:2])
        if func in (_aten.clone.default, _aten._to_copy.default):
            dtype = kwargs.get("dtype") or args[0].dtype
            return self._add(roots[0].view(args[0]), (*roots[0].dtypes, *[dtype] * (dtype != args[0].dtype)))
        if func in (_aten.cat.default, _aten.stack.default) and len({root.dtypes for root in roots}) == 1:
            return self._join(func, *args, **kwargs)
        returns = [value.alias_info for value in func._schema.returns]
        is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
        if func in (_aten._conj.default, _aten._neg_view.default):  # a view of other values
            is_view = False
        if func is _aten._unsafe_view.default or (is_view and func is not _aten.view.dtype):
            return func(*args, **kwargs)
        raise _refusal(func, roots)

    def _join(self, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        roots = [self._find_root(tensor) for tensor in tensors]
        known = [root for root in roots if root is not None]
        if len(known) < len(roots):
            raise _refusal(func, known)
        parts = [root.view(tensor) for root, tensor in zip(known, tensors, strict=True)]
        dim += (len(parts[0].shape) + (func is _aten.stack.default)) * (dim < 0)
        if func is _aten.stack.default:
            parts = [part.with_dim(dim) for part in parts]
        return self._add(join_tensors(parts, dim, "load_weights"), known[0].dtypes)

    def _run_without_roots(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on other tensors, unless it would change a parameter."""
        for value in _written_tensors(func._schema.arguments, args, kwargs):
            if _storage_of(value) in self._parameters:
                region = self._region_of(value)
                if func not in (_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor):
                    what = f"load_weights changes {region.name!r} by {func} without a tensor of the checkpoint"
                    raise ArgumentError(f"{what}, so it cannot be recorded")
                self.found.append(Fill(region, 0.0 if func is _aten.zero_.default else float(args[1])))
                return value
        return func(*args, **kwargs)

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        root = self._find_root(source)
        if root is None or _storage_of(target) not in self._parameters:
            known = [end for end in (root, self._find_root(target)) if end is not None]
            raise _refusal(_aten.copy_.default, known)
        for before, after in itertools.pairwise(root.dtypes):
            if after != target.dtype and not _keeps_values(before, after):
                raise ArgumentError(f"load_weights casts {_name_of([root])!r} to {after} and then to {target.dtype}")
        for part in root.view(source.expand(target.shape)).parts:
            along = [dim for dim, place_dim in enumerate(part.dims) if place_dim >= 0]
            dims = [part.dims[dim] for dim in along]
            shape = [len(part.place[place_dim]) for place_dim in dims]
            strides = [target.stride(place_dim) * part.place[place_dim].step for place_dim in dims]
            offset = sum(indices.start * stride for indices, stride in zip(part.place, target.stride(), strict=True))
            region = self._region_of(target.as_strided(shape, strides, target.storage_offset() + offset))
            self.found.append(TracedCopy(Side(part.source, part.region, tuple(along)), region))
        return target

    def _region_of(self, view: torch.Tensor) -> ParameterRegion:
        """The region of a parameter that a view shows. Of tied parameters, the first one counts."""
        first = view.storage_offset()
        last = first + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        for name, tensor in self._parameters[_storage_of(view)]:
            begin = tensor.storage_offset()
            end = begin + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            if begin <= first and (last <= end or not view.numel()):
                if view.dtype != tensor.dtype:
                    raise ArgumentError(f"load_weights writes {name!r} as {view.dtype}, so it cannot be recorded")
                return ParameterRegion(name, tuple(view.shape), view.stride(), first - begin)
        raise ArgumentError("load_weights writes outside of the parameters, so it cannot be recorded")

    def _add(self, made: ComposedTensor, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        tensor = torch.empty(made.shape, dtype=dtypes[-1], device="meta")
        self._roots[_storage_of(tensor)] = _Root(tensor, made, dtypes)
        return tensor.view(made.shape)

    def _find_root(self, value: Any) -> _Root | None:
        return self._roots.get(_storage_of(value)) if isinstance(value, torch.Tensor) else None


def _storage_of(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor, on the meta device too."""
    return tensor.untyped_storage()._cdata


def _memory_of(tensor: torch.Tensor) -> Any:
    return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()


def _keeps_values(before: torch.dtype, after: torch.dtype) -> bool:
    try:
        return torch.promote_types(before, after) == after
    except RuntimeError:  # float8 promotes to nothing
        return False


def _name_of(roots: Sequence[_Root]) -> str:
    """The first tensor of the checkpoint in some roots."""
    return next((part.source for root in roots for part in root.made.parts), "")


def _refusal(func: Any, roots: Sequence[_Root]) -> ArgumentError:
    return ArgumentError(
        f"load_weights computes {func} with {_name_of(roots)!r}, so it cannot be recorded; give it to the Subscriber "
        "as load_weights=, with model=None"
    )


def _written_tensors(arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of an operation writes, such as those of ``out=``."""
    written: list[torch.Tensor] = []
    for number, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written
