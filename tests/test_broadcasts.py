"""Chains of whole slices: their way through pods, their chunks, and what travels together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reshard import Layout, Mesh, Topology, make_plan
from reshard.plan import TensorSpec
from reshard.planning import plan_tensors
from reshard.topology import Host, Port


def test_a_chain_enters_each_pod_once():
    """Hosts 0 to 5 are in pods 0, 1, 0, 1, 0, 1."""
    hosts = tuple(Host((Port.of(1e9),), host % 2) for host in range(6))
    topology = Topology(tuple(range(6)), hosts, pods=(Port.of(1e9),) * 2)
    src, dst = Layout(Mesh.of(1, first_rank=2)), Layout(Mesh([0, 1, 3, 4, 5], {"x": 5}))
    plan = make_plan(src, dst, (2**20,), "float32", topology=topology, strategy="broadcast")
    edges = [*zip(plan.transfers.sender.tolist(), plan.transfers.receiver.tolist(), strict=True)]
    assert edges == [(2, 4), (4, 0), (0, 3), (3, 5), (5, 1)]


def test_chunks_of_a_chain_are_as_small_as_messages_are_cheap():
    src, dst = Layout(Mesh.of(1)), Layout(Mesh.of(4, first_rank=1))
    took = {}
    for latency in (1e-5, 1e-4, 1e-2):
        topology = Topology(tuple(range(5)), latency_seconds=latency)
        plan = make_plan(src, dst, (2**24,), "int8", topology=topology, strategy="broadcast")
        took[latency] = int(plan.transfers.num_chunks[0])
        best = math.sqrt(3 * 2**24 / (1.25e9 * latency))  # of a chain of four
        assert took[latency] == pytest.approx(max(best, 16), rel=0.1)
    assert took[1e-5] > 2 * took[1e-4] > 2 * took[1e-2]


@pytest.mark.parametrize(("strategy", "receivers"), [("send_recv", 1), ("broadcast_naive", 2)])
def test_small_regions_of_one_tree_travel_together_until_a_message_is_full(strategy, receivers):
    """40 of 60,000 bytes, and those of another dtype by themselves."""
    layouts = Layout(Mesh([0])), Layout(Mesh(range(1, 1 + receivers)))
    specs = [TensorSpec((60_000,), "int8", *layouts, str(at)) for at in range(40)]
    specs.insert(20, TensorSpec((16,), "int32", *layouts, "other"))
    plan = plan_tensors(specs, strategy=strategy, topology=Topology(tuple(range(1 + receivers))))
    assert sorted(np.diff(plan.transfers.box_at).tolist()) == [1, 6, 17, 17]  # 17 fit into 1 MiB
    assert plan.num_messages == 41 * receivers
