"""Tiles of shards, unit tasks between two layouts, and conversion of specs to JAX."""

from __future__ import annotations

import math
import sys
import types

import numpy as np
import pytest
from hypothesis import given

from reshard import Layout, Mesh, RegionLayout
from reshard.errors import LayoutError
from reshard.sharding.spec import Strided
from reshard.sharding.tensor_spec import TensorSpec
from reshard.sharding.tiles import cut_tiles
from reshard.sharding.unit_tasks import cut_unit_tasks
from tests.support.random_problems import random_problem
from tests.support.strategies_of_cases import cases


def test_boxes_of_different_ranks_may_partly_overlap():
    layout = RegionLayout({0: [[(0, 6), (0, 4)]], 1: [[(3, 9), (2, 4)], [(9, 10), (2, 4)]]})
    shards = cut_tiles(layout, (10, 4))
    found = {}
    for rank in (0, 1):
        for start, stop, local in zip(*shards.pieces_of(rank), strict=True):
            found[rank, tuple(start), tuple(stop)] = tuple(local)
    assert found == {
        (0, (0, 0), (3, 2)): (0, 0),
        (0, (0, 2), (3, 4)): (0, 2),
        (0, (3, 0), (6, 2)): (3, 0),
        (0, (3, 2), (6, 4)): (3, 2),
        (1, (3, 2), (6, 4)): (0, 0),  # held by both ranks
        (1, (6, 2), (9, 4)): (3, 0),
        (1, (9, 2), (10, 4)): (6, 0),
    }


@pytest.mark.parametrize(
    ("src", "dst", "strided"),
    [
        ("S0 R R", "S01 R R", False),  # whole rows of a shard
        ("S0 R R", "R S0 R", True),  # columns of a shard
        ("R R R", "R R S0", True),
        ("S01 R R", "S01 S2 R", False),  # part of one row
        ("S01 R R", "S01 R S2", True),  # parts of several rows
    ],
)
def test_is_strided_is_known_for_simple_layouts(src, dst, strided):
    mesh, other = Mesh.of("2x2x2"), Mesh.of("2x2x2", first_rank=8)
    tasks = cut_unit_tasks(cut_tiles(Layout(mesh, src), (4, 4, 4)), cut_tiles(Layout(other, dst), (4, 4, 4)))
    assert tasks.is_strided.all() == tasks.is_strided.any() == strided
    assert (tasks.holders >= 0).all() and (tasks.destinations >= 8).all()


@pytest.mark.parametrize("seed", range(40))
def test_is_strided_matches_numpy_contiguity(seed):
    src, dst, shape, _ = random_problem(seed)
    tasks = cut_unit_tasks(cut_tiles(src, shape), cut_tiles(dst, shape))
    for index in range(len(tasks)):
        is_contiguous = []
        for shards, tile in ((tasks.src, tasks.src_tile[index]), (tasks.dst, tasks.dst_tile[index])):
            origin = shards.start[tile]
            held = np.empty(shards.stop[tile] - origin, dtype=np.int8)
            start, stop = tasks.start[index] - origin, tasks.stop[index] - origin
            box = held[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            is_contiguous.append(box.flags.c_contiguous)
        assert tasks.is_strided[index] == (not all(is_contiguous)), (tasks.start[index], tasks.stop[index])


def test_to_jax_round_trips(monkeypatch):
    class PartitionSpec(tuple):
        def __new__(cls, *dims):
            return super().__new__(cls, dims)

    module = types.ModuleType("jax.sharding")
    module.PartitionSpec = PartitionSpec
    monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    monkeypatch.setitem(sys.modules, "jax.sharding", module)
    mesh = Mesh.of("2x4", axes=["dp", "tp"])
    for spec in (("dp", None, "tp"), (("tp", "dp"),), (), (None, "tp")):
        layout = Layout(mesh, spec)
        assert Layout(mesh, layout.to_jax()) == layout
    with pytest.raises(LayoutError, match="a PartitionSpec cannot express"):
        Layout(mesh, ((Strided("tp", 2), "dp"),)).to_jax()


def test_find_returns_only_boxes_inside_one_tile():
    shards = cut_tiles(RegionLayout({0: [[(0, 4), (0, 6)], [(6, 8), (0, 6)]]}), (8, 6))  # local array: 6 x 6
    boxes = np.array([[(1, 3), (2, 6)], [(6, 8), (0, 1)], [(3, 5), (0, 6)], [(5, 7), (0, 6)], [(4, 6), (0, 6)]])
    assert shards.find(0, boxes[:, :, 0], boxes[:, :, 1]) == [
        (slice(1, 3), slice(2, 6)),
        (slice(4, 6), slice(0, 1)),
        None,  # begins inside
        None,  # ends inside
        None,  # overlaps neither tile
    ]


@given(cases())
def test_layout_regions_and_shapes_match_shards(case):
    """Computed for one rank, they equal those from the table of all tiles."""
    shape, src, dst, _ = case
    for layout in (src, dst):
        shards = cut_tiles(layout, shape)
        for rank in layout.ranks:
            regions = layout.regions(shape, rank)
            volume = sum(math.prod(stop - start for start, stop in box) for box in regions)
            assert math.prod(layout.local_shape(shape, rank)) == volume
            assert layout.local_shape(shape, rank) == shards.local_shape(rank)
            if isinstance(layout, Layout):
                assert sorted(regions) == sorted(box for box, _ in shards.boxes_of(rank))
        with pytest.raises(LayoutError, match="rank 99 is not in"):
            layout.regions(shape, 99)
        with pytest.raises(LayoutError, match="at least 0"):
            layout.local_shape((-1, *shape[1:]), layout.ranks[0])


def test_a_million_unit_tasks_cover_the_tensor_in_little_memory():
    """1,024 -> 1,024 ranks: tasks are arrays, so they take well under a second and a gigabyte."""
    src, dst = Layout(Mesh.of("256x4"), "R S01 R"), Layout(Mesh.of("256x4", first_rank=1024), "S01 R R")
    tasks = TensorSpec((2048, 2048, 64), "float32", src, dst).tasks
    assert len(tasks) == 1024 * 1024
    assert int(tasks.numel.sum()) == 2048 * 2048 * 64
    assert tasks.start.nbytes + tasks.stop.nbytes < 64 * 2**20
