"""Orders of broadcasts: which host sends which region."""

from __future__ import annotations

import pytest

from reshard import Layout, Mesh, Topology, make_plan
from reshard.cli.demo_cases import study_cases
from reshard.cost.cost_report import CostReport
from reshard.topology.topology import Host, Link


def test_greedy_order_balances_replicated_senders():
    """Case 2 of the study: both source hosts hold the whole tensor, so each should send half."""
    case = study_cases(4)[1]
    topology = Topology(tuple(rank // 4 for rank in range(16)))
    for strategy, loads in [
        ("broadcast_naive", {0: 2}),
        ("broadcast_size", {0: 1, 1: 1}),
        ("broadcast_greedy", {0: 1, 1: 1}),
    ]:
        plan = make_plan(case.src, case.dst, case.shape, case.dtype, topology=topology, strategy=strategy)
        sent = {}
        for transfer in range(len(plan.transfers)):
            host = plan.transfers.edges_of(transfer)[0][0] // 4
            sent[host] = sent.get(host, 0) + 1
        assert sent == loads


def test_search_sends_from_the_fast_host():
    """Two source hosts, one with a tenth of the rate, and four regions for four fast hosts."""
    fast, slow = Host((Link.of(1e9),)), Host((Link.of(1e8),))
    topology = Topology(tuple(range(6)), (slow, fast, fast, fast, fast, fast), latency_seconds=0)
    src, dst = Layout(Mesh.of(2)), Layout(Mesh.of(4, first_rank=2), "S0")
    plan = make_plan(src, dst, (4_000_000,), "int8", topology=topology, strategy="broadcast_search")
    assert CostReport(plan).predicted_seconds == pytest.approx(
        4e-3
    )  # all four from the fast host: the slow one takes 10 ms per region
