"""Rules from the loader of an engine: which regions of the trainer's tensors go to which parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.formatting import count_of
from reshard.sharding import Box
from reshard.weights.mapping.parts import Region
from reshard.weights.mapping.rules import Drop, match_names
from reshard.weights.mapping.strided import view_of_tensor
from reshard.weights.model.holdings import Holding, ModelState, join_dim
from reshard.weights.model.loader_trace import Fill, NamedTensors, ParameterRegion, TracedCopy, trace_loader
from reshard.weights.model.manifest import Manifest, state_of_rank
from reshard.weights.model.pieces import Side
from reshard.weights.param_meta import read_metas

#: A loader of an engine: it takes ``(name, tensor)`` pairs.
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True)
class RecordedLoader:
    """The result of :func:`record`: a loader to trace when the tensors of the trainer are known."""

    load_weights: LoadWeights
    kept: tuple[str, ...]
    source: Manifest | None


@check_arguments()
def record(
    load_weights: LoadWeights, *, kept: Sequence[str] = (), metas: Sequence[Any] | None = None
) -> RecordedLoader:
    """Rules for a :class:`Subscriber`, from the loader of its engine, so that each rank receives only what it loads.

    When the Subscriber is made, the loader runs once with tensors of the trainer's names, shapes and dtypes, on the
    meta device. The loader may take views (``narrow``, ``chunk``, ``view``, ``transpose``, an index), join and cast
    views, ``copy_`` them to parameters, and fill parameters with a number. The parameters do not change. Later,
    versions are copied as recorded, and the loader does not run again.

    Args:
        load_weights: takes an iterable of ``(name, tensor)`` pairs, as ``load_weights`` of vLLM's models does.
            Tensors that it leaves out do not travel to the engine.
        kept: patterns of parameters that the loader need not write, for example ``"{p}.k_scale"``.
        metas: the tensors that the trainer will publish, as vLLM's ``ParamMeta`` of each tensor. Default: the tensors
            that a trainer publishes when the Subscriber is made.

    Raises:
        ArgumentError: an entry of ``metas`` is not valid.
    """
    return RecordedLoader(load_weights, tuple(kept), None if metas is None else read_metas(metas))


class Recording:
    """The copies and fills that the loader of one rank makes.

    Args:
        loader: loader of the engine.
        model: a module, or a mapping of tensors, as the loader writes it.
        source: the trainer's tensors.

    Attributes:
        held: the regions of the trainer's tensors that this rank receives, by name; tied tensors have the first name.
        device: device on which they arrive.

    Raises:
        ArgumentError: the loader computes or fails, writes an element twice, or leaves out a part of a parameter.
    """

    def __init__(self, loader: RecordedLoader, model: Any, source: Manifest) -> None:
        tensors, parameters = _tensors_of(model)
        entries = {name: (entry.shape, getattr(torch, entry.dtype)) for name, entry in source.entries.items()}
        steps = trace_loader(loader.load_weights, tensors, entries)
        self._steps = _drop_repeated_copies(_resolve_tie(step, source.tied) for step in steps)
        self._model, self._source = model, source
        self._geometry = {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in tensors.items()}
        self._devices = sorted({tensor.device.type for tensor in tensors.values()})
        self.device = next(iter(tensors.values())).device
        kept = {name for pattern in loader.kept for name, _ in match_names(pattern, tensors)}
        _check_writes(self._steps, tensors, parameters - kept)
        regions: dict[str, list[Region]] = {}
        for step in self._steps:
            if isinstance(step, TracedCopy):
                regions.setdefault(step.source.name, []).append(step.source.region)
        self.held = {name: cover(tensor_regions) for name, tensor_regions in regions.items()}

    def state(self) -> dict[str, Any]:
        """The state that this rank tells the others; see :func:`reshard.weights.model.manifest.state_of_rank`."""
        holdings = {}
        for name, boxes in self.held.items():
            entry = self._source.entries[name]
            array = torch.empty(self.shape(name), dtype=getattr(torch, entry.dtype), device="meta")
            holdings[name] = Holding(array, entry.shape, boxes)
        return {**state_of_rank(ModelState(holdings, {}, {})), "devices": self._devices}

    def without_unused(self, manifest: Manifest) -> Manifest:
        """The manifest of the engine, with rules that drop tensors of the trainer that no rank of the engine takes."""
        tied = self._source.tied
        unused = [name for name in self._source.entries if tied.get(name, name) not in manifest.entries]
        return replace(manifest, rules=tuple(map(Drop, unused)))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the local array with the regions of a tensor."""
        boxes = self.held[name]
        sizes = [hi - lo for lo, hi in boxes[0]]
        if len(boxes) > 1:
            dim = join_dim(boxes)
            sizes[dim] = sum(box[dim][1] - box[dim][0] for box in boxes)
        return tuple(sizes)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the loader writes."""
        tensors, _ = _tensors_of(self._model)
        return [tensors[name] for name in dict.fromkeys(step.target.name for step in self._steps)]

    def replay(self, arrays: NamedTensors) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Write the arrays into the parameters; then yield each region of a parameter and the values that belong there.

        Args:
            arrays: local arrays with the regions ``held``.

        Raises:
            ArgumentError: a parameter is gone, or has another shape.
        """
        tensors, _ = _tensors_of(self._model)
        for name in {step.target.name for step in self._steps}:
            tensor = tensors.get(name)
            if tensor is None or (tensor.shape, tensor.stride(), tensor.dtype) != self._geometry[name]:
                raise ArgumentError(f"{name!r} is gone or has another shape; make a new Subscriber")
        with torch.no_grad():
            for step in self._steps:
                view = step.target.view(tensors[step.target.name])
                if isinstance(step, TracedCopy):
                    view.copy_(self._view(step.source, arrays))
                else:
                    view.fill_(step.value)
        for step in self._steps:
            if isinstance(step, TracedCopy):
                yield step.target.view(tensors[step.target.name]), self._view(step.source, arrays)

    def _view(self, side: Side, arrays: NamedTensors) -> torch.Tensor:
        return side.view(arrays[side.name], self.held[side.name])


def _tensors_of(model: Any) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The parameters and buffers of a model by name, and the names of the parameters. Tied ones have one name."""
    if isinstance(model, torch.nn.Module):
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        tensors = {**parameters, **dict(model.named_buffers())}
    elif isinstance(model, Mapping):
        tensors = parameters = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    else:
        raise ArgumentError(f"a model is a torch.nn.Module or a mapping of tensors, not {type(model).__name__}")
    if not tensors:
        raise ArgumentError("the model has no tensors")
    first_name: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ArgumentError(f"{name!r} is on the meta device: give it memory first (model.to_empty)")
        first_name.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name, name)
    return {name: tensors[name] for name in first_name.values()}, set(parameters)


def _resolve_tie(step: TracedCopy | Fill, tied: Mapping[str, str]) -> TracedCopy | Fill:
    if isinstance(step, Fill):
        return step
    name = tied.get(step.source.name, step.source.name)
    return TracedCopy(Side(name, step.source.region, step.source.dims), step.target)


def cover(regions: Iterable[Region]) -> tuple[Box, ...]:
    """The smallest disjoint boxes, side by side along one dim, that cover regions of a tensor; otherwise one box."""
    boxes = {tuple((indices[0], indices[-1] + 1) for indices in region) for region in regions}
    ndim, size = len(next(iter(boxes))), 0
    while size != len(boxes):
        size = len(boxes)
        for dim in range(ndim):
            boxes = _join_along(boxes, dim)
    joined = tuple(sorted(boxes))
    differing = [dim for dim in range(ndim) if len({box[dim] for box in joined}) > 1]
    if len(differing) <= 1:
        return joined
    return (tuple((min(lo for lo, _ in sides), max(hi for _, hi in sides)) for sides in zip(*joined, strict=True)),)


def _join_along(boxes: set[Box], dim: int) -> set[Box]:
    """Join boxes that are equal along all other dims, and touch or overlap along this one."""
    rows: dict[Any, list[tuple[int, int]]] = {}
    for box in boxes:
        rows.setdefault((box[:dim], box[dim + 1 :]), []).append(box[dim])
    joined = set()
    for (before, after), sides in rows.items():
        begin, end = min(sides)
        for lo, hi in sorted(sides):
            if lo > end:
                joined.add((*before, (begin, end), *after))
                begin = lo
            end = max(end, hi)
        joined.add((*before, (begin, end), *after))
    return joined


def _check_writes(steps: Sequence[TracedCopy | Fill], tensors: NamedTensors, needed: set[str]) -> None:
    """Raise ArgumentError unless each element of a parameter is loaded or filled once.

    Args:
        needed: names of the parameters that must be loaded whole.
    """
    of_name: dict[str, list[tuple[Region, bool]]] = {name: [] for name in tensors}
    for step in steps:
        for region in _regions_in(step.target, tensors[step.target.name]):
            of_name[step.target.name].append((region, isinstance(step, TracedCopy)))
    left_out = []
    for name, writes in of_name.items():
        count = _count_written(name, [region for region, _ in writes], [is_copy for _, is_copy in writes])
        if name in needed and count < tensors[name].numel():
            left_out.append(f"{tensors[name].numel() - count} of {tensors[name].numel()} elements of {name!r}")
    if left_out:
        more = f", and elements of {count_of(len(left_out) - 5, 'more parameter')}" if len(left_out) > 5 else ""
        raise ArgumentError(
            f"load_weights leaves out {', '.join(left_out[:5])}{more}; if that is right, name them in record(kept=)"
        )


def _regions_in(region: ParameterRegion, tensor: torch.Tensor) -> list[Region]:
    """The regions of a parameter that form one in memory, with the dims of the parameter in the order of its memory."""
    order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), dim))
    ordered = tensor.permute(order)
    if not ordered.is_contiguous():
        raise ArgumentError(f"{region.name!r} has gaps in its memory, so its loader cannot be recorded")
    return [part.region for part in view_of_tensor(region.name, ordered.shape, *_geometry_of(region)).parts]


def _geometry_of(region: ParameterRegion) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return region.shape, region.strides, region.offset


def _count_written(name: str, regions: Sequence[Region], is_copy: Sequence[bool]) -> int:
    """The number of elements in some regions of a parameter. A copy may overwrite a fill, but not another copy."""
    if not regions:
        return 0
    edges = []
    for along in zip(*regions, strict=True):
        dim_edges = [np.array([edge for indices in along for edge in (indices.start, indices[-1] + 1)])]
        dim_edges += [
            np.concatenate([np.array(indices), np.array(indices) + 1]) for indices in along if indices.step > 1
        ]
        edges.append(np.unique(np.concatenate(dim_edges)))
    written = np.zeros([len(cuts) - 1 for cuts in edges], dtype=np.uint8)
    for region, copied in zip(regions, is_copy, strict=True):
        cells = []
        for indices, cuts in zip(region, edges, strict=True):
            starts = np.array(indices) if indices.step > 1 else cuts[(cuts >= indices[0]) & (cuts <= indices[-1])]
            cells.append(np.searchsorted(cuts, starts))
        where = np.ix_(*cells)
        if (written[where] == 2).any():
            raise ArgumentError(f"load_weights writes elements of {name!r} twice, so it cannot be recorded")
        written[where] = 2 if copied else 1
    sizes = np.ones_like(written, dtype=np.int64)
    for dim, cuts in enumerate(edges):
        sizes *= np.diff(cuts).reshape([-1 if other == dim else 1 for other in range(len(edges))])
    return int(sizes[written > 0].sum())


def _drop_repeated_copies(steps: Iterable[TracedCopy | Fill]) -> tuple[TracedCopy | Fill, ...]:
    """The steps with each copy once: a tied tensor is copied under all its names."""
    kept: list[TracedCopy | Fill] = []
    copies: set[TracedCopy] = set()
    for step in steps:
        if isinstance(step, TracedCopy):
            if step in copies:
                continue
            copies.add(step)
        kept.append(step)
    return tuple(kept)
