"""Chunk scheduling: numbers of chunks, limits, forwarding inside hosts, and transfers between pods."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from reshard import Layout, Mesh, Topology, check_plan, make_plan
from reshard.errors import ArgumentError, PlanError, TopologyError
from reshard.plan import PlanTransfers, expand_messages
from reshard.planner.multicast import strategy as multicast_module
from reshard.planner.multicast.native_schedule import make_schedule
from reshard.planner.multicast.strategy import make_workload, multicast, nics_of
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes
from reshard.planner.strategy_registry import STRATEGIES
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.topology import Host, Link
from tests.reference.pod_chunk_scheduler import PodChunkScheduler
from tests.reference.schedule import schedule_python
from tests.support.random_problems import random_problem


def _broadcast(shape, num, topology=None):
    """A broadcast from rank 0 to ``num`` ranks, each on its own host by default."""
    spec = TensorSpec(shape, "int8", Layout(Mesh([0])), Layout(Mesh(range(1, num + 1))))
    return PlanProblem.of([spec], topology or Topology(tuple(range(num + 1)), latency_seconds=0))


def _num_chunks(problem):
    return len(make_workload(problem)[0].host_class_of)


def test_more_hosts_get_fewer_chunks():
    """Chunks times hosts stays below about 2**14, with at least 64 chunks."""
    counts = {num: _num_chunks(_broadcast((2**27,), num)) for num in (50, 64, 100, 200, 500, 1000)}
    for num, count in counts.items():
        assert max(64, min(256, 2**14 // num)) <= count <= 1.5 * max(64, min(256, 2**14 // num))


@pytest.mark.parametrize(("shape", "chunks"), [((2, 2**27), 35), ((2**27, 2), 8), ((1, 2**28), 8), ((2**28,), 8)])
def test_only_contiguous_chunks_have_up_to_32_mib(shape, chunks):
    """A latency of 1 s asks for as few chunks as possible. Chunks that may need packing have at most 7.5 MiB."""
    topology = Topology((0, 1), latency_seconds=1.0)
    assert _num_chunks(_broadcast(shape, 1, topology)) == chunks


def test_one_byte_is_scheduled():
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([1, 2])), (1,), "int8", strategy="multicast")
    check_plan(plan)
    assert plan.num_messages == 2


def test_chunk_limit_refuses_and_host_limit_falls_back_to_routes(monkeypatch):
    problem = _broadcast((2**30,), 3, Topology((0, 1, 2, 3), latency_seconds=1.0))
    assert _num_chunks(problem) == 32
    for most in (32, 31):
        monkeypatch.setattr(multicast_module, "_MAX_CHUNKS", most)
        if most == 32:
            assert _num_chunks(problem) == 32
        else:
            with pytest.raises(ArgumentError, match="make at least 32 chunks; at most 31"):
                make_workload(problem)
    monkeypatch.undo()
    for most in (4, 3):
        monkeypatch.setattr(multicast_module, "_MAX_HOSTS", most)
        assert isinstance(multicast(problem), PlanTransfers if most == 4 else Routes)


@pytest.mark.parametrize("schedule", [schedule_python, make_schedule])
@pytest.mark.parametrize("receivers", [7, 8, 9, 30])
def test_forwarding_inside_a_host_uses_a_chain_or_a_binary_tree(receivers, schedule, monkeypatch):
    monkeypatch.setattr(multicast_module, "make_schedule", schedule)
    topology = Topology((0, *[1] * receivers), inside_bytes_per_second=1e10)
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh(range(1, receivers + 1))), (2**20,), "int8", topology=topology)
    num_forwards = Counter()
    depth = {}
    for message in expand_messages(plan):
        part = message.boxes[0][1]
        if message.sender:
            num_forwards[part, message.sender] += 1
        depth[part, message.receiver] = depth.get((part, message.sender), 0) + 1
    assert max(num_forwards.values()) == (1 if receivers <= 8 else 2)
    assert max(depth.values()) == (receivers if receivers <= 8 else int(np.log2(receivers)) + 1)


@pytest.mark.parametrize(
    ("receivers", "inside", "is_fast"),
    [(1, 1e3, True), (2, 2e9, True), (2, 1.9e9, False), (8, 2e9, True), (9, 3.9e9, False), (9, 4e9, True),
     (30, 4e9, True), (30, 3.9e9, False), (30, None, True)],
)  # fmt: skip
def test_ranks_take_turns_if_one_rank_cannot_forward_everything(receivers, inside, is_fast):
    """With a NIC of 1 GB/s. Ranks of a chain forward each byte once, ranks of a tree twice, and must stay half idle."""
    hosts = (Host((Link.of(1e9),)),) * 2
    topology = Topology((0, *[1] * receivers), hosts, inside_bytes_per_second=inside)
    assert (make_workload(_broadcast((2**20,), receivers, topology))[0].max_lead > 1) == is_fast


def test_topology_must_cover_destination_ranks():
    problem = TensorSpec((8,), "int8", Layout(Mesh([0])), Layout(Mesh([3])))
    with pytest.raises(TopologyError, match="rank 3"):
        PlanProblem.of([problem], Topology((0, 1)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_count_messages_matches_expanded_messages(strategy):
    src, dst = Layout(Mesh.of(2), "S0"), Layout(Mesh.of("2x2", first_rank=1), "S1 R")
    plan = make_plan(
        src, dst, (64, 2**20), "int8", strategy=strategy, topology=Topology((0, 0, 1, 1, 2)).without_latency()
    )
    for rank in plan.ranks:
        assert plan.count_messages(rank) == len(list(expand_messages(plan, rank)))


def test_check_plan_limits_messages():
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([1])), (2**13, 2**12), "int8", strategy="send_recv")
    columns = {name: getattr(plan.transfers, name) for name in PlanTransfers.__dataclass_fields__}
    cut = PlanTransfers(**(columns | {"splits": np.array([[4097, 4096]])}))
    with pytest.raises(PlanError, match="16781312 boxes; at most 16777216"):
        check_plan(replace(plan, transfers=cut))


@pytest.mark.integration
def test_chosen_pod_transfers_cannot_be_improved_by_an_exchange(monkeypatch):
    choose = PodChunkScheduler.choose_transfers
    seen = Counter()

    def choose_and_check(self, choices):
        chosen = choose(self, choices)
        by_port = {}
        for choice in choices:
            for number in choice.passes[0], choice.passes[-1]:
                by_port.setdefault(number, []).append(choice)
        taken = [choice for choice in choices if chosen.has(choice)]
        ports = Counter(number for choice in taken for number in (choice.passes[0], choice.passes[-1]))
        assert all(count == 1 for count in ports.values())
        for number, free_rate in chosen.free_rate.items():
            assert sum(choice.rate for choice in taken if number in choice.passes[1:-1]) <= free_rate * (1 + 1e-6)
        for choice in choices:
            self.exchange(choice, chosen, by_port)
        again = sum(choice.weight for choice in choices if chosen.has(choice))
        seen["gains"] += again > sum(choice.weight for choice in taken) + 1e-6
        seen["rounds"] += 1
        return choose(self, choices)

    monkeypatch.setattr(PodChunkScheduler, "choose_transfers", choose_and_check)
    for seed in (*range(60), 646, 997, 1135):  # in the last three, one exchange makes another one gain
        src, dst, shape, topology = random_problem(seed)
        if topology.pods:
            problem = PlanProblem.of([TensorSpec(shape, "float32", src, dst)], topology)
            schedule_python(nics_of(problem), make_workload(problem)[0])
    assert seen["rounds"] > 1000 and not seen["gains"]
