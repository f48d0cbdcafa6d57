"""The bounds with latency against values by hand, the best of all plans of small cases, and random plans."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from reshard import CostReport, Layout, Mesh, Plan, Topology, find_bound, make_plan, simulate
from reshard.cost.latency_bounds import find_latency_bounds
from reshard.plan import PlanTransfers
from reshard.planner.strategy_registry import STRATEGIES
from reshard.topology import Host, Link
from tests.support.random_problems import random_problem


def on_hosts(count, num_nics=1, rate=1e6, **changes):
    """Hosts with one rank for each NIC, and latencies of 1 s."""
    hosts = (Host((Link.of(rate),) * num_nics),)
    return Topology(
        tuple(rank // num_nics for rank in range(count * num_nics)), hosts, **({"latency_seconds": 1.0} | changes)
    )


def bounds_of(src, dst, nbytes, topology):
    found = find_latency_bounds(make_plan(src, dst, nbytes, "int8", topology=topology, strategy="send_recv"))
    return found and (found.any_plan_seconds, found.unmerged_seconds)


@pytest.mark.parametrize(
    ("src", "dst", "shape", "topology", "any_plan", "unmerged"),
    [
        # 1 host informs 7 others in 3 rounds, and all bytes leave it first
        (Mesh.of(1), Mesh.of(7, first_rank=1), (10**6,), on_hosts(8), 4.0, 4.0),
        # with 2 NICs in each host, 1, 3 and 9 hosts have the byte
        (Mesh.of(2), Mesh.of(16, first_rank=2), (1,), on_hosts(9, 2), 2.0, 2.0),
        # each of 3 hosts sends a third to a fourth, which receives 3 MB
        (Mesh.of(3), Mesh.of(1, first_rank=3), (3 * 10**6,), on_hosts(4), 4.0, 4.0),
    ],
)
def test_replicas_by_hand(src, dst, shape, topology, any_plan, unmerged):
    found = bounds_of(Layout(src), Layout(dst), shape, topology)
    assert found == pytest.approx((any_plan, unmerged), abs=1e-5)


def test_exchanges_by_hand():
    """Each of 4 hosts sends 1 MB to each of 4 others. If a share x of the 16 parts goes directly, senders take
    4 s + 4x s of latency, and receivers 1 s of latency + 4 s + 4(1 - x) s for what they relay: equal at x = 5/8."""
    src, dst = Layout(Mesh.of(4), "S0 R"), Layout(Mesh.of(4, first_rank=4), "R S0")
    assert bounds_of(src, dst, (4000, 4000), on_hosts(8)) == pytest.approx((6.5, 8.0))
    in_place = Layout(Mesh.of(4), "R S0")  # each host sends to 3, and relays cost time at both ends
    assert bounds_of(src, in_place, (4000, 4000), on_hosts(4, latency_seconds=0.5)) == pytest.approx((4.5, 4.5))
    assert bounds_of(src, in_place, (400, 400), on_hosts(4, rate=1e4, latency_seconds=1.0)) == pytest.approx((6, 6))
    assert bounds_of(src, in_place, (400, 400), on_hosts(4, rate=1e5)) == pytest.approx((2.0, 3.3))  # 2 rounds


def test_topologies_without_such_bounds():
    src, dst = Layout(Mesh.of(1)), Layout(Mesh.of(1, first_rank=1))
    assert bounds_of(src, dst, (8,), on_hosts(2, latency_seconds=0.0)) is None
    assert bounds_of(src, dst, (8,), on_hosts(2, burst_bytes=1)) is None
    assert bounds_of(src, src, (8,), on_hosts(2)) == (0.0, 0.0)
    assert bounds_of(src, dst, (10**6,), on_hosts(2, start_seconds=1.0)) == pytest.approx((3.0, 3.0))


def test_a_rotation_reaches_the_bound_of_unmerged_plans():
    topology = Topology.uniform([rank // 8 for rank in range(2048)])
    src, dst = Layout(Mesh.of((128, 8)), "S0 S1"), Layout(Mesh.of((128, 8), first_rank=1024), "S1 S0")
    plan = make_plan(src, dst, (65536, 65536), "bfloat16", topology=topology)
    found = find_latency_bounds(plan)
    seconds = simulate(plan).makespan_seconds
    assert seconds == pytest.approx(0.0665, rel=1e-3)
    assert seconds == pytest.approx(found.unmerged_seconds, rel=1e-3)
    assert seconds / find_bound(plan).seconds == pytest.approx(1.238, rel=1e-3)
    assert 1 < seconds / found.any_plan_seconds < 1.04
    text = str(CostReport(plan))
    assert f"with latency {found.any_plan_seconds:.6g} s for any plan, {found.unmerged_seconds:.6g} s if" in text


def test_a_report_compares_a_plan_only_with_bounds_that_hold_for_it():
    src, dst = Layout(Mesh.of((2, 4)), "S01 R"), Layout(Mesh.of((2, 4), first_rank=8), "R S1")
    topology = Topology.uniform([rank // 4 for rank in range(16)])
    names = [f"w{number}" for number in range(40)]
    plan = make_plan(dict.fromkeys(names, src), dict.fromkeys(names, dst), dict.fromkeys(names, (64, 64)), "float32",
                     topology=topology)  # fmt: skip
    report = CostReport(plan)
    bounds = report.latency_bounds
    assert bounds.any_plan_seconds < report.predicted_seconds < bounds.unmerged_seconds
    line = f"{bounds.any_plan_seconds:.6g} s for any plan; with one region in each message, unlike here, "
    assert f"with latency {line}{bounds.unmerged_seconds:.6g} s" in str(report)


def test_the_busiest_port_of_a_report_is_one_that_the_bound_names():
    """All NICs of the chain of hosts are equally busy; the bound is that of a receiver."""
    src, dst = Layout(Mesh.of(1), "R"), Layout(Mesh.of(3, first_rank=1), "R")
    topology = Topology.uniform((0, 1, 2, 3), 1e9)
    report = CostReport(make_plan(src, dst, (10**7,), "float32", topology=topology, strategy="broadcast"))
    receiver = report.bound.ports[0]
    assert report.port_loads[0].port not in report.bound.ports
    assert f"busiest      {receiver}: " in str(report)


@pytest.mark.integration
def test_no_plan_is_below_its_bounds():
    """200 plans on hosts of several NICs, rates and pods. Plain sends of one region each are unmerged."""
    num_unmerged = 0
    for seed in range(200):
        chance = random.Random(seed)
        src, dst, shape, topology = random_problem(seed)
        topology = replace(topology, latency_seconds=chance.choice((1e-7, 1e-5, 1e-3)))
        name = chance.choice(sorted(STRATEGIES))
        plan = make_plan(src, dst, shape, "float32", topology=topology, strategy=name)
        found, seconds = find_latency_bounds(plan), simulate(plan).makespan_seconds
        assert seconds >= found.any_plan_seconds * (1 - 1e-9), seed
        assert found.unmerged_seconds >= found.any_plan_seconds
        if name == "send_recv" and (plan.transfers.num_boxes == 1).all():
            assert seconds >= found.unmerged_seconds * (1 - 1e-9), seed
            num_unmerged += 1
    assert num_unmerged > 10


def fastest_of_all_plans(src, dst, shape, topology, most):
    """Seconds of the fastest of all plans of at most ``most`` messages, each of some whole parts that its sender has.

    Parts are the elements of a tensor of bytes. A message may gather parts from several messages, and relay them.
    """
    plan = make_plan(src, dst, shape, "int8", topology=topology, strategy="send_recv")
    cells = list(itertools.product(*map(range, shape)))
    spec, rate = plan.tensors[0], topology.hosts[0].nics[0].egress_bytes_per_second
    has, needed = ({rank: _parts(of, rank, cells) for rank in plan.ranks} for of in (spec.src_tiles, spec.dst_tiles))
    best = float("inf")

    def extend(messages, has, busy):
        nonlocal best
        missing = sum(not needed[rank] <= has[rank].keys() for rank in plan.ranks)
        if not missing:
            for window in (1, 8):
                best = min(best, simulate(_with_messages(plan, messages, cells, window)).makespan_seconds)
        if not missing or len(messages) + missing > most:
            return
        for sender, receiver in itertools.permutations(plan.ranks, 2):
            fresh = sorted(has[sender].keys() - has[receiver].keys())
            for parts in itertools.chain(*(itertools.combinations(fresh, count) for count in range(1, len(fresh) + 1))):
                load = busy[sender] + topology.latency_seconds + len(parts) / rate
                if load < best * (1 - 1e-9):
                    after = sorted({has[sender][part] for part in parts} - {-1})
                    with_parts = has | {receiver: has[receiver] | dict.fromkeys(parts, len(messages))}
                    extend([*messages, (sender, receiver, parts, after)], with_parts, busy | {sender: load})

    extend([], {rank: dict.fromkeys(parts, -1) for rank, parts in has.items()}, dict.fromkeys(plan.ranks, 0.0))
    return best, find_latency_bounds(plan)


def _parts(shards, rank, cells):
    """The numbers of the cells that a rank of a layout has."""
    boxes = list(zip(*shards.pieces_of(rank)[:2], strict=True)) if rank in shards.layout.ranks else []
    return {
        number
        for number, cell in enumerate(np.array(cells))
        if any((start <= cell).all() and (cell < stop).all() for start, stop in boxes)
    }


def _with_messages(plan, messages, cells, window):
    """The plan with other messages: sender, receiver, parts, and the messages that bring them to the sender."""
    num, parts = len(messages), [part for message in messages for part in message[2]]
    start = np.array([cells[part] for part in parts])
    transfers = PlanTransfers(
        box_offsets=np.cumsum([0, *(len(message[2]) for message in messages)]),
        box_tensor=np.zeros(len(parts)),
        box_start=start,
        box_stop=start + 1,
        edge_offsets=np.arange(num + 1),
        sender=np.array([message[0] for message in messages]),
        receiver=np.array([message[1] for message in messages]),
        splits=np.ones((num, start.shape[1])),
        window=np.full(num, window),
        after_offsets=np.cumsum([0, *(len(message[3]) for message in messages)]),
        after=np.array([earlier for message in messages for earlier in message[3]]),
        source=np.full(num, -1),
    )
    return Plan(plan.tensors, plan.topology, "exhaustive", transfers)


def line(spec, *ranks):
    return Layout(Mesh(list(ranks), {"a": len(ranks)}), spec)


#: Layouts, shape, limit on messages, bytes per second with a latency of 1 s; seconds of the fastest plan over the bound
#: of any plan. Above 1, elements of one byte cannot be cut as finely as the bound assumes.
SMALL = [
    (line("R", 0), line("R", 1, 2, 3), (1,), 3, 1e6, 1.0),
    (line("R", 0), line("R", 1, 2), (2,), 4, 1e6, 1.0),
    (line("S0", 0, 1, 2), line("R", 3), (3,), 3, 1.0, 1.0),
    (line("S0 R", 0, 1), line("R S0", 0, 1), (2, 2), 3, 1.0, 1.0),
    (line("R", 0), line("S0", 1, 2, 3), (3,), 3, 1e6, 1.0),
    (line("R", 0), line("S0", 1, 2), (2,), 3, 1.0, 4 / 3),
]
LARGER = [
    (line("S0", 0, 1, 2), line("R", 0, 1, 2), (3,), 5, 1e6, 1.0),
    (line("S0", 0, 1, 2), line("R", 0, 1, 2), (3,), 5, 1.0, 5 / 3),
    (line("S0 R", 0, 1), line("R S0", 2, 3), (2, 2), 4, 1e6, 1.0),
    (line("S0 R", 0, 1), line("R S0", 2, 3), (2, 2), 4, 1.0, 4 / 3.5),
    (line("S0 R", 0, 1), line("R S0", 2, 3), (2, 2), 4, 0.1, 22 / 21.9091),
    (line("R", 0), line("S0", 1, 2, 3), (3,), 4, 1.0, 1.25),
]


@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(case, marks=pytest.mark.integration) for case in LARGER)])
def test_the_fastest_of_all_plans_is_not_below_the_bounds(case):
    src, dst, shape, most, rate, ratio = case
    topology = replace(Topology.uniform(range(4), rate), latency_seconds=1.0)
    best, found = fastest_of_all_plans(src, dst, shape, topology, most)
    assert best >= found.any_plan_seconds * (1 - 1e-9)
    assert best == pytest.approx(ratio * found.any_plan_seconds, rel=1e-4)
