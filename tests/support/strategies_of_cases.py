"""Hypothesis strategies for meshes, layouts and whole cases."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from reshard import Layout, Mesh, RegionLayout, Topology
from reshard.sharding.spec import Strided

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12, 13])


@st.composite
def meshes(draw, max_rank=15, max_size=9):
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3).filter(lambda s: math.prod(s) <= max_size))
    ranks = draw(st.permutations(range(max_rank + 1)))[: math.prod(sizes)]
    return Mesh(ranks, {f"a{i}": size for i, size in enumerate(sizes)})


@st.composite
def layouts(draw, ndim, strided=True):
    mesh = draw(meshes())
    axes = draw(st.permutations(mesh.axes))
    spec = [[] for _ in range(ndim)]
    for axis in axes:
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            factor = draw(st.sampled_from([1, 1, 1, 2, 3])) if strided else 1
            spec[dim].append(axis if factor == 1 else Strided(axis, factor))
    return Layout(mesh, tuple(tuple(steps) for steps in spec))


@st.composite
def region_layouts(draw, shape, covering):
    """Cut each dim at random places and assign each cell to some ranks; if ``covering``, to at least one."""
    cuts = []
    for size in shape:
        marks = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        cuts.append(list(itertools.pairwise(marks)) or [(0, 0)])
    ranks = draw(st.permutations(range(16)))[: draw(st.integers(1, 4))]
    rows = {rank: [] for rank in ranks}
    # a rank holds cells of one line along dim 0 only, so that they can be joined
    lines = [[]]
    for dim in range(1, len(shape)):
        lines = [[*line, piece] for line in lines for piece in cuts[dim]]
    line_of = {rank: draw(st.sampled_from(range(len(lines)))) for rank in ranks}
    for index, line in enumerate(lines):
        here = [rank for rank in ranks if line_of[rank] == index]
        if covering and not here:
            return RegionLayout({rank: [[(0, size) for size in shape]] for rank in ranks}, ndim=len(shape))
        for piece in cuts[0] if shape else []:
            takers = [rank for rank in here if draw(st.booleans())]
            if covering and not takers:
                takers = here[:1]
            for rank in takers:
                rows[rank].append([piece, *line])
    if not shape:
        rows = {rank: [[]] for rank in ranks}
    for rank in ranks:
        rows[rank] = draw(st.permutations(rows[rank]))
    return RegionLayout(rows, ndim=len(shape))


@st.composite
def cases(draw):
    """``(shape, src, dst, topology)``."""
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    src = draw(st.one_of(layouts(len(shape)), region_layouts(shape, covering=True)))
    dst = draw(st.one_of(layouts(len(shape)), region_layouts(shape, covering=False)))
    hosts = draw(st.lists(st.integers(0, 3), min_size=16, max_size=16))
    return shape, src, dst, Topology(tuple(hosts))
