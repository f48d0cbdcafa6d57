"""Where a layout puts each element of a tensor of a given shape.

The only place that knows the chunk rule. Everything is arrays: a layout of a million tiles is three of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

import numpy as np

from reshard.errors import LayoutError
from reshard.layout import MAX_NDIM, AnyLayout, Box, Layout, RegionLayout, format_box
from reshard.notation import Step, axis_of, split_factor_of

NO_RANK = -1
_MIX = np.uint64(0x9E3779B97F4A7C15)
MAX_PIECES = 2**22
#: Cells into which regions that overlap in part may be cut.
MAX_CELLS = 2**17


@dataclass(frozen=True, eq=False)
class DimCuts:
    """One tensor dim cut into intervals that do not overlap, ascending; empty ones are left out.

    ``coord`` says which part of the dim (counted major first over its axes) an interval belongs to, and
    ``local`` where it lies in that part; ``local_size`` is the size of each part.
    """

    lo: np.ndarray
    hi: np.ndarray
    coord: np.ndarray
    local: np.ndarray
    local_size: np.ndarray


@dataclass(frozen=True, eq=False)
class Shards:
    """The tiles of a sharded tensor: boxes that do not overlap, and who holds each.

    Attributes:
        layout, shape: what was cut.
        start, stop: ``(tiles, ndim)`` half-open boxes, none of them empty.
        ranks: ``(tiles, replicas)`` the holders of each tile, padded with :data:`NO_RANK`.
        local: ``(tiles, replicas, ndim)`` where the tile starts in the local array of each holder.
        cuts: per dim the intervals whose product the tiles are (row-major); None for explicit regions.
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
            return _joined_shape(self.layout, rank)
        assert self.cuts is not None
        mesh = self.layout.mesh
        coords = np.unravel_index(mesh.ranks.index(rank), mesh.sizes) if mesh.sizes else ()
        at = dict(zip(mesh.axes, coords, strict=True))
        shape = []
        for dim, cut in enumerate(self.cuts):
            part = 0
            for step in self.layout.spec[dim] if dim < len(self.layout.spec) else ():
                part = part * mesh.axis_size(axis_of(step)) + int(at[axis_of(step)])
            shape.append(int(cut.local_size[part]))
        return tuple(shape)

    def pieces_of(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tiles of one rank: their ``start``, ``stop`` and where each starts in its local array."""
        tile, replica = np.nonzero(self.ranks == rank)
        return self.start[tile], self.stop[tile], self.local[tile, replica]

    def find(self, rank: int, start: np.ndarray, stop: np.ndarray) -> list[tuple[slice, ...] | None]:
        """Where boxes lie in the local array of a rank; None for one that does not lie in a single tile of it.

        Args:
            start, stop: ``(boxes, ndim)``, none of them empty.
        """
        found: list[tuple[slice, ...] | None] = [None] * len(start)
        tile_start, tile_stop, local = self.pieces_of(rank)
        box_of, tile_of = find_overlaps(start, stop, tile_start, tile_stop)
        inside = ((start[box_of] >= tile_start[tile_of]) & (stop[box_of] <= tile_stop[tile_of])).all(axis=1)
        box_of, tile_of = box_of[inside], tile_of[inside]
        first = start[box_of] - tile_start[tile_of] + local[tile_of]
        last = first + stop[box_of] - start[box_of]
        for box, lo, hi in zip(box_of.tolist(), first.tolist(), last.tolist(), strict=True):
            found[box] = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        return found

    def boxes_of(self, rank: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """The tiles of one rank as ``(box, where it starts in the local array)``."""
        for start, stop, local in zip(*self.pieces_of(rank), strict=True):
            yield tuple(zip(start.tolist(), stop.tolist(), strict=True)), tuple(local.tolist())


def cut_shards(layout: AnyLayout, shape: Sequence[int]) -> Shards:
    """Cut a tensor of ``shape`` as ``layout`` says.

    Raises:
        LayoutError: the layout has more dims than the shape, or a region reaches past it.
    """
    shape = check_shape(shape)
    if len(shape) > MAX_NDIM:
        raise LayoutError(f"shape {list(shape)} has {len(shape)} dims; at most {MAX_NDIM} are supported")
    if any(size < 0 for size in shape) or math.prod(size for size in shape if size) >= 2**56:
        raise LayoutError(f"shape {list(shape)} must have sizes of at least 0 and fewer than 2**56 elements")
    if isinstance(layout, RegionLayout):
        return _cut_regions(layout, shape)
    return _cut_grid(layout, shape)


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple of integers; raises LayoutError if it is none."""
    try:
        if isinstance(shape, str):
            raise TypeError
        return tuple(index(size) for size in shape)
    except TypeError:
        raise LayoutError(f"shape {shape!r} is not a sequence of integers") from None


def chunk_rule(size: np.ndarray, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """torch.chunk: ``ceil(size / num_chunks)`` elements to each chunk until none are left.

    Returns ``(start, stop)`` of shape ``size.shape + (num_chunks,)``.
    """
    size = np.asarray(size, dtype=np.int64)[..., None]
    chunk = -(-size // num_chunks)
    number = np.arange(num_chunks, dtype=np.int64)
    return np.minimum(chunk * number, size), np.minimum(chunk * (number + 1), size)


def _cut_dim(size: int, steps: Sequence[Step], axis_sizes: Sequence[int]) -> DimCuts:
    if all(split_factor_of(step) == 1 for step in steps):
        lo, length = np.zeros(1, dtype=np.int64), np.array([size], dtype=np.int64)
        for axis_size in axis_sizes:
            start, stop = chunk_rule(length, axis_size)
            lo, length = (lo[:, None] + start).ravel(), (stop - start).ravel()
        coord = np.flatnonzero(length)
        return DimCuts(lo[coord], (lo + length)[coord], coord, np.zeros_like(coord), length)
    parts: list[list[tuple[int, int]]] = [[(0, size)]]
    for step, axis_size in zip(steps, axis_sizes, strict=True):
        parts = [piece for part in parts for piece in _cut_strided(part, split_factor_of(step), axis_size)]
        if sum(map(len, parts)) > MAX_PIECES:
            raise LayoutError(
                f"steps {' '.join(map(str, steps))} cut {size} elements into more than {MAX_PIECES} pieces"
            )
    rows = []
    for coord_index, part in enumerate(parts):
        local = 0
        for lo_, hi_ in part:
            rows.append((lo_, hi_, coord_index, local))
            local += hi_ - lo_
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
    local_size = np.array([sum(hi_ - lo_ for lo_, hi_ in part) for part in parts], dtype=np.int64)
    return DimCuts(table[:, 0], table[:, 1], table[:, 2], table[:, 3], local_size)


def _cut_strided(part: list[tuple[int, int]], split_factor: int, num_parts: int) -> list[list[tuple[int, int]]]:
    """Cut the elements of ``part``, taken in order, into ``split_factor`` chunks and each over ``num_parts``."""
    total = sum(hi - lo for lo, hi in part)
    split_factor = min(split_factor, max(total, 1))
    if min(split_factor, total) * num_parts > MAX_PIECES:
        raise LayoutError(
            f"a split factor of {split_factor} over {num_parts} ranks makes more than {MAX_PIECES} pieces"
        )
    outer_lo, outer_hi = chunk_rule(np.array(total), split_factor)
    kept = outer_hi > outer_lo
    outer_lo, outer_hi = outer_lo[kept], outer_hi[kept]
    inner_lo, inner_hi = chunk_rule(outer_hi - outer_lo, num_parts)
    ends = np.cumsum([0] + [hi - lo for lo, hi in part])
    result = []
    for part_index in range(num_parts):
        piece: list[tuple[int, int]] = []
        for lo, hi in zip(
            (outer_lo + inner_lo[:, part_index]).tolist(), (outer_lo + inner_hi[:, part_index]).tolist(), strict=True
        ):
            at = int(np.searchsorted(ends, lo, side="right")) - 1
            while lo < hi:
                taken = min(hi, int(ends[at + 1])) - lo
                first = part[at][0] + lo - int(ends[at])
                if taken and piece and piece[-1][1] == first:
                    piece[-1] = (piece[-1][0], first + taken)
                elif taken:
                    piece.append((first, first + taken))
                lo, at = lo + taken, at + 1
        result.append(piece)
    return result


def _cut_grid(layout: Layout, shape: tuple[int, ...]) -> Shards:
    mesh, spec = layout.mesh, layout.spec
    if len(spec) > len(shape):
        raise LayoutError(
            f"layout {layout} shards dim {len(spec) - 1}, but the tensor of shape {list(shape)} has {len(shape)} dims"
        )
    spec = spec + ((),) * (len(shape) - len(spec))
    cuts = tuple(
        _cut_dim(size, steps, [mesh.axis_size(axis_of(step)) for step in steps])
        for size, steps in zip(shape, spec, strict=True)
    )
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
    return Shards(
        layout=layout,
        shape=shape,
        start=combine([cut.lo for cut in cuts]),
        stop=combine([cut.hi for cut in cuts]),
        ranks=ranks,
        local=np.broadcast_to(local[:, None, :], (num_tiles, ranks.shape[1], len(shape))),
        cuts=cuts,
    )


def combine(columns: Sequence[np.ndarray]) -> np.ndarray:
    """The product of one array per dim, row-major: shape ``(product of lengths, number of dims)``."""
    total = math.prod(len(column) for column in columns)
    out = np.empty((total, len(columns)), dtype=np.int64)
    inner = total
    for dim, column in enumerate(columns):
        inner = inner // len(column) if len(column) else 0
        out[:, dim] = np.tile(np.repeat(column, inner), total // (inner * len(column)) if inner else 0)
    return out


def _joined_shape(layout: RegionLayout, rank: int) -> tuple[int, ...]:
    boxes = dict(layout.boxes)[rank]
    if not boxes:
        return (0,) * layout.ndim
    shape = [hi - lo for lo, hi in boxes[0]]
    if shape:
        shape[layout.join_dim] = sum(box[layout.join_dim][1] - box[layout.join_dim][0] for box in boxes)
    return tuple(shape)


def _cut_regions(layout: RegionLayout, shape: tuple[int, ...]) -> Shards:
    if layout.ndim != len(shape):
        raise LayoutError(f"regions have {layout.ndim} dims, but the tensor of shape {list(shape)} has {len(shape)}")
    holders: dict[Box, list[tuple[int, tuple[int, ...]]]] = {}
    for rank, row in layout.boxes:
        at = 0
        for box in row:
            for (_, hi), size in zip(box, shape, strict=True):
                if hi > size:
                    raise LayoutError(f"rank {rank}: region {format_box(box)} reaches past shape {list(shape)}")
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
    return Shards(layout, shape, bounds[:, :, 0].copy(), bounds[:, :, 1].copy(), ranks, locals_, None)


_Holders = dict[Box, list[tuple[int, tuple[int, ...]]]]


def _refine(holders: _Holders, ndim: int) -> _Holders:
    """Split boxes that overlap in part into cells, so that any two boxes are the same or apart."""
    boxes = sorted(holders)
    for box in boxes:
        ranks = [rank for rank, _ in holders[box]]
        if len(set(ranks)) != len(ranks):
            rank = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise LayoutError(f"rank {rank} holds region {format_box(box)} twice")
    bounds = np.array(boxes, dtype=np.int64).reshape(len(boxes), ndim, 2)
    first, second = find_overlaps(bounds[:, :, 0], bounds[:, :, 1], bounds[:, :, 0], bounds[:, :, 1])
    apart = first < second
    first, second = first[apart], second[apart]
    if not len(first):
        return holders
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
        marks = [sorted({edge for box in group_boxes for edge in box[dim]}) for dim in range(len(group_boxes[0]))]
        for box in group_boxes:
            inside = [[m for m in marks[dim] if lo <= m <= hi] for dim, (lo, hi) in enumerate(box)]
            num_cells += math.prod(len(m) - 1 for m in inside)
            if num_cells > MAX_CELLS:
                raise LayoutError(f"regions that overlap in part would be cut into more than {MAX_CELLS} cells")
            columns = [np.arange(len(m) - 1) for m in inside]
            for cell in combine(columns).tolist():
                piece = tuple((inside[dim][i], inside[dim][i + 1]) for dim, i in enumerate(cell))
                refined.setdefault(piece, []).extend(
                    (rank, tuple(at + lo - outer for at, (lo, _), (outer, _) in zip(local, piece, box, strict=True)))
                    for rank, local in holders[box]
                )
    return refined


def find_overlaps(
    start_a: np.ndarray, stop_a: np.ndarray, start_b: np.ndarray, stop_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """All pairs ``(i, j)`` of boxes ``a[i]`` and ``b[j]`` that share an element, sorted.

    Boxes are not empty. Candidates come from a sweep along the dim with the most distinct cuts.
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
    for rows in np.array_split(np.arange(num_a), max(1, int(counts.sum()) // 2**22 + 1)):
        a = np.repeat(rows, counts[rows])
        b = by_start[ranges(first[rows], counts[rows])]
        hit = np.ones(len(a), dtype=bool)
        for d in range(ndim):
            hit &= (start_a[a, d] < stop_b[b, d]) & (start_b[b, d] < stop_a[a, d])
        found_a.append(a[hit])
        found_b.append(b[hit])
    a, b = np.concatenate(found_a), np.concatenate(found_b)
    order = np.lexsort((b, a))
    return a[order], b[order]


def mix_rows(rows: np.ndarray, seed: int = 0) -> np.ndarray:
    """``(rows,)`` a number of 64 bits for each row of integers; equal rows have equal numbers, others hardly ever."""
    key = np.full(len(rows), seed, dtype=np.uint64)
    for column in (*rows.T, np.full(len(rows), rows.shape[1])):
        key = (key ^ (key >> np.uint64(29))) * _MIX + column.astype(np.uint64)
    return (key ^ (key >> np.uint64(32))) * _MIX


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``[first[0], first[0]+1, ..., first[1], ...]`` with ``counts[i]`` numbers each."""
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    return np.arange(total, dtype=np.int64) - np.repeat(before - first, counts)
