"""Regions with the same holders and needers, and how they are cut into chunks of equal size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.routes import Problem
from reshard.shards import NO_RANK, ranges

#: A dim is cut alone when a chunk is at least this many of its slices: then no chunk is more than one part in as many
#: larger than another. Else the next dim is cut too, and a chunk is up to three boxes.
_EVEN = 32


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
        first, inverse = _group(rows)
        order = np.argsort(inverse, kind="stable")
        counts = np.bincount(inverse, minlength=len(first))
        task = needed[order]
        lead = needed[first]
        nbytes = np.zeros(len(first), dtype=np.int64)
        np.add.at(nbytes, inverse, problem.nbytes[needed])
        return cls(
            task=task,
            task_at=np.concatenate([[0], np.cumsum(counts)]),
            nbytes=nbytes,
            itemsize=itemsize[lead],
            holders=problem.holders[lead],
            receivers=problem.receivers[lead],
        )

    def __len__(self) -> int:
        return len(self.nbytes)


def _group(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each set of equal rows, ascending, and for each row the number of its set."""
    _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first, kind="stable"), kind="stable")
    return np.sort(first), rank[inverse.ravel()]


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of chunks: chunk i has rows ``at[i]:at[i + 1]`` of ``tensor``, ``start`` and ``stop``."""

    at: np.ndarray
    tensor: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def cut_boxes(problem: Problem, classes: Classes, num_chunks: np.ndarray) -> Boxes:
    """Cut each class into ``num_chunks`` chunks, in the order of the classes, as even as elements allow.

    The tasks of a class are laid end to end and cut at equal distances.
    """
    size = (problem.stop - problem.start)[classes.task]
    numel = size.prod(axis=1, dtype=np.int64)
    counts = np.diff(classes.task_at)
    class_of = np.repeat(np.arange(len(classes)), counts)
    total = classes.nbytes // classes.itemsize
    # per chunk of a class, the elements at which it begins and ends in its class
    chunk_class = np.repeat(np.arange(len(classes)), num_chunks)
    nth = np.arange(len(chunk_class)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    grain = _grains(size, numel, class_of, total, num_chunks)
    before = np.cumsum(numel) - numel
    before -= before[classes.task_at[:-1]][class_of]  # elements of its class before each task
    lo = total[chunk_class] * nth // num_chunks[chunk_class]
    hi = total[chunk_class] * (nth + 1) // num_chunks[chunk_class]
    # each chunk meets a run of tasks
    key = before + numel  # end of each task in its class, made ascending over all classes
    base = np.concatenate([[0], np.cumsum(total)])[:-1]
    ends = key + base[class_of]
    first = np.searchsorted(ends, lo + base[chunk_class], side="right")
    last = np.searchsorted(ends, hi + base[chunk_class] - 1, side="right")
    met = last - first + 1
    chunk = np.repeat(np.arange(len(chunk_class)), met)
    row = ranges(first, met)
    start = np.maximum(lo[chunk] - before[row], 0)
    stop = np.minimum(hi[chunk] - before[row], numel[row])
    # ends inside a task stand at whole slices of the dim that is fine enough
    start = np.where(start < numel[row], _snap(start, grain[row]), start)
    stop = np.where(stop < numel[row], _snap(stop, grain[row]), stop)
    some = stop > start
    return _flat_boxes(problem, classes.task, size, chunk[some], row[some], start[some], stop[some], len(chunk_class))


def _snap(at: np.ndarray, grain: np.ndarray) -> np.ndarray:
    return (at + grain // 2) // grain * grain


def _grains(
    size: np.ndarray, numel: np.ndarray, class_of: np.ndarray, total: np.ndarray, num_chunks: np.ndarray
) -> np.ndarray:
    """Of each task, in how many elements it may be cut: the largest slice that a chunk is many of."""
    per_chunk = np.maximum(total // np.maximum(num_chunks, 1), 1)[class_of]
    grain = np.ones(len(size), dtype=np.int64)
    slice_ = numel.copy()
    found = np.zeros(len(size), dtype=bool)
    for dim in range(size.shape[1]):
        slice_ = slice_ // np.maximum(size[:, dim], 1)
        fits = ~found & (slice_ * _EVEN <= per_chunk)
        grain = np.where(fits, slice_, grain)
        found |= fits
    return grain


def _flat_boxes(
    problem: Problem,
    task: np.ndarray,
    size: np.ndarray,
    chunk: np.ndarray,
    row: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    num_chunks: int,
) -> Boxes:
    """The boxes of ranges of elements of tasks, in C order.

    From the innermost dim outwards: what begins or ends inside a slice is a box of its own, whole slices are a range of
    the next dim.
    """
    ndim = size.shape[1]
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    at = np.arange(len(row))

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
        found.append((chunk[which], row[which], origin + first, origin + last))

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
    if not ndim:
        origin = problem.start[task[row[at]]]
        found.append((chunk[at], row[at], origin, origin))
    if not found:
        none = np.zeros((0, ndim), dtype=np.int64)
        return Boxes(np.zeros(num_chunks + 1, dtype=np.int64), np.zeros(0, dtype=np.int64), none, none)
    owner, of, first, last = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((*(first[:, d] for d in range(ndim - 1, -1, -1)), of, owner))
    return Boxes(
        at=np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_chunks))]),
        tensor=problem.tensor[task[of[order]]],
        start=first[order],
        stop=last[order],
    )
