"""Meshes, layouts, topologies, bounds and strategies: invalid input and known numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from reshard import Layout, Mesh, RegionLayout, Topology, check_plan, make_plan
from reshard.api.one_process import execute_local
from reshard.cli.demo_cases import study_cases
from reshard.cost.cost_report import CostReport
from reshard.cost.lower_bound import Bound, _classes, _min_egress, find_bound, min_largest_share
from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.errors import ArgumentError, LayoutError, MeshError, PartialError, TopologyError
from reshard.formatting import format_bytes, format_ranks
from reshard.plan.json import plan_to_json
from reshard.planner.multicast.strategy import INSIDE_WINDOW
from reshard.sharding.mesh import parse_ranks
from reshard.sharding.tensor_spec import TensorSpec
from reshard.sharding.tiles import cut_shards
from reshard.topology.topology import Host, Link
from tests.support.strategies_of_cases import cases
from tests.support.tensors import same_bytes, take_shard, whole_tensor


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Mesh([0, 1, 1], {"x": 3}), "rank 1 appears 2 times"),
        (lambda: Mesh([0, -1], {"x": 2}), "rank -1 is outside"),
        (lambda: Mesh([0, 1], {"x": 3}), "hold 3 ranks, but 2 are given"),
        (lambda: Mesh([], {"x": 0}), "size 0"),
        (lambda: Mesh([0], {"a b": 1}), "must be letters"),
        (lambda: Mesh.of("2y4"), "not of the form 2x4"),
        (lambda: Mesh.of("2x2", axes=["a", "a"]), "axis 'a' appears 2 times"),
        (lambda: Mesh.of("a=2,a=2"), "axis 'a' appears 2 times"),
        (lambda: Mesh.of("a=2,b"), "not of the form dp=2,tp=4"),
        (lambda: Mesh.of("a=2,=3"), "axis name '' must be letters"),
        (lambda: Mesh.of("a=2x3"), "not of the form dp=2,tp=4"),
        (lambda: Mesh.of("a=2", axes=["b"]), "not of the form 2x4 or dp=2,tp=4"),
        (lambda: Mesh.of("999999999x999999999"), "more than"),
        (lambda: Mesh.from_array([[0, 1], [2]]), "full grid"),
        (lambda: Mesh.from_array([0.5]), "integers"),
        (lambda: Mesh([[0, 1], [2]]), "full grid"),
        (lambda: Mesh([[0, 1], [2, 3]], {"x": 3}), "hold 3 ranks, but 4 are given"),
        (lambda: parse_ranks("3-1"), "empty or too long"),
    ],
)
def test_invalid_meshes_are_refused(build, text):
    with pytest.raises(MeshError, match=text):
        build()


def test_equal_meshes_from_text_arrays_and_jax_compare_equal():
    mesh = Mesh([4, 5, 6, 0], {"dp": 2, "tp": 2})
    assert str(mesh) == "Mesh(dp=2, tp=2; ranks 4-6,0)"
    assert parse_ranks(format_ranks(mesh.ranks)) == [4, 5, 6, 0]
    assert mesh == Mesh.from_array([[4, 5], [6, 0]], ["dp", "tp"])
    assert Mesh([[4, 5], [6, 0]]) == Mesh([4, 5, 6, 0], {"0": 2, "1": 2})
    assert hash(mesh) == hash(Mesh.from_array([[4, 5], [6, 0]], ["dp", "tp"]))

    class Device:
        def __init__(self, ident):
            self.id = ident

    class JaxMesh:
        devices = np.array([[Device(4), Device(5)], [Device(6), Device(0)]])
        axis_names = ("dp", "tp")

    assert Mesh.from_jax(JaxMesh()) == mesh


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        ("S2", LayoutError, "names axis 2"),
        ("X", LayoutError, "neither R nor S"),
        ("S0 S0", LayoutError, "twice"),
        ("dp R", LayoutError, r"write axis names as in '\(dp, -, tp\)'"),
        ("(dp, nope)", LayoutError, "names axis 'nope'"),
        ("(dp, dp)", LayoutError, "twice"),
        ("(dp", LayoutError, "not of the form"),
        (("nope",), LayoutError, "names axis 'nope'"),
        (["S0", "R"], LayoutError, "write 'S0 R' as one string"),
        ((("dp", "dp"),), LayoutError, "twice"),
        ((3,), LayoutError, "must be None, an axis name"),
        (7, LayoutError, "must be a string such as"),
        ("Shard(0)", LayoutError, "1 placement for the 2 axes"),
        ("Shard(dp), Replicate()", LayoutError, "has text beside its placements"),
        ("Shard(0), tp", LayoutError, "has text beside its placements"),
        ("Shard(-1), Replicate()", LayoutError, "a negative dim needs the number of tensor dims"),
        ("Partial(sum), Replicate()", PartialError, "reduce it first"),
    ],
)
def test_invalid_specs_are_refused(spec, error, text):
    with pytest.raises(error, match=text):
        Layout(Mesh.of("2x2", axes=["dp", "tp"]), spec)


def test_spec_notations_are_equivalent():
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    class P:  # like jax.sharding.PartitionSpec: iterable, but not a tuple
        UNCONSTRAINED = object()
        unreduced = frozenset()

        def __init__(self, *partitions):
            self.partitions = partitions

        def __iter__(self):
            return iter(self.partitions)

    mesh = Mesh.of("2x4", axes=["dp", "tp"])
    ours = Layout(mesh, ("dp", None, "tp"))
    assert ours == Layout(mesh, "S0 R S1") == Layout(mesh, [Shard(0), Shard(2)])
    assert ours == Layout(mesh, P("dp", None, ("tp",), None))
    assert ours == Layout(mesh, "Shard(0), Shard(2)") == Layout(mesh, str((Shard(0), Shard(2))))
    assert ours == Layout(mesh, "[Shard(0), Shard(-1)]", ndim=3)
    with pytest.raises(LayoutError, match="must be None, an axis name"):
        Layout(mesh, P("dp", P.UNCONSTRAINED))
    assert ours.to_2023(4) == "S0 R S1 R"
    assert ours.to_placements() == [Shard(0), Shard(2)]
    major_tp = Layout(mesh, "S10")
    assert str(major_tp) == "(tp+dp) on Mesh(dp=2, tp=4; ranks 0-7)"
    assert major_tp.to_placements() == [_StridedShard(0, split_factor=4), Shard(0)]
    assert Layout(mesh) == Layout(mesh, "R R") == Layout(mesh, [Replicate(), Replicate()])
    with pytest.raises(PartialError, match="reduce it first"):
        Layout(mesh, [Partial(), Replicate()])
    with pytest.raises(LayoutError, match="2 axes"):
        Layout(mesh, [Shard(0)])


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: RegionLayout({}), "at least one rank"),
        (lambda: RegionLayout({0: []}), "give ndim"),
        (lambda: RegionLayout({-1: [[(0, 1)]]}), "a rank is -1; it must be an integer from 0"),
        (lambda: RegionLayout({0: [[(2, 1)]]}), "start <= stop"),
        (lambda: RegionLayout({0: [[(0, 1)], [(0, 1), (0, 1)]]}), "same number"),
        (lambda: RegionLayout({0: [[(0, 1), (0, 2)], [(1, 2), (0, 3)]]}), "cannot be joined along dim 0"),
        (lambda: RegionLayout({0: [[(0, 1)]]}, join_dim=1), "join_dim 1"),
        (lambda: RegionLayout({0: [5]}), "pair per tensor dim"),
        (lambda: RegionLayout({0: [[], []]}), "one box"),
        (lambda: cut_shards(RegionLayout({0: [[(0, 9)]]}), (8,)), "reaches past shape"),
        (lambda: cut_shards(RegionLayout({0: [[(0, 4)], [(2, 6)]]}), (8,)), "overlap"),
        (lambda: cut_shards(RegionLayout({0: [[(0, 4)], [(0, 4)]]}), (8,)), "twice"),
        (lambda: cut_shards(RegionLayout({0: [[(0, 4)]]}), (8, 8)), "regions have 1 dims"),
        (lambda: cut_shards(Layout(Mesh.of("2"), "R S0"), (8,)), "shards dim 1"),
        (lambda: cut_shards(Layout(Mesh.of("2")), (1,) * 9), "at most 8"),
        (lambda: cut_shards(Layout(Mesh.of("2")), (2**40, 2**40)), "fewer than"),
    ],
)
def test_invalid_regions_and_shapes_are_refused(build, text):
    with pytest.raises(LayoutError, match=text):
        build()


def test_dtype_name_accepts_all_libraries():
    assert dtype_name("float") == dtype_name(torch.float32) == dtype_name(np.float32) == "float32"
    assert dtype_name(np.dtype("int8")) == dtype_name(torch.int8) == "int8"
    with pytest.raises(ArgumentError, match="is not supported; supported dtypes are"):
        dtype_name("string")
    with pytest.raises(ArgumentError, match=r"dtype 'flaot32' is not supported; did you mean 'float32'\?; supported"):
        dtype_name("flaot32")
    for name, size in ITEMSIZE.items():
        if hasattr(torch, name):
            assert getattr(torch, name).itemsize == size


def test_invalid_topologies_are_refused():
    with pytest.raises(TopologyError, match="positive"):
        Topology.uniform((0,), 0.0)
    with pytest.raises(TopologyError, match="must be from 0 to"):
        Topology((-1,))
    with pytest.raises(TopologyError, match="rank 1 has no host"):
        make_plan(Layout(Mesh.of("1")), Layout(Mesh.of("1", first_rank=1)), (4,), "int8", topology=Topology((0,)))
    assert Topology.from_hostnames(["b", "a", "b"]).host_of_rank == (0, 1, 0)


# Bytes between hosts and inside hosts, in tensor sizes; the bound in tensor sizes over the NIC rate.
STUDY = {
    "study 1": (1, 3, 0.5),
    "study 2": (1, 3, 0.5),
    "study 3": (1, 3, 0.5),
    "study 4": (1, 0, 0.5),
    "study 5": (1, 3, 0.5),
    "study 6": (1, 3, 0.5),
    "study 7": (2, 6, 1.0),
    "study 8": (2, 0, 1.0),
    "study 9": (1, 3, 0.5),
}


@pytest.mark.parametrize("case", study_cases(4), ids=lambda case: case.name)
def test_plans_and_bounds_of_the_study_cases_have_the_expected_bytes(case):
    topology = replace(Topology.uniform([rank // 4 for rank in range(case.num_ranks)], 1e9), latency_seconds=0.0)
    between, inside, bound = STUDY[case.name]
    total = int(np.prod(case.shape)) * 4
    plan = make_plan(case.src, case.dst, case.shape, case.dtype, topology=topology)
    assert plan.bytes_moved() == (between * total, inside * total, 0)
    assert find_bound(plan).seconds == pytest.approx(bound * total / 1e9, rel=1e-2)
    naive = make_plan(case.src, case.dst, case.shape, case.dtype, topology=topology, strategy="send_recv")
    assert sum(naive.bytes_moved()) == total * (between + inside)
    assert naive.bytes_moved()[1:] == (0, 0)


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


@given(
    st.dictionaries(st.frozensets(st.integers(0, 4), min_size=1).map(lambda s: tuple(sorted(s))), st.integers(1, 10**9))
)
def test_least_largest_share_is_the_maximum_over_host_sets(held):
    hosts = sorted({host for key in held for host in key})
    by_sets = max(
        (
            sum(n for key, n in held.items() if set(key) <= set(chosen)) / len(chosen)
            for size in range(1, len(hosts) + 1)
            for chosen in itertools.combinations(hosts, size)
        ),
        default=0.0,
    )
    assert min_largest_share(held, dict.fromkeys(range(64), 1.0)) == pytest.approx(by_sets, rel=1e-6)


def test_bound_is_exact_if_source_and_destination_share_hosts():
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2"), "R S0")
    assert find_bound([TensorSpec((4, 4), "int8", src, dst)], Topology.uniform((0, 1), 1.0)).seconds == pytest.approx(
        4.0
    )
    assert find_bound([TensorSpec((4, 4), "int8", src, dst)], Topology.uniform((0, 0), 1.0)).seconds == 0.0
    # two of three hosts hold the tensor and the third needs it: each holder sends half
    src, dst = Layout(Mesh.of("2")), Layout(Mesh.of("3"))
    assert find_bound([TensorSpec((8,), "int8", src, dst)], Topology.uniform((0, 1, 2), 1.0)).seconds == pytest.approx(
        8.0
    )
    # one holder at half the rate of two receivers: it sends each byte once, and a receiver passes it on
    src, dst = Layout(Mesh.of("1")), Layout(Mesh.of("2", first_rank=1))
    slow_sender = Topology((0, 1, 2), (Host((Link.of(1.0),)), Host((Link.of(2.0),)), Host((Link.of(2.0),))))
    assert find_bound([TensorSpec((8,), "int8", src, dst)], slow_sender).seconds == pytest.approx(8.0)
    # receivers that cannot send: the sender must send everything twice
    mute = Topology((0, 1, 2), (Host((Link.of(1.0),)), Host((Link(1e-6, 2.0),)), Host((Link(1e-6, 2.0),))))
    assert find_bound([TensorSpec((8,), "int8", src, dst)], mute).seconds == pytest.approx(16.0, rel=1e-4)


def test_bound_counts_pod_uplinks_and_used_nics():
    src, dst = Layout(Mesh.of("2")), Layout(Mesh.of("4", first_rank=2))
    hosts = tuple(Host((Link.of(1.0),), pod=int(host > 1)) for host in range(6))
    topology = Topology(tuple(range(6)), hosts, pods=(Link.of(0.5), Link.of(0.25)))
    assert find_bound([TensorSpec((8,), "int8", src, dst)], topology).seconds == pytest.approx(
        32.0
    )  # once into the pod
    # three hosts of a pod need a third each; holders are a host of the pod and two hosts of another pod
    src = Layout(Mesh([0, 4, 5], {"x": 3}))
    dst = Layout(Mesh([1, 2, 3], {"x": 3}), "S0")
    hosts = tuple(Host((Link.of(1.0),), pod=int(host > 3)) for host in range(6))
    topology = Topology(tuple(range(6)), hosts, pods=(Link.of(1.0), Link.of(1.0)))
    assert find_bound([TensorSpec((12,), "int8", src, dst)], topology).seconds == pytest.approx(6.0)
    src, dst = Layout(Mesh.of("2")), Layout(Mesh.of("4", first_rank=2))
    two_nics = Topology((0, 0, 1, 1, 2, 2), (Host((Link.of(1.0), Link.of(2.0))),))
    assert find_bound([TensorSpec((9,), "int8", src, dst)], two_nics).seconds == pytest.approx(3.0)
    idle = Topology(tuple(range(6)), two_nics.hosts)  # no rank uses the second NICs
    assert find_bound([TensorSpec((9,), "int8", src, dst)], idle).seconds == pytest.approx(9.0)


def test_bound_reason_names_the_binding_links():
    hosts = Topology(
        (0, 1, 2, 3), (Host((Link.of(1e9),)), Host((Link.of(1e9),)), Host((Link.of(1e9),)), Host((Link(1e9, 2.5e8),)))
    )
    rows, whole = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(2))
    pair, one = Mesh.of(2, first_rank=2), Mesh.of(1, first_rank=2)

    def reason(src, dst, topology=hosts):
        return find_bound([TensorSpec((2**30,), "int8", src, dst)], topology)

    assert reason(rows, Layout(pair, "S0")) == Bound(
        2**29 / 2.5e8, "host 3 must receive 512 MiB and can receive 250 MB/s"
    )
    even = Topology((0, 1, 2, 3), (Host((Link.of(1e9),)),))
    slow = Topology(
        (0, 1, 2, 3), (Host((Link.of(5e8),)), Host((Link.of(2.5e8),)), Host((Link.of(1e9),)), Host((Link.of(1e9),)))
    )
    assert reason(rows, Layout(one), slow) == Bound(
        2**29 / 2.5e8, "host 1 holds 512 MiB that no other host has and can send 250 MB/s"
    )
    assert reason(whole, Layout(pair), slow) == Bound(
        2**30 / 7.5e8, "hosts 0 and 1 hold 1 GiB that no other host has and can send 750 MB/s together"
    )
    assert reason(rows, Layout(Mesh.of(2), "S0"), even).reason == "nothing crosses hosts"
    swapped = reason(rows, Layout(Mesh.from_array([1, 0]), "S0"), even)
    assert swapped.seconds == pytest.approx(2**29 / 1e9)


@given(cases())
def test_closed_form_and_linear_program_agree(problem):
    shape, src, dst, topology = problem
    classes = _classes([TensorSpec(shape, "float32", src, dst)], topology.host_of_rank.__getitem__)
    destinations = {host for _, row in classes for host in row}
    if not classes or destinations & {host for row, _ in classes for host in row}:
        return
    rate = 1e9
    arrival = max(sum(n for (_, row), n in classes.items() if host in row) for host in destinations) / rate
    egress = dict.fromkeys(range(topology.num_hosts), rate)
    found = find_bound([TensorSpec(shape, "float32", src, dst)], Topology.uniform(topology.host_of_rank, rate)).seconds
    assert found == pytest.approx(max(arrival, _min_egress(classes, egress)[0]), rel=1e-6)


def test_small_regions_between_two_ranks_share_a_message():
    """Interleaved columns: the 32 boxes from rank 0 to rank 2 are one message."""
    stripes = {rank: [[(0, 4), (2 * i + rank, 2 * i + rank + 1)] for i in range(32)] for rank in (0, 1)}
    src = RegionLayout(stripes, join_dim=1)
    plan = make_plan(src, Layout(Mesh([2], {"x": 1})), (4, 64), "float32")
    assert len(plan.transfers) == 2
    assert plan.num_messages == 64
    assert {len(m["after"]) for m in plan_to_json(plan)["messages"]} == {0}
    assert plan_to_json(plan)["messages"][0]["window"] == 32 * INSIDE_WINDOW


def test_tensors_of_eight_dims_move_and_of_nine_are_refused():
    src = Layout(Mesh.of("2x2"), "R S0 R R R R R S1")
    dst = Layout(Mesh.of("2x2", first_rank=4), "S1 R R S0")
    shape = (2, 3, 1, 2, 1, 2, 1, 5)
    plan = make_plan(src, dst, shape, "int64", strategy="broadcast")
    assert plan.strategy == "broadcast_greedy"
    check_plan(plan)
    whole = whole_tensor(shape)
    out = execute_local(plan, [{rank: take_shard(src, rank, whole) for rank in src.ranks}])[0]
    assert all(same_bytes(out[rank], take_shard(dst, rank, whole)) for rank in dst.ranks)
    with pytest.raises(LayoutError, match="at most 8"):
        make_plan(src, dst, (*shape, 1), "int64")


def test_a_million_unit_tasks_cover_the_tensor_in_little_memory():
    """1,024 -> 1,024 ranks: tasks are arrays, so they take well under a second and a gigabyte."""
    src, dst = Layout(Mesh.of("256x4"), "R S01 R"), Layout(Mesh.of("256x4", first_rank=1024), "S01 R R")
    tasks = TensorSpec((2048, 2048, 64), "float32", src, dst).tasks
    assert len(tasks) == 1024 * 1024
    assert int(tasks.numel.sum()) == 2048 * 2048 * 64
    assert tasks.start.nbytes + tasks.stop.nbytes < 64 * 2**20


def test_bound_is_found_if_rates_are_a_billion_times_apart():
    hosts = (Host((Link(1.0, 1e9),)), Host((Link(1e9, 1.0),)))
    spec = TensorSpec((8192,), "int8", Layout(Mesh.of(4), "S0"), Layout(Mesh.of(4)))
    assert find_bound([spec], Topology((0, 0, 1, 1), hosts)).seconds >= 4096.0


def test_bound_adds_the_rates_of_nics_past_the_limit_on_one_port():
    spec = TensorSpec((2**40,), "int8", Layout(Mesh.of(2)), Layout(Mesh.of(2, first_rank=2)))
    topology = Topology((0, 0, 1, 1), (Host((Link.of(1e18), Link.of(1e18))),))
    assert find_bound([spec], topology).seconds == 2**40 / 2e18


def test_search_sends_from_the_fast_host():
    """Two source hosts, one with a tenth of the rate, and four regions for four fast hosts."""
    fast, slow = Host((Link.of(1e9),)), Host((Link.of(1e8),))
    topology = Topology(tuple(range(6)), (slow, fast, fast, fast, fast, fast), latency_seconds=0)
    src, dst = Layout(Mesh.of(2)), Layout(Mesh.of(4, first_rank=2), "S0")
    plan = make_plan(src, dst, (4_000_000,), "int8", topology=topology, strategy="broadcast_search")
    assert CostReport(plan).predicted_seconds == pytest.approx(
        4e-3
    )  # all four from the fast host: the slow one takes 10 ms per region


def test_bytes_are_formatted_in_binary_units():
    expected = {0: "0 bytes", 1023: "1023 bytes", 1024: "1 KiB", 1536: "1.5 KiB", 2**20: "1 MiB", 3 * 2**29: "1.5 GiB"}
    assert {nbytes: format_bytes(nbytes) for nbytes in expected} == expected
