"""The tiles of a sharded tensor: which region each rank holds, and where it lies in the local array.

Tiles are rows of arrays, so that a layout of a million tiles needs no Python object for each.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.errors import LayoutError, PlanError
from reshard.ragged import NO_RANK, ranges
from reshard.sharding.box_search import find_overlapping
from reshard.sharding.dim_cuts import MAX_PIECES, DimCuts, check_sizes
from reshard.sharding.layout import AnyLayout, Box, Layout, RegionLayout, format_box
from reshard.sharding.spec import axis_of

#: Limit on the cells that partly overlapping regions are cut into.
MAX_CELLS = 2**17


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a sharded tensor: disjoint boxes, and the ranks that hold each.

    Attributes:
        layout, shape: the layout and the global shape that were cut.
        start, stop: ``(tiles, ndim)`` half-open boxes, none of them empty.
        ranks: ``(tiles, replicas)`` the ranks that hold each tile, padded with :data:`NO_RANK`.
        local: ``(tiles, replicas, ndim)`` where the tile starts in the local array of each holder.
        cuts: the cuts of each dim, of which the tiles are the row-major product; None for explicit regions.
    """

    layout: AnyLayout
    shape: tuple[int, ...]
    start: np.ndarray
    stop: np.ndarray
    ranks: np.ndarray
    local: np.ndarray
    cuts: tuple[DimCuts, ...] | None

    @cached_property
    def numel(self) -> np.ndarray:
        """Elements of each tile."""
        return (self.stop - self.start).prod(axis=1, dtype=np.int64)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local array of a rank of the layout."""
        if isinstance(self.layout, RegionLayout):
            return self.layout.joined_shape(rank)
        assert self.cuts is not None
        parts = self.layout.parts_of(rank, len(self.shape))
        return tuple(int(cut.local_size[part]) for cut, part in zip(self.cuts, parts, strict=True))

    def pieces_of(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(start, stop, local)`` of the tiles of one rank; ``local`` is where each starts in the local array."""
        tile, replica = np.nonzero(self.ranks == rank)
        return self.start[tile], self.stop[tile], self.local[tile, replica]

    def find(self, rank: int, start: np.ndarray, stop: np.ndarray) -> list[tuple[slice, ...] | None]:
        """Slices of boxes in the local array of a rank; None for a box that does not lie inside one of its tiles.

        Args:
            start, stop: ``(boxes, ndim)``, none of them empty.
        """
        slices: list[tuple[slice, ...] | None] = [None] * len(start)
        tile_start, tile_stop, local = self.pieces_of(rank)
        box_of, tile_of = find_overlaps(start, stop, tile_start, tile_stop)
        inside = ((start[box_of] >= tile_start[tile_of]) & (stop[box_of] <= tile_stop[tile_of])).all(axis=1)
        box_of, tile_of = box_of[inside], tile_of[inside]
        first = start[box_of] - tile_start[tile_of] + local[tile_of]
        last = first + stop[box_of] - start[box_of]
        for box, lo, hi in zip(box_of.tolist(), first.tolist(), last.tolist(), strict=True):
            slices[box] = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        return slices

    def boxes_of(self, rank: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """``(box, local start)`` of each tile of one rank."""
        for start, stop, local in zip(*self.pieces_of(rank), strict=True):
            yield tuple(zip(start.tolist(), stop.tolist(), strict=True)), tuple(local.tolist())


#: Shards that are in use, by layout and shape, because most tensors of a model share both with another tensor.
_IN_USE: weakref.WeakValueDictionary[tuple[AnyLayout, tuple[int, ...]], Tiles] = weakref.WeakValueDictionary()


def cut_tiles(layout: AnyLayout, shape: Sequence[int]) -> Tiles:
    """Cut a tensor of ``shape`` into the tiles of ``layout``.

    Raises:
        LayoutError: the layout has more dims than the shape, a region reaches past the shape or overlaps another region
            of the same rank, or there are too many tiles.
    """
    shape = check_sizes(shape)
    shards = _IN_USE.get((layout, shape))
    if shards is None:
        shards = _cut_regions(layout, shape) if isinstance(layout, RegionLayout) else _cut_grid(layout, shape)
        _IN_USE[layout, shape] = shards
    return shards


def _cut_grid(layout: Layout, shape: tuple[int, ...]) -> Tiles:
    mesh, spec = layout.mesh, layout.spec
    cuts = layout.cut_dims(shape)
    spec = spec + ((),) * (len(shape) - len(spec))
    num_tiles = math.prod(len(cut.lo) for cut in cuts)
    if num_tiles > MAX_PIECES:
        raise LayoutError(
            f"layout {layout} cuts shape {list(shape)} into {num_tiles} tiles; at most {MAX_PIECES} are supported"
        )
    used = [mesh.axes.index(axis_of(step)) for steps in spec for step in steps]
    order = used + [i for i in range(len(mesh.axes)) if i not in used]
    by_part = mesh.array.transpose(order).reshape([len(cut.local_size) for cut in cuts] + [-1])
    ranks = by_part[np.ix_(*(cut.coord for cut in cuts), np.arange(by_part.shape[-1]))]
    ranks = ranks.reshape(num_tiles, by_part.shape[-1])
    local = combine([cut.local for cut in cuts])
    return Tiles(
        layout=layout,
        shape=shape,
        start=combine([cut.lo for cut in cuts]),
        stop=combine([cut.hi for cut in cuts]),
        ranks=ranks,
        local=np.broadcast_to(local[:, None, :], (num_tiles, ranks.shape[1], len(shape))),
        cuts=cuts,
    )


def combine(columns: Sequence[np.ndarray]) -> np.ndarray:
    """The Cartesian product of one array per dim, row-major: shape ``(product of lengths, number of dims)``."""
    total = math.prod(len(column) for column in columns)
    out = np.empty((total, len(columns)), dtype=np.int64)
    inner = total
    for dim, column in enumerate(columns):
        inner = inner // len(column) if len(column) else 0
        out[:, dim] = np.tile(np.repeat(column, inner), total // (inner * len(column)) if inner else 0)
    return out


def _cut_regions(layout: RegionLayout, shape: tuple[int, ...]) -> Tiles:
    layout.check_fits(shape)
    holders: dict[Box, list[tuple[int, tuple[int, ...]]]] = {}
    for rank, rank_boxes in layout.boxes:
        at = 0
        for box in rank_boxes:
            local = tuple(at if dim == layout.join_dim else 0 for dim in range(len(shape)))
            at += box[layout.join_dim][1] - box[layout.join_dim][0] if shape else 1
            if all(hi > lo for lo, hi in box):
                holders.setdefault(box, []).append((rank, local))
    holders = _refine(holders, len(shape))
    boxes = sorted(holders)
    width = max(map(len, holders.values()), default=1)
    ranks = np.full((len(boxes), width), NO_RANK, dtype=np.int64)
    locals_ = np.zeros((len(boxes), width, len(shape)), dtype=np.int64)
    for tile, box in enumerate(boxes):
        for replica, (rank, local) in enumerate(sorted(holders[box])):
            ranks[tile, replica] = rank
            locals_[tile, replica] = local
    bounds = np.array(boxes, dtype=np.int64).reshape(len(boxes), len(shape), 2)
    return Tiles(layout, shape, bounds[:, :, 0].copy(), bounds[:, :, 1].copy(), ranks, locals_, None)


_Holders = dict[Box, list[tuple[int, tuple[int, ...]]]]


def _refine(holders: _Holders, ndim: int) -> _Holders:
    """Split partly overlapping boxes into cells, so that any two boxes are equal or disjoint.

    Boxes that overlap, directly or through others, form a group. Each box is cut at all coordinates of its group.
    """
    boxes = sorted(holders)
    for box in boxes:
        ranks = [rank for rank, _ in holders[box]]
        if len(set(ranks)) != len(ranks):
            rank = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise LayoutError(f"rank {rank} holds region {format_box(box)} twice")
    bounds = np.array(boxes, dtype=np.int64).reshape(len(boxes), ndim, 2)
    try:
        overlapping = np.flatnonzero(find_overlapping(np.zeros(len(boxes)), bounds[:, :, 0], bounds[:, :, 1]))
    except PlanError:  # heavy overlap: treat all boxes as overlapping; the limit on cells applies
        overlapping = np.arange(len(boxes))
    if not len(overlapping):
        return holders
    start, stop = bounds[overlapping, :, 0], bounds[overlapping, :, 1]
    first, second = find_overlaps(start, stop, start, stop)
    first, second = overlapping[first[first < second]], overlapping[second[first < second]]
    group = list(range(len(boxes)))

    def root(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    for i, j in zip(first.tolist(), second.tolist(), strict=True):
        shared = {rank for rank, _ in holders[boxes[i]]} & {rank for rank, _ in holders[boxes[j]]}
        if shared:
            raise LayoutError(f"rank {min(shared)}: regions {format_box(boxes[i])} and {format_box(boxes[j])} overlap")
        group[root(i)] = root(j)
    members: dict[int, list[Box]] = {}
    for i, box in enumerate(boxes):
        members.setdefault(root(i), []).append(box)
    refined: _Holders = {}
    num_cells = 0
    for group_boxes in members.values():
        if len(group_boxes) == 1:
            refined[group_boxes[0]] = holders[group_boxes[0]]
            continue
        edges = [sorted({edge for box in group_boxes for edge in box[dim]}) for dim in range(len(group_boxes[0]))]
        for box in group_boxes:
            inside = [[m for m in edges[dim] if lo <= m <= hi] for dim, (lo, hi) in enumerate(box)]
            num_cells += math.prod(len(m) - 1 for m in inside)
            if num_cells > MAX_CELLS:
                raise LayoutError(f"partly overlapping regions would be cut into more than {MAX_CELLS} cells")
            columns = [np.arange(len(m) - 1) for m in inside]
            for cell in combine(columns).tolist():
                piece = tuple((inside[dim][i], inside[dim][i + 1]) for dim, i in enumerate(cell))
                refined.setdefault(piece, []).extend(
                    (
                        rank,
                        tuple(index + lo - outer for index, (lo, _), (outer, _) in zip(local, piece, box, strict=True)),
                    )
                    for rank, local in holders[box]
                )
    return refined


def find_overlaps(
    start_a: np.ndarray, stop_a: np.ndarray, start_b: np.ndarray, stop_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """All pairs ``(i, j)`` of boxes ``a[i]`` and ``b[j]`` that share an element, sorted.

    No box may be empty. Candidates come from a sweep along the dim with the most distinct coordinates.
    """
    num_a, num_b, ndim = len(start_a), len(start_b), start_a.shape[1]
    if not num_a or not num_b:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if ndim == 0:
        pairs = combine([np.arange(num_a), np.arange(num_b)])
        return pairs[:, 0], pairs[:, 1]
    dim = max(range(ndim), key=lambda d: len(np.unique(start_a[:, d])) + len(np.unique(start_b[:, d])))
    by_start = np.argsort(start_b[:, dim], kind="stable")
    starts = start_b[by_start, dim]
    reach = np.maximum.accumulate(stop_b[by_start, dim])
    first = np.searchsorted(reach, start_a[:, dim], side="right")
    last = np.searchsorted(starts, stop_a[:, dim], side="left")
    found_a, found_b = [], []
    counts = np.maximum(last - first, 0)
    for indices in np.array_split(np.arange(num_a), max(1, int(counts.sum()) // 2**22 + 1)):
        a = np.repeat(indices, counts[indices])
        b = by_start[ranges(first[indices], counts[indices])]
        hit = np.ones(len(a), dtype=bool)
        for d in range(ndim):
            hit &= (start_a[a, d] < stop_b[b, d]) & (start_b[b, d] < stop_a[a, d])
        found_a.append(a[hit])
        found_b.append(b[hit])
    a, b = np.concatenate(found_a), np.concatenate(found_b)
    order = np.lexsort((b, a))
    return a[order], b[order]
