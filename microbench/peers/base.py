"""The interface of a contender: a method of moving the tensors of one benchmark row.

Every rank creates the contender once, which is the set-up, and then calls it once per turn, which is timed. All turns
use the same source and output tensors. A contender that does not support a row raises :class:`NotApplicable` on
creation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reshard.sharding import Layout, TensorSpec


class NotApplicable(Exception):
    """The contender does not support the row. All ranks must raise this with the same text, which is the reason."""


Tensors = Sequence[torch.Tensor | None]
#: ``make(specs, rank, sources, outs)`` returns a function that fills ``outs`` from ``sources``.
MakeContender = Callable[[Sequence[TensorSpec], int, Tensors, Tensors], Callable[[], None]]


def slices_of(spec: TensorSpec, layout: Any, rank: int) -> tuple[slice, ...]:
    """The region of a rank's shard in the global tensor; empty if the rank has no shard.

    Args:
        layout: ``spec.src`` or ``spec.dst``.

    Raises:
        NotApplicable: the shard consists of several boxes.
    """
    shards = spec.src_tiles if layout is spec.src else spec.dst_tiles
    boxes = [box for box, _ in shards.boxes_of(rank)]
    if not boxes:
        return tuple(slice(0, 0) for _ in spec.shape)
    if len(boxes) > 1:
        raise NotApplicable("shards of several regions are not supported")
    return tuple(slice(lo, hi) for lo, hi in boxes[0])


def are_replicated(specs: Sequence[TensorSpec]) -> bool:
    """Whether all source and destination layouts are plain :class:`Layout` objects that replicate the whole tensor."""
    layouts = [layout for spec in specs for layout in (spec.src, spec.dst)]
    return all(isinstance(layout, Layout) and not any(layout.spec) for layout in layouts)
