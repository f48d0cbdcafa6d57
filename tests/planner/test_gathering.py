"""Regions that are gathered inside the sending hosts: valid plans, fewer latencies, and the same elements."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import pytest
import torch

from reshard import (
    CostReport,
    Layout,
    Mesh,
    TensorSpec,
    Topology,
    check_plan,
    make_plan,
    parse_plan,
    plan_from_json,
    plan_to_json,
)
from reshard.errors import PlanError
from reshard.plan import GATHERED, Plan, PlanTransfers, expand_messages
from reshard.planner.multicast.gathering import Gathering
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.runtime.cpu import program_executor
from reshard.runtime.cpu.verification import TransferDigests, describe_copy
from tests.support.memory_transport import run_in_threads
from tests.support.random_problems import random_problem
from tests.support.reference_check import check_plan as check_by_replay
from tests.support.tensors import same_bytes, take_shard, whole_tensor


def _hosts(count: int, ranks: int = 8) -> Topology:
    """Hosts of so many ranks with one NIC of 100 Gbit/s, and the latencies of TCP."""
    topology = Topology.uniform([rank // ranks for rank in range(count * ranks)], 12.5e9)
    return replace(topology, latency_seconds=1e-4, inside_latency_seconds=5e-5)


def _plan(src: str, dst: str, shape: tuple[int, int], grid: str = "2x4", **options) -> Plan:
    first, second = Mesh.of(grid), Mesh.of(grid, first_rank=Mesh.of(grid).size)
    ranks = first.sizes[1]
    topology = _hosts(2 * first.sizes[0], ranks)
    return make_plan(Layout(first, src), Layout(second, dst), shape, "float32", topology=topology, **options)


@pytest.mark.parametrize(("src", "dst"), [("S01 R", "R S1"), ("S01 R", "R S01"), ("S01 R", "R S0"), ("S01 R", "R R")])
def test_auto_gathers_where_latency_decides(src, dst):
    """Without it, no plan takes less than the second bound: each region is in a message of its own."""
    plan = _plan(src, dst, (1024, 1024), "4x8")
    report = CostReport(plan)
    assert plan.strategy == "gathered_multicast"
    assert report.latency_bounds.any_plan_seconds < report.predicted_seconds < report.latency_bounds.unmerged_seconds
    if dst == "R S1":
        assert report.predicted_seconds < 0.3 * report.latency_bounds.unmerged_seconds


def test_random_plans_are_valid_and_can_be_written():
    num_gathered = 0
    for seed in range(120):
        src, dst, shape, topology = random_problem(seed)
        options = {"topology": topology, "strategy": "gathered_multicast", "staging_bytes": 2**16 << seed % 8}
        plan = make_plan(src, dst, shape, "int16", **options)
        num_gathered += (plan.transfers.source == GATHERED).any()
        check_plan(plan)
        check_by_replay(plan)
        assert parse_plan(str(plan)) == plan
        assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
    assert num_gathered >= 20


@pytest.mark.parametrize("in_rounds", [False, True, "streams"])
def test_every_element_arrives(in_rounds):
    for seed in range(40):
        src, dst, shape, topology = random_problem(seed)
        plan = make_plan(src, dst, shape, "int64", topology=topology, strategy="gathered_multicast")
        if not (plan.transfers.source == GATHERED).any():
            continue
        whole = whole_tensor(shape)
        outs = {
            r: [s if s is None else torch.full_like(s, -1)] for r in plan.ranks for s in [take_shard(dst, r, whole)]
        }
        run_in_threads(plan, {r: [take_shard(src, r, whole)] for r in plan.ranks}, outs, in_rounds=in_rounds)
        for rank in dst.ranks:
            assert same_bytes(outs[rank][0], take_shard(dst, rank, whole))


def test_a_rank_that_gathers_other_bytes_than_it_received_is_named(monkeypatch):
    check = program_executor._Execution.check_gathered

    def change_and_check(self, op, passed_on):
        *_, parts = passed_on.values()
        *_, last = parts.values()
        last[-1] += 1
        check(self, op, passed_on)

    monkeypatch.setattr(program_executor._Execution, "check_gathered", change_and_check)
    plan = _plan("S0 S1", "S1 S0", (8, 8), "1x2", strategy="gathered_multicast")
    gathered = next(message for message in expand_messages(plan) if message.gathered)
    whole, ranks = whole_tensor((8, 8), torch.float32), plan.ranks
    sources = {rank: [take_shard(plan.tensors[0].src, rank, whole)] for rank in ranks}
    outs = {rank: [take_shard(plan.tensors[0].dst, rank, whole)] for rank in ranks}
    with pytest.raises(program_executor.WrongCopyError) as caught:
        run_in_threads(plan, sources, outs, seconds=1, digests={rank: TransferDigests() for rank in ranks})
    assert caught.value.id in {message.id for message in expand_messages(plan) if message.gathered}
    text = describe_copy(plan, gathered.sender, gathered.id)
    assert f"rank {gathered.sender} gathered other bytes than it had received (message {gathered.id})" in text


def test_many_tensors_are_gathered_together():
    """Equal tensors are planned as one; a box of all of them becomes a box of each, at both ends of a message."""
    src, dst = Layout(Mesh.of("2x4"), "S01 R"), Layout(Mesh.of("2x4", first_rank=8), "R S1")
    shapes = {f"w{i}": (16 + 8 * (i % 2), 12) for i in range(6)}
    plan = make_plan(src, dst, shapes, "float32", topology=_hosts(4, 4))
    check_plan(plan)
    check_by_replay(plan)
    gathered = [message for message in expand_messages(plan) if message.gathered]
    assert {len({tensor for tensor, _, _ in message.boxes}) for message in gathered} == {6}


def _changed(plan: Plan, **arrays) -> PlanTransfers:
    return PlanTransfers(
        **{name: getattr(plan.transfers, name) for name in PlanTransfers.__dataclass_fields__} | arrays
    )


def test_plans_that_gather_what_is_not_there_are_refused():
    plan = _plan("S01 R", "R S1", (64, 64), strategy="gathered_multicast")
    transfers = plan.transfers
    later, earlier = transfers.gathered[0].tolist()
    missing = transfers.after.tolist()
    missing.remove(earlier)  # the first gathered transfer is the first that has any `after`
    at = transfers.after_offsets - (torch.arange(len(transfers) + 1) > later).numpy()
    with pytest.raises(PlanError, match="which is not in `after`"):
        check_plan(replace(plan, transfers=_changed(plan, after=missing, after_offsets=at)))
    first = int((transfers.source == -1).argmax())
    source = transfers.source.copy()
    source[first] = GATHERED
    with pytest.raises(PlanError, match=f"transfer {first} is gathered, but comes after no transfer to its sender"):
        _changed(plan, source=source)
    splits, last = transfers.splits.copy(), int(transfers.gathered[-1, 0])
    splits[last, 0] = 2
    with pytest.raises(PlanError, match=f"transfer {last} is gathered, so it must be a single message"):
        _changed(plan, splits=splits)
    with pytest.raises(PlanError, match="only a gathered message comes from several"):
        parse_plan(str(plan).replace("gathered from", "from"))


def test_memory_does_not_grow_with_messages_times_receivers():
    """512 receivers need each region, so a row of receivers for each message would take 4 KiB each."""
    src, dst = Layout(Mesh.of("64x8"), "S01 R"), Layout(Mesh.of("64x8", first_rank=512), "R R")
    problem = PlanProblem.of([TensorSpec((512, 64), "int8", src, dst)], _hosts(128))
    gathering = Gathering.find(problem)
    tracemalloc.start()
    transfers = gathering.plan()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (transfers.source == GATHERED).any()
    assert peak < 4096 * len(transfers)
