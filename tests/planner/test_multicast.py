"""Multicast plans: time against the lower bound, chunks, staging, and equality with the reference implementation."""

import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from reshard import Layout, Mesh, Topology, make_plan, simulate
from reshard.cli.plan_page.html_report import plan_to_html
from reshard.cost.lower_bound import find_bound
from reshard.plan import Load, check_plan, describe_load, expand_messages, find_loads, parse_plan
from reshard.planner.multicast.classes import Classes, cut_pieces
from reshard.planner.multicast.host_classes import HostClasses
from reshard.planner.multicast.native_schedule import make_schedule
from reshard.planner.multicast.strategy import make_workload, multicast_from_fast, nics_of, without_slow_holders
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.machine_presets import load_preset
from reshard.topology.topology import Host, Link
from tests.reference.schedule import schedule_python
from tests.support.memory_transport import run_in_threads
from tests.support.strategies_of_cases import cases
from tests.support.tensors import same_bytes, take_shard, whole_tensor

ROWS_TO_COLUMNS = ("S0 R", "R S0")


def _plan(src, dst, src_hosts, dst_hosts, shape=(1024, 1024), **topology):
    a, b = Mesh.of((src_hosts, 2)), Mesh.of((dst_hosts, 2), first_rank=2 * src_hosts)
    no_latency = {"latency_seconds": 0.0, "inside_latency_seconds": 0.0}
    hosts = Topology(tuple(rank // 2 for rank in range(2 * (src_hosts + dst_hosts))), **(no_latency | topology))
    return make_plan(Layout(a, src), Layout(b, dst), shape, "float32", strategy="multicast", topology=hosts)


@pytest.mark.parametrize(
    ("src", "dst", "src_hosts", "dst_hosts"),
    [
        ("S0 R", "R S0", 2, 2),
        ("R R", "S0 R", 2, 3),
        ("R R", "R R", 3, 4),
        ("S0 R", "R R", 1, 4),
        ("S1 R", "S0 R", 3, 5),
    ],
)
def test_plans_are_near_the_bound(src, dst, src_hosts, dst_hosts):
    plan = _plan(src, dst, src_hosts, dst_hosts)
    check_plan(plan)
    assert simulate(plan).makespan_seconds <= 1.015 * find_bound(plan).seconds


@pytest.mark.parametrize("hosts", [5, 16])
@pytest.mark.parametrize("nbytes", [2**10, 2**16, 2**22, 2**28])
def test_broadcast_from_one_holder_is_near_the_optimal_number_of_rounds(hosts, nbytes):
    rate, latency = 4e11, 1.5e-5
    topology = Topology(tuple(range(hosts + 1)), (Host((Link.of(rate),)),), latency_seconds=latency)
    src, dst = Layout(Mesh.of(1)), Layout(Mesh.of(hosts, first_rank=1))
    plan = make_plan(src, dst, (nbytes,), "int8", strategy="multicast", topology=topology)
    rounds = math.ceil(math.log2(hosts + 1))
    best = min((n - 1 + rounds) * (latency + nbytes / n / rate) for n in range(1, 100))
    assert simulate(plan).makespan_seconds <= 1.1 * best


@pytest.mark.parametrize("rates", [(1e9, 5e8, 2.5e8, 1e9, 1e9), (1e9, 1e9, 2.5e8, 2.5e8, 5e8)])
@pytest.mark.parametrize(("src", "dst"), [("S0 R", "R S0"), ("R R", "S0 R"), ("S0 R", "R R"), ("R S1", "S1 R")])
def test_auto_is_not_slower_than_other_strategies(src, dst, rates):
    topology = Topology(tuple(rank // 2 for rank in range(10)), tuple(Host((Link.of(rate),)) for rate in rates))
    layouts = Layout(Mesh.of((2, 2)), src), Layout(Mesh.of((3, 2), first_rank=4), dst)
    for shape in ((3000, 1024), (12, 8)):
        for latency in (0.0, 1e-4):
            with_latency = replace(topology, latency_seconds=latency)
            seconds = {
                name: simulate(
                    make_plan(*layouts, shape, "float32", strategy=name, topology=with_latency)
                ).makespan_seconds
                for name in (None, "multicast", "send_recv", "broadcast_greedy", "broadcast_size")
            }
            assert seconds[None] <= 1.01 * min(seconds.values())


def test_plan_names_the_chosen_strategy():
    """Latencies favour direct sends: the four ranks of a host send at the same time, but chunks leave the host in turn."""
    src, dst = Layout(Mesh.of((4, 4)), "S1 R"), Layout(Mesh.of((1, 4), first_rank=16), "R S1")
    topology = Topology(tuple(rank // 4 for rank in range(20)), latency_seconds=1e-4)
    free = topology.without_latency()
    replicas = Layout(Mesh.of((1, 4), first_rank=16))
    assert make_plan(src, replicas, (8192, 4096), "float32", topology=free).strategy == "multicast"
    for strategy in (None, "auto"):
        plan = make_plan(src, dst, (32, 32), "float32", topology=topology, strategy=strategy)
        assert plan.strategy == "send_recv"
        assert simulate(plan).makespan_seconds < 5e-4


def test_ranks_of_a_host_forward_at_the_same_time():
    topology = load_preset("dgx_h100", 24)
    src, dst = Layout(Mesh.of((1, 8)), "S0 S1"), Layout(Mesh.of((2, 8), first_rank=8))
    topology = replace(topology, latency_seconds=0.0, inside_latency_seconds=0.0)
    plan = make_plan(src, dst, (16384, 16384), "bfloat16", topology=topology)
    assert simulate(plan).makespan_seconds < 1.1 * find_bound(plan).seconds


@pytest.mark.parametrize(("inside", "num_ranks"), [(None, 1), (1e10, 1), (1.5e9, 2)])
def test_one_rank_receives_for_its_host_if_its_links_are_fast(inside, num_ranks):
    topology = replace(_plan("R R", "R R", 1, 2).topology, inside_bytes_per_second=inside)
    src, dst = Layout(Mesh.of((1, 2)), "R R"), Layout(Mesh.of((2, 2), first_rank=2), "R R")
    plan = make_plan(src, dst, (4096, 1024), "float32", topology=topology, strategy="multicast")
    host, sender, receiver = plan.topology.host_array, plan.transfers.sender, plan.transfers.receiver
    crosses = host[sender] != host[receiver]
    for h in (1, 2):
        receiving_ranks = set(receiver[crosses & (host[receiver] == h)].tolist())
        assert len(receiving_ranks) == num_ranks
        assert set(sender[crosses & (host[sender] == h)].tolist()) <= receiving_ranks


def test_text_keeps_the_order_across_ranks():
    plan = _plan("R R", "R R", 2, 3)
    assert len(plan.transfers.after)
    assert parse_plan(str(plan)) == plan


@given(
    cases(),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.sampled_from([1e9, 5e8, 2.5e8]), min_size=4, max_size=4),
    st.sampled_from([(None, 0.0), (4e9, 0.0), (5e8, 1e-5)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_native_and_reference_schedules_are_equal(case, nics, in_pods, rates, inside, is_mixed, near_first, partners):
    shape, src, dst, topology = case
    nic_rates = [[Link.of(rate / (1 + 9 * (is_mixed and n % 2))) for n in range(nics)] for rate in rates]
    hosts = tuple(Host(row, i % 2 if in_pods else None) for i, row in enumerate(nic_rates))
    topology = replace(topology, hosts=hosts, nic_of_rank=(), pods=(Link.of(5e8), Link.of(1e9)) if in_pods else ())
    topology = replace(topology, inside_bytes_per_second=inside[0], inside_latency_seconds=inside[1])
    plan = make_plan(src, dst, shape, "float32", strategy="multicast", topology=topology)
    check_plan(plan)
    copy.copy(plan.transfers)  # through the constructor, which checks ``after`` and ``source``
    problem = PlanProblem.of([TensorSpec(shape, "float32", src, dst)], plan.topology)
    workload = replace(make_workload(problem)[0], near_first=near_first, keeps_partners=partners)
    nics = nics_of(problem)
    native, reference = make_schedule(nics, workload), schedule_python(nics, workload)
    for name in native.__dataclass_fields__:
        assert (getattr(native, name) == getattr(reference, name)).all(), name


@pytest.mark.nightly
def test_native_and_reference_schedules_of_many_hosts_in_pods_are_equal():
    rng = random.Random(1)
    src, dst = Layout(Mesh.of((32, 2)), "S1 R R"), Layout(Mesh.of((64, 2), first_rank=64), "R S01 R")
    hosts = tuple(Host((Link.of(rng.choice((5, 10, 40)) * 1.25e8),), host // 16) for host in range(96))
    pods = tuple(Link.of(rate) for rate in (1e10, 7e9, 7.5e9, 1.25e10, 9e9, 1.3e10))
    topology = Topology(tuple(rank // 2 for rank in range(192)), hosts, pods=pods)
    problem = PlanProblem.of([TensorSpec((1024, 1024, 32), "float32", src, dst)], topology)
    workload, nics = make_workload(problem)[0], nics_of(problem)
    native, reference = make_schedule(nics, workload), schedule_python(nics, workload)
    for name in native.__dataclass_fields__:
        assert (getattr(native, name) == getattr(reference, name)).all(), name


def _gbit(*rates):
    return Host(tuple(Link.of(rate * 1.25e8) for rate in rates))


@pytest.mark.parametrize(
    ("src", "dst", "shape", "hosts", "host_of_rank", "most"),
    [
        # shards so uneven that the ranks of some NICs hold nothing
        (
            Layout(Mesh.of("4x4"), "R R S01"),
            Layout(Mesh.of("2x4", first_rank=16)),
            (1000, 1100, 40),
            (_gbit(10, 10, 10, 10),),
            [rank // 4 for rank in range(24)],
            1.01,
        ),
        # a fast and a slow NIC in one host
        (
            Layout(Mesh.of("2"), "S0"),
            Layout(Mesh.of("2", first_rank=2)),
            (8192, 8192),
            (_gbit(25), _gbit(25, 1)),
            (0, 0, 1, 1),
            1.02,
        ),
        # two replicas, one of them on a much slower host
        (
            Layout(Mesh.of("2")),
            Layout(Mesh.of("1", first_rank=2)),
            (2**28,),
            (_gbit(1), _gbit(25), _gbit(25)),
            (0, 1, 2),
            1.02,
        ),
        # NICs of one rate; hosts have different numbers of NICs, and ranks share them unevenly
        (
            Layout(Mesh([0, 6, 8, 9, 11, 13], {"a": 3, "b": 2}), ("b", "a")),
            Layout(Mesh([2, 11, 15], {"a": 3})),
            (16666667, 3),
            (_gbit(1, 1), _gbit(1, 1, 1, 1), _gbit(1, 1, 1, 1), _gbit(1, 1, 1), _gbit(1)),
            (0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4),
            1.02,
        ),
        # pods of many NICs whose rates differ by direction
        (
            Layout(Mesh.of("3x8"), "S0 R"),
            Layout(Mesh.of("3x8", first_rank=24), "S1 R"),
            (1024, 32768),
            tuple(
                Host((Link(out * 1.25e9, into * 1.25e9),) * 8, pod)
                for out, into, pod in (
                    (0.25, 1, 0), (0.5, 0.5, 0), (1, 0.5, 0), (0.25, 0.5, 1), (0.5, 1, 1), (0.5, 0.5, 1),
                )
            ),
            [rank // 8 for rank in range(48)],
            1.3,
        ),
        # fast receivers that exchange the data of two slow holders and a faster one
        (
            Layout(Mesh.of("3x4"), "R S1 R"),
            Layout(Mesh.of("2x4", first_rank=12)),
            (2048, 512, 48),
            (_gbit(2.5), _gbit(2.5), _gbit(5), _gbit(10), _gbit(10)),
            [rank // 4 for rank in range(20)],
            1.01,
        ),
    ],
    ids=["uneven shards", "mixed NICs", "slow replica", "different numbers of NICs", "pods of many NICs", "slow holders"],
)  # fmt: skip
def test_auto_is_near_the_bound_with_unequal_hosts(src, dst, shape, hosts, host_of_rank, most):
    pods = (Link.of(1.5e10),) * 2 if hosts[0].pod is not None else ()
    topology = Topology(tuple(host_of_rank), hosts, pods=pods).without_latency()
    plan = make_plan(src, dst, shape, "float32", topology=topology)
    check_plan(plan)
    assert simulate(plan).makespan_seconds <= most * find_bound(plan).seconds


def test_slow_host_that_needs_a_region_stays_a_holder():
    src, dst = (
        Layout(Mesh.of("2")),
        Layout(Mesh.of("3")),
    )  # ranks 0 and 1 hold replicas; slow rank 0 also needs the region
    topology = Topology((0, 1, 2), (_gbit(1), _gbit(25), _gbit(25)))
    problem = PlanProblem.of([TensorSpec((2**20,), "float32", src, dst)], topology)
    assert without_slow_holders(problem) is None
    slow = Topology((0, 1, 2, 3), (_gbit(1), _gbit(1), _gbit(25), _gbit(25)))
    two = [
        TensorSpec((8,), "int8", Layout(Mesh(ranks)), Layout(Mesh([2])), name)
        for name, ranks in (("a", [0, 1]), ("b", [0]))
    ]
    assert without_slow_holders(PlanProblem.of(two, slow)) is None  # no fast host holds anything
    for strategy in (multicast_from_fast, None):
        check_plan(make_plan(src, dst, (2**20,), "float32", topology=topology, strategy=strategy))
    mixed = Layout(Mesh([0, 1, 2], {"x": 3}))
    plan = make_plan(mixed, Layout(Mesh([0, 3], {"x": 2})), (2**20,), "float32", strategy=multicast_from_fast,
                     topology=Topology((0, 1, 2, 3), (_gbit(1), _gbit(1), _gbit(25), _gbit(25))))  # fmt: skip
    check_plan(plan)
    assert 1 not in {message.sender for message in expand_messages(plan)}  # rank 1 is slow and needs nothing


@given(cases(), st.integers(1, 40))
def test_chunks_cover_their_host_class_evenly(case, count):
    shape, src, dst, topology = case
    problem = PlanProblem.of([TensorSpec(shape, "float32", src, dst)], topology)
    classes = Classes.of(problem)
    host_classes = HostClasses.of(classes, topology)
    assert host_classes.nbytes.sum() == classes.nbytes.sum()
    assert (np.diff(host_classes.host_class) >= 0).all()
    pieces = cut_pieces(
        problem, host_classes.classes, host_classes.host_class, np.full(len(host_classes), count), host_classes.moves
    )
    numel = (pieces.stop - pieces.start).prod(axis=1)
    assert (numel > 0).all()
    assert (np.diff(pieces.at) > 0).all()
    assert (np.unique(pieces.chunk) == np.arange(len(pieces.host_class_of))).all()
    assert (np.diff(pieces.chunk) >= 0).all()
    assert (host_classes.host_class[pieces.class_of] == pieces.host_class_of[pieces.chunk]).all()
    of_piece = np.repeat(np.arange(len(pieces.chunk)), np.diff(pieces.at))
    assert (np.bincount(of_piece, weights=4 * numel, minlength=len(pieces.chunk)) == pieces.nbytes).all()
    sizes = np.bincount(pieces.chunk, weights=pieces.nbytes)
    for host_class, total in enumerate(host_classes.nbytes.tolist()):
        mine = sizes[pieces.host_class_of == host_class]
        assert mine.sum() == total
        assert mine.max() <= total / count * (1.05 if host_classes.moves[host_class] else 1.2) + 8
    for k in range(len(host_classes.classes)):
        seen = np.zeros(shape, dtype=np.int64)
        for row in np.flatnonzero(pieces.class_of[of_piece] == k).tolist():
            at = tuple(slice(a, b) for a, b in zip(pieces.start[row], pieces.stop[row], strict=True))[: len(shape)]
            seen[at] += 1
        assert seen.max() <= 1
        assert 4 * seen.sum() == host_classes.classes.nbytes[k]


def test_eight_chunks_fit_in_staging():
    src, dst = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(2, first_rank=2), "R S0")
    topology = Topology((0, 1, 2, 3), latency_seconds=1e-2)  # favours few, large chunks
    for staging in (2**16, 2**20, 2**26):
        plan = make_plan(
            src, dst, (1024, 2048), "float32", strategy="multicast", topology=topology, staging_bytes=staging
        )
        assert plan.message_bytes.max() <= staging // 8
        check_plan(plan)


@pytest.mark.parametrize("width", [150, 197, 230, 239])
def test_eight_chunks_inside_a_host_fit_in_staging(width):
    src, dst = Layout(Mesh.of(1)), Layout(Mesh.of(1, first_rank=1))
    for rows in range(20, 120, 7):
        plan = make_plan(src, dst, (rows, width), "float32", strategy="multicast", staging_bytes=2**16)
        assert plan.message_bytes.max() <= 2**16 // 8


def test_rank_with_a_copy_from_its_host_sends_without_staging_again():
    """Rank 1 receives the tensor from rank 0 of its host, and sends half of it to the other host."""
    topology = Topology((0, 0, 1, 1), (Host((Link.of(1e9),) * 2),)).without_latency()
    src, dst = Layout(Mesh.of(1)), Layout(Mesh.of(3, first_rank=1))
    plan = make_plan(src, dst, (2**20,), "float32", strategy="multicast", topology=topology)
    check_plan(plan)
    assert {0, 1} <= set(plan.transfers.sender.tolist())
    assert simulate(plan).makespan_seconds <= 1.05 * find_bound(plan).seconds


@pytest.mark.parametrize("staging", [2**16, 2**20])
@pytest.mark.parametrize("numel", [10**5, 10**6])
@pytest.mark.parametrize(("latency", "inside"), [(1e-4, (None, 1e-4)), (0.0, (None, 1e-4)), (0.0, (1e8, 0.0))])
def test_relays_do_not_deadlock_with_slow_links_inside_hosts(staging, numel, latency, inside):
    """The rank at the sending NIC does not hold the data, so it stages all of it over a slow link inside the host."""
    topology = Topology(
        (0, 0, 1, 1), (Host((Link.of(1e9),) * 2),), inside_bytes_per_second=inside[0],
        latency_seconds=latency, inside_latency_seconds=inside[1],
    )  # fmt: skip
    src, dst = Layout(Mesh([1, 2], {"x": 2}), "S0"), Layout(Mesh([3, 0], {"x": 2}), "S0")
    plan = make_plan(src, dst, (numel,), "int32", topology=topology, staging_bytes=staging, strategy="multicast")
    check_plan(plan)
    whole = torch.arange(numel, dtype=torch.int32)
    halves = whole[: numel // 2], whole[numel // 2 :]
    sources = {0: [None], 1: [halves[0]], 2: [halves[1]], 3: [None]}
    outs = {0: [torch.zeros_like(halves[1])], 1: [None], 2: [None], 3: [torch.zeros_like(halves[0])]}
    run_in_threads(plan, sources, outs, seconds=30)
    assert torch.equal(outs[3][0], halves[0])
    assert torch.equal(outs[0][0], halves[1])


@pytest.mark.parametrize("slow", [5e8, 2.5e8, 1e7])
@pytest.mark.parametrize("numel", [10, 100_000, 2**22])
def test_slow_port_sends_the_last_chunk_if_the_fast_port_may_not_enter_the_pod(slow, numel):
    hosts = (Host((Link.of(1e9),), 0), Host((Link.of(1e9),), 1), Host((Link.of(slow),), 0))
    topology = Topology((0, 0, 1, 1, 2, 2), hosts, pods=(Link.of(1e9), Link.of(slow)))
    src, dst = Layout(Mesh([4, 2], {"x": 2}), "S0"), Layout(Mesh([0, 1, 2], {"x": 3}))
    plan = make_plan(src, dst, (numel,), "int8", topology=topology, strategy="multicast")
    check_plan(plan)


def test_unused_hosts_do_not_change_the_plan():
    src, dst = Layout(Mesh.of("1x4"), "S0 R"), Layout(Mesh.of("1x4", first_rank=4), "R S0")
    near, far = (Topology((0,) * 4 + (host,) * 4) for host in (1, 2**20))
    plans = [make_plan(src, dst, (64, 64), "float32", topology=topology) for topology in (near, far)]
    assert plans[0].transfers.sender.tolist() == plans[1].transfers.sender.tolist()
    assert find_bound(plans[0]).seconds == find_bound(plans[1]).seconds
    check_plan(plans[1])


def test_loads_are_the_bytes_of_each_port():
    """A host with two NICs sends half of 4 MiB to each of two hosts in another pod, which exchange the halves."""
    hosts = (Host((Link.of(1e9),) * 2, 0), Host((Link.of(5e8),), 1), Host((Link.of(5e8),), 1))
    topology = Topology((0, 0, 1, 2), hosts, pods=(Link.of(1e9), Link.of(2e9)))
    src, dst = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(2, first_rank=2))
    plan = make_plan(src, dst, (2**20,), "float32", topology=topology, strategy="multicast")
    loads = {load.port: load for load in find_loads(plan)}
    assert loads["pod 0 up"].nbytes == loads["pod 1 down"].nbytes == 2**22
    assert loads["pod 1 down"].seconds == 2**22 / 2e9
    assert loads["host 0 out, NIC 0"].nbytes + loads["host 0 out, NIC 1"].nbytes == 2**22
    assert loads["host 1 in"].nbytes == loads["host 2 in"].nbytes == 2**22
    assert loads["host 1 out"].nbytes + loads["host 2 out"].nbytes == 2**22
    assert max(load.seconds for load in loads.values()) <= find_bound(plan).seconds * (1 + 1e-9)


def test_what_moves_inside_a_host_loads_it_if_its_ranks_share_a_rate():
    """Each of two hosts receives 1 MiB once, and passes it to its second rank."""
    topology = replace(Topology((0, 1, 1, 2, 2)), inside_total_bytes_per_second=1e6)
    src, dst = Layout(Mesh.of(1), "R"), Layout(Mesh.of(4, first_rank=1))
    plan = make_plan(src, dst, (2**20,), "int8", topology=topology, strategy="multicast")
    loads = {load.port: load for load in find_loads(plan)}
    assert loads["host 1 inside"] == Load("host 1 inside", 2**20, 1e6) and loads["host 2 inside"].nbytes == 2**20
    assert describe_load(loads["host 1 inside"]) == "Host 1 moves 1 MiB inside at 1 MB/s"
    assert "Host 1 moves 1 MiB inside" in plan_to_html(plan)


def test_auto_prefers_send_recv_if_it_is_as_fast_with_fewer_messages():
    layouts = [Layout(Mesh(ranks), "S0") for ranks in ([0, 1], [2, 3])]
    for latency in (8e-5, 0.0):
        topology = replace(Topology.uniform([0, 0, 1, 1], 1.2e8), latency_seconds=latency)
        plan = make_plan(*layouts, (64, 32768), "float32", topology=topology)
        assert plan.strategy == "send_recv"
        assert make_plan(*layouts, (64, 32768), "float32", topology=topology, strategy="multicast").num_messages > 20
        assert plan.num_messages <= 2


@pytest.mark.nightly
def test_rank_can_stage_a_dropped_piece_again():
    """The shards are so uneven that ranks at some NICs hold nothing. They stage pieces twice, once per receiving host."""
    src, dst = Layout(Mesh.of("4x4"), "R R S01"), Layout(Mesh.of("2x4", first_rank=16))
    topology = Topology(tuple(rank // 4 for rank in range(24)), (Host((Link.of(1e9),) * 4),)).without_latency()
    plan = make_plan(src, dst, (128, 128, 40), "float32", strategy="multicast", topology=topology)
    check_plan(plan)
    received_boxes = [(message.receiver, str(message.boxes)) for message in expand_messages(plan)]
    assert len(received_boxes) > len(set(received_boxes))
    whole = whole_tensor((128, 128, 40), torch.float32)
    sources = {rank: [take_shard(src, rank, whole)] for rank in plan.ranks}
    for in_rounds in (False, True):
        outs = {rank: [torch.zeros_like(whole) if rank >= 16 else None] for rank in plan.ranks}
        run_in_threads(plan, sources, outs, seconds=60, in_rounds=in_rounds)
        for rank in range(16, 24):
            assert same_bytes(outs[rank][0], whole)


def test_chunks_end_where_equal_classes_end():
    """Each rank of 16 hosts holds a region that one rank of each of 16 other hosts needs. A cut inside it costs time."""
    topology = Topology.uniform([rank // 8 for rank in range(256)])
    layouts = Layout(Mesh.of("16x8"), "S01 R"), Layout(Mesh.of("16x8", first_rank=128), "S1 R")
    plan = make_plan(*layouts, (65536, 1024), "float32", topology=topology, strategy="multicast")
    check_plan(plan)
    assert plan.num_messages == 128 * 16
    latencies = 128 * topology.latency_seconds  # of the messages of a port
    assert simulate(plan).makespan_seconds <= 1.001 * (find_bound(plan).seconds + latencies)
