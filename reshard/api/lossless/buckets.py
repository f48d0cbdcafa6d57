"""Buckets: all regions of some tensors that the same ranks hold and the same ranks need, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from reshard.ragged import NO_RANK
from reshard.runtime.array_bytes import contiguous, flat_bytes
from reshard.sharding import TensorSpec

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Region:
    """A box of one tensor, as slices of a rank's source and destination shards; None where its shard lacks the box."""

    tensor: str
    src: Slices | None
    dst: Slices | None


@dataclass(frozen=True)
class Bucket:
    """The regions that travel from ``holders`` to ``receivers``, in an order that is the same on all ranks.

    Attributes:
        nbytes: bytes of all regions.
    """

    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    regions: tuple[Region, ...]
    nbytes: int

    def views(self, shards: Mapping[str, torch.Tensor], side: str) -> Iterator[torch.Tensor]:
        """The regions in a rank's shards of one side, ``"src"`` or ``"dst"``."""
        for region in self.regions:
            yield shards[region.tensor].detach()[getattr(region, side)]


def find_buckets(specs: Sequence[TensorSpec], rank: int) -> dict[str, Bucket]:
    """The buckets of some tensors by name, in the same order on all ranks, with the regions as ``rank`` holds them."""
    regions: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Region]] = {}
    nbytes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for spec in specs:
        tasks = spec.tasks
        sides = [
            shards.find(rank, tasks.start, tasks.stop) if rank in shards.layout.ranks else [None] * len(tasks)
            for shards in (spec.src_tiles, spec.dst_tiles)
        ]
        for i, (src, dst) in enumerate(zip(*sides, strict=True)):
            key = _ranks(tasks.holders[i]), _ranks(tasks.destinations[i])
            regions.setdefault(key, []).append(Region(spec.name or "", src, dst))
            nbytes[key] = nbytes.get(key, 0) + int(tasks.numel[i]) * spec.itemsize
    return {
        f"{'+'.join(map(str, key[0]))} > {'+'.join(map(str, key[1]))}": Bucket(*key, tuple(bucket_regions), nbytes[key])
        for key, bucket_regions in sorted(regions.items())
    }


def bytes_of(view: torch.Tensor) -> np.ndarray:
    """The bytes of a region; a copy unless the region is contiguous."""
    return flat_bytes(contiguous(view)).numpy()


def _ranks(padded: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(int(rank) for rank in padded if rank != NO_RANK))
