"""The reference implementation of ``copy_runs`` of ``native/module.cpp``."""

from __future__ import annotations

from typing import Any

import numpy as np


def copy_runs_python(src: Any, dst: Any, src_offsets: np.ndarray, dst_offsets: np.ndarray, length: np.ndarray) -> None:
    """Copy ``length[i]`` bytes from ``src[src_offsets[i]:]`` to ``dst[dst_offsets[i]:]`` for every i; flat uint8 arrays.

    Raises:
        ValueError: the index arrays differ in size.
        IndexError: a run lies outside its array; nothing was copied.
    """
    if not len(src_offsets) == len(dst_offsets) == len(length):
        raise ValueError("copy_runs: src_offsets, dst_offsets and length must have the same size")
    for index, array in ((src_offsets, src), (dst_offsets, dst)):
        if len(index) and (index.min() < 0 or length.min() < 0 or (index + length).max() > len(array)):
            raise IndexError("copy_runs: a run lies outside its array")
    for a, b, n in zip(src_offsets.tolist(), dst_offsets.tolist(), length.tolist(), strict=True):
        dst[b : b + n] = src[a : a + n]
