"""The lower bound on the time of a plan, compared with values by hand and other formulas."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reshard import Layout, Mesh, Topology, make_plan
from reshard.cli.demo_cases import study_cases
from reshard.cost.lower_bound import Bound, _classes, _min_egress, find_bound, min_largest_share
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.topology import Host, Link
from tests.support.strategies_of_cases import cases

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


def test_bound_is_found_if_rates_are_a_billion_times_apart():
    hosts = (Host((Link(1.0, 1e9),)), Host((Link(1e9, 1.0),)))
    spec = TensorSpec((8192,), "int8", Layout(Mesh.of(4), "S0"), Layout(Mesh.of(4)))
    assert find_bound([spec], Topology((0, 0, 1, 1), hosts)).seconds >= 4096.0


def test_bound_adds_the_rates_of_nics_past_the_limit_on_one_port():
    spec = TensorSpec((2**40,), "int8", Layout(Mesh.of(2)), Layout(Mesh.of(2, first_rank=2)))
    topology = Topology((0, 0, 1, 1), (Host((Link.of(1e18), Link.of(1e18))),))
    assert find_bound([spec], topology).seconds == 2**40 / 2e18
