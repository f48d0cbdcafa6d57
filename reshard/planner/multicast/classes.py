"""Regions with the same holders and destinations, and how they are cut into chunks of equal size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planner.strategies.problem import Problem
from reshard.ragged import NO_RANK, mix_rows, ranges

#: A dim is cut alone when a chunk is at least this many of its slices: then no chunk is more than one part in as many
#: larger than another. Else the next dim is cut too, and a chunk is up to three boxes.
EVEN = 64
#: Inside hosts, where chunks need not be even, whole slices are worth more: they need no packing.
_EVEN_INSIDE = 16
#: Where the next class begins within one part in as many of a chunk's end, the chunk ends there.
_NEAR = 64


@dataclass(frozen=True, eq=False)
class Classes:
    """Tasks by who holds and who needs them; those of one class can travel together.

    Attributes:
        task: tasks that somebody lacks, by class. task_at: class k has ``task[task_at[k]:task_at[k + 1]]``.
        nbytes, itemsize: ``(classes,)``. holders, receivers: ``(classes, replicas)`` ranks, padded with -1; receivers
            do not hold what they need.
    """

    task: np.ndarray
    task_at: np.ndarray
    nbytes: np.ndarray
    itemsize: np.ndarray
    holders: np.ndarray
    receivers: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> Classes:
        """All classes of a problem, in the order of their first tasks."""
        needed = np.flatnonzero((problem.receivers != NO_RANK).any(axis=1) & (problem.nbytes > 0))
        itemsize = np.array([spec.itemsize for spec in problem.tensors], dtype=np.int64)[problem.tensor]
        rows = np.concatenate(
            [
                np.sort(problem.holders[needed], axis=1),
                np.sort(problem.receivers[needed], axis=1),
                itemsize[needed, None],
            ],
            axis=1,
        )
        first, inverse = group_rows(rows)
        order = np.argsort(inverse, kind="stable")
        counts = np.bincount(inverse, minlength=len(first))
        lead = needed[first]
        return cls(
            task=needed[order],
            task_at=np.concatenate([[0], np.cumsum(counts)]),
            nbytes=sum_by(inverse, problem.nbytes[needed], len(first)),
            itemsize=itemsize[lead],
            holders=problem.holders[lead],
            receivers=problem.receivers[lead],
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    def take(self, order: np.ndarray) -> Classes:
        """The same classes in another order."""
        counts = np.diff(self.task_at)[order]
        return Classes(
            task=self.task[ranges(self.task_at[order], counts)],
            task_at=np.concatenate([[0], np.cumsum(counts)]),
            nbytes=self.nbytes[order],
            itemsize=self.itemsize[order],
            holders=self.holders[order],
            receivers=self.receivers[order],
        )


def sum_by(key: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """``(count,)`` sums of the integers whose key it is."""
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, key, values)
    return total


def group_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each set of equal rows, ascending, and for each row the number of its set."""
    _, first, inverse = np.unique(mix_rows(rows), return_index=True, return_inverse=True)
    if not (rows == rows[first[inverse]]).all():  # two rows have one key
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse.ravel()]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Chunks cut where other ranks hold or need what follows: each piece is one message wherever it goes.

    Attributes:
        chunk, class_of: ``(pieces,)`` in the order of the chunks; every chunk has a piece.
        host_class_of: ``(chunks,)``. nbytes: ``(pieces,)``.
        at, tensor, start, stop: piece i has boxes ``at[i]:at[i + 1]`` of ``tensor``, ``start`` and ``stop``.
    """

    chunk: np.ndarray
    class_of: np.ndarray
    host_class_of: np.ndarray
    nbytes: np.ndarray
    at: np.ndarray
    tensor: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def cut_pieces(
    problem: Problem, classes: Classes, host_class: np.ndarray, num_chunks: np.ndarray, is_even: np.ndarray
) -> Pieces:
    """Lay the classes of each host class end to end and cut them into ``num_chunks`` chunks, as even as elements allow.

    Args:
        host class: ``(classes,)`` ascending. num_chunks: ``(host_classes,)``. is_even: ``(host_classes,)`` where sizes
        must be equal.
    """
    total = sum_by(host_class, classes.nbytes, len(num_chunks))
    before = np.cumsum(classes.nbytes) - classes.nbytes
    first_class = np.searchsorted(host_class, np.arange(len(num_chunks)))
    offset = before - before[first_class][host_class]  # of each class in its host class
    whole, count = total[host_class], num_chunks[host_class]
    # chunk j of a host class begins at byte whole * j // count; ends close to those of a class are moved there
    near = whole // count // _NEAR
    after_first = np.minimum((offset + near) * count // whole + 1, count)
    upto = offset + classes.nbytes - near
    after_last = np.maximum(-(-upto * count // whole), after_first)  # ends in between are after_first : after_last
    met = after_last - after_first + 1
    class_of = np.repeat(np.arange(len(classes)), met)
    nth = np.arange(len(class_of)) - np.repeat(np.cumsum(met) - met, met)
    number = after_first[class_of] - 1 + nth  # of its chunk in its host class
    itemsize, numel = classes.itemsize[class_of], (classes.nbytes // classes.itemsize)[class_of]

    def element(j: np.ndarray) -> np.ndarray:
        return (whole[class_of] * j // count[class_of] - offset[class_of]) // itemsize

    lo = np.where(nth == 0, 0, element(number))
    hi = np.where(nth == met[class_of] - 1, numel, element(number + 1))
    per_slice = np.maximum(whole // count // classes.itemsize, 1) // np.where(is_even[host_class], EVEN, _EVEN_INSIDE)
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
class _Boxes:
    """Row i of what was cut has boxes ``at[i]:at[i + 1]`` of ``tensor``, ``start`` and ``stop``."""

    at: np.ndarray
    tensor: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def _cut_boxes(
    problem: Problem, classes: Classes, class_of: np.ndarray, lo: np.ndarray, hi: np.ndarray, per_slice: np.ndarray
) -> _Boxes:
    """The boxes of elements ``lo`` to ``hi`` of classes whose tasks are laid end to end.

    Rows follow each other without a gap in each class. ``per_slice`` are elements that a slice may have where ends are
    moved to whole slices, by class.
    """
    size = (problem.stop - problem.start)[classes.task]
    numel = size.prod(axis=1, dtype=np.int64)
    of_task = np.repeat(np.arange(len(classes)), np.diff(classes.task_at))
    grain = _grains(size, numel, per_slice[of_task])
    before = np.cumsum(numel) - numel
    before -= before[classes.task_at[:-1]][of_task]  # elements of its class before each task
    # each row meets a run of tasks
    base = np.cumsum(classes.nbytes // classes.itemsize) - classes.nbytes // classes.itemsize
    ends = before + numel + base[of_task]
    first = np.searchsorted(ends, lo + base[class_of], side="right")
    last = np.searchsorted(ends, hi + base[class_of] - 1, side="right")
    met = np.where(hi > lo, last - first + 1, 0)
    piece = np.repeat(np.arange(len(class_of)), met)
    row = ranges(first, met)
    start = np.maximum(lo[piece] - before[row], 0)
    stop = np.minimum(hi[piece] - before[row], numel[row])
    # ends inside a task stand at whole slices of the dim that is fine enough
    start = np.where(start < numel[row], _snap(start, grain[row]), start)
    stop = np.where(stop < numel[row], _snap(stop, grain[row]), stop)
    some = stop > start
    return _flat_boxes(problem, classes.task, size, piece[some], row[some], start[some], stop[some], len(class_of))


def _snap(at: np.ndarray, grain: np.ndarray) -> np.ndarray:
    return (at + grain // 2) // grain * grain


def _grains(size: np.ndarray, numel: np.ndarray, per_slice: np.ndarray) -> np.ndarray:
    """Of each task, in how many elements it may be cut: the largest slice of at most so many."""
    grain = np.ones(len(size), dtype=np.int64)
    slice_ = numel.copy()
    found = np.zeros(len(size), dtype=bool)
    for dim in range(size.shape[1]):
        slice_ = slice_ // np.maximum(size[:, dim], 1)
        fits = ~found & (slice_ <= per_slice)
        grain = np.where(fits, slice_, grain)
        found |= fits
    return grain


def _flat_boxes(
    problem: Problem,
    task: np.ndarray,
    size: np.ndarray,
    piece: np.ndarray,
    row: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    num_pieces: int,
) -> _Boxes:
    """The boxes of ranges of elements of tasks, in C order.

    From the innermost dim outwards: what begins or ends inside a slice is a box of its own, whole slices are a range of
    the next dim.
    """
    ndim = size.shape[1]
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    is_whole = (start == 0) & (stop == size.prod(axis=1)[row])
    of_whole = task[row[is_whole]]
    found.append((piece[is_whole], row[is_whole], problem.start[of_whole], problem.stop[of_whole]))
    at = np.flatnonzero(~is_whole)
    start, stop = start[at], stop[at]

    def emit(which: np.ndarray, lo: np.ndarray, hi: np.ndarray, dim: int) -> None:
        """Elements lo to hi of dim ``dim``, counted over all dims before it, in one slice of those."""
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
        found.append((piece[which], row[which], origin + first, origin + last))

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
    owner, of, first, last = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((*(first[:, d] for d in range(ndim - 1, -1, -1)), of, owner)) if len(found) > 1 else slice(None)
    return _Boxes(
        at=np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_pieces))]),
        tensor=problem.tensor[task[of[order]]],
        start=first[order],
        stop=last[order],
    )
