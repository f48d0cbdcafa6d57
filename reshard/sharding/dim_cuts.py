"""Cuts one tensor dim over mesh axes. All other modules get their cuts from here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np

from reshard.errors import LayoutError
from reshard.formatting import brief
from reshard.sharding.spec import Step, split_factor_of

MAX_PIECES = 2**22
MAX_NDIM = 8


@dataclass(frozen=True, eq=False)
class DimCuts:
    """One tensor dim, cut into parts.

    A part holds the elements of one position on the dim's mesh axes. It is one interval of the dim, several if a step
    is :class:`~reshard.sharding.spec.Strided`, or empty. Parts are numbered major first, in the order of steps.
    Intervals are disjoint, not empty, and in ascending order.

    Attributes:
        lo, hi: ``(intervals,)`` half-open bounds of each interval.
        coord: ``(intervals,)`` part of each interval.
        local: ``(intervals,)`` offset of each interval in its part.
        local_size: ``(parts,)`` number of elements of each part.
    """

    lo: np.ndarray
    hi: np.ndarray
    coord: np.ndarray
    local: np.ndarray
    local_size: np.ndarray


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Convert a shape to a tuple of integers; raises LayoutError if it is not a sequence of integers."""
    try:
        if isinstance(shape, str):
            raise TypeError
        return tuple(index(size) for size in shape)
    except TypeError:
        raise LayoutError(f"shape {brief(shape)} is not a sequence of integers") from None


def check_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """Like :func:`check_shape`, but also reject too many dims, negative sizes and too many elements."""
    shape = check_shape(shape)
    if len(shape) > MAX_NDIM:
        raise LayoutError(f"shape {brief(list(shape))} has {len(shape)} dims; at most {MAX_NDIM} are supported")
    if any(size < 0 for size in shape) or math.prod(size for size in shape if size) >= 2**56:
        raise LayoutError(f"shape {brief(list(shape))} must have sizes of at least 0 and fewer than 2**56 elements")
    return shape


def chunk_rule(size: np.ndarray, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """The rule of ``torch.chunk``: each chunk gets ``ceil(size / num_chunks)`` elements until none are left.

    Returns ``(start, stop)`` of shape ``size.shape + (num_chunks,)``.
    """
    size = np.asarray(size, dtype=np.int64)[..., None]
    chunk = -(-size // num_chunks)
    number = np.arange(num_chunks, dtype=np.int64)
    return np.minimum(chunk * number, size), np.minimum(chunk * (number + 1), size)


def cut_dim(size: int, steps: Sequence[Step], axis_sizes: Sequence[int]) -> DimCuts:
    """Cut a dim of ``size`` elements by ``steps`` in order; ``axis_sizes`` has the mesh axis size of each step.

    Raises:
        LayoutError: the steps cut the dim into too many pieces.
    """
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
    for number, part in enumerate(parts):
        local = 0
        for first, end in part:
            rows.append((first, end, number, local))
            local += end - first
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
    local_size = np.array([sum(end - first for first, end in part) for part in parts], dtype=np.int64)
    return DimCuts(table[:, 0], table[:, 1], table[:, 2], table[:, 3], local_size)


def _cut_strided(part: list[tuple[int, int]], split_factor: int, num_parts: int) -> list[list[tuple[int, int]]]:
    """Cut the elements of a part into ``split_factor`` chunks, and each chunk into ``num_parts`` pieces.

    Returns the new parts: part ``i`` has piece ``i`` of every chunk. A part is a list of half-open intervals.
    """
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
