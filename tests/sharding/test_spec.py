"""Specs: notations that are equivalent, and specs that are refused."""

from __future__ import annotations

import pytest

from reshard import Layout, Mesh
from reshard.errors import LayoutError, PartialError


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        ("S2", LayoutError, "names axis 2"),
        ("X", LayoutError, "neither R nor S"),
        ("S0 S0", LayoutError, "twice"),
        ("dp R", LayoutError, r"write axis names as in '\(dp, -, tp\)'"),
        ("(dp, nope)", LayoutError, "names axis 'nope'"),
        ("(dp, dp)", LayoutError, "twice"),
        ("(dp", LayoutError, "not of the form"),
        (("nope",), LayoutError, "names axis 'nope'"),
        (["S0", "R"], LayoutError, "write 'S0 R' as one string"),
        ((("dp", "dp"),), LayoutError, "twice"),
        ((3,), LayoutError, "must be None, an axis name"),
        (7, LayoutError, "must be a string such as"),
        ("Shard(0)", LayoutError, "1 placement for the 2 axes"),
        ("Shard(dp), Replicate()", LayoutError, "has text beside its placements"),
        ("Shard(0), tp", LayoutError, "has text beside its placements"),
        ("Shard(-1), Replicate()", LayoutError, "a negative dim needs the number of tensor dims"),
        ("Partial(sum), Replicate()", PartialError, "reduce it first"),
    ],
)
def test_invalid_specs_are_refused(spec, error, text):
    with pytest.raises(error, match=text):
        Layout(Mesh.of("2x2", axes=["dp", "tp"]), spec)


def test_spec_notations_are_equivalent():
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    class P:  # like jax.sharding.PartitionSpec: iterable, but not a tuple
        UNCONSTRAINED = object()
        unreduced = frozenset()

        def __init__(self, *partitions):
            self.partitions = partitions

        def __iter__(self):
            return iter(self.partitions)

    mesh = Mesh.of("2x4", axes=["dp", "tp"])
    ours = Layout(mesh, ("dp", None, "tp"))
    assert ours == Layout(mesh, "S0 R S1") == Layout(mesh, [Shard(0), Shard(2)])
    assert ours == Layout(mesh, P("dp", None, ("tp",), None))
    assert ours == Layout(mesh, "Shard(0), Shard(2)") == Layout(mesh, str((Shard(0), Shard(2))))
    assert ours == Layout(mesh, "[Shard(0), Shard(-1)]", ndim=3)
    with pytest.raises(LayoutError, match="must be None, an axis name"):
        Layout(mesh, P("dp", P.UNCONSTRAINED))
    assert ours.to_2023(4) == "S0 R S1 R"
    assert ours.to_placements() == [Shard(0), Shard(2)]
    major_tp = Layout(mesh, "S10")
    assert str(major_tp) == "(tp+dp) on Mesh(dp=2, tp=4; ranks 0-7)"
    assert major_tp.to_placements() == [_StridedShard(0, split_factor=4), Shard(0)]
    assert Layout(mesh) == Layout(mesh, "R R") == Layout(mesh, [Replicate(), Replicate()])
    with pytest.raises(PartialError, match="reduce it first"):
        Layout(mesh, [Partial(), Replicate()])
    with pytest.raises(LayoutError, match="2 axes"):
        Layout(mesh, [Shard(0)])
