"""Boxes of arrays as tables of addresses, for copies by native code.

A row of a table is a box: the address of its first byte, the length of its contiguous parts in bytes, then the count
and the stride in bytes of each outer dim, major first. A count of 1 fills rows of fewer dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

#: ``(offset, contiguous bytes, [(count, stride), ...])`` of a box.
BoxParts = tuple[int, int, list[tuple[int, int]]]


def split_box(strides: Sequence[int], itemsize: int, box: Sequence[slice]) -> BoxParts:
    """The contiguous parts of a box of an array. Strides and offsets are in bytes."""
    offset, inner = 0, itemsize
    outer: list[tuple[int, int]] = []  # minor first
    for cut, stride in zip(reversed(box), reversed(strides), strict=True):
        offset += cut.start * stride
        count = cut.stop - cut.start
        if count == 1:
            continue
        if not outer and stride == inner:
            inner *= count
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = outer[-1][0] * count, outer[-1][1]
        else:
            outer.append((count, stride))
    return offset, inner, outer[::-1]


def tabulate_boxes(boxes: Sequence[BoxParts]) -> np.ndarray:
    """A table of boxes, with offsets in place of addresses: int64 ``(boxes, 2 + 2 * dims)``."""
    dims = max(len(outer) for _, _, outer in boxes)
    lines = []
    for offset, inner, outer in boxes:
        fill = [(1, 0)] * (dims - len(outer))
        lines.append([offset, inner, *(value for pair in (*fill, *outer) for value in pair)])
    return np.array(lines, dtype=np.int64)


def tabulate_buffers(buffers: Sequence[torch.Tensor]) -> np.ndarray:
    """The table of flat buffers of bytes."""
    return np.array([[buffer.data_ptr(), buffer.numel()] for buffer in buffers], dtype=np.int64)
