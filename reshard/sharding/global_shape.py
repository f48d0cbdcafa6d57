"""The global shape of a tensor, from the sizes of its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import ArgumentError
from reshard.formatting import count_of
from reshard.sharding.layout import Layout, RegionLayout
from reshard.sharding.spec import axis_of
from reshard.sharding.tiles import cut_tiles


def find_minority(values: Mapping[int, Any]) -> tuple[list[int], list[int]] | None:
    """Ranks with the most common value (in a tie, the lowest rank's) and with the next; None if all are equal."""
    ranks_of: dict[Any, list[int]] = {}
    for rank in sorted(values):
        ranks_of.setdefault(values[rank], []).append(rank)
    if len(ranks_of) < 2:
        return None
    usual, odd, *_ = sorted(ranks_of.values(), key=len, reverse=True)
    return usual, odd


def find_global_shape(what: str, sizes: Mapping[int, Sequence[int]], layout: Layout | RegionLayout) -> list[int]:
    """The global shape: along each dim, the sum of the sizes of the shards along a line of the mesh.

    Args:
        what: names the tensor in errors.
        sizes: shape of the shard of each rank.
        layout: layout of the shards. A RegionLayout states the shape by itself.

    Raises:
        ArgumentError: a rank of the layout has no shard, or no global shape gives the ranks shards of these sizes.
    """
    if isinstance(layout, RegionLayout):
        boxes = [box for _, rank_boxes in layout.boxes for box in rank_boxes]
        return [max((box[dim][1] for box in boxes), default=0) for dim in range(layout.ndim)]
    for rank in layout.ranks:
        if rank not in sizes:
            raise ArgumentError(
                f"{what}: rank {rank} does not know the shape; pass shape=, or a shard on each source rank"
            )
    shards_of = {rank: tuple(sizes[rank]) for rank in layout.ranks}
    _check_numbers_of_dims(what, shards_of, layout)
    shape = [_sum_along(dim, shards_of, layout) for dim in range(len(shards_of[layout.ranks[0]]))]
    shards = cut_tiles(layout, shape)
    for rank, size in shards_of.items():
        expected = shards.local_shape(rank)
        if size != expected:
            dim = next(dim for dim in range(len(shape)) if size[dim] != expected[dim])
            is_whole = shape[dim] == expected[dim]
            rule = "the dim is not sharded" if is_whole else f"{layout} shards {count_of(shape[dim], 'element')}"
            passed = count_of(size[dim], "element")
            raise ArgumentError(
                f"{what}: rank {rank} passes {passed} along dim {dim}, but should pass {expected[dim]}, because {rule}"
                "; pass shape= if another rank is wrong, or a RegionLayout if the shards are right"
            )
    return shape


def _check_numbers_of_dims(what: str, sizes: Mapping[int, tuple[int, ...]], layout: Layout) -> None:
    groups = find_minority({rank: len(size) for rank, size in sizes.items()})
    if groups is not None:
        (usual, *_), (odd, *_) = groups
        raise ArgumentError(
            f"{what}: rank {odd} passes a shard of shape {list(sizes[odd])}, rank {usual} one of {list(sizes[usual])}; "
            "shards of one tensor have the same number of dims"
        )
    ndim = len(sizes[layout.ranks[0]])
    if len(layout.spec) > ndim:
        raise ArgumentError(
            f"{what}: layout {layout} shards dim {len(layout.spec) - 1}, but shards have {count_of(ndim, 'dim')}"
        )


def _sum_along(dim: int, sizes: Mapping[int, tuple[int, ...]], layout: Layout) -> int:
    """The size of a dim; of a dim that is not sharded, the size that most ranks have."""
    mesh = layout.mesh
    axes = [mesh.axes.index(axis_of(step)) for step in (layout.spec[dim] if dim < len(layout.spec) else ())]
    if not axes:
        groups = find_minority({rank: size[dim] for rank, size in sizes.items()})
        return sizes[layout.ranks[0] if groups is None else groups[0][0]][dim]
    line = mesh.array[tuple(slice(None) if number in axes else 0 for number in range(len(mesh.axes)))]
    return sum(sizes[rank][dim] for rank in line.ravel().tolist())
