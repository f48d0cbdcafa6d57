"""Limits and edge cases of meshes, region layouts and specs."""

from __future__ import annotations

import types

import numpy as np
import pytest

import reshard.sharding.dim_cuts
import reshard.sharding.tiles
from reshard import Layout, Mesh, RegionLayout
from reshard.errors import LayoutError, MeshError
from reshard.formatting import format_ranks
from reshard.sharding.mesh import MAX_AXES, MAX_MESH_RANKS, MAX_RANK, parse_ranks
from reshard.sharding.spec import Strided
from reshard.sharding.tiles import cut_tiles, find_overlaps


def test_meshes_at_their_limits_are_accepted_and_beyond_refused():
    assert Mesh([MAX_RANK]).ranks == (4_194_303,)
    with pytest.raises(MeshError, match="rank 4194304 is outside"):
        Mesh([MAX_RANK + 1])
    assert Mesh.of((1,) * MAX_AXES).sizes == (1,) * 16
    with pytest.raises(MeshError, match="at most 16 axes, not 17"):
        Mesh.of((1,) * 17)
    assert Mesh.of(MAX_MESH_RANKS).size == 2**20
    with pytest.raises(MeshError, match="more than 1048576 ranks"):
        Mesh.of(MAX_MESH_RANKS + 1)
    assert len(parse_ranks(f"7,9-{MAX_MESH_RANKS + 7}")) == MAX_MESH_RANKS
    with pytest.raises(MeshError, match="too long"):
        parse_ranks(f"7,9-{MAX_MESH_RANKS + 8}")
    ranks = [*range(4_000_000, 4_000_100), 5, 3]
    assert parse_ranks(format_ranks(ranks)) == ranks


def test_shapes_have_fewer_than_2_to_the_56_elements():
    whole = Layout(Mesh.of(1))
    assert cut_tiles(whole, (2**55, 1)).stop.tolist() == [[2**55, 1]]
    assert cut_tiles(whole, (2**55, 0)).local_shape(0) == (2**55, 0)
    with pytest.raises(LayoutError, match="fewer than"):
        cut_tiles(whole, (2**28, 2**28))


def test_with_ranks_replaces_ranks():
    mesh = Mesh([4, 2, 7, 0], {"dp": 2, "tp": 2})
    assert mesh.with_ranks({4: 0, 2: 1, 7: 2, 0: 9, 5: 5}) == Mesh([0, 1, 2, 9], {"dp": 2, "tp": 2})
    with pytest.raises(MeshError, match="no new rank is given for rank 7"):
        mesh.with_ranks({4: 0, 2: 1, 0: 9})
    regions = RegionLayout({4: [[(0, 4)]], 7: [[(4, 6)]]})
    assert regions.with_ranks({4: 1, 7: 0, 5: 5}) == RegionLayout({1: [[(0, 4)]], 0: [[(4, 6)]]})
    with pytest.raises(LayoutError, match="no new rank is given for rank 7"):
        regions.with_ranks({4: 0})
    with pytest.raises(LayoutError, match="ranks 4 and 7 both become rank 2; each needs its own"):
        regions.with_ranks({4: 2, 7: 2})


def test_from_device_mesh_keeps_ranks_and_axis_names():
    grid = types.SimpleNamespace(tolist=lambda: [[3, 1], [0, 2]])
    named = types.SimpleNamespace(mesh=grid, mesh_dim_names=("dp", "tp"))
    assert Mesh.from_device_mesh(named) == Mesh([3, 1, 0, 2], {"dp": 2, "tp": 2})
    unnamed = types.SimpleNamespace(mesh=grid, mesh_dim_names=None)
    assert Mesh.from_device_mesh(unnamed).axes == ("0", "1")
    with pytest.raises(MeshError, match="SimpleNamespace is not a DeviceMesh"):
        Mesh.from_device_mesh(types.SimpleNamespace(mesh=grid))


def test_mesh_size_errors_name_the_counts():
    with pytest.raises(MeshError, match="2x3 hold 6 ranks"):
        Mesh(range(5), {"x": 2, "y": 3})
    with pytest.raises(MeshError, match="a single rank"):
        Mesh([0, 1], {})


def test_region_layout_ignores_the_order_of_ranks():
    a, b = [[(0, 2), (0, 4)], [(6, 8), (0, 4)]], [[(2, 6), (0, 4)]]
    assert RegionLayout({0: a, 3: b}) == RegionLayout({3: b, 0: a})
    assert RegionLayout({3: b, 0: a}).ranks == (0, 3)


@pytest.mark.parametrize("wrong", [True, 1.0, "0"])
def test_join_dim_and_ndim_must_be_integers(wrong):
    box = [[(0, 2), (0, 4)]]
    with pytest.raises(LayoutError, match=f"join_dim is {wrong!r}; it must be an integer from 0 to 8"):
        RegionLayout({0: box}, join_dim=wrong)
    with pytest.raises(LayoutError, match=f"ndim is {wrong!r}; it must be an integer from 0 to 8"):
        RegionLayout({0: box}, ndim=wrong)


def test_join_error_compares_with_the_first_box():
    boxes = [[(0, 2), (1, 4)], [(2, 4), (0, 3)], [(4, 6), (5, 7)]]
    with pytest.raises(LayoutError, match="dim 1 has 3 and 2 elements"):
        RegionLayout({0: boxes})
    assert RegionLayout({0: boxes[:2]}).boxes[0][1] == (((0, 2), (1, 4)), ((2, 4), (0, 3)))


def test_empty_boxes_make_no_tiles():
    layout = RegionLayout({0: [[(0, 2), (0, 4)], [(2, 2), (0, 4)], [(2, 5), (0, 4)]], 1: [[(3, 3), (0, 4)]]})
    shards = cut_tiles(layout, (5, 4))
    assert [tuple(item) for item in shards.start] == [(0, 0), (2, 0)]
    assert shards.local_shape(0) == (5, 4) and shards.local_shape(1) == (0, 4)
    assert shards.pieces_of(0)[2].tolist() == [[0, 0], [2, 0]]  # the empty box takes no space
    assert len(shards.pieces_of(1)[0]) == 0


def test_repeated_region_of_a_rank_is_refused():
    box = [(0, 4)]
    with pytest.raises(LayoutError, match="rank 5 holds region"):
        cut_tiles(RegionLayout({2: [box], 5: [box, box], 7: [box]}), (4,))


def test_number_of_cells_is_limited(monkeypatch):
    layout = RegionLayout({0: [[(0, 6)]], 1: [[(2, 8)]], 2: [[(4, 9)]]})  # 3 cells each: cut at 2, 4; 4, 6; 6, 8
    monkeypatch.setattr(reshard.sharding.tiles, "MAX_CELLS", 9)
    assert len(cut_tiles(layout, (9,)).start) == 5
    monkeypatch.setattr(reshard.sharding.tiles, "MAX_CELLS", 8)
    with pytest.raises(LayoutError, match="more than 8 cells"):
        cut_tiles(layout, (9,))


def test_split_factors_above_the_dim_size_are_equivalent():
    """Split factors of at least 3 cut a dim of size 3 into single elements."""
    mesh = Mesh.of((2, 2), axes=["a", "b"])
    shapes = {
        factor: [cut_tiles(Layout(mesh, (("b", Strided("a", factor)),)), (3,)).local_shape(rank) for rank in range(4)]
        for factor in (1, 3, 4, 64)
    }
    assert shapes[3] == shapes[4] == shapes[64]


def test_trailing_replicated_dims_are_dropped():
    mesh = Mesh.of((2, 2))
    assert Layout(mesh, "R R").spec == Layout(mesh, ()).spec == ()
    assert Layout(mesh, "R S1 R").spec == ((), ("1",))


@pytest.mark.parametrize("factor", [0, -1, 2.5, "2"])
def test_split_factors_must_be_positive_integers(factor):
    with pytest.raises(LayoutError, match="must be an integer of at least 1"):
        Layout(Mesh.of("2"), (Strided("0", factor),))


def test_number_of_strided_pieces_is_limited(monkeypatch):
    monkeypatch.setattr(reshard.sharding.dim_cuts, "MAX_PIECES", 8)
    layout = Layout(Mesh.of("2"), (Strided("0", 4),))
    assert cut_tiles(layout, (8,)).local_shape(1) == (4,)
    with pytest.raises(LayoutError, match="split factor of 5 over 2 ranks makes more than 8 pieces"):
        cut_tiles(Layout(Mesh.of("2"), (Strided("0", 5),)), (16,))


@pytest.mark.parametrize("rank", ["1", True, 1.0])
def test_first_rank_must_be_an_integer(rank):
    with pytest.raises(MeshError, match="must be an integer"):
        Mesh.of("2", first_rank=rank)


def test_mesh_array_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        Mesh.of("2x2").array[0, 0] = 7


def test_to_2023_pads_to_ndim():
    layout = Layout(Mesh.of("2"))
    assert (layout.to_2023(), layout.to_2023(2)) == ("", "R R")


@pytest.mark.parametrize("seed", range(20))
def test_find_overlaps_matches_comparing_all_pairs(seed):
    rng = np.random.default_rng(seed)
    num_a, num_b, ndim = rng.integers(0, 12), rng.integers(0, 12), rng.integers(0, 4)
    starts = [rng.integers(0, 5, (num, ndim)) for num in (num_a, num_b)]
    stops = [start + rng.integers(1, 4, start.shape) for start in starts]
    found = zip(*find_overlaps(starts[0], stops[0], starts[1], stops[1]), strict=True)
    expected = [
        (i, j)
        for i in range(num_a)
        for j in range(num_b)
        if (starts[0][i] < stops[1][j]).all() and (starts[1][j] < stops[0][i]).all()
    ]
    assert list(found) == expected


def test_disjoint_boxes_are_not_cut():
    layout = RegionLayout(
        {0: [((0, 4), (0, 2))], 1: [((4, 8), (0, 2))], 2: [((6, 10), (0, 2))], 3: [((10, 12), (0, 2))]}
    )
    cut = cut_tiles(layout, (12, 2))
    assert cut.start[:, 0].tolist() == [0, 4, 6, 8, 10]
    assert cut.stop[:, 0].tolist() == [4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Mesh([0, 1, 1], {"x": 3}), "rank 1 appears 2 times"),
        (lambda: Mesh([0, -1], {"x": 2}), "rank -1 is outside"),
        (lambda: Mesh([0, 1], {"x": 3}), "hold 3 ranks, but 2 are given"),
        (lambda: Mesh([], {"x": 0}), "size 0"),
        (lambda: Mesh([0], {"a b": 1}), "must be letters"),
        (lambda: Mesh.of("2y4"), "not of the form 2x4"),
        (lambda: Mesh.of("2x2", axes=["a", "a"]), "axis 'a' appears 2 times"),
        (lambda: Mesh.of("a=2,a=2"), "axis 'a' appears 2 times"),
        (lambda: Mesh.of("a=2,b"), "not of the form dp=2,tp=4"),
        (lambda: Mesh.of("a=2,=3"), "axis name '' must be letters"),
        (lambda: Mesh.of("a=2x3"), "not of the form dp=2,tp=4"),
        (lambda: Mesh.of("a=2", axes=["b"]), "not of the form 2x4 or dp=2,tp=4"),
        (lambda: Mesh.of("999999999x999999999"), "more than"),
        (lambda: Mesh.from_array([[0, 1], [2]]), "full grid"),
        (lambda: Mesh.from_array([0.5]), "integers"),
        (lambda: Mesh([[0, 1], [2]]), "full grid"),
        (lambda: Mesh([[0, 1], [2, 3]], {"x": 3}), "hold 3 ranks, but 4 are given"),
        (lambda: parse_ranks("3-1"), "empty or too long"),
    ],
)
def test_invalid_meshes_are_refused(build, text):
    with pytest.raises(MeshError, match=text):
        build()


def test_equal_meshes_from_text_arrays_and_jax_compare_equal():
    mesh = Mesh([4, 5, 6, 0], {"dp": 2, "tp": 2})
    assert str(mesh) == "Mesh(dp=2, tp=2; ranks 4-6,0)"
    assert parse_ranks(format_ranks(mesh.ranks)) == [4, 5, 6, 0]
    assert mesh == Mesh.from_array([[4, 5], [6, 0]], ["dp", "tp"])
    assert Mesh([[4, 5], [6, 0]]) == Mesh([4, 5, 6, 0], {"0": 2, "1": 2})
    assert hash(mesh) == hash(Mesh.from_array([[4, 5], [6, 0]], ["dp", "tp"]))

    class Device:
        def __init__(self, ident):
            self.id = ident

    class JaxMesh:
        devices = np.array([[Device(4), Device(5)], [Device(6), Device(0)]])
        axis_names = ("dp", "tp")

    assert Mesh.from_jax(JaxMesh()) == mesh
