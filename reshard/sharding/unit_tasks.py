"""Unit tasks: regions with the ranks that hold and that need them. They imply no choice of senders or routes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.errors import LayoutError
from reshard.ragged import ranges
from reshard.sharding.dim_cuts import DimCuts
from reshard.sharding.layout import format_box
from reshard.sharding.tiles import Tiles, combine, find_overlaps


@dataclass(frozen=True, eq=False)
class UnitTasks:
    """Every pair of a source tile and a destination tile that share elements.

    Attributes:
        src, dst: the shards of the source and the destination layout.
        start, stop: ``(tasks, ndim)`` the shared boxes, which cover each destination tile exactly once.
        src_tile, dst_tile: ``(tasks,)`` indices into the tiles of ``src`` and ``dst``.
    """

    src: Tiles
    dst: Tiles
    start: np.ndarray
    stop: np.ndarray
    src_tile: np.ndarray
    dst_tile: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def numel(self) -> np.ndarray:
        """``(tasks,)`` elements of each box."""
        return (self.stop - self.start).prod(axis=1, dtype=np.int64)

    @cached_property
    def is_strided(self) -> np.ndarray:
        """``(tasks,)`` bool: whether the box is not contiguous in its source or its destination tile."""
        strided = np.zeros(len(self), dtype=bool)
        for shards, tile in ((self.src, self.src_tile), (self.dst, self.dst_tile)):
            size, whole = self.stop - self.start, (shards.stop - shards.start)[tile]
            is_outer = np.ones(len(self), dtype=bool)  # whether all dims before this one have size 1
            for dim in range(size.shape[1]):
                strided |= ~is_outer & (size[:, dim] != whole[:, dim])
                is_outer &= size[:, dim] == 1
        return strided

    @property
    def holders(self) -> np.ndarray:
        """``(tasks, replicas)`` ranks that hold each box, padded with -1."""
        return self.src.ranks[self.src_tile]

    @property
    def destinations(self) -> np.ndarray:
        """``(tasks, replicas)`` ranks that need each box, padded with -1."""
        return self.dst.ranks[self.dst_tile]


def cut_unit_tasks(src: Tiles, dst: Tiles) -> UnitTasks:
    """The unit tasks between two shardings of one tensor.

    Two grids are intersected dim by dim and the intersections combined, so the work is proportional to the output,
    not to the number of tile pairs.

    Raises:
        LayoutError: the shapes differ, or no source rank holds a region that the destination needs.
    """
    if src.shape != dst.shape:
        raise LayoutError(f"source shape {list(src.shape)} and destination shape {list(dst.shape)} differ")
    if src.cuts is not None and dst.cuts is not None:
        return _from_grids(src, dst, src.cuts, dst.cuts)
    src_tile, dst_tile = find_overlaps(src.start, src.stop, dst.start, dst.stop)
    tasks = UnitTasks(
        src=src,
        dst=dst,
        start=np.maximum(src.start[src_tile], dst.start[dst_tile]),
        stop=np.minimum(src.stop[src_tile], dst.stop[dst_tile]),
        src_tile=src_tile,
        dst_tile=dst_tile,
    )
    held = np.zeros(len(dst.start), dtype=np.int64)
    np.add.at(held, dst_tile, tasks.numel)
    short = np.flatnonzero(held < dst.numel)
    if len(short):
        tile = int(short[0])
        box = format_box(list(zip(dst.start[tile].tolist(), dst.stop[tile].tolist(), strict=True)))
        raise LayoutError(
            f"rank {dst.ranks[tile, 0]} needs {dst.numel[tile]} elements of {box}, "
            f"but the source layout holds only {held[tile]} of them"
        )
    return tasks


def count_unit_tasks(src: Tiles, dst: Tiles) -> int | None:
    """The number of unit tasks, without building them; None if a side is not a grid."""
    if src.cuts is None or dst.cuts is None:
        return None
    return math.prod(int(_overlap_ranges(a, b)[1].sum()) for a, b in zip(src.cuts, dst.cuts, strict=True))


def _overlap_ranges(a: DimCuts, b: DimCuts) -> tuple[np.ndarray, np.ndarray]:
    """For each interval of ``a``, the first interval of ``b`` that overlaps it, and how many do."""
    first = np.searchsorted(b.hi, a.lo, side="right")
    return first, np.searchsorted(b.lo, a.hi, side="left") - first


def _from_grids(src: Tiles, dst: Tiles, src_cuts: tuple[DimCuts, ...], dst_cuts: tuple[DimCuts, ...]) -> UnitTasks:
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for a, b in zip(src_cuts, dst_cuts, strict=True):
        first, counts = _overlap_ranges(a, b)
        i, j = np.repeat(np.arange(len(a.lo)), counts), ranges(first, counts)
        columns.append((i, j, np.maximum(a.lo[i], b.lo[j]), np.minimum(a.hi[i], b.hi[j])))
    i_of = combine([column[0] for column in columns])
    j_of = combine([column[1] for column in columns])
    src_tile = np.zeros(len(i_of), dtype=np.int64)
    dst_tile = np.zeros(len(i_of), dtype=np.int64)
    for dim in range(len(columns)):
        src_tile = src_tile * len(src_cuts[dim].lo) + i_of[:, dim]
        dst_tile = dst_tile * len(dst_cuts[dim].lo) + j_of[:, dim]
    return UnitTasks(
        src=src,
        dst=dst,
        start=combine([column[2] for column in columns]),
        stop=combine([column[3] for column in columns]),
        src_tile=src_tile,
        dst_tile=dst_tile,
    )
