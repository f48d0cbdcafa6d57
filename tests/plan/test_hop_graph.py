"""A plan as a networkx graph of hops."""

from __future__ import annotations

import networkx as nx
import pytest

from reshard import Layout, Mesh, Topology, make_plan


@pytest.mark.parametrize("strategy", ["send_recv", "broadcast", "multicast", "local_all_gather"])
def test_every_destination_is_reached_by_data_edges_from_a_holder(strategy):
    src, dst = Layout(Mesh.of("4"), "S0 R"), Layout(Mesh.of("2x4", first_rank=4), "R R")
    topology = Topology.uniform([rank // 4 for rank in range(12)])
    plan = make_plan(src, dst, (64, 8), "float32", topology=topology, strategy=strategy)
    graph = plan.to_networkx()
    assert nx.is_directed_acyclic_graph(graph)
    between, inside, _ = plan.bytes_moved()
    sums = {True: 0, False: 0}
    for _, data in graph.nodes(data=True):
        sums[data["crosses_hosts"]] += data["nbytes"]
        assert data["num_chunks"] >= 1
    assert (sums[True], sums[False]) == (between, inside)
    by_data = nx.DiGraph([(a, b) for a, b, edge in graph.edges(data=True) if edge["reason"] == "data"])
    for transfer, sender, receiver in graph:
        before = by_data.pred.get((transfer, sender, receiver), {})
        assert sender in src.ranks or any(hop[2] == sender for hop in before)
