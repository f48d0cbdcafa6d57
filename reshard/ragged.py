"""Ragged arrays and row hashes."""

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


#: Stands for "no rank" in integer arrays of ranks.
NO_RANK = -1
