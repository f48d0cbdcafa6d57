"""Boxes of contiguous arrays as byte runs, and many short copies in one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard import _native


def box_runs(shape: Sequence[int], itemsize: int, boxes: Sequence[Sequence[slice]]) -> tuple[np.ndarray, np.ndarray]:
    """The byte runs of boxes of a contiguous array, box by box, each in row-major order.

    Returns:
        ``(at, length)`` in bytes, both ``(runs,)`` int64.
    """
    starts, lengths = [], []
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for box in boxes:
        inner = len(shape)  # the box spans all dims from here on, so their elements are contiguous
        while inner > 0 and box[inner - 1].stop - box[inner - 1].start == shape[inner - 1]:
            inner -= 1
        first = max(inner - 1, 0)
        length = itemsize * math.prod(cut.stop - cut.start for cut in box[first:])
        at = np.array([sum(cut.start * stride for cut, stride in zip(box[first:], strides[first:], strict=True))])
        for cut, stride in zip(reversed(box[:first]), reversed(strides[:first]), strict=True):
            at = (np.arange(cut.start, cut.stop)[:, None] * stride + at).ravel()
        starts.append(at)
        lengths.append(np.full(len(at), length))
    return np.concatenate(starts).astype(np.int64), np.concatenate(lengths).astype(np.int64)


def box_span(shape: Sequence[int], itemsize: int, box: Sequence[slice]) -> tuple[int, int] | None:
    """``(start, stop)`` bytes of a box of a contiguous array; None if the box is not one run."""
    at, stride, inner = 0, itemsize, True  # inner: the box spans every dim so far
    nbytes = itemsize
    for size, cut in zip(reversed(shape), reversed(box), strict=True):
        length = cut.stop - cut.start
        if not inner and length > 1:
            return None
        inner = inner and length == size
        at += cut.start * stride
        stride *= size
        nbytes *= length
    return at, at + nbytes


def copy_runs(src: Any, dst: Any, src_offsets: np.ndarray, dst_offsets: np.ndarray, length: np.ndarray) -> None:
    """Copy ``length[i]`` bytes from ``src[src_offsets[i]]`` to ``dst[dst_offsets[i]]``, for every i.

    Args:
        src, dst: flat uint8 arrays.
        src_offsets, dst_offsets, length: ``(runs,)`` int64.

    Raises:
        ValueError: the index arrays differ in size. IndexError: a run is outside its array; nothing was copied.
    """
    _native.copy_runs(src, dst, src_offsets, dst_offsets, length)
