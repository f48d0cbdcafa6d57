"""The reference implementation of ``copy_runs`` of ``native/module.cpp``."""

from __future__ import annotations

from typing import Any

import numpy as np


def copy_runs_python(src: Any, dst: Any, src_at: np.ndarray, dst_at: np.ndarray, length: np.ndarray) -> None:
    """Copy ``length[i]`` bytes from ``src[src_at[i]:]`` to ``dst[dst_at[i]:]`` for every i; flat uint8 arrays.

    Raises:
        ValueError: the index arrays differ in size.
        IndexError: a run lies outside its array; nothing was copied.
    """
    if not len(src_at) == len(dst_at) == len(length):
        raise ValueError("copy_runs: src_at, dst_at and length must have the same size")
    for index, array in ((src_at, src), (dst_at, dst)):
        if len(index) and (index.min() < 0 or length.min() < 0 or (index + length).max() > len(array)):
            raise IndexError("copy_runs: a run lies outside its array")
    for a, b, n in zip(src_at.tolist(), dst_at.tolist(), length.tolist(), strict=True):
        dst[b : b + n] = src[a : a + n]
