"""Plans in closed form: each rank expands its own messages, without a list of those of others."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import reshard
from reshard import (
    CostReport,
    Layout,
    Mesh,
    Plan,
    Topology,
    check_plan,
    find_bound,
    make_plan,
    parse_plan,
    plan_from_json,
    plan_to_json,
    simulate,
)
from reshard.api.preparation import plan_per_host
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.cost import find_latency_bounds
from reshard.cost.prediction import _seconds_of_rotation
from reshard.errors import ArgumentError, PlanError, TopologyError
from reshard.plan import RotationPlan, expand_messages, find_loads, find_waits, is_sound
from reshard.planner import planning
from reshard.runtime import build_program
from reshard.sharding import TensorSpec
from reshard.testing.processes import run_processes
from reshard.topology import Host, Link
from tests.support.memory_transport import run_in_threads
from tests.support.tensors import take_shard, whole_tensor

LIMIT = 2**26


def pair(src, dst, hosts=(8, 8), ranks=4):
    """Layouts over ``(hosts, ranks)`` to as many other hosts, and a topology of them."""
    count = hosts[0] * ranks
    layouts = Layout(Mesh.of((hosts[0], ranks)), src), Layout(Mesh.of((hosts[1], ranks), first_rank=count), dst)
    return *layouts, Topology.uniform([rank // ranks for rank in range(sum(hosts) * ranks)], 1e9)


def rotation(src, dst, shape, topology, dtype="int32"):
    return RotationPlan.find([TensorSpec(shape, dtype, src, dst)], topology, 2**26, LIMIT)


PAIRS = [
    ("S0 S1", "S1 S0", (8, 8)),
    ("S0 S1", "S0 S1", (8, 4)),
    ("S01 R", "S01 R", (8, 8)),
    ("R R", "S0 R", (8, 8)),
    ("S01 R", "S1 R", (8, 8)),
    ("S01 R", "R S1", (8, 8)),
    ("S0 R", "R S0", (8, 4)),
    ("S01 R", "R R", (8, 8)),
    ("S01 R", "R S0", (8, 8)),
    ("S01 R", "R S01", (16, 8)),
]


@pytest.mark.parametrize("nics", [1, 4])
@pytest.mark.parametrize(("src", "dst", "hosts"), PAIRS)
def test_plans_deliver_and_take_the_time_of_their_bound(src, dst, hosts, nics):
    src, dst, topology = pair(src, dst, hosts)
    topology = replace(topology, hosts=(Host((Link.of(1e9),) * nics),), nic_of_rank=())
    plan = rotation(src, dst, (8192, 8192), topology)
    if nics > 1 and dst.spec[:1] == (("0",),) and not src.spec:
        assert plan is None  # one region for each host enters by one of its NICs
        return
    check_plan(plan)
    listed = Plan(plan.tensors, topology, "listed", plan.transfers, plan.staging_bytes)
    assert find_bound(plan).seconds == pytest.approx(find_bound(listed).seconds)
    assert find_bound(plan).reason == find_bound(listed).reason
    found, expected = find_latency_bounds(plan), find_latency_bounds(listed)
    assert found.any_plan_seconds == pytest.approx(expected.any_plan_seconds)
    assert found.unmerged_seconds == pytest.approx(expected.unmerged_seconds)
    assert find_loads(plan) == find_loads(listed)
    assert (plan.num_messages, plan.bytes_moved()) == (listed.num_messages, listed.bytes_moved())
    seconds = simulate(plan).makespan_seconds
    if plan.has_lanes:
        assert seconds <= _seconds_of_rotation(plan)
    else:
        assert seconds == pytest.approx(_seconds_of_rotation(plan), rel=0.02)
        assert seconds <= 1.05 * found.unmerged_seconds


@pytest.mark.parametrize("nics", [1, 2])
def test_ranks_expand_what_the_plan_lists(nics):
    """Each message, its order constraints and its programs are those of the listed plan."""
    src, dst, topology = pair("S01 R R", "R S1 S0", (4, 4))
    topology = replace(topology, hosts=(Host((Link.of(1e9),) * nics),), nic_of_rank=())
    plan = rotation(src, dst, (64, 12, 8), topology)
    check_plan(plan)
    listed = Plan(plan.tensors, topology, "listed", plan.transfers, plan.staging_bytes)
    number = {key: row for row, key in enumerate(sorted({m.id for r in plan.ranks for m in expand_messages(plan, r)}))}
    assert len(number) == plan.num_messages
    for rank in plan.ranks:
        own = list(expand_messages(plan, rank))
        assert plan.count_messages(rank) == len(own)
        assert [
            (number[m.id], m.sender, m.receiver, m.boxes, None if m.source is None else number[m.source]) for m in own
        ] == [(m.id, m.sender, m.receiver, m.boxes, m.source) for m in expand_messages(listed, rank)]
        waits, expected = find_waits(plan, rank), find_waits(listed, rank)
        found = {(number[later], number[earlier], *rest) for later, earlier, *rest in _rows(waits)}
        assert {row for row in found if rank in row[2:4]} == {row for row in _rows(expected) if rank in row[2:4]}


def _rows(waits):
    columns = (waits.later, waits.earlier, waits.waiter, waits.actor, waits.is_sent)
    return set(zip(*(column.tolist() for column in columns), strict=True))


def test_the_programs_of_all_ranks_move_a_tensor():
    src, dst, topology = pair("S01 R", "R S0", (3, 3), 2)
    plan = rotation(src, dst, (48, 18), topology)
    whole = whole_tensor((48, 18), torch.int32)
    sources = {rank: [take_shard(src, rank, whole) if rank in src.ranks else None] for rank in plan.ranks}
    outs = {
        rank: [torch.zeros_like(take_shard(dst, rank, whole)) if rank in dst.ranks else None] for rank in plan.ranks
    }
    run_in_threads(plan, sources, outs, seconds=20)
    assert all(torch.equal(outs[rank][0], take_shard(dst, rank, whole)) for rank in dst.ranks)


def random_exchange(seed):
    """Tensors, several of which may have no dims, between hosts in any order, on a topology of equal NICs."""
    chance = random.Random(seed)
    sides, host_of_rank, hosts = ([], []), [], []
    counts = [chance.choice((1, 2, 3, 4, 6, 8)) for _ in sides]
    num_ranks = [chance.choice((1, 2, 3, 4)) for _ in sides]
    kinds = [Host((Link(*chance.choices((1e9, 2e9), k=2)),) * chance.choice((1, 1, 2, 3))) for _ in sides]
    order = [side for side in (0, 1) for _ in range(counts[side])]
    if chance.random() < 0.4:
        chance.shuffle(order)
    for side in order:
        sides[side].extend(range(len(host_of_rank), len(host_of_rank) + num_ranks[side]))
        host_of_rank += [len(hosts)] * num_ranks[side]
        hosts.append(kinds[side])
    if chance.random() < 0.3:
        chance.shuffle(sides[0])
    topology = Topology(
        tuple(host_of_rank),
        tuple(hosts),
        latency_seconds=chance.choice((1e-3, 1e-4, 1e-5, 0.0)),
        inside_bytes_per_second=chance.choice((None, 8e9)),
        inside_latency_seconds=chance.choice((0.0, 1e-5)),
    )
    tensors = []
    for number in range(chance.choice((1, 1, 2, 3))):
        ndim = chance.choice((0, 1, 2, 2, 3))
        layouts = []
        for side in sides:
            rows = chance.choice([count for count in range(1, len(side) + 1) if len(side) % count == 0])
            dims = [[] for _ in range(ndim)]
            for axis in "ab":
                if ndim and chance.random() < 0.7:
                    chance.choice(dims).append(axis)
            layouts.append(Layout(Mesh(side, {"a": rows, "b": len(side) // rows}), dims))
        shape = tuple(chance.choice((24, 48, 144)) for _ in range(ndim))
        tensors.append(TensorSpec(shape, chance.choice(("int32", "int8")), *layouts, name=f"t{number}"))
    return tensors, topology


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.integration) for first in (300, 600))])
def test_random_exchanges(first):
    """Plans deliver, their figures are those of their messages, and their estimate is at least the simulated time."""
    num_plans = 0
    for seed in range(first, first + 300):
        tensors, topology = random_exchange(seed)
        plan = RotationPlan.find(tensors, topology, 2**26, LIMIT)
        if plan is None:
            continue
        num_plans += 1
        check_plan(plan)
        listed = Plan(plan.tensors, topology, "listed", plan.transfers, plan.staging_bytes)
        assert find_loads(plan) == find_loads(listed), seed
        assert (plan.num_messages, plan.bytes_moved()) == (listed.num_messages, listed.bytes_moved()), seed
        assert find_bound(plan).seconds == pytest.approx(find_bound(listed).seconds), seed
        seconds = simulate(plan).makespan_seconds
        assert _seconds_of_rotation(plan) >= 0.9 * seconds, seed
        if topology.latency_seconds:
            found, expected = find_latency_bounds(plan), find_latency_bounds(listed)
            assert found.any_plan_seconds <= expected.any_plan_seconds * (1 + 1e-9), seed
            assert found.unmerged_seconds <= expected.unmerged_seconds * (1 + 1e-9), seed
            assert seconds >= expected.unmerged_seconds * (1 - 1e-9), seed
    assert num_plans > 30


def test_problems_without_closed_form():
    src, dst, topology = pair("S01 R", "R S0")
    assert rotation(src, dst, (2048, 1020), topology) is None  # columns do not divide
    assert rotation(src, src, (2048, 1024), topology) is None  # hosts hold and need data
    spec = TensorSpec((2**14, 2**14), "int32", src, dst)  # 32 x 8 regions of 4 MiB
    assert RotationPlan.find([spec], topology, 2**26, 2**22) is not None
    assert RotationPlan.find([spec], topology, 2**26, 2**22 - 1) is None
    one, every, few = pair("R R", "R R", (1, 8))
    assert rotation(one, every, (64, 64), few) is None  # a broadcast would keep the sender 8 times as busy
    slow = replace(topology, hosts=(Host((Link.of(1e9),)),) * 15 + (Host((Link.of(5e8),)),))
    assert rotation(src, dst, (2048, 1024), slow) is None


@pytest.mark.parametrize("dst", ["S1 R", "R S0"])
def test_plans_for_16384_ranks(dst):
    """33.6 and 268 million messages: ranks of both ends agree on each message of a few of them."""
    hosts = 2048
    src, dst, topology = pair("S01 R", dst, (hosts, hosts), 8)
    plan = make_plan(src, dst, (65536, 65536), "bfloat16", topology=topology)
    assert plan.strategy == "rotation"
    assert str(plan).splitlines()[-1] == f"closed form of {plan.num_messages} messages"
    assert plan == parse_plan(str(plan)) == plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    data = pickle.dumps(plan)
    assert len(data) < 2**22  # without the ranks of each tile
    assert plan == pickle.loads(data)
    assert is_sound(pickle.loads(data))
    with pytest.raises(ArgumentError, match="choose one rank"):
        check_plan(plan)
    chance = random.Random(0)
    receiver = chance.choice(dst.ranks)
    mine = {m.id: m for m in expand_messages(plan, receiver)}
    for message in chance.sample(sorted(mine.values(), key=lambda m: m.id), 2):
        other = message.sender if message.receiver == receiver else message.receiver
        theirs = next(m for m in expand_messages(plan, other) if m.id == message.id)
        assert (theirs.sender, theirs.receiver, theirs.boxes) == (message.sender, message.receiver, message.boxes)
    report = CostReport(plan)
    assert report.makespan.is_estimate
    assert report.lower_bound_seconds < report.latency_bounds.unmerged_seconds <= report.predicted_seconds


def test_small_plans_as_text_and_json():
    src, dst, topology = pair("S01 R", "R S0", (4, 2), 2)
    spec = TensorSpec((16, 16), "int32", src, dst, '<script>"x"</script>')
    plan = RotationPlan([spec], topology)
    assert plan == parse_plan(str(plan))
    data = plan_to_json(plan)
    assert len(data["messages"]) == plan.num_messages
    assert plan == plan_from_json(json.loads(json.dumps(data)))
    assert "<script>" not in plan._repr_html_()
    text = str(plan)
    for wrong, rule in (
        (text.replace("closed form of 32", "closed form of 31"), "32 messages, not 31"),
        (text.replace("plan rotation", "plan send_recv"), "has the strategy rotation"),
        (text.replace("[16, 16]", "[16, 15]"), "no plan in closed form"),
    ):
        with pytest.raises(PlanError, match=rule):
            parse_plan(wrong)
    data["messages"].pop()
    with pytest.raises(PlanError, match="messages"):
        plan_from_json(data)


def test_nonsense_makes_no_plan():
    src, dst, topology = pair("S01 R", "R S0", (4, 2), 2)
    tensors = [TensorSpec((16, 16), "int32", src, dst)]
    for arguments, error in (
        (([], topology), PlanError),
        ((3, topology), ArgumentError),
        ((tensors, None), ArgumentError),
        ((tensors, topology, -1), ArgumentError),
        ((tensors, topology, "x"), ArgumentError),
        ((tensors, Topology((0,))), TopologyError),
    ):
        with pytest.raises(error):
            RotationPlan(*arguments)


def move(rank, num_ranks):
    """Move tensors by plans in closed form; returns the number of wrong elements, and the strategy."""
    planning.MAX_HOLDINGS = 0
    plan_per_host.SHARED_FROM_SECONDS = 0.0  # one rank would plan for all, but has no arrays to share
    half = num_ranks // 2
    src, dst = Layout(Mesh.of((half // 2, 2)), "S01 R"), Layout(Mesh.of((half // 2, 2), first_rank=half), "R S0")
    topology = Topology(tuple(number // 2 for number in range(num_ranks)))
    shapes = {"w": (8 * half, 8 * half), "x": (2 * half, half)}
    sources = {name: shard_of_positions(src, rank, shape, "float32") for name, shape in shapes.items()}
    result = reshard.reshard(sources, src, dst, shape=shapes, topology=topology, timeout_seconds=120)
    with pytest.raises(ArgumentError, match="verify=True needs a list of all"):
        reshard.reshard(sources, src, dst, shape=shapes, topology=topology, verify=True)
    (call_group,) = [each for group in reshard.coordination.known_groups(None) for each in group.call_groups.values()]
    strategies = {plan.strategy for plan, _, _ in call_group.cache.values()}
    if rank < half:
        return 0, strategies
    wrong = (count_unlike(result[name], shard_of_positions(dst, rank, shapes[name], "float32")) for name in shapes)
    return sum(wrong), strategies


@pytest.mark.integration
@pytest.mark.parametrize("num_ranks", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_processes_move_tensors_in_closed_form(num_ranks):
    assert run_processes(move, num_ranks, num_ranks, timeout_seconds=400) == [(0, {"rotation"})] * num_ranks


@pytest.mark.slow
def test_all_of_16384_ranks_receive_each_element_once():
    """Each receiver gets disjoint regions of as many elements as it needs, and all sends are as many as receives."""
    src, dst, topology = pair("S01 R", "S1 R", (2048, 2048), 8)
    plan = make_plan(src, dst, (65536, 65536), "bfloat16", topology=topology)
    needed = 65536 * 65536 // 8
    num_sent, sums = 0, np.zeros(2, dtype=np.uint64)
    for rank in plan.ranks:
        (own,) = plan.own_messages(rank)
        for end, place in ((own.sender, 0), (own.receiver, 1)):
            with np.errstate(over="ignore"):
                sums[place] += (own.key[end == rank].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).sum(
                    dtype=np.uint64
                )
        num_sent += int((own.sender == rank).sum())
        if rank in dst.ranks:
            got = own.receiver == rank
            start, stop = own.start[got], own.stop[got]
            assert int((stop - start).prod(axis=1).sum()) == needed
            order = np.argsort(start[:, 0])
            assert (stop[order[:-1], 0] == start[order[1:], 0]).all()  # rows follow each other
    assert num_sent == plan.num_messages
    assert sums[0] == sums[1]


def test_program_of_one_of_16384_ranks():
    src, dst, topology = pair("S01 R", "S1 R", (2048, 2048), 8)
    plan = make_plan(src, dst, (65536, 65536), "bfloat16", topology=topology)
    program = build_program(plan, dst.ranks[5])
    assert (len(program.recvs), len(program.sends_inside), program.sends_across) == (2048, 0, ())


@pytest.mark.slow
@pytest.mark.parametrize(("src", "dst", "most"), [(src, dst, 1.15 if dst == "R S1" else 1.02) for src, dst, _ in PAIRS])
def test_closed_forms_of_1024_ranks(src, dst, most):
    src, dst, topology = pair(src, dst, (128, 128), 8)
    plan = rotation(src, dst, (65536, 65536), topology, "bfloat16")
    check_plan(plan)
    assert simulate(plan).makespan_seconds <= most * find_latency_bounds(plan).unmerged_seconds


def test_the_inside_of_hosts_is_loaded_as_by_the_listed_messages():
    src, dst, topology = pair("S01 R", "R S0", (8, 8))
    topology = replace(topology, inside_total_bytes_per_second=1e9)
    plan = rotation(src, dst, (8192, 8192), topology)
    listed = Plan(plan.tensors, topology, "listed", plan.transfers, plan.staging_bytes)
    assert find_loads(plan) == find_loads(listed)
    assert any(load.port.endswith("inside") for load in find_loads(listed))
