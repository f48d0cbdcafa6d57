"""Classes of regions with the same holders and receivers, and the cutting of classes into even chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard import _native
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.ragged import NO_RANK, ranges

#: Chunks end at whole slices of a dim if a chunk has at least ``MIN_SLICES`` slices. Chunk sizes then differ by at most
#: 1/64. If a chunk has fewer slices, the next dim is cut too, and the chunk has up to three boxes.
MIN_SLICES = 64
#: Like ``MIN_SLICES``, inside hosts, where chunks may be uneven and whole slices need no packing.
_MIN_SLICES_INSIDE = 16
#: A chunk ends at the end of a class if that is within 1/64 of the chunk's size.
_SNAP_DIVISOR = 64


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes of tasks with the same holders, receivers and itemsize; tasks of one class can share messages.

    Attributes:
        task, task_offsets: class k has tasks ``task[task_offsets[k]:task_offsets[k + 1]]``; tasks without receivers are
        left out. nbytes, itemsize: ``(classes,)`` bytes in total, and bytes per element.
        holders, receivers: ``(classes, replicas)`` ranks, padded with -1; receivers are not holders.
    """

    task: np.ndarray
    task_offsets: np.ndarray
    nbytes: np.ndarray
    itemsize: np.ndarray
    holders: np.ndarray
    receivers: np.ndarray

    @classmethod
    def of(cls, problem: PlanProblem) -> Classes:
        """All classes of a problem, ordered by first task."""
        needed = np.flatnonzero((problem.receivers != NO_RANK).any(axis=1) & (problem.nbytes > 0))
        itemsize = np.array([spec.itemsize for spec in problem.tensors], dtype=np.int64)[problem.tensor]
        num_holders = problem.holders.shape[1]
        rows = np.concatenate([problem.holders[needed], problem.receivers[needed], itemsize[needed, None]], axis=1)
        rows[:, :num_holders].sort(axis=1)
        rows[:, num_holders:-1].sort(axis=1)
        first, inverse = group_rows(rows)
        order = np.argsort(inverse, kind="stable") if len(first) < len(inverse) else inverse
        counts = np.bincount(inverse, minlength=len(first))
        lead = needed[first]
        return cls(
            task=needed[order],
            task_offsets=np.concatenate([[0], np.cumsum(counts)]),
            nbytes=sum_by(inverse, problem.nbytes[needed], len(first)),
            itemsize=itemsize[lead],
            holders=problem.holders[lead],
            receivers=problem.receivers[lead],
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    def take(self, order: np.ndarray) -> Classes:
        """The classes in the given order."""
        counts = np.diff(self.task_offsets)[order]
        return Classes(
            task=self.task[ranges(self.task_offsets[order], counts)],
            task_offsets=np.concatenate([[0], np.cumsum(counts)]),
            nbytes=self.nbytes[order],
            itemsize=self.itemsize[order],
            holders=self.holders[order],
            receivers=self.receivers[order],
        )


def sum_by(key: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """``(count,)`` sums of integer ``values``, grouped by ``key``."""
    if count == len(key) and (key == np.arange(count)).all():
        return values.copy()
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, key, values)
    return total


def group_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group equal rows: the first row of each group, ascending, and for each row the number of its group."""
    first, number = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    return first[: _native.number_rows(np.ascontiguousarray(rows), first, number)], number


@dataclass(frozen=True, eq=False)
class Pieces:
    """Chunks cut into pieces at class boundaries. A piece is always sent as one message.

    Attributes:
        chunk, class_of: ``(pieces,)`` chunk and class of each piece, ordered by chunk; every chunk has a piece.
        host_class_of: ``(chunks,)`` host class of each chunk.
        nbytes: ``(pieces,)``.
        at, tensor, start, stop: piece i has boxes ``at[i]:at[i + 1]``; ``tensor`` ``(boxes,)``, ``start`` and ``stop``
            ``(boxes, ndim)``.
    """

    chunk: np.ndarray
    class_of: np.ndarray
    host_class_of: np.ndarray
    nbytes: np.ndarray
    at: np.ndarray
    tensor: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def boxes(self) -> Boxes:
        """The boxes of each piece."""
        return Boxes(self.at, self.tensor, self.start, self.stop)

    def __len__(self) -> int:
        return len(self.chunk)


def cut_pieces(
    problem: PlanProblem, classes: Classes, host_class: np.ndarray, num_chunks: np.ndarray, is_even: np.ndarray
) -> Pieces:
    """Concatenate the classes of each host class and cut them into ``num_chunks`` chunks of nearly equal size.

    Args:
        problem: the problem.
        classes: its classes, ordered by host class.
        host_class: ``(classes,)`` host class of each class, ascending.
        num_chunks: ``(host_classes,)`` number of chunks.
        is_even: ``(host_classes,)`` bool, whether chunk sizes must be even.
    """
    if len(classes) == len(num_chunks) and (num_chunks == 1).all():  # each class is a chunk
        alone = np.arange(len(classes))
        return Pieces(
            chunk=alone,
            class_of=alone,
            host_class_of=alone,
            nbytes=classes.nbytes,
            at=classes.task_offsets,
            tensor=problem.tensor[classes.task],
            start=problem.start[classes.task],
            stop=problem.stop[classes.task],
        )
    total = sum_by(host_class, classes.nbytes, len(num_chunks))
    before = np.cumsum(classes.nbytes) - classes.nbytes
    first_class = np.searchsorted(host_class, np.arange(len(num_chunks)))
    offset = before - before[first_class][host_class]  # first byte of each class in its host class
    whole, count = total[host_class], num_chunks[host_class]
    # chunk j of a host class begins at byte whole * j // count; a boundary near the end of a class moves to that end
    near = whole // count // _SNAP_DIVISOR
    after_first = np.minimum((offset + near) * count // whole + 1, count)
    upto = offset + classes.nbytes - near
    # chunks after_first:after_last begin inside the class
    after_last = np.maximum(-(-upto * count // whole), after_first)
    num_pieces = after_last - after_first + 1
    class_of = np.repeat(np.arange(len(classes)), num_pieces)
    nth = np.arange(len(class_of)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    number = after_first[class_of] - 1 + nth  # index of the piece's chunk in its host class
    itemsize, numel = classes.itemsize[class_of], (classes.nbytes // classes.itemsize)[class_of]

    def element(j: np.ndarray) -> np.ndarray:
        return (whole[class_of] * j // count[class_of] - offset[class_of]) // itemsize

    lo = np.where(nth == 0, 0, element(number))
    hi = np.where(nth == num_pieces[class_of] - 1, numel, element(number + 1))
    per_slice = np.maximum(whole // count // classes.itemsize, 1) // np.where(
        is_even[host_class], MIN_SLICES, _MIN_SLICES_INSIDE
    )
    boxes = _cut_boxes(problem, classes, class_of, lo, hi, per_slice)
    some = np.diff(boxes.at) > 0
    chunk = number + np.concatenate([[0], np.cumsum(num_chunks)])[host_class[class_of]]
    present, numbered = np.unique(chunk[some], return_inverse=True)
    box_bytes = (boxes.stop - boxes.start).prod(axis=1, dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(box_bytes)])[boxes.at]
    return Pieces(
        chunk=numbered,
        class_of=class_of[some],
        host_class_of=np.repeat(np.arange(len(num_chunks)), num_chunks)[present],
        nbytes=(np.diff(ends) * itemsize)[some],
        at=np.concatenate([[0], np.cumsum(np.diff(boxes.at)[some])]),
        tensor=boxes.tensor,
        start=boxes.start,
        stop=boxes.stop,
    )


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of rows: row i has boxes ``at[i]:at[i + 1]`` of ``tensor``, ``start`` and ``stop``."""

    at: np.ndarray
    tensor: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[Boxes]) -> Boxes:
        """Concatenate rows."""
        return cls(
            at=np.concatenate([[0], np.cumsum(np.concatenate([np.diff(part.at) for part in parts]))]),
            tensor=np.concatenate([part.tensor for part in parts]),
            start=np.concatenate([part.start for part in parts]),
            stop=np.concatenate([part.stop for part in parts]),
        )


def _cut_boxes(
    problem: PlanProblem, classes: Classes, class_of: np.ndarray, lo: np.ndarray, hi: np.ndarray, per_slice: np.ndarray
) -> Boxes:
    """The boxes of elements ``lo:hi`` of the concatenated tasks of each class.

    Args:
        problem, classes: the tasks.
        class_of, lo, hi: ``(rows,)`` class and element range of each row; the rows of a class leave no gaps.
        per_slice: ``(classes,)`` largest slice, in elements, to which cuts are rounded.
    """
    size = (problem.stop - problem.start)[classes.task]
    numel = size.prod(axis=1, dtype=np.int64)
    of_task = np.repeat(np.arange(len(classes)), np.diff(classes.task_offsets))
    grain = _grains(size, numel, per_slice[of_task])
    before = np.cumsum(numel) - numel
    before -= before[classes.task_offsets[:-1]][of_task]  # elements of its class before each task
    # find the tasks that each row overlaps
    base = np.cumsum(classes.nbytes // classes.itemsize) - classes.nbytes // classes.itemsize
    ends = before + numel + base[of_task]
    first = np.searchsorted(ends, lo + base[class_of], side="right")
    last = np.searchsorted(ends, hi + base[class_of] - 1, side="right")
    num_tasks = np.where(hi > lo, last - first + 1, 0)
    piece = np.repeat(np.arange(len(class_of)), num_tasks)
    row = ranges(first, num_tasks)
    start = np.maximum(lo[piece] - before[row], 0)
    stop = np.minimum(hi[piece] - before[row], numel[row])
    # round cuts inside a task to whole slices
    start = np.where(start < numel[row], _snap(start, grain[row]), start)
    stop = np.where(stop < numel[row], _snap(stop, grain[row]), stop)
    some = stop > start
    return _flat_boxes(problem, classes.task, size, piece[some], row[some], start[some], stop[some], len(class_of))


def _snap(at: np.ndarray, grain: np.ndarray) -> np.ndarray:
    return (at + grain // 2) // grain * grain


def _grains(size: np.ndarray, numel: np.ndarray, per_slice: np.ndarray) -> np.ndarray:
    """``(tasks,)`` elements to which cuts are rounded: the largest slice with at most ``per_slice`` elements."""
    grain = np.ones(len(size), dtype=np.int64)
    slice_ = numel.copy()
    is_placed = np.zeros(len(size), dtype=bool)
    for dim in range(size.shape[1]):
        slice_ = slice_ // np.maximum(size[:, dim], 1)
        fits = ~is_placed & (slice_ <= per_slice)
        grain = np.where(fits, slice_, grain)
        is_placed |= fits
    return grain


def _flat_boxes(
    problem: PlanProblem,
    task: np.ndarray,
    size: np.ndarray,
    piece: np.ndarray,
    row: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    num_pieces: int,
) -> Boxes:
    """The boxes of element ranges of tasks, where elements are numbered in C order.

    Works from the innermost dim outwards. A partial slice at the start or end of a range becomes a box. The whole
    slices in between become a range of the next dim.
    """
    ndim = size.shape[1]
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    is_whole = (start == 0) & (stop == size.prod(axis=1)[row])
    of_whole = task[row[is_whole]]
    columns.append((piece[is_whole], row[is_whole], problem.start[of_whole], problem.stop[of_whole]))
    at = np.flatnonzero(~is_whole)
    start, stop = start[at], stop[at]

    def emit(which: np.ndarray, lo: np.ndarray, hi: np.ndarray, dim: int) -> None:
        """Add the boxes ``lo:hi`` of dim ``dim``, where indices count over all outer dims too; each is in one slice."""
        if not len(which):
            return
        dims = size[row[which]]
        first = np.zeros_like(dims)
        last = dims.copy()
        outer = lo // dims[:, dim]
        first[:, dim], last[:, dim] = lo % dims[:, dim], (hi - 1) % dims[:, dim] + 1
        for d in range(dim - 1, -1, -1):
            first[:, d] = outer % dims[:, d]
            last[:, d] = first[:, d] + 1
            outer = outer // dims[:, d]
        origin = problem.start[task[row[which]]]
        columns.append((piece[which], row[which], origin + first, origin + last))

    for dim in range(ndim - 1, -1, -1):
        inner = size[row[at], dim]
        one = start // inner == (stop - 1) // inner
        emit(at[one], start[one], stop[one], dim)
        at, start, stop, inner = at[~one], start[~one], stop[~one], inner[~one]
        head, tail = start % inner != 0, stop % inner != 0
        emit(at[head], start[head], (start // inner * inner + inner)[head], dim)
        emit(at[tail], (stop // inner * inner)[tail], stop[tail], dim)
        start, stop = -(-start // inner), stop // inner
        more = stop > start
        at, start, stop = at[more], start[more], stop[more]
    owner, of, first, last = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = (
        np.lexsort((*(first[:, d] for d in range(ndim - 1, -1, -1)), of, owner)) if len(columns) > 1 else slice(None)
    )
    return Boxes(
        at=np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_pieces))]),
        tensor=problem.tensor[task[of[order]]],
        start=first[order],
        stop=last[order],
    )
