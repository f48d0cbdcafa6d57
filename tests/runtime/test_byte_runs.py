"""Byte runs of boxes, and the native copy against its reference implementation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reshard.runtime.byte_runs import box_runs, box_span, copy_runs
from tests.reference.byte_runs import copy_runs_python


@st.composite
def arrays_with_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        box = []
        for size in shape:
            lo = draw(st.integers(0, size - 1))
            box.append(slice(lo, draw(st.integers(lo + 1, size))))
        boxes.append(tuple(box))
    return shape, boxes, draw(st.sampled_from([np.uint8, np.int16, np.complex128]))


@given(arrays_with_boxes(), st.sampled_from([copy_runs, copy_runs_python]))
def test_runs_match_indexing(case, copy):
    shape, boxes, dtype = case
    array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    flat = array.reshape(-1).view(np.uint8)
    at, length = box_runs(shape, array.itemsize, boxes)
    expected = np.concatenate([array[(..., *box)].ravel() for box in boxes])
    packed = np.zeros(int(length.sum()), dtype=np.uint8)
    copy(flat, packed, at, np.cumsum(length) - length, length)
    assert packed.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(2, 3, 2), (3, 1, 2, 2), (3, 3, 3)])
def test_runs_of_every_box_are_maximal(shape):
    array = np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape)
    whole = [[slice(lo, hi) for lo in range(size) for hi in range(lo + 1, size + 1)] for size in shape]
    for box in itertools.product(*whole):
        at, length = box_runs(shape, 2, [box])
        runs = [array.tobytes()[a : a + n] for a, n in zip(at.tolist(), length.tolist(), strict=True)]
        assert b"".join(runs) == array[box].tobytes()
        assert (at[1:] > at[:-1] + length[:-1]).all() or array[box].size == len(at)


@given(arrays_with_boxes())
def test_box_span_finds_boxes_of_one_run(case):
    shape, boxes, dtype = case
    array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    for box in boxes:
        at, length = box_runs(shape, array.itemsize, [box])
        span = box_span(shape, array.itemsize, box)
        assert (span is not None) == array[box].flags.c_contiguous
        if span is not None:
            assert array.tobytes()[slice(*span)] == array[box].tobytes()
            assert span == (at[0], at[-1] + length[-1])


@pytest.mark.parametrize("copy", [copy_runs, copy_runs_python])
@pytest.mark.parametrize(
    "bad", [([0], [0], [9]), ([-1], [0], [1]), ([0], [8], [1]), ([0], [0], [-1]), ([2**62], [0], [2**62])]
)
def test_runs_outside_their_arrays_are_rejected(copy, bad):
    src, dst = np.ones(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    with pytest.raises(IndexError):
        copy(src, dst, *(np.array(x, dtype=np.int64) for x in bad))
    with pytest.raises(ValueError, match="same size"):
        copy(src, dst, *(np.zeros(n, dtype=np.int64) for n in (1, 2, 1)))
    assert not dst.any()
    copy(src, dst, *(np.array(x, dtype=np.int64) for x in ([0, 8], [2, 8], [1, 0])))  # one run is empty
    assert dst.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
