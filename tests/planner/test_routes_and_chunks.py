"""Chains, chunk sizes, bundles of small regions, transfers, planning limits and the candidates of ``auto``."""

from __future__ import annotations

import math
from dataclasses import MISSING, replace

import numpy as np
import pytest
import torch

from reshard import Layout, Mesh, Topology, make_plan
from reshard.cost.cost_report import CostReport
from reshard.errors import ArgumentError, PlanError
from reshard.plan import PlanTransfers, expand_messages, find_sender_changes, find_waits, parse_plan
from reshard.planner import auto_strategy
from reshard.planner.estimates import StrategyBounds
from reshard.planner.multicast.chunk_workload import ChunkWorkload
from reshard.planner.multicast.strategy import make_workload, multicast
from reshard.planner.planning import plan_tensors
from reshard.planner.strategies.broadcast import broadcast_in_rotation
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes
from reshard.planner.strategies.sends_and_all_gathers import send_recv
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.topology import Host, Link
from tests.support.random_problems import random_problem


def test_chain_enters_each_pod_once():
    """Hosts 0 to 5 are in pods 0, 1, 0, 1, 0, 1."""
    hosts = tuple(Host((Link.of(1e9),), host % 2) for host in range(6))
    topology = Topology(tuple(range(6)), hosts, pods=(Link.of(1e9),) * 2)
    src, dst = Layout(Mesh.of(1, first_rank=2)), Layout(Mesh([0, 1, 3, 4, 5], {"x": 5}))
    plan = make_plan(src, dst, (2**20,), "float32", topology=topology, strategy="broadcast")
    edges = [*zip(plan.transfers.sender.tolist(), plan.transfers.receiver.tolist(), strict=True)]
    assert edges == [(2, 4), (4, 0), (0, 3), (3, 5), (5, 1)]


def test_chain_chunk_size_grows_with_latency():
    src, dst = Layout(Mesh.of(1)), Layout(Mesh.of(4, first_rank=1))
    num_chunks = {}
    for latency in (1e-5, 1e-4, 1e-2):
        topology = Topology(tuple(range(5)), latency_seconds=latency)
        plan = make_plan(src, dst, (2**24,), "int8", topology=topology, strategy="broadcast")
        num_chunks[latency] = int(plan.transfers.num_chunks[0])
        best = math.sqrt(3 * 2**24 / (1.25e9 * latency))  # for a chain of four hops
        assert num_chunks[latency] == pytest.approx(max(best, 16), rel=0.1)
    assert num_chunks[1e-5] > 2 * num_chunks[1e-4] > 2 * num_chunks[1e-2]


@pytest.mark.parametrize(("strategy", "receivers"), [("send_recv", 1), ("broadcast_naive", 2)])
def test_small_regions_with_one_tree_share_messages(strategy, receivers):
    """40 regions of about 60,000 bytes share messages of up to 1 MiB; a region of another dtype or of 64 KiB travels alone."""
    layouts = Layout(Mesh([0])), Layout(Mesh(range(1, 1 + receivers)))
    specs = [TensorSpec((60_000 - index,), "int8", *layouts, str(index)) for index in range(40)]
    specs.insert(20, TensorSpec((16,), "int32", *layouts, "other"))
    specs += [TensorSpec((2**16 + index,), "int8", *layouts, f"large {index}") for index in range(2)]
    plan = plan_tensors(specs, strategy=strategy, topology=Topology(tuple(range(1 + receivers))))
    assert sorted(np.diff(plan.transfers.box_offsets).tolist()) == [1, 1, 1, 6, 17, 17]  # 17 fit into 1 MiB
    assert plan.num_messages == 43 * receivers


def test_transfers_copy_their_arrays_and_are_read_only():
    given = make_plan(Layout(Mesh([0])), Layout(Mesh([1, 2]), "S0"), (8, 8), "int8").transfers
    columns = {name: getattr(given, name).copy() for name in given.__dataclass_fields__}
    made = PlanTransfers(**columns)
    for name, column in columns.items():
        assert column.flags.writeable and not getattr(made, name).flags.writeable
        column += 1
        assert (getattr(made, name) == getattr(given, name)).all()


def _plans_of_two_tensors():
    one = TensorSpec((8,), "int8", Layout(Mesh([0])), Layout(Mesh([1])), "a")
    return plan_tensors([one, replace(one, name="b")]), plan_tensors([one])


def test_by_tensor_orders_values_as_the_plan_and_refuses_others():
    both, alone = _plans_of_two_tensors()
    assert alone.staging_bytes == 64 * 2**20
    assert alone.by_tensor(5) == [5] and alone.by_tensor({"a": 6}) == [6] and alone.by_tensor(None) == [None]
    assert both.by_tensor({"b": 1, "a": 2}) == [2, 1] and both.by_tensor(None) == [None, None]
    with pytest.raises(ArgumentError, match="the plan has 2 tensors"):
        both.by_tensor(5)
    with pytest.raises(ArgumentError, match="the dict of tensors lacks"):
        both.by_tensor({"a": 2})


@pytest.mark.parametrize("strategy", ["multicast", "send_recv"])
def test_estimates_of_plans_that_take_too_long_to_simulate(strategy, monkeypatch):
    """The estimate of a plan that orders the messages of each port is close; others are upper estimates."""
    topology = Topology.uniform([rank // 4 for rank in range(32)])
    src, dst = Layout(Mesh.of("4x4"), "S0 S1"), Layout(Mesh.of("4x4", first_rank=16), "S1 R")
    plan = make_plan(src, dst, (2048, 2048), "float32", topology=topology, strategy=strategy)
    simulated = CostReport(plan)
    assert not simulated.makespan.is_estimate and "estimated" not in str(simulated)
    monkeypatch.setattr("reshard.cost.prediction.MAX_OPERATIONS", 10)
    estimated = CostReport(plan)
    assert estimated.makespan.is_estimate and "estimated, not simulated" in str(estimated)
    most = 1.02 if strategy == "multicast" else 4.5
    assert 0.98 <= estimated.predicted_seconds / simulated.predicted_seconds <= most


def test_workload_counts_steps_and_by_default_messages_inside_hosts_are_free():
    """Each chunk visits all hosts, holders and destinations once per destination."""
    spec = TensorSpec((64, 64), "float32", Layout(Mesh([0])), Layout(Mesh([1, 2, 3])))
    workload, _ = make_workload(PlanProblem.of([spec], Topology((0, 1, 2, 3))))
    assert workload.num_steps == len(workload.host_class_of) * 3 * (4 + 1 + 3)
    needed = [name for name, field in ChunkWorkload.__dataclass_fields__.items() if field.default is MISSING]
    plain = ChunkWorkload(**{name: getattr(workload, name) for name in needed})
    assert (plain.max_lead, plain.inside_each, plain.inside_per_byte) == (1, 0, 0)  # messages inside hosts are free
    assert not plain.near_first and not plain.keeps_partners


@pytest.mark.parametrize("steps", [2 * 10**9, 25 * 10**8])
def test_regions_are_broadcast_above_the_step_limit(steps, monkeypatch):
    monkeypatch.setattr(ChunkWorkload, "num_steps", steps)
    spec = TensorSpec((64, 64), "float32", Layout(Mesh([0, 1])), Layout(Mesh([2, 3])))
    problem = PlanProblem.of([spec], Topology((0, 1, 2, 3)))
    assert isinstance(multicast(problem), Routes if steps > 2 * 10**9 else PlanTransfers)


def test_rotation_sends_directly_if_each_region_has_one_holder_and_receiver():
    several = PlanProblem.of([TensorSpec((8,), "int8", Layout(Mesh([0])), Layout(Mesh([1, 2])))], Topology((0, 1, 2)))
    assert broadcast_in_rotation(several).sender.tolist() == [0, 1]
    halves = Layout(Mesh([2, 3]), "S0")
    exchange = PlanProblem.of([TensorSpec((8,), "int8", Layout(Mesh([0, 1]), "S0"), halves)], Topology((0, 1, 2, 3)))
    assert broadcast_in_rotation(exchange).receiver.tolist() == send_recv(exchange).receiver.tolist() == [2, 3]


def test_chunks_are_at_most_32_mib():
    topology = Topology((0, 1), latency_seconds=1.0)  # asks for as few messages as possible
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([1])), (2**31,), "int8", strategy="multicast", topology=topology)
    assert plan.num_messages == 64


def _tried(problem, monkeypatch):
    """The strategies that ``auto`` plans when lower bounds rule out none."""
    tried = []
    plan = auto_strategy._Choice.plan
    monkeypatch.setattr(auto_strategy._Choice, "plan", lambda self, name: tried.append(name) or plan(self, name))
    monkeypatch.setattr(StrategyBounds, "of_ungathered", 0.0)  # no plan is close enough to stop
    monkeypatch.setattr(auto_strategy, "_VARIANT_CUTOFF", np.inf)
    for kind in ("of_trees", "of_broadcasts"):
        monkeypatch.setattr(StrategyBounds, kind, 0.0)
    monkeypatch.setattr(StrategyBounds, "of_gathers", lambda self, num_receivers: 0.0)
    auto_strategy.choose_fastest(problem)
    monkeypatch.undo()
    return set(tried)


@pytest.mark.integration
def test_auto_skips_strategies_that_cannot_differ(monkeypatch):
    def problem(num, holders, receivers, hosts):
        layouts = Layout(Mesh(holders)), Layout(Mesh(receivers))
        specs = [TensorSpec((64,), "int8", *layouts, str(index)) for index in range(num)]
        return PlanProblem.of(specs, Topology((0, 1, 2, 3), hosts, latency_seconds=1e-3))

    slow, fast, two = (Host((Link.of(rate),) * n) for rate, n in ((1e8, 1), (1e9, 1), (1e9, 2)))
    always = {"send_recv", "multicast", "broadcast_naive", "multicast_from_partners"}
    orders = {"broadcast_greedy", "broadcast_search"}
    gathers = {"local_all_gather", "global_all_gather"}
    for num, hosts, holders, receivers, expected in (
        (128, (fast,) * 4, [0], [3], orders | {"broadcast_search_longer"}),
        (1_001, (fast,) * 4, [0], [3], {"broadcast_greedy"}),
        (10_001, (fast,) * 4, [0], [3], set()),
        (1, (fast,) * 4, [0], [2, 3], orders | gathers),
        (1, (two,) * 4, [0], [3], orders | {"multicast_near"}),
        (1, (fast, fast, fast, slow), [0], [3], orders),
        (1, (slow, fast, fast, fast), [0, 1], [3], orders | {"broadcast_size", "multicast_from_fast"}),
    ):
        assert _tried(problem(num, holders, receivers, hosts), monkeypatch) == always | expected


ORDERED = """\
plan by_hand staging_bytes=65536
topology nic_bytes_per_second=1.0 hosts 0*2,1*2,2*2
tensor 0 uint8 [9] from () on Mesh(ranks 0) to () on Mesh(0=5; ranks 1-5)
0: t0 [0:1] 0 -> 2 splits 1 window 1
1: t0 [1:2] 1 -> 4 splits 1 window 1 after 0
2: t0 [2:3] 4 -> 3 splits 1 window 1 after 0
3: t0 [3:4] 3 -> 5 splits 1 window 1 after 0
4: t0 [4:5] 0 -> 2 splits 1 window 1 after 0
5: t0 [5:6] 0 -> 3 splits 1 window 1 after 0
6: t0 [6:7] 1 -> 2 splits 1 window 1 after 0
7: t0 [7:8] 4 -> 2 splits 1 window 1 after 0
8: t0 [8:9] 4 -> 5 splits 1 window 1 after 0
"""


def test_find_waits_and_find_sender_changes_match_a_plan_by_hand():
    """Each host has two ranks. Transfer 4 uses the connection of transfer 0; neither rank of 8 can see the end of 0."""
    plan = parse_plan(ORDERED)
    waits = find_waits(plan)
    assert not waits.earlier.any()
    rows = zip(waits.later, waits.waiter, waits.actor, waits.is_sent, strict=True)
    assert [tuple(map(int, row)) for row in rows] == [
        (1, 1, 0, 1), (2, 3, 2, 0), (3, 3, 2, 0), (5, 0, 0, 1), (6, 1, 0, 1), (7, 2, 2, 0)
    ]  # fmt: skip
    assert np.flatnonzero(find_sender_changes(plan)).tolist() == [2, 7]
    other = parse_plan(ORDERED.replace("4 -> 5 splits 1 window 1 after 0", "4 -> 5 splits 1 window 1 after 1"))
    columns = {name: getattr(other.transfers, name) for name in PlanTransfers.__dataclass_fields__}
    with pytest.raises(PlanError, match="transfer 8 gets data from transfer 0, but does not come after it"):
        PlanTransfers(**columns | {"source": np.array([-1] * 8 + [0])})


def test_auto_compares_estimates_above_the_simulation_limit(monkeypatch):
    """Two replicas on one host: send_recv sends the bytes twice over the link, so it takes twice as long."""
    spec = TensorSpec((2**26,), "int8", Layout(Mesh([0])), Layout(Mesh([1, 2])))
    problem = PlanProblem.of([spec], Topology((0, 1, 1)))
    chosen = auto_strategy.choose_fastest(problem)[0]
    monkeypatch.setattr("reshard.cost.prediction.MAX_OPERATIONS", 0)
    monkeypatch.setattr(auto_strategy, "_LARGE", 0)
    assert auto_strategy.choose_fastest(problem)[0] == chosen == "multicast"


def test_messages_follow_the_last_messages_of_transfers_they_depend_on():
    found = 0
    for seed in range(40):
        src, dst, shape, topology = random_problem(seed)
        specs = [TensorSpec(shape, "float32", src, dst, "a"), TensorSpec((7, 7), "float32", src, dst, "b")]
        plan = plan_tensors(specs, strategy="multicast", topology=topology)
        transfers = plan.transfers
        last = {}  # id of the last box of the last message, by transfer
        for message in expand_messages(plan):
            named = transfers.after[
                transfers.after_offsets[message.transfer] : transfers.after_offsets[message.transfer + 1]
            ]
            wanted = [last[transfer] for transfer in named.tolist()]
            if transfers.source[message.transfer] >= 0:
                source = last[int(transfers.source[message.transfer])]
                wanted.remove(source)
                assert message.source == source - len(message.boxes) + 1
            assert list(message.after) == wanted
            found += len(wanted)
            last[message.transfer] = message.id + len(message.boxes) - 1
    assert found > 100


@pytest.mark.parametrize("shape", [(3, 2**25), (2, 3, 2**24), (2**26, 2), (5, 2**23 + 1), (2**27 + 3,)])
def test_chunks_have_4_to_8_mib(shape):
    """A row larger than 8 MiB is cut too; each of its chunks then lies in one row."""
    layouts = Layout(Mesh([0])), Layout(Mesh([1]))
    plan = make_plan(*layouts, shape, "int8", topology=Topology((0, 1)), strategy="send_recv")
    sizes = [
        math.prod(stop - start for start, stop in zip(*m.boxes[0][1:], strict=True)) for m in expand_messages(plan)
    ]
    assert sum(sizes) == math.prod(shape) and max(sizes) <= 2**23 <= 2.01 * min(sizes)


@pytest.mark.parametrize("names", [("a", "a"), ("a", None), (None, None)])
def test_several_tensors_need_distinct_names(names):
    specs = [TensorSpec((8,), "int8", Layout(Mesh([0])), Layout(Mesh([1])), name) for name in names]
    with pytest.raises(PlanError, match="2 tensors need 2 different names, not "):
        plan_tensors(specs)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), torch.float32])
def test_dtype_is_normalized_to_its_name(dtype):
    spec = TensorSpec((8,), dtype, Layout(Mesh([0])), Layout(Mesh([1])))
    assert spec.dtype == "float32" and spec == TensorSpec((8,), "float32", spec.src, spec.dst)
