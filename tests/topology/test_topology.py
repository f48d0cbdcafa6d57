"""Topologies: JSON and YAML files, presets, defaults and invalid input."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from reshard import Layout, Mesh, ReshardError, Topology, check_plan, make_plan, simulate
from reshard.errors import ArgumentError, PlanError, TopologyError
from reshard.plan import parse_plan, plan_from_json, plan_to_json
from reshard.sharding.mesh import MAX_RANK
from reshard.topology.machine_presets import MACHINES, load_preset
from reshard.topology.topology import Host, Link
from reshard.topology.topology_files import parse_rate, read_topology, topology_from_json, topology_to_json

FILE = {
    "hosts": [
        {"devices": 4, "nics": ["400 Mbit/s", {"egress": "1 Gbit/s", "ingress": 5e7}], "count": 2, "pod": 0},
        {"devices": 1, "nics": ["50 MB/s"], "pod": 1},
    ],
    "pods": ["1 Gbit/s", "200 Mbit/s"],
    "inside": "8 GB/s",
    "inside_total": "20 GB/s",
    "latency_seconds": 6e-5,
}


def test_yaml_and_json_are_equivalent(tmp_path):
    yaml = pytest.importorskip("yaml")
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(FILE))
    assert read_topology(path) == topology_from_json(FILE)
    path.write_text("hosts: [")
    with pytest.raises(TopologyError, match="not YAML"):
        read_topology(path)


def test_yaml_accepts_numbers_with_exponents(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "cluster.yaml"
    path.write_text("hosts:\n- {devices: 2, nics: [12.5e9, 1e9]}\nlatency_seconds: 1e-5\n")
    topology = read_topology(path)
    assert topology.latency_seconds == 1e-5
    assert [nic.egress_bytes_per_second for nic in topology.host(0).nics] == [1.25e10, 1e9]
    path.write_text("hosts: {\n")
    with pytest.raises(TopologyError, match="not YAML: while parsing a flow node") as caught:
        read_topology(path)
    assert "\n" not in str(caught.value)


def test_missing_pyyaml_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "cluster.yml"
    path.write_text("hosts: []")
    with pytest.raises(TopologyError, match=r"pip install 'reshard\[yaml\]'"):
        read_topology(path)


@pytest.mark.parametrize("name", MACHINES)
def test_presets_fill_hosts_in_order(name):
    machine = MACHINES[name]
    topology = load_preset(name, 2 * machine.devices + 1)
    assert topology.host_of_rank == (0,) * machine.devices + (1,) * machine.devices + (2,)
    assert len(set(topology.nic_of_rank[: machine.devices])) == machine.nics
    assert topology.nic(0).egress_bytes_per_second == machine.nic_gbit * 1e9 / 8
    assert topology_from_json(topology_to_json(topology)) == topology


def test_unknown_preset_error_lists_the_presets():
    with pytest.raises(TopologyError, match=r"no preset 'dgx'; presets are p3\.8xlarge, dgx_a100"):
        load_preset("dgx", 8)


def test_json_files_set_every_part_of_a_topology(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(FILE))
    topology = read_topology(path)
    assert topology.host_of_rank == (0,) * 4 + (1,) * 4 + (2,)
    assert topology.nic_of_rank == (0, 0, 1, 1, 0, 0, 1, 1, 0)
    assert topology.nic(2) == Link(1.25e8, 5e7)
    assert topology.host(1).egress_bytes_per_second == 1.75e8
    assert topology.nic(8) == Link.of(5e7)
    assert topology.pods == (Link.of(1.25e8), Link.of(2.5e7))
    assert (topology.inside_bytes_per_second, topology.inside_total_bytes_per_second) == (8e9, 2e10)
    assert "inside a host: 8 GB/s for each rank, 20 GB/s together" in str(topology)
    assert topology.latency_seconds == 6e-5
    assert topology_from_json(json.loads(json.dumps(topology_to_json(topology)))) == topology


links = st.builds(Link, st.floats(1e3, 1e12), st.floats(1e3, 1e12))


@st.composite
def topologies(draw):
    num_hosts = draw(st.integers(1, 4))
    pods = tuple(draw(st.lists(links, max_size=2)))
    hosts = tuple(
        Host(
            tuple(draw(st.lists(links, min_size=1, max_size=3))), draw(st.integers(0, len(pods) - 1)) if pods else None
        )
        for _ in range(num_hosts)
    )
    host_of_rank = tuple(draw(st.lists(st.integers(0, num_hosts - 1), min_size=1, max_size=8)))
    nics = draw(st.none() | st.just([draw(st.integers(0, len(hosts[host].nics) - 1)) for host in host_of_rank]))
    inside, total = draw(st.none() | st.floats(1e3, 1e12)), draw(st.none() | st.floats(1e3, 1e12))
    rates = {"inside_bytes_per_second": inside, "inside_total_bytes_per_second": total}
    return Topology(host_of_rank, hosts, tuple(nics or ()), pods, **rates, latency_seconds=draw(st.floats(0, 1)))


@given(topologies(), st.integers(1, 8))
def test_topologies_round_trip_in_json_and_plans(topology, count):
    assert topology_from_json(json.loads(json.dumps(topology_to_json(topology)))) == topology
    part = topology.first(count)
    assert part.host_of_rank == topology.host_of_rank[:count]
    ranks = len(part.host_of_rank)
    plan = make_plan(Layout(Mesh.of([ranks])), Layout(Mesh.of([ranks]), "S0"), (8,), "int8", topology=topology)
    assert parse_plan(str(plan)) == plan
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hosts": []}, "at least one host"),
        ({"hosts": [{"devices": 1, "ranks": [0]}], "pods": []}, "either devices"),
        ({"hosts": [{"devices": 1}, {"ranks": [1]}], "pods": []}, "every host has devices"),
        ({"hosts": [{"ranks": [0]}, {"ranks": [0]}], "pods": []}, "rank 0 is on hosts 0 and 1"),
        ({"hosts": [{"ranks": [0]}, {"ranks": [2]}], "pods": []}, "rank 1 has no host"),
        ({"hosts": [{"devices": 1, "nics": ["fast"]}], "pods": []}, "'25 Gbit/s'"),
        ({"hosts": [{"devices": 1, "nics": []}], "pods": []}, "1 to 128 NICs"),
        ({"hosts": [{"devices": 1, "nics": [0]}], "pods": []}, "positive"),
        ({"hosts": [{"devices": 1, "nics": [{"egress": 1}]}], "pods": []}, "egress"),
        ({"hosts": [{"devices": 2, "nic_of_device": [0]}], "pods": []}, "NICs for 1"),
        ({"hosts": [{"devices": 1, "nic_of_device": [1]}], "pods": []}, "which host 0 lacks"),
        ({"hosts": [{"devices": 1, "pod": 2}]}, "in pod 2"),
        ({"hosts": [{"devices": 1}]}, "in no pod"),
        ({"hosts": [{"devices": 1, "pod": 0, "color": 1}]}, r"entry 0 of hosts: unknown keys in a host.*: 'color'"),
        ({"hosts": [{"devices": 1, "count": 0}]}, "count"),
        ({"latency_seconds": -1}, "latency_seconds"),
        ({"speed": 1}, "unknown keys in topology: 'speed'"),
        ({"inside_bytes_per_second": 1}, "'inside_bytes_per_second'; write 'inside': '100 GB/s'"),
        ({"hosts": [{"devices": 1, "inside": 1}]}, "'inside' belongs beside 'hosts', not into a host"),
    ],
)
def test_invalid_topology_json_is_refused(change, match):
    with pytest.raises(TopologyError, match=match):
        topology_from_json(FILE | change)


def test_rates_are_parsed_and_wrong_ones_refused():
    assert parse_rate("10 Gbit/s") == 1.25e9
    assert parse_rate("450GB/s") == 450e9
    assert parse_rate("25Gbps") == parse_rate("25 Gb/s") == 3.125e9
    assert parse_rate("3 GiB/s") == 3 * 2**30
    assert parse_rate(1000) == 1000.0
    for wrong in ("10", "10 Gbpm", "10 gb/s", "-1 Gbit/s", "0 bit/s", "1e400 B/s", None, True, [], "9" * 500 + " B/s"):
        with pytest.raises(TopologyError):
            parse_rate(wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("1 Gbit/s"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["hosts", "devices", "ranks", "nics", "pods", "pod", "count", "nic_of_device", "egress", "ingress"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.nightly
@given(JSON)
def test_random_json_never_crashes(data):
    with contextlib.suppress(ReshardError):
        topology_from_json(data)
    with contextlib.suppress(ReshardError):
        topology_from_json({"hosts": [data]})


def test_huge_or_badly_typed_topologies_are_refused():
    for build, match in (
        (lambda: Host(pod="a"), "pod is 'a'"),
        (lambda: Host(pod=0.5), "pod is 0.5"),
        (lambda: Topology((0, 4_000_000), (Host((Link.of(1), Link.of(2))),)), "at most 65536"),
        (lambda: topology_from_json({"hosts": [{"devices": 0, "count": 4_000_000}]}), "65536 hosts"),
        (lambda: topology_from_json({"hosts": [{"devices": 10**5000}]}), "a huge number"),
        (lambda: topology_from_json({"hosts": [{"devices": 1}], "send_buffer_bytes": 10**5000}), "a huge number"),
    ):
        with pytest.raises(TopologyError, match=match):
            build()
    hosts = tuple(Host((Link.of(host + 1),)) for host in range(9))
    assert len(Topology(tuple(range(9)), hosts).first(2).hosts) == 2


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: &a [1, 1]\nhosts: [*a, *a]\n", "aliases such as"),
        ("hosts: [{devices: 2}]\nlatency_seconds: !!timestamp zz\n", "not YAML"),
        ("hosts: [{devices: 2}]\nlatency_seconds: !!bool zz\n", "not YAML"),
        ("hosts: [{devices: 2, nics: [1e-300]}]\n", "positive and finite, from 1e-06 to 1e"),
        ("hosts: [{devices: 2, nics: [1.7e308]}]\n", "positive and finite"),
    ],
)
def test_hostile_yaml_is_refused(tmp_path, text, error):
    pytest.importorskip("yaml")
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=error):
        read_topology(path)


def test_endless_file_is_refused():
    with pytest.raises(TopologyError, match="larger than"):
        read_topology("/dev/zero")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"hosts": [{"devices": 4}], "hosts": [{"devices": 8}]}', "'hosts' is given twice"),
        ("a.json", '{"hosts": [{"devices": 4, "devices": 8}]}', "'devices' is given twice"),
        ("a.json", '{"hosts": [{"devices": 4}], "\\u001b[31m\\n": 1}', r"'\x1b[31m\n'"),
        ("a.yaml", "hosts: [{devices: 4, devices: 8}]", "'devices' is given twice"),
        ("a.yaml", "hosts: [{devices: 010}]", "010 is not a plain whole number"),
        ("a.yaml", "hosts: [{devices: 1:30}]", "1:30 is not a plain whole number"),
        ("a.yaml", "hosts:\n" + "- {devices: 1}\n" * 100_000, "write it as JSON"),
    ],
)
def test_ambiguous_topology_files_are_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TopologyError, match=re.escape(message)):
        read_topology(path)


def test_byte_order_mark_is_accepted(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"hosts": [{"devices": 4}]}', encoding="utf-8-sig")
    assert len(read_topology(path).host_of_rank) == 4


@pytest.mark.nightly
def test_all_forms_of_a_topology_have_the_same_limit_of_ranks():
    """A mesh may hold rank 2**22 - 1, so a topology may cover 2**22 ranks, and no form may cover more."""
    most = MAX_RANK + 1
    refused = "a topology has at most 4194304 ranks"
    largest = topology_from_json({"hosts": [{"devices": most}]})
    assert largest == Topology((0,) * most)
    largest.check_covers([MAX_RANK])
    assert len(load_preset("tcp", most).host_of_rank) == most
    for make, message in (
        (lambda: Topology((0,) * (most + 1)), f"{refused}, not 4194305"),
        (lambda: load_preset("tcp", most + 1), "num_ranks is 4194305; it must be an integer from 1 to 4,194,304"),
        (lambda: topology_from_json({"hosts": [{"devices": most + 1}]}), "devices is 4194305; it must be an integer"),
        (lambda: topology_from_json({"hosts": [{"devices": most // 2 + 1, "count": 2}]}), refused),
        (
            lambda: topology_from_json({"hosts": [{"devices": most}, {"devices": 1, "nics": ["1 Gbit/s"]}]}),
            f"{refused}, not 4194305",
        ),
    ):
        with pytest.raises(TopologyError, match=message):
            make()


def test_arguments_of_wrong_types_are_named():
    plan = make_plan(Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2)), (8,), "float32")
    with pytest.raises(TopologyError, match="needs a Topology, not str"):
        simulate(plan, "tcp")
    with pytest.raises(PlanError, match="needs a Plan, not str"):
        simulate(str(plan))
    with pytest.raises(PlanError, match="needs a Plan, not str"):
        check_plan(str(plan))
    with pytest.raises(TopologyError, match="num_ranks is 'x'"):
        load_preset("tcp", "x")
    with pytest.raises(ArgumentError, match="strategy <lambda> must return Routes, not list"):
        make_plan(plan.tensors[0].src, plan.tensors[0].dst, (8,), "float32", strategy=lambda problem: [])


def test_omitted_latencies_default_to_tcp():
    hosts = {"hosts": [{"devices": 2, "count": 2}]}
    short = {"host_of_rank": [0, 0, 1, 1]}
    for default in (Topology((0, 0, 1, 1)), Topology.uniform([0, 0, 1, 1]), *map(topology_from_json, (hosts, short))):
        assert (default.latency_seconds, default.inside_latency_seconds) == (1e-4, 5e-5)
    free = default.without_latency()
    numbers = {"latency_seconds": 0, "inside_latency_seconds": 0}
    assert free == topology_from_json(hosts | numbers) == topology_from_json(short | numbers)
    src, dst = Layout(Mesh.of(2)), Layout(Mesh.of(2, first_rank=2))
    for topology in (
        default,
        free,
        replace(default, inside_latency_seconds=0),
        replace(free, sender_change_seconds=1e-4),
    ):
        assert topology_from_json(topology_to_json(topology)) == topology
        plan = make_plan(src, dst, (8,), "int8", topology=topology)
        assert parse_plan(str(plan)).topology == topology
        data = plan_to_json(plan)
        assert plan_from_json(data) == plan
        for name in numbers:  # earlier versions omitted latencies of 0
            if not data["topology"][name]:
                del data["topology"][name]
        assert plan_from_json(data) == plan


def test_text_of_a_topology_groups_equal_hosts():
    topology = topology_from_json(
        {
            "hosts": [
                {"devices": 4, "nics": ["25 Gbit/s"] * 2, "count": 2, "pod": 0},
                {"devices": 2, "nics": [{"egress": "10 Gbit/s", "ingress": 3.125e9}], "pod": 1},
            ],
            "pods": ["50 Gbit/s", "25 Gbit/s"],
            "inside": "100 GB/s",
        }
    )
    assert str(topology).splitlines() == [
        "hosts in pod 0: 2 x (4 ranks, NICs 2 x 3.125 GB/s)",
        "uplink of pod 0: 6.25 GB/s",
        "hosts in pod 1: 1 x (2 ranks, NICs 1 x 1.25 GB/s out, 3.125 GB/s in)",
        "uplink of pod 1: 3.125 GB/s",
        "inside a host: 100 GB/s for each rank",
        "latency: 100 us between hosts, 50 us inside",
    ]


def test_text_of_a_topology_groups_equal_pods_and_shows_a_smaller_last_one():
    hosts = [{"devices": 2, "nics": "2 x 100 Gbit/s", "count": 5}]
    topology = topology_from_json({"hosts": hosts, "hosts_per_pod": 2, "oversubscription": 2})
    assert str(topology).splitlines()[:4] == [
        "hosts in each of pods 0-1: 2 x (2 ranks, NICs 2 x 12.5 GB/s)",
        "uplink of each of pods 0-1: 25 GB/s",
        "hosts in pod 2: 1 x (2 ranks, NICs 2 x 12.5 GB/s)",
        "uplink of pod 2: 12.5 GB/s",
    ]


def test_pods_of_equal_hosts_in_one_line():
    """A cluster as people describe it: 16 hosts of 8 NICs, four in a pod, half of their rate between pods."""
    short = topology_from_json(
        {
            "hosts": [{"devices": 8, "count": 16, "nics": "8 x 400 Gbit/s"}],
            "hosts_per_pod": 4,
            "oversubscription": 2,
        }
    )
    written_out = topology_from_json(
        {
            "hosts": [{"devices": 8, "count": 4, "nics": [50e9] * 8, "pod": pod} for pod in range(4)],
            "pods": ["800 GB/s"] * 4,
        }
    )
    assert short == written_out == topology_from_json(topology_to_json(short))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"oversubscription": 2}, "needs hosts_per_pod, or the pod of every host"),
        ({"hosts_per_pod": 1, "oversubscription": 0}, "oversubscription is 0; it must be a positive"),
        ({"hosts_per_pod": 1, "oversubscription": 2, "pods": []}, "pods and oversubscription exclude each other"),
        ({"hosts_per_pod": 1, "oversubscription": "2:1"}, "oversubscription is '2:1'; it must be a positive number"),
        ({"hosts_per_pod": 1, "oversubscription": True}, "oversubscription is True; it must be a positive number"),
        ({"hosts_per_pod": 1}, "hosts_per_pod needs the uplinks of the pods"),
        ({"hosts_per_pod": 0}, "hosts_per_pod is 0; it must be a positive integer"),
        (
            {"hosts": [{"devices": 1, "pod": 0}], "hosts_per_pod": 1, "oversubscription": 2},
            "hosts_per_pod and the pod of a host exclude",
        ),
        ({"hosts": [{"devices": 1, "pod": 1}], "oversubscription": 2}, r"numbered from 0 without gaps, not \[1\]"),
        ({"hosts": [{"devices": 1, "nics": "2000 x 1 GB/s"}]}, "a host has 1 to 128 NICs, not 2000"),
        ({"hosts": [{"devices": 1, "nics": "2 x fast"}]}, "a rate must be .*, not 'fast'"),
        ({"hosts": [{"devices": 1, "nics": 5}]}, "nics must be a list of links, or text such as .*, not 5"),
    ],
)
def test_wrong_short_forms_are_named(changes, message):
    with pytest.raises(TopologyError, match=message):
        topology_from_json({"hosts": [{"devices": 1, "count": 2}], **changes})


def test_invalid_topologies_are_refused():
    with pytest.raises(TopologyError, match="positive"):
        Topology.uniform((0,), 0.0)
    with pytest.raises(TopologyError, match="must be from 0 to"):
        Topology((-1,))
    with pytest.raises(TopologyError, match="rank 1 has no host"):
        make_plan(Layout(Mesh.of("1")), Layout(Mesh.of("1", first_rank=1)), (4,), "int8", topology=Topology((0,)))
    assert Topology.from_hostnames(["b", "a", "b"]).host_of_rank == (0, 1, 0)
