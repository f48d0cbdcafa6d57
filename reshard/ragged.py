"""Ragged arrays, that is, rows of unequal length in one flat array; and hashes of rows."""

from __future__ import annotations

import numpy as np

_MIX = np.uint64(0x9E3779B97F4A7C15)


def hash_rows(rows: np.ndarray, seed: int = 0) -> np.ndarray:
    """``(rows,)`` a 64-bit hash of each row of integers."""
    key = np.full(len(rows), seed, dtype=np.uint64)
    for column in (*rows.T, np.full(len(rows), rows.shape[1])):
        key = (key ^ (key >> np.uint64(29))) * _MIX + column.astype(np.uint64)
    return (key ^ (key >> np.uint64(32))) * _MIX


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenated ranges: ``first[i], first[i] + 1, ...`` with ``counts[i]`` numbers for each ``i``."""
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    return np.arange(total, dtype=np.int64) - np.repeat(before - first, counts)


def distinct_values(values: np.ndarray) -> np.ndarray:
    """The different values, ascending. ``values``: ``(entries,)`` integers, at least 0."""
    size = int(values.max(initial=0)) + 1
    if size > 64 * len(values) + _MAX_MARKED:
        values = np.sort(values)  # faster than hashing them, as np.unique does
        return values[np.diff(values, prepend=-1) > 0]
    is_present = np.zeros(size, dtype=bool)
    is_present[values] = True
    return np.flatnonzero(is_present)


def number_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values, ascending, and for each entry the index of its value among them.

    Args:
        values: ``(entries,)`` integers, at least 0.
    """
    size = int(values.max(initial=0)) + 1
    if size > 4 * len(values) + _MAX_MARKED:
        distinct, number = np.unique(values, return_inverse=True)
        return distinct, number.ravel().astype(np.int64)
    is_present = np.zeros(size, dtype=bool)
    is_present[values] = True
    return np.flatnonzero(is_present), (np.cumsum(is_present) - 1)[values]


#: Values below this are marked in an array; it is faster than sorting even a few.
_MAX_MARKED = 2**14
#: Stands for "no rank" in integer arrays of ranks.
NO_RANK = -1
