"""Loads of classes of links equal those computed by hand, and the picture names them."""

from __future__ import annotations

import pytest

from microbench.planner.link_loads import draw_loads, from_json, loads_of, to_json
from reshard import Layout, Mesh
from reshard.planner import plan_tensors
from reshard.sharding import TensorSpec
from reshard.topology import Host, Link, Topology


def test_loads_of_links_equal_those_by_hand(tmp_path):
    pytest.importorskip("matplotlib")
    # hosts of 2 ranks and NICs in pods of one host; rank 0 alone holds 8,000 bytes that ranks 2 and 3 need in halves
    topology = Topology(
        (0, 0, 1, 1),
        (Host((Link.of(1e6),) * 2, pod=0), Host((Link.of(2e6),) * 2, pod=1)),
        (0, 1, 0, 1),
        (Link.of(4e6), Link.of(8e6)),
        inside_bytes_per_second=1e9,
    )
    layouts = Layout(Mesh.of(1), "R"), Layout(Mesh.of(2, first_rank=2), "S0")
    plan = plan_tensors([TensorSpec((8000,), "uint8", *layouts)], topology=topology, strategy="send_recv")
    loads = loads_of(plan)
    assert {name: (load.num_links, load.mean_seconds, load.rail_seconds) for name, load in loads.items()} == {
        "NICs of sources, out": (1, 0.008, (0.008,)),
        "uplinks of their pods, up": (1, 0.002, ()),
        "uplinks of destinations' pods, down": (1, 0.001, ()),
        "NICs of destinations, in": (2, 0.002, (0.002, 0.002)),
        "NICs of destinations, out": (2, 0.0, (0.0, 0.0)),
        "links inside hosts, into a rank": (2, 0.0, ()),
    }
    assert from_json(to_json(loads)) == loads
    draw_loads("a half each", loads, 0.008, 0.009, tmp_path / "loads.svg")
    drawn = (tmp_path / "loads.svg").read_text(encoding="utf-8")
    assert all(name in drawn.replace("&#39;", "'") for name in loads) and "predicted 0.009 s" in drawn
