"""Limits of planning: refused sizes, and simpler strategies for large problems."""

import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from reshard import Layout, Mesh, RegionLayout, Topology, make_plan
from reshard.cost.lower_bound import find_bound
from reshard.cost.simulator import simulate
from reshard.errors import ArgumentError, PlanError
from reshard.plan import check_plan
from reshard.planner.multicast.classes import Classes
from reshard.planner.multicast.host_classes import HostClasses
from reshard.planner.multicast.native_schedule import make_schedule
from reshard.planner.multicast.rotation import rotate_hosts
from reshard.planner.multicast.strategy import nics_of
from reshard.planner.strategies.broadcast import broadcast_in_rotation
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes
from reshard.planner.strategies.sends_and_all_gathers import send_recv
from reshard.sharding import TensorSpec
from reshard.topology import Host, Link


def on_hosts(num_ranks, devices=2):
    rate = 1e9 if devices == 1 else 1.25e9
    return Topology.uniform([rank // devices for rank in range(num_ranks)], rate).without_latency()


def assert_broadcast_in_rotation(src, dst, shape, topology):
    plan, expected = (
        make_plan(src, dst, shape, "float32", topology=topology, strategy=strategy)
        for strategy in ("multicast", broadcast_in_rotation)
    )
    check_plan(plan)
    for name in ("region", "sender", "receiver", "splits"):
        assert (getattr(plan.transfers, name) == getattr(expected.transfers, name)).all()


@pytest.mark.parametrize(
    "src, dst, named",
    [("R R", "S0 R", "900,000,000"), ("S0 R", "R R", "900,000,000"), ("S0 R", "R S0", "900,000,000")],
)
def test_plans_too_large_for_memory_are_refused_quickly(src, dst, named):
    meshes = Mesh.of(30_000), Mesh.of(30_000, first_rank=30_000)
    layouts = (Layout(mesh, spec) for mesh, spec in zip(meshes, (src, dst), strict=True))
    begun = time.monotonic()
    with pytest.raises(ArgumentError, match=f"30,000 to 30,000 ranks.* {named} times; at most 20,000,000"):
        make_plan(*layouts, (30_000, 30_000), "int8")
    assert time.monotonic() - begun < 10


def test_limit_counts_all_tensors_and_region_layouts():
    rows, columns = Layout(Mesh.of(64), "S0 R"), Layout(Mesh.of(64, first_rank=64), "R S0")
    shapes = {f"w{i}": (64, 64) for i in range(5000)}
    with pytest.raises(ArgumentError, match=r"5000 tensors.* 20,480,000 times"):
        make_plan(rows, columns, shapes, "int8")
    halves = RegionLayout({0: [((0, 32), (0, 64))], 1: [((32, 64), (0, 64))]})
    check_plan(make_plan(halves, columns, (64, 64), "int8"))


@pytest.mark.parametrize("pair", [("S0 R", "R S0"), ("R R", "S0 R"), ("S0 R", "R R")])
def test_broadcast_in_rotation_above_the_step_limit(pair, monkeypatch):
    monkeypatch.setattr("reshard.planner.multicast.strategy._MAX_STEPS", 10)
    src, dst = Layout(Mesh.of(8), pair[0]), Layout(Mesh.of(8, first_rank=8), pair[1])
    assert_broadcast_in_rotation(src, dst, (512, 512), on_hosts(16))


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        ("S01 R", "R S01", (768, 768)),  # each rank sends to each
        ("S0 R", "R S0", (768, 766)),  # replicas inside hosts, at both ends; columns do not divide
        ("S01 R", "R R", (768, 768)),  # regions pass along chains inside hosts
        ("S01 R", "S1 R", (1536, 2**14)),  # regions are cut into several messages
    ],
)
def test_large_exchanges_are_sent_in_rotation(src, dst, shape, monkeypatch):
    topology = on_hosts(24)
    layouts = Layout(Mesh.of("6x2"), src), Layout(Mesh.of("6x2", first_rank=12), dst)
    scheduled, rotated = (
        (
            monkeypatch.setattr("reshard.planner.multicast.rotation.MAX_SCHEDULED", most),
            make_plan(*layouts, shape, "float32", topology=topology, strategy="multicast", staging_bytes=2**19),
        )[1]
        for most in (10**6, 10)
    )
    check_plan(rotated)
    host = topology.host_array
    across = host[rotated.transfers.sender] != host[rotated.transfers.receiver]
    ends = host[rotated.transfers.sender[across]].tolist(), host[rotated.transfers.receiver[across]].tolist()
    pairs = list(dict.fromkeys(zip(*ends, strict=True)))[:6]
    assert len({sender for sender, _ in pairs}) == len({receiver for _, receiver in pairs}) == 6  # of the first slot
    assert rotated.num_messages <= 1.05 * scheduled.num_messages
    assert simulate(rotated).makespan_seconds <= 1.02 * find_bound(rotated).seconds


@pytest.mark.parametrize(("dst", "is_rotated"), [("R S01", True), ("R S1", True), ("R S0", False)])
def test_exchanges_rotate_over_nics_unless_hosts_forward(dst, is_rotated, monkeypatch):
    """Each of two ranks of a host has a NIC of its own, so in each slot a rank sends to another one."""
    monkeypatch.setattr("reshard.planner.multicast.rotation.MAX_SCHEDULED", 10)
    topology = Topology(tuple(rank // 2 for rank in range(24)), (Host((Link.of(1e9),) * 2),)).without_latency()
    layouts = Layout(Mesh.of("6x2"), "S01 R"), Layout(Mesh.of("6x2", first_rank=12), dst)
    problem = PlanProblem.of([TensorSpec((768, 768), "float32", *layouts)], topology)
    rotated = rotate_hosts(problem, HostClasses.of(Classes.of(problem), topology), nics_of(problem))
    assert (rotated is not None) == is_rotated
    plan = make_plan(*layouts, (768, 768), "float32", topology=topology, strategy="multicast")
    check_plan(plan)
    assert simulate(plan).makespan_seconds <= 1.02 * find_bound(plan).seconds
    if rotated is not None:
        assert sorted(rotated.sender[:12].tolist()) == list(range(12))
        assert sorted(rotated.receiver[:12].tolist()) == list(range(12, 24))


def test_uneven_exchanges_are_not_sent_in_rotation(monkeypatch):
    """Two of three hosts send to one, so in rotation it would wait for the third."""
    monkeypatch.setattr("reshard.planner.multicast.rotation.MAX_SCHEDULED", 0)
    src = RegionLayout({0: [((0, 8), (0, 8))], 2: [((8, 16), (0, 8))], 4: [((16, 32), (0, 8))]})
    dst = RegionLayout({6: [((0, 16), (0, 8))], 8: [((16, 24), (0, 8))], 10: [((24, 32), (0, 8))]})
    plan = make_plan(src, dst, (32, 8), "float32", topology=on_hosts(12), strategy="multicast")
    check_plan(plan)
    assert simulate(plan).makespan_seconds <= 1.02 * find_bound(plan).seconds


def test_planning_can_be_interrupted(monkeypatch):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    monkeypatch.setattr("reshard.planner.multicast.strategy._MAX_STEPS", 2**62)
    monkeypatch.setattr("reshard.planner.multicast.rotation.MAX_SCHEDULED", 2**62)
    count = 1024
    src, dst = Layout(Mesh.of(count), "S0 R"), Layout(Mesh.of(count, first_rank=count), "R R")
    old_handler = signal.signal(signal.SIGALRM, stop)

    def make(ports, workload):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return make_schedule(ports, workload)

    monkeypatch.setattr("reshard.planner.multicast.strategy.make_schedule", make)
    try:
        with pytest.raises(Stop):
            make_plan(src, dst, (count, 64), "float32", topology=on_hosts(2 * count, 1), strategy="multicast")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old_handler)


def test_too_many_chunks_are_refused():
    src, dst = Layout(Mesh.of(4), "S0 R"), Layout(Mesh.of(4, first_rank=4), "R S0")
    with pytest.raises(ArgumentError, match=r"chunks; at most 500,00[0-9] fit in one plan"):
        make_plan(src, dst, (10**8, 10**7), "float32", topology=on_hosts(8))


def test_broadcast_in_rotation_above_the_host_limit(monkeypatch):
    monkeypatch.setattr("reshard.planner.multicast.strategy._MAX_HOSTS", 3)
    src, dst = Layout(Mesh.of(4), "S0 R"), Layout(Mesh.of(4, first_rank=4), "R R")
    assert_broadcast_in_rotation(src, dst, (64, 64), on_hosts(8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": [0, 9]}, r"strategy odd: task\[1\] is 9, but the tasks are 0 to 1"),
        ({"task": [-1, 1]}, r"strategy odd: task\[0\] is -1, but the tasks are 0 to 1"),
        ({"sender": [0, 7]}, r"strategy odd: sender\[1\] is 7, but the ranks are 0-2"),
        ({"receiver": [-5, 2]}, r"strategy odd: receiver\[0\] is -5, but the ranks are 0-2"),
        ({"edge_offsets": [0, 7, 2]}, "strategy odd: edge_offsets must rise from 0 to 2 in 2 steps"),
        ({"sender": [0.0, 1.0]}, r"strategy odd: sender must have shape \[2\] and hold integers, .* dtype float64"),
        ({"stop": [[4]]}, r"strategy odd: stop must have shape \[2, 1\] and hold integers, for 2 routes"),
        (None, "strategy odd: index 2 of tasks in the routes: the tasks are 0 to 1"),
    ],
)
def test_a_strategy_function_that_returns_a_wrong_index_is_named(changes, message):
    def odd(problem):
        if changes is None:
            return Routes.of(problem, [(0, [(0, 2)]), (2, [(1, 2)])])
        return replace(send_recv(problem), **{name: np.array(value) for name, value in changes.items()})

    with pytest.raises(PlanError, match=message):
        make_plan(Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("1", first_rank=2)), (8,), "float32", strategy=odd)
