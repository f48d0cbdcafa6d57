"""Boxes as strided regions: the kernel's reference implementation, and the kernel in Triton's interpreter and compiler."""

from __future__ import annotations

import math
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

from reshard.runtime.strided_regions import box_regions, copy_regions_python, make_tables


@st.composite
def boxes(draw):
    """Shapes and itemsizes of up to three arrays, and boxes of them."""
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
    """Array contents, region tables, the expected parts of the buffer, and its size."""
    generator = np.random.default_rng(0)
    contents = [generator.integers(0, 256, math.prod(shape) * itemsize, dtype=np.uint8) for shape, itemsize in arrays]
    regions, wanted, at = [], [], 0
    for tensor, shape, itemsize, box in found:
        regions += box_regions(tensor, shape, itemsize, box, at)
        part = contents[tensor].reshape(*shape, itemsize)[box].tobytes()
        at += -(-len(part) // 16) * 16
        wanted.append((at, part))
    return contents, make_tables(regions, [16] * len(arrays)), wanted, at


@given(boxes())
@example(([((3,) * 6, 2)], [(0, (3,) * 6, 2, (slice(1, 3),) * 6)]))  # more dims than a region has
@example(([((4, 3000), 8)], [(0, (4, 3000), 8, (slice(1, 4), slice(5, 2990)))]))  # rows of several tiles
@example(([((4, 90), 8)], [(0, (4, 90), 8, (slice(i, i + 2), slice(7, stop))) for i, stop in enumerate((9, 9, 80))]))
def test_regions_gather_and_scatter_boxes(case):
    arrays, found = case
    contents, tables, wanted, size = _case(arrays, found)
    assert sum(table.copied_bytes for table in tables) == sum(len(part) for _, part in wanted)
    buffer = np.zeros(size, dtype=np.uint8)
    for table in tables:
        copy_regions_python(table, contents, buffer, True)
    for end, part in wanted:
        start = end - -(-len(part) // 16) * 16
        assert buffer[start : start + len(part)].tobytes() == part
    back = [np.zeros_like(content) for content in contents]
    for table in tables:
        copy_regions_python(table, back, buffer, False)
    for tensor, shape, itemsize, box in found:
        views = [side[tensor].reshape(*shape, itemsize)[box] for side in (back, contents)]
        assert np.array_equal(*views)


def test_contiguous_rows_are_merged():
    whole = (slice(0, 4), slice(0, 6), slice(0, 8))
    assert box_regions(0, (4, 6, 8), 4, whole, 0) == [(0, 0, 0, 768, 1, 1, 1, 0, 0, 0)]
    columns = (slice(0, 4), slice(0, 6), slice(2, 4))
    assert box_regions(0, (4, 6, 8), 4, columns, 0) == [(0, 8, 0, 8, 1, 1, 24, 0, 0, 32)]
    (table,) = make_tables(box_regions(0, (4, 6, 8), 4, columns, 0), [16])
    assert table.unit == 8


def test_odd_addresses_and_short_rows_get_their_own_tables():
    regions = box_regions(0, (64, 4096), 4, (slice(0, 64), slice(0, 3000)), 0)  # rows of 12000 bytes
    regions += box_regions(1, (64, 64), 2, (slice(0, 64), slice(1, 2)), 12000 * 64)
    regions += box_regions(2, (64, 64), 4, (slice(0, 64), slice(0, 64)), 12000 * 64 + 128)
    tables = make_tables(regions, [16, 2, 2])
    assert [(table.unit, table.tile, len(table.programs)) for table in tables] == [
        (16, (1, 1024), 2 * 64),
        (2, (128, 8), 1),
        (2, (1, 1024), 8),  # one row of 16 KiB, at an address aligned to two bytes
    ]


@pytest.mark.parametrize("nbytes", [256, 512, 2304, 4096, 2**14])
def test_warm_up_compiles_all_that_a_buffer_can_need(nbytes, monkeypatch):
    kernel = pytest.importorskip("reshard.runtime.cuda.pack_kernel", reason="triton is not installed")
    copier, compiled = kernel.RegionCopier(torch.device("cpu")), set()
    monkeypatch.setattr(
        copier, "copy", lambda uploaded, addresses, buffer, to: compiled.add((uploaded[0].unit, uploaded[0].tile, to))
    )
    copier.warm_up(torch.zeros(nbytes, dtype=torch.uint8))
    rows = {(0, 0, 0, length, 1, 1, 1, 0, 0, 0) for length in range(1, nbytes + 1)}
    for alignment in (16, 8, 4, 2, 1):
        needed = {
            (table.unit, table.tile, to) for table in make_tables(sorted(rows), [alignment]) for to in (True, False)
        }
        assert needed <= compiled


@pytest.mark.parametrize(("unit", "pairs"), [(16, True), (8, False), (1, False)])
def test_kernel_loads_pairs_of_words_where_all_is_aligned(monkeypatch, unit, pairs):
    kernel = pytest.importorskip("reshard.runtime.cuda.pack_kernel", reason="triton is not installed")
    launch = MagicMock()
    monkeypatch.setattr(kernel, "_copy_regions", launch)
    copier = kernel.RegionCopier(torch.device("cpu"))
    (table,) = make_tables([(0, 0, 0, 4 * unit, 1, 1, 1, 0, 0, 0)], [unit])
    copier.copy(copier.upload(table), copier.find_addresses((0,)), torch.zeros(4 * unit, dtype=torch.uint8), True)
    assert launch[(1,)].call_args.kwargs["PAIRS"] is pairs


_INTERPRETED = """
import sys
import numpy as np, torch
from tests.runtime.test_strided_regions import _case
from reshard.runtime.cuda.pack_kernel import RegionCopier
arrays = [((5, 7, 9), 4), ((64, 40), 2), ((3, 3, 3, 3, 3, 5), 8), ((3, 500), 4)]
cuts = [(0, (slice(1, 4), slice(2, 7), slice(0, 5))), (0, (slice(0, 5), slice(0, 7), slice(0, 9))),
        (1, (slice(3, 60), slice(8, 40))), (2, (slice(0, 2),) * 5 + (slice(1, 4),)), (3, (slice(1, 3), slice(7, 490)))]
found = [(t, *arrays[t], box) for t, box in cuts]
contents, tables, wanted, size = _case(arrays, found)
copier = RegionCopier(torch.device("cpu"))
buffer = torch.zeros(size, dtype=torch.uint8)
copier.warm_up(torch.zeros(2**14, dtype=torch.uint8))
placed = [copier.upload(table) for table in tables]
assert len({table.unit for table in tables}) > 2
held = [torch.from_numpy(content) for content in contents]
for one in placed:
    copier.copy(one, copier.find_addresses(tuple(array.data_ptr() for array in held)), buffer, True)
for end, part in wanted:
    start = end - -(-len(part) // 16) * 16
    assert buffer[start : start + len(part)].numpy().tobytes() == part
back = [torch.zeros(len(content), dtype=torch.uint8) for content in contents]
for one in placed:
    copier.copy(one, copier.find_addresses(tuple(array.data_ptr() for array in back)), buffer, False)
for t, shape, itemsize, box in found:
    a, b = (np.asarray(side[t]).reshape(*shape, itemsize)[box] for side in (back, contents))
    assert np.array_equal(a, b)
print("equal")
"""


@pytest.mark.nightly
def test_interpreted_kernel_matches_its_python_reference(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed: it comes with torch for CUDA")
    import os
    import subprocess
    import sys

    run = subprocess.run(
        [sys.executable, "-c", _INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "equal", run.stderr


_COMPILED = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from reshard.runtime.cuda.pack_kernel import _copy_regions as kernel
pointers = ("addresses", "buffer", "rows", "programs", "like")
signature = {name: "*i32" if name == "programs" else "*i64" for name in pointers}
for pairs in (True, False):
    values = dict(TO_BUFFER=True, PAIRS=pairs, DOWN=4, ACROSS=256, NUM_COLUMNS=10, AT_TENSOR=0, AT_ARRAY=1, AT_BUFFER=2,
                  AT_ROW=3, AT_SIZE=4, AT_STRIDE=7)
    source = ASTSource(
        fn=kernel, signature=signature | {name: "constexpr" for name in values},
        constexprs={(kernel.arg_names.index(name),): value for name, value in values.items()},
        attrs={(number,): [["tt.divisibility", 16]] for number in range(len(pointers))})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print(pairs, "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx)
"""


@pytest.mark.nightly
def test_kernel_compiles_and_loads_sixteen_bytes_at_once():
    """Needs no GPU. The interpreter accepts code that the compiler rejects, so compile as well."""
    pytest.importorskip("triton", reason="triton is not installed: it comes with torch for CUDA")
    import subprocess
    import sys

    run = subprocess.run([sys.executable, "-c", _COMPILED], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.split() == ["True", "True", "False", "False"], run.stderr
