"""What moves tensors in the benchmarks: our strategies, and what users would use instead.

A contender is made by every rank (that is its set-up), then called once per turn with the same tensors and outs.
:class:`NotApplicable` says why one cannot do a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import reshard
from reshard.layout import Layout
from reshard.plan import Plan, TensorSpec


class NotApplicable(Exception):  # it is an answer, not an error
    """A contender cannot do a row; says why, alike on all ranks."""


Tensors = Sequence[torch.Tensor | None]
#: ``make(specs, rank, sources, outs)``.
MakeContender = Callable[[Sequence[TensorSpec], int, Tensors, Tensors], Callable[[], None]]


def make_ours(plan: Plan, rank: int, sources: Tensors, outs: Tensors) -> Callable[[], None]:
    """A Mover for a plan."""
    if rank not in plan.ranks:
        return lambda: None
    mover = reshard.Mover(plan)
    named = plan.tensors[0].name is not None
    names = [spec.name for spec in plan.tensors]
    source: Any = dict(zip(names, sources, strict=True)) if named else sources[0]
    out: Any = dict(zip(names, outs, strict=True)) if named else outs[0]
    return lambda: mover(source, out=out)


def slices_of(spec: TensorSpec, layout: Any, rank: int) -> tuple[slice, ...]:
    """Where the shard of a rank lies in the global tensor."""
    shards = spec.src_shards if layout is spec.src else spec.dst_shards
    boxes = [box for box, _ in shards.boxes_of(rank)]
    if not boxes:
        return tuple(slice(0, 0) for _ in spec.shape)
    if len(boxes) > 1:
        raise NotApplicable("a shard of several regions")
    return tuple(slice(lo, hi) for lo, hi in boxes[0])


def are_replicated(specs: Sequence[TensorSpec]) -> bool:
    """Whether every rank of both layouts holds whole tensors."""
    layouts = [layout for spec in specs for layout in (spec.src, spec.dst)]
    return all(isinstance(layout, Layout) and not any(layout.spec) for layout in layouts)


class GlooBroadcast:
    """Gloo's own ``broadcast`` from the first source rank to all destination ranks."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, sources: Tensors, outs: Tensors) -> None:
        if not are_replicated(specs):
            raise NotApplicable("it moves whole tensors: both layouts must be replicated")
        self.root = specs[0].src.ranks[0]
        members = sorted({self.root, *specs[0].dst.ranks})
        self.group = dist.new_group(members)
        self.rank, self.tensors = rank, sources if rank == self.root else outs
        self.takes_part = rank in members
        self.copy = rank == self.root and outs[0] is not None
        self.sources, self.outs = sources, outs

    def __call__(self) -> None:
        if self.takes_part:
            for tensor in self.tensors:
                dist.broadcast(tensor, self.root, group=self.group)
        if self.copy:
            for source, out in zip(self.sources, self.outs, strict=True):
                assert source is not None
                assert out is not None
                out.copy_(source)


class FullTensor:
    """torch's own way: ``DTensor.full_tensor()`` on the source mesh, broadcast to the destination, slice."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, sources: Tensors, outs: Tensors) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        for spec in specs:
            if not isinstance(spec.src, Layout) or not isinstance(spec.dst, Layout):
                raise NotApplicable("DTensor has no layout of explicit regions")
        src, dst = specs[0].src, specs[0].dst
        assert isinstance(src, Layout)
        if any((np.diff(src.mesh.array, axis=axis) < 0).any() for axis in range(src.mesh.array.ndim)):
            raise NotApplicable("torch sorts the ranks of a group, so along each mesh axis they must ascend")
        mesh = DeviceMesh("cpu", src.mesh.array.tolist())
        self.root = src.ranks[0]
        self.members = sorted({self.root, *dst.ranks})
        self.group = dist.new_group(self.members)
        self.rank, self.outs, self.specs = rank, outs, specs
        self.at = [
            None if out is None else slices_of(spec, spec.dst, rank) for spec, out in zip(specs, outs, strict=True)
        ]
        self.dtensors: list[Any] = []
        for spec, source in zip(specs, sources, strict=True):
            if source is None:
                self.dtensors.append(None)
                continue
            assert isinstance(spec.src, Layout)
            stride = torch.empty(spec.shape, device="meta").stride()
            placements = spec.src.to_placements()
            self.dtensors.append(
                DTensor.from_local(
                    source, mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=stride
                )
            )

    def __call__(self) -> None:
        for spec, dtensor, at, out in zip(self.specs, self.dtensors, self.at, self.outs, strict=True):
            full = None if dtensor is None else dtensor.full_tensor()
            if self.rank in self.members:
                if full is None or self.rank != self.root:
                    full = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
                dist.broadcast(full, self.root, group=self.group)
                if out is not None:
                    out.copy_(full[at])


def make_awex(specs: Sequence[TensorSpec], rank: int, sources: Tensors, outs: Tensors) -> Callable[[], None]:
    """Awex's point-to-point plan."""
    from microbench.awex import Awex

    return Awex(specs, rank, sources, outs)


#: What users would use instead, by name.
OTHERS: dict[str, MakeContender] = {
    "gloo broadcast": GlooBroadcast,
    "full_tensor + broadcast": FullTensor,
    "awex": make_awex,
}
