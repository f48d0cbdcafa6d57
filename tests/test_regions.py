"""Boxes as strided regions: the kernel's twin, and the kernel itself in Triton's interpreter."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard.regions import box_regions, copy_regions_python, make_table


@st.composite
def boxes(draw):
    """Shapes and item sizes of up to three arrays, and boxes of them."""
    arrays = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=6)))
        arrays.append((shape, draw(st.sampled_from([1, 2, 4, 8, 16]))))
    found = []
    for tensor, (shape, itemsize) in enumerate(arrays):
        for _ in range(draw(st.integers(0, 3))):
            box = []
            for size in shape:
                a, b = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
                box.append(slice(a, b))
            found.append((tensor, shape, itemsize, tuple(box)))
    return arrays, found


def _case(arrays, found):
    """Contents, table, and what the buffer should hold."""
    generator = np.random.default_rng(0)
    contents = [generator.integers(0, 256, math.prod(shape) * itemsize, dtype=np.uint8) for shape, itemsize in arrays]
    regions, wanted, at = [], [], 0
    for tensor, shape, itemsize, box in found:
        regions += box_regions(tensor, shape, itemsize, box, at)
        part = contents[tensor].reshape(*shape, itemsize)[box].tobytes()
        at += -(-len(part) // 16) * 16
        wanted.append((at, part))
    return contents, make_table(regions), wanted, at


@given(boxes())
@example(([((3,) * 6, 2)], [(0, (3,) * 6, 2, (slice(1, 3),) * 6)]))  # more dims than a region has
@example(([((4, 3000), 8)], [(0, (4, 3000), 8, (slice(1, 4), slice(5, 2990)))]))  # rows of several tiles
@example(([((4, 90), 8)], [(0, (4, 90), 8, (slice(i, i + 2), slice(7, stop))) for i, stop in enumerate((9, 9, 80))]))
def test_regions_gather_and_scatter_what_the_boxes_hold(case):
    arrays, found = case
    contents, table, wanted, size = _case(arrays, found)
    assert table.nbytes == sum(len(part) for _, part in wanted)
    buffer = np.zeros(size, dtype=np.uint8)
    copy_regions_python(table, contents, buffer, True)
    for end, part in wanted:
        start = end - -(-len(part) // 16) * 16
        assert buffer[start : start + len(part)].tobytes() == part
    back = [np.zeros_like(content) for content in contents]
    copy_regions_python(table, back, buffer, False)
    for tensor, shape, itemsize, box in found:
        views = [side[tensor].reshape(*shape, itemsize)[box] for side in (back, contents)]
        assert np.array_equal(*views)


def test_rows_that_lie_together_are_one():
    whole = (slice(0, 4), slice(0, 6), slice(0, 8))
    assert box_regions(0, (4, 6, 8), 4, whole, 0) == [(0, 0, 0, 768, 1, 1, 1, 0, 0, 0)]
    columns = (slice(0, 4), slice(0, 6), slice(2, 4))
    assert box_regions(0, (4, 6, 8), 4, columns, 0) == [(0, 8, 0, 8, 1, 1, 24, 0, 0, 32)]
    assert make_table(box_regions(0, (4, 6, 8), 4, columns, 0)).unit == 8


def test_launches_have_tiles_that_fit_their_rows():
    wide = make_table(box_regions(0, (64, 4096), 4, (slice(0, 64), slice(0, 2048)), 0))
    assert wide.tile == (1, 1024)
    assert len(wide.programs) == 64
    widest = make_table(box_regions(0, (64, 4096), 4, (slice(0, 64), slice(0, 3000)), 0))
    assert widest.tile == (1, 1024)
    assert len(widest.programs) == 2 * 64
    narrow = make_table(box_regions(0, (4096, 64), 4, (slice(0, 4096), slice(0, 32)), 0))
    assert narrow.tile == (64, 16)
    assert len(narrow.programs) == 64


_INTERPRETED = """
import sys
import numpy as np, torch
sys.path.insert(0, sys.argv[1])
from test_regions import _case
from reshard.region_kernel import RegionCopier
arrays = [((5, 7, 9), 4), ((64, 40), 2), ((3, 3, 3, 3, 3, 5), 8), ((3, 500), 4)]
cuts = [(0, (slice(1, 4), slice(2, 7), slice(0, 5))), (0, (slice(0, 5), slice(0, 7), slice(0, 9))),
        (1, (slice(3, 60), slice(8, 40))), (2, (slice(0, 2),) * 5 + (slice(1, 4),)), (3, (slice(1, 3), slice(7, 490)))]
found = [(t, *arrays[t], box) for t, box in cuts]
contents, table, wanted, size = _case(arrays, found)
copier = RegionCopier(table, torch.device("cpu"))
buffer = torch.zeros(size, dtype=torch.uint8)
copier.copy([torch.from_numpy(content) for content in contents], buffer, True)
for end, part in wanted:
    start = end - -(-len(part) // 16) * 16
    assert buffer[start : start + len(part)].numpy().tobytes() == part
back = [torch.zeros(len(content), dtype=torch.uint8) for content in contents]
copier.copy(back, buffer, False)
for t, shape, itemsize, box in found:
    a, b = (np.asarray(side[t]).reshape(*shape, itemsize)[box] for side in (back, contents))
    assert np.array_equal(a, b)
print("as the twin")
"""


def test_the_kernel_does_what_its_twin_does(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed: it comes with torch for CUDA")
    import os
    import subprocess
    import sys
    from pathlib import Path

    run = subprocess.run(
        [sys.executable, "-c", _INTERPRETED, str(Path(__file__).parent)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "as the twin", run.stderr
