"""Emulated hosts: elements, bytes on the wire and clean-up, but no timings. Run with ``make test-cluster``."""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import reshard
from microbench.cases.rows import CLUSTERS, all_rows, read_cluster
from microbench.emulation import namespaces
from microbench.emulation.emulated_cluster import ClusterError, EmulatedCluster
from microbench.harness.benchmark_rank import BenchmarkJob, run_jobs
from microbench.harness.suite import plan_row
from microbench.training import compare_schedules, drawn_pipelines
from reshard.planner.planning import plan_tensors
from reshard.sharding.tensor_spec import TensorSpec
from reshard.testing.processes import LaunchError
from reshard.topology.topology import Topology
from reshard.topology.topology_files import topology_from_json

ROOT = Path(__file__).parents[2]
_reason = namespaces.why_unsupported()


def on_hosts(test):
    return pytest.mark.cluster(pytest.mark.skipif(_reason is not None, reason=str(_reason))(test))


def _cluster(nics=1, devices=2, count=2, **more):
    hosts = [{"count": count, "devices": devices, "nics": ["1 Gbit/s"] * nics}]
    return topology_from_json({"hosts": hosts} | more)


def _processes_of(parent):
    """All descendants of a process."""
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, rest = [], [parent]
    while rest:
        below = children.get(rest.pop(), [])
        found += below
        rest += below
    return found


def _have_ended(pids, seconds=5.0):
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _interfaces():
    return Path("/proc/self/net/dev").read_text().count("\n")


def _describe_rank(rank, report):
    report(("hello", rank))
    names = sorted(line.partition(":")[0].strip() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return socket.gethostname(), names, os.listdir("/dev/shm"), dist.get_world_size()


@on_hosts
def test_hosts_are_isolated_and_leave_nothing():
    before, interfaces = set(_processes_of(os.getpid())), _interfaces()
    reports = []
    with EmulatedCluster(_cluster(nics=2, devices=2)) as cluster:
        results = cluster.run(_describe_rank, on_report=lambda rank, value: reports.append((rank, value)))
        inside = set(_processes_of(os.getpid())) - before
        assert len(inside) >= 5
        assert _interfaces() == interfaces
    assert [name for name, *_ in results] == ["host0", "host0", "host1", "host1"]
    assert results[0][1] == ["in1", "inside", "lo", "nic0"]
    assert results[1][1] == ["inside", "lo", "nic1"]
    assert all(shared == [] and size == 4 for *_, shared, size in results)
    assert sorted(reports) == [(rank, ("hello", rank)) for rank in range(4)]
    assert _have_ended(inside)
    assert _interfaces() == interfaces


ROWS = ("R S0 R on 2x4 -> S0 R R on 2x4", "S0 -> R", "2 -> 3 hosts, R R", "columns -> rows", "one host -> all others")


def _move(rank, report, specs, plan):
    results = []
    run_jobs(rank, results.append, [BenchmarkJob("0", specs, plan)])
    return results


@on_hosts
@pytest.mark.parametrize("name", ROWS)
def test_every_element_arrives_and_each_nic_carries_the_bytes_of_the_plan(name):
    """Small tensors on the clusters of the suites: every element arrives, and each NIC carries the bytes of the plan."""
    row = next(row for row in all_rows(0, 0, scale=1 / 16) if row.name == name)
    planned = plan_row(row, "0", ("broadcast_greedy", "global_all_gather", "full_tensor + broadcast"), 1)
    num_turns = Counter()
    rows = []
    with EmulatedCluster(read_cluster(row.cluster)) as cluster:
        before = cluster.crossed_bytes()

        def on_report(rank, report):
            if report[0] == "row":
                rows.append(report[2])
            elif report[0] == "turn":
                num_turns[report[2]] += 1

        with_plan = [turn for turn in planned.turns if turn.name in planned.plans]
        others = [turn for turn in planned.turns if turn.name not in planned.plans]
        cluster.run(run_jobs, [BenchmarkJob("0", row.tensors, with_plan)], on_report=on_report, timeout_seconds=60.0)
        after = cluster.crossed_bytes()
        cluster.run(run_jobs, [BenchmarkJob("0", row.tensors, others)], on_report=on_report, timeout_seconds=60.0)
    for contender, result in (rows[0] | rows[1]).items():
        assert result["wrong"] == 0, contender
        assert len(result["seconds"]) == 1
    # This process may read the counters of a turn when the next one has begun, so compare sums over all turns.
    leaving, entering = Counter(), Counter()
    for contender, plan in planned.plans.items():
        host_of = plan.topology.host_of_rank
        sizes = plan.message_bytes[plan.transfers.transfer_of_edge].tolist()
        for sender, receiver, nbytes in zip(
            plan.transfers.sender.tolist(), plan.transfers.receiver.tolist(), sizes, strict=True
        ):
            if host_of[sender] != host_of[receiver]:
                leaving[host_of[sender]] += nbytes * num_turns[contender]
                entering[host_of[receiver]] += nbytes * num_turns[contender]
    for host, (x, y) in enumerate(zip(before, after, strict=True)):
        for way, payload in enumerate((leaving[host], entering[host])):
            counted = sum(b[way] - a[way] for a, b in zip(x, y, strict=True))
            # headers add 4.6 %; acknowledgements and barriers use the opposite direction
            other = max(leaving[host], entering[host])
            assert payload <= counted <= 1.06 * payload + 0.05 * other + 150_000 * num_turns.total(), host


def _fail(rank, report, how):
    if rank == 1:
        if how == "raise":
            raise ValueError("rank 1 fails on purpose")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


@on_hosts
def test_failed_rank_is_named_and_the_next_run_works():
    with EmulatedCluster(_cluster()) as cluster:
        for how, match in (("raise", "rank 1 fails on purpose"), ("die", "exit code -9")):
            with pytest.raises(LaunchError, match=match) as caught:
                cluster.run(_fail, how, grace_seconds=0.2)
            assert [failure.rank for failure in caught.value.failures] == [0, 1, 2, 3]
        with pytest.raises(LaunchError, match="did not finish in time"):
            cluster.run(_sleep, timeout_seconds=0.5)
        assert cluster.run(_describe_rank)[3][0] == "host1"


class _Unreadable(Exception):
    def __init__(self, a, b):
        super().__init__("a and b")


def _raise_unreadable(rank, report):
    raise _Unreadable(1, 2)


@on_hosts
def test_two_clusters_at_once_reject_unusable_functions():
    first, second = EmulatedCluster(_cluster(devices=1)), EmulatedCluster(_cluster(devices=1))
    for cluster in (first, second):
        assert cluster.run(_describe_rank)[1][0] == "host1"
        with pytest.raises(LaunchError, match="does not unpickle"):
            cluster.run(_raise_unreadable, grace_seconds=1.0)
        with pytest.raises(ClusterError, match="importable by name"):
            cluster.run(lambda rank, report: rank)
    begun = time.monotonic()
    first.close()
    second.close()
    assert time.monotonic() - begun < 3.0
    with pytest.raises(ClusterError, match="closed"):
        first.run(_describe_rank)


def _sleep(rank, report):
    time.sleep(30)


@on_hosts
def test_killed_launcher_leaves_no_process():
    code = (
        "import sys; import torch, time\n"
        "from tests.microbench.test_cluster import EmulatedCluster, _cluster, _sleep\n"
        "with EmulatedCluster(_cluster()) as cluster:\n"
        "    print('up', flush=True)\n"
        "    cluster.run(_sleep)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        assert launcher.stdout.readline() == "up\n"
        deadline = time.monotonic() + 5
        while len(_processes_of(launcher.pid)) < 10 and time.monotonic() < deadline:
            time.sleep(0.02)  # cluster, store, 2 keepers, 2 init processes, 4 ranks
        inside = _processes_of(launcher.pid)
        assert len(inside) >= 10
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    assert _have_ended(inside)


def _reshard_by_hostname(rank, report):
    mesh, other = reshard.Mesh.of("2"), reshard.Mesh.of("2", first_rank=2)
    src, dst = reshard.Layout(mesh, "S0"), reshard.Layout(other)
    whole = torch.arange(64.0).reshape(8, 8)
    out = reshard.reshard(whole[4 * rank : 4 * rank + 4].clone() if rank < 2 else None, src, dst)
    return None if out is None else bool(torch.equal(out, whole))


@on_hosts
def test_reshard_finds_hosts_by_host_name():
    with EmulatedCluster(_cluster()) as cluster:
        assert cluster.run(_reshard_by_hostname) == [None, None, True, True]


def test_errors_say_why_hosts_cannot_be_emulated(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    monkeypatch.setattr(namespaces.Path, "exists", lambda path: False)
    assert "install iproute2" in namespaces.why_unsupported()
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "torchrun" in namespaces.why_unsupported()
    monkeypatch.setattr("microbench.emulation.emulated_cluster.why_unsupported", lambda: "no namespaces here")
    with pytest.raises(ClusterError, match="no namespaces here"):
        EmulatedCluster(_cluster())
    monkeypatch.setattr("microbench.emulation.emulated_cluster.why_unsupported", lambda: None)
    with pytest.raises(ClusterError, match="at most 250 hosts"):
        EmulatedCluster(_cluster(count=251))
    with pytest.raises(ClusterError, match="rates of emulated links"):
        EmulatedCluster(Topology.uniform((0, 1), 1.0))


def test_a_network_namespace_that_cannot_be_joined_leaves_no_open_file(monkeypatch):
    class Refusing:
        def setns(self, descriptor, kind):
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(namespaces, "_libc", Refusing)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError, match="setns: Operation not permitted"):
        namespaces.join_nic(os.getpid())
    assert os.listdir("/proc/self/fd") == before


def test_every_row_fits_its_cluster():
    rows = all_rows(0, 4)
    assert {path.stem for path in CLUSTERS.glob("*.json")} == {row.cluster for row in rows}
    assert len({(row.suite, row.name) for row in rows}) == len(rows)
    for row in rows:
        topology = read_cluster(row.cluster)
        for spec in row.tensors:
            assert isinstance(spec, TensorSpec)
            topology.check_covers(spec.src.ranks)
            topology.check_covers(spec.dst.ranks)


def test_random_rows_depend_only_on_the_seed():
    def rows_of(seed):
        return [str(row) for row in all_rows(seed, 8) if row.suite == "random"]

    assert rows_of(7) == rows_of(7) != rows_of(8)
    plan_tensors(next(row for row in all_rows(7, 8) if row.suite == "random").tensors)


@pytest.mark.nightly
@on_hosts
def test_every_method_trains_on_emulated_hosts(monkeypatch):
    """The compare_schedules command on two hosts with timed stages and a few microbatches; no speed is checked."""
    monkeypatch.setattr(compare_schedules, "NUM_MICROBATCHES", 4)
    setting = compare_schedules.settings("u_transformer")["timed 2"]
    small = replace(setting, workload=replace(setting.workload, batch=16, num_microbatches=4))
    record = compare_schedules.run_setting(small, 1, lambda line: None)
    rows = {row["method"]: row for row in record["rows"]}
    assert set(rows) == {*(spec.name for spec in compare_schedules.METHODS), compare_schedules.SIGNAL}
    assert all(len(row["seconds"]) == 1 and row["predicted_seconds"] > 0 for row in rows.values())
    timeline, predicted = record["timelines"][compare_schedules.OURS]
    assert len(predicted.transfers) == len(timeline.transfers)
    moved = [c for c in timeline.transfers if c.channel.is_forward]
    assert len(moved) == 4
    assert all(c.ready <= c.end for c in timeline.transfers)
    table = compare_schedules.format_setting(record)
    assert all(name in table for name in rows)


@pytest.mark.nightly
@on_hosts
def test_drawn_pipelines_run_torchs_schedules_beside_ours(capsys):
    """The drawn_pipelines command on a V of two rows; no speed is checked."""
    drawn_pipelines.run(argparse.Namespace(number=1, seed=3, rows=4, stages=8, milliseconds=4.0, repeats=1))
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("3: 2 rows, V 2 a row, 4 stages, 4 mb")]
    assert len(rows) == 2 and "torch ZBVZeroBubble" in rows[0] and "torch DualPipeV" in rows[1]
    assert lines[-1].startswith("2 comparisons")


def test_drawn_pipelines_compare_schedules_at_equal_peaks():
    case = drawn_pipelines.draw_case(3, 4, 8)
    pipeline = drawn_pipelines.make_pipeline(case, 0.01)
    comparisons = drawn_pipelines.make_comparisons(case, pipeline)
    assert [item.other for item in comparisons] == ["zb_v, torch ZBVZeroBubble", "dualpipe_v, torch DualPipeV"]
    for item in comparisons:
        other, ours = item.schedules
        assert all(x <= y for x, y in zip(ours.peak_bytes(pipeline), other.peak_bytes(pipeline), strict=True))
        assert drawn_pipelines.predict(ours, pipeline) <= drawn_pipelines.predict(other, pipeline) * 1.001
    assert not drawn_pipelines.summarize([(1.0, 0.01), (1.03, 0.01)])[1]
    assert not drawn_pipelines.summarize([(1.0, 0.11)])[1]
    assert drawn_pipelines.summarize([(1.0, 0.01)])[1]
