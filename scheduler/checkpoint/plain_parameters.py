"""The parameters of this rank with the names and the shapes of the whole model, as checkpoints store them.

On a grid of :mod:`reshard.parallel`, several DTensors, or a transposed one, may stand for one parameter of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from reshard.errors import ArgumentError
from reshard.formatting import unwrapped_name
from reshard.parallel.plain_state import find_plain_forms
from reshard.sharding import Layout, Mesh

from ..gradients.data_parallel import without_ddp


@dataclass(frozen=True)
class PlainParameter:
    """A parameter of the whole model.

    Attributes:
        name: its name in the whole model.
        parameters: the parameters of this rank that it is made of, by concatenation along dim 0.
        is_transposed: whether it is the transpose of the concatenation.
    """

    name: str
    parameters: tuple[torch.nn.Parameter, ...]
    is_transposed: bool = False

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | JoinedTensor:
        """Tensors in the shapes of ``parameters`` as one tensor in the shape of the whole model, without a copy."""
        if len(tensors) == 1 and not self.is_transposed:
            return tensors[0]
        return JoinedTensor(tuple(tensors), self.is_transposed)


def named_state(module: torch.nn.Module) -> tuple[list[PlainParameter], dict[str, torch.Tensor]]:
    """The parameters of a stage, each under all of its names, and its persistent buffers."""
    state = {unwrapped_name(name): value for name, value in without_ddp(module).state_dict(keep_vars=True).items()}
    plain = []
    forms = find_plain_forms(without_ddp(module))
    for name, form in {unwrapped_name(name): form for name, form in forms.items()}.items():
        plain.append(
            PlainParameter(name, tuple(state.pop(unwrapped_name(part)) for part in form.parts), form.is_transposed)
        )
    buffers = {}
    for name, value in state.items():
        if isinstance(value, torch.nn.Parameter):
            plain.append(PlainParameter(name, (value,)))
        elif isinstance(value, torch.Tensor):
            buffers[name] = value
    return plain, buffers


@dataclass(frozen=True)
class JoinedTensor:
    """DTensors that are concatenated along dim 0 and may be transposed, as one tensor without a copy."""

    tensors: tuple[Any, ...]
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        shape = (sum(tensor.shape[0] for tensor in self.tensors), *self.tensors[0].shape[1:])
        return shape[::-1] if self.is_transposed else shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all parts."""
        dtype: torch.dtype = self.tensors[0].dtype
        return dtype


def find_pieces(tensor: torch.Tensor | JoinedTensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The boxes of a tensor on this rank: ``(offsets, local tensor)`` of each, where a local tensor is a view.

    A DTensor without elements on this rank has no box. A plain tensor is one box.
    """
    if isinstance(tensor, JoinedTensor):
        pieces, start = [], 0
        for item in tensor.tensors:
            for (first, *others), local in find_pieces(item):
                offsets = (first + start, *others)
                pieces.append((offsets[::-1], local.t()) if tensor.is_transposed else (offsets, local))
            start += item.shape[0]
        return pieces
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.dim(), tensor.detach())]
    local, layout = tensor.detach().to_local(), Layout(Mesh.from_device_mesh(tensor.device_mesh), tensor.placements)
    shape = layout.local_shape(tensor.shape, dist.get_rank())
    if shape != tuple(local.shape):
        raise ArgumentError(
            f"a DTensor of shape {list(tensor.shape)} on {layout} has {list(local.shape)} here, and not {list(shape)}"
        )
    boxes = layout.regions(tensor.shape, dist.get_rank())
    starts: list[dict[int, int]] = []  # of each dim: {start in the whole tensor: start in the local tensor}
    for dim in range(tensor.dim()):
        intervals = dict.fromkeys(box[dim] for box in boxes)
        ends = itertools.accumulate(stop - start for start, stop in intervals)
        starts.append({start: end - (stop - start) for (start, stop), end in zip(intervals, ends, strict=True)})
    pieces = []
    for box in boxes:
        inside = [
            slice(index[start], index[start] + stop - start) for index, (start, stop) in zip(starts, box, strict=True)
        ]
        pieces.append((tuple(start for start, _ in box), local[tuple(inside)]))
    return pieces
