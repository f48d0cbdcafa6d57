"""Arrays whose rows have different lengths, and hashes of rows."""

from __future__ import annotations

import numpy as np

_MIX = np.uint64(0x9E3779B97F4A7C15)


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


NO_RANK = -1
