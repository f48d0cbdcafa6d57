"""Baselines that use only torch: a Gloo broadcast, and ``DTensor.full_tensor`` followed by a broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from microbench.peers.base import NotApplicable, Tensors, are_replicated, slices_of
from reshard.sharding import Layout, TensorSpec


class GlooBroadcast:
    """Broadcast each whole tensor with Gloo, from the first source rank to all destination ranks."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, sources: Tensors, outs: Tensors) -> None:
        if not are_replicated(specs):
            raise NotApplicable("it moves whole tensors, so both layouts must be replicated")
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
    """Gather with ``DTensor.full_tensor()`` on the source mesh, broadcast to the destination ranks, slice there."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, sources: Tensors, outs: Tensors) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        for spec in specs:
            if not isinstance(spec.src, Layout) or not isinstance(spec.dst, Layout):
                raise NotApplicable("DTensor does not support layouts of explicit regions")
        src, dst = specs[0].src, specs[0].dst
        assert isinstance(src, Layout)
        if any((np.diff(src.mesh.array, axis=axis) < 0).any() for axis in range(src.mesh.array.ndim)):
            raise NotApplicable("torch sorts the ranks of a group, so ranks must ascend along each mesh axis")
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
        for spec, dtensor, index, out in zip(self.specs, self.dtensors, self.at, self.outs, strict=True):
            full = None if dtensor is None else dtensor.full_tensor()
            if self.rank in self.members:
                if full is None or self.rank != self.root:
                    full = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
                dist.broadcast(full, self.root, group=self.group)
                if out is not None:
                    out.copy_(full[index])
