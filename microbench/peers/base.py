"""What moves tensors in the benchmarks: our strategies, and what users would use instead.

A contender is made by every rank (that is its set-up), then called once per turn with the same tensors and outs.
:class:`NotApplicable` says why one cannot do a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reshard.sharding.layout import Layout
from reshard.sharding.tensor_spec import TensorSpec


class NotApplicable(Exception):  # it is an answer, not an error
    """A contender cannot do a row; says why, alike on all ranks."""


Tensors = Sequence[torch.Tensor | None]
#: ``make(specs, rank, sources, outs)``.
MakeContender = Callable[[Sequence[TensorSpec], int, Tensors, Tensors], Callable[[], None]]


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
