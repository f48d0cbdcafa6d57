"""Find boxes that overlap, and the box that contains a point, without comparing all pairs.

Boxes start in one bin per group. A sweep along each dim in turn splits every bin wherever no box straddles the cut,
until bins hold few boxes. The boxes of a grid separate in one pass. Bins whose boxes interlock are cut at the median of
the box sides, and a box that straddles the cut becomes two.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from reshard.errors import PlanError

#: Bins of at most this many boxes are compared pair by pair.
_MAX_PAIRWISE = 16
#: Passes over all dims before bins are halved. In the worst arrangement, one pass separates a single box.
_PASSES = 3
#: Number of pairs compared at once, which limits memory.
_PAIRS_PER_BATCH = 2**21


def find_overlapping(group: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """``(boxes,)`` bool: whether each box shares an element with another box of its group.

    Args:
        group: ``(boxes,)`` integers; boxes of different groups are not compared.
        start, stop: ``(boxes, ndim)`` integers, half-open; no box is empty.

    Raises:
        PlanError: the boxes overlap or interlock so much that separating them takes too many parts.
    """
    overlapping = np.zeros(len(group), dtype=bool)
    if len(group) < 2:
        return overlapping
    bins = _Bins(group, start, stop, start[:0])
    num_dims, idle, dim = start.shape[1], 0, 0  # idle: consecutive dims along which no bin could be halved
    while True:
        bins.separate(2)
        for a, b in _pairs(bins.bin, bins.first, bins.size):
            once = a < b
            a, b = a[once], b[once]
            hit = ((bins.start[a] < bins.stop[b]) & (bins.start[b] < bins.stop[a])).all(axis=1)
            overlapping[bins.box[a[hit]]] = True
            overlapping[bins.box[b[hit]]] = True
        bins.keep(bins.size > _MAX_PAIRWISE)
        if not len(bins.box):
            return overlapping
        if idle == num_dims:  # no box has a side inside its bin, so each box fills its bin
            overlapping[bins.box] = True
            return overlapping
        idle = 0 if bins.halve(dim) else idle + 1
        dim = (dim + 1) % max(num_dims, 1)


def locate_points(point: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """``(points,)`` index of the box that contains each point; -1 for points outside all boxes.

    Args:
        point: ``(points, ndim)`` integers.
        start, stop: ``(boxes, ndim)`` integers, half-open; no box is empty, and no two overlap.

    Raises:
        PlanError: the boxes interlock so much that separating them takes too many parts.
    """
    box_of_point = np.full(len(point), -1, dtype=np.int64)
    if not len(start) or not len(point):
        return box_of_point
    bins = _Bins(np.zeros(len(start), dtype=np.int64), start, stop, point)
    dim = 0
    while True:
        bins.separate(1)
        for index, box in _pairs(bins.bin_of_point, bins.first, bins.size):
            hit = ((bins.start[box] <= bins.point[index]) & (bins.point[index] < bins.stop[box])).all(axis=1)
            box_of_point[bins.point_id[index[hit]]] = bins.box[box[hit]]
        bins.keep(bins.size > _MAX_PAIRWISE)
        if not len(bins.box) or not len(bins.point):
            return box_of_point
        bins.halve(dim)
        dim = (dim + 1) % start.shape[1]


def _pairs(bin_of: np.ndarray, first: np.ndarray, size: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of ``(entry, box)`` pairs: each box or point with each box of its bin, for bins of few boxes."""
    rows = np.flatnonzero(size[bin_of] <= _MAX_PAIRWISE)
    for part in np.array_split(rows, max(1, len(rows) * _MAX_PAIRWISE // _PAIRS_PER_BATCH)):
        counts = size[bin_of[part]]
        offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        yield np.repeat(part, counts), np.repeat(first[bin_of[part]], counts) + offset


class _Bins:
    """Boxes and points in bins. Boxes can overlap, and contain a point, only inside a bin. Boxes are in bin order.

    ``box`` and ``point_id`` are the numbers of the original boxes and points. A box that was cut has several entries.
    """

    def __init__(self, group: np.ndarray, start: np.ndarray, stop: np.ndarray, point: np.ndarray) -> None:
        order = np.argsort(group, kind="stable")
        self.box = order
        self._limit = 4 * len(group) + 2**16  # largest number of boxes, counting all parts of a cut box
        columns = [self._compress(start[:, d], stop[:, d], point[:, d]) for d in range(start.shape[1])]
        self.start, self.stop, self.point = (
            np.stack([column[i] for column in columns], axis=1) if columns else given
            for i, given in enumerate((start, stop, point))
        )
        self.start, self.stop = self.start[order], self.stop[order]
        self._span = [int(column[1].max()) + 1 for column in columns]
        self.point_id = np.arange(len(point))
        self.bin_of_point = np.zeros(len(point), dtype=np.int64)
        self._renumber(group[order])

    def _compress(self, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
        """The starts, stops and points of one dim, shifted or ranked so that ``bin * span + coordinate`` fits int64."""
        smallest = columns[0].min()
        columns = (columns[0] - smallest, columns[1] - smallest, np.maximum(columns[2] - smallest, -1))
        if (int(columns[1].max()) + 2) * self._limit < 2**62:
            return tuple(np.minimum(column, columns[1].max()) for column in columns)
        cuts = np.unique(np.concatenate(columns[:2]))
        ends = len(cuts) - 1
        points = np.minimum(np.searchsorted(cuts, columns[2], side="right") - 1, ends)
        return np.searchsorted(cuts, columns[0]), np.searchsorted(cuts, columns[1]), points

    def _renumber(self, bins: np.ndarray) -> None:
        """Number bins from 0; ``bins`` is ascending."""
        begins = np.ones(len(bins), dtype=bool)
        begins[1:] = bins[1:] != bins[:-1]
        self.bin = np.cumsum(begins) - 1
        self.first = np.flatnonzero(begins)
        self.size = np.diff(np.append(self.first, len(bins)))

    def keep(self, kept: np.ndarray) -> None:
        """Keep the bins where ``kept`` is True."""
        if kept.all():
            return
        number = np.cumsum(kept) - 1
        boxes, points = kept[self.bin], kept[self.bin_of_point]
        self.box, self.start, self.stop = self.box[boxes], self.start[boxes], self.stop[boxes]
        self.point_id, self.point = self.point_id[points], self.point[points]
        self.bin_of_point = number[self.bin_of_point[points]]
        self._renumber(number[self.bin[boxes]])

    def separate(self, min_size: int) -> None:
        """Split bins wherever no box straddles the cut, and drop bins of fewer than ``least`` boxes."""
        for _ in range(_PASSES):
            before = len(self.box), len(self.size)
            for dim in range(self.start.shape[1]):
                self._cut(dim)
                self.keep(self.size >= min_size)
            if (len(self.box), len(self.size)) == before or not len(self.box):
                return

    def _cut(self, dim: int) -> None:
        """Start a new bin at each box that begins where all earlier boxes of its bin have ended."""
        span = self._span[dim]
        order = np.argsort(self.bin * span + self.start[:, dim], kind="stable")
        self.box, self.start, self.stop = self.box[order], self.start[order], self.stop[order]
        base = self.bin * span  # the new order leaves this array as it is: boxes move only inside their bin
        low = base + self.start[:, dim]
        reach = np.maximum.accumulate(base + self.stop[:, dim])
        begins = np.ones(len(low), dtype=bool)
        begins[1:] = low[1:] >= reach[:-1]
        bins, old = np.cumsum(begins) - 1, self.bin
        if len(self.point):
            at = np.searchsorted(low, self.bin_of_point * span + self.point[:, dim], side="right") - 1
            inside = (at >= 0) & (old[np.maximum(at, 0)] == self.bin_of_point)
            self.point_id, self.point, self.bin_of_point = self.point_id[inside], self.point[inside], bins[at[inside]]
        self._renumber(bins)

    def halve(self, dim: int) -> bool:
        """Cut each bin at the median of the box sides strictly inside it; False if no bin has such a side."""
        low, high = self.start[:, dim], self.stop[:, dim]
        inner_low = low > np.minimum.reduceat(low, self.first)[self.bin]
        inner_high = high < np.maximum.reduceat(high, self.first)[self.bin]
        side = np.concatenate([low[inner_low], high[inner_high]])
        bin_of_side = np.concatenate([self.bin[inner_low], self.bin[inner_high]])
        if not len(side):
            return False
        side = np.sort(bin_of_side * self._span[dim] + side)
        counts = np.bincount(bin_of_side, minlength=len(self.size))
        middle = np.minimum(np.cumsum(counts) - counts + counts // 2, len(side) - 1)
        cut_of_bin = np.where(counts > 0, side[middle] % self._span[dim], self._span[dim])
        cut = cut_of_bin[self.bin]
        left, right = low < cut, high > cut
        if left.sum() + right.sum() > self._limit:
            raise PlanError(
                f"boxes overlap or interlock so much that separating them takes more than {self._limit} parts"
            )
        bins = np.concatenate([2 * self.bin[left], 2 * self.bin[right] + 1])
        start = np.concatenate([self.start[left], self.start[right]])
        stop = np.concatenate([self.stop[left], self.stop[right]])
        start[left.sum() :, dim] = np.maximum(start[left.sum() :, dim], cut[right])
        stop[: left.sum(), dim] = np.minimum(stop[: left.sum(), dim], cut[left])
        order = np.argsort(bins, kind="stable")
        self.box = np.concatenate([self.box[left], self.box[right]])[order]
        self.start, self.stop = start[order], stop[order]
        if len(self.point):
            wanted = 2 * self.bin_of_point + (self.point[:, dim] >= cut_of_bin[self.bin_of_point])
            number = np.unique(bins)  # a half without boxes is dropped
            index = np.minimum(np.searchsorted(number, wanted), len(number) - 1)
            known = number[index] == wanted
            self.point_id, self.point, self.bin_of_point = self.point_id[known], self.point[known], index[known]
        self._renumber(bins[order])
        return True
