"""Layouts and regions that are refused."""

from __future__ import annotations

import pytest

from reshard import Layout, Mesh, RegionLayout
from reshard.errors import LayoutError
from reshard.sharding.tiles import cut_tiles


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: RegionLayout({}), "at least one rank"),
        (lambda: RegionLayout({0: []}), "give ndim"),
        (lambda: RegionLayout({-1: [[(0, 1)]]}), "a rank is -1; it must be an integer from 0"),
        (lambda: RegionLayout({0: [[(2, 1)]]}), "start <= stop"),
        (lambda: RegionLayout({0: [[(0, 1)], [(0, 1), (0, 1)]]}), "same number"),
        (lambda: RegionLayout({0: [[(0, 1), (0, 2)], [(1, 2), (0, 3)]]}), "cannot be joined along dim 0"),
        (lambda: RegionLayout({0: [[(0, 1)]]}, join_dim=1), "join_dim 1"),
        (lambda: RegionLayout({0: [5]}), "pair per tensor dim"),
        (lambda: RegionLayout({0: [[], []]}), "one box"),
        (lambda: cut_tiles(RegionLayout({0: [[(0, 9)]]}), (8,)), "reaches past shape"),
        (lambda: cut_tiles(RegionLayout({0: [[(0, 4)], [(2, 6)]]}), (8,)), "overlap"),
        (lambda: cut_tiles(RegionLayout({0: [[(0, 4)], [(0, 4)]]}), (8,)), "twice"),
        (lambda: cut_tiles(RegionLayout({0: [[(0, 4)]]}), (8, 8)), "regions have 1 dims"),
        (lambda: cut_tiles(Layout(Mesh.of("2"), "R S0"), (8,)), "shards dim 1"),
        (lambda: cut_tiles(Layout(Mesh.of("2")), (1,) * 9), "at most 8"),
        (lambda: cut_tiles(Layout(Mesh.of("2")), (2**40, 2**40)), "fewer than"),
    ],
)
def test_invalid_regions_and_shapes_are_refused(build, text):
    with pytest.raises(LayoutError, match=text):
        build()
