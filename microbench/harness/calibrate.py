"""Measure the link rates of a cluster with plain Gloo traffic.

A port is one direction of a NIC or uplink. Each port is the bottleneck of one test, whose flows have enough capacity at
their other ends. Tests without a common port run at the same time. A flow is a train of messages. Its rate is the
Theil-Sen slope through the arrival times, which is robust against short stalls of the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import theilslopes

from microbench.emulation.cluster import Cluster
from microbench.emulation.links import PAYLOAD_SHARE
from microbench.harness.steal_time import (
    MAX_STEAL_SHARE,
    MAX_TRIES,
    Laps,
    RetryBudget,
    merge_laps,
    steal_seconds,
    steal_share,
)
from microbench.harness.worker import Stopwatch
from reshard import Layout, Mesh, Mover, make_plan
from reshard.topology.model import Host, Port, Topology

TRAIN_SECONDS = 0.6
TRAIN_MESSAGES = 24
WARMUP_MESSAGES = 4
#: A round repeats until all rates are within this part of the expected rates, or until enough rounds were undisturbed.
TOLERANCE = 0.01
MIN_QUIET_ROUNDS = 3
MAX_ROUNDS = 8
#: Longest time that one measurement waits for steal time to end, and the timeout of the whole measurement.
RETRY_SECONDS = 60.0
MEASURE_SECONDS = 600.0
START_TURNS = 9
#: ``(kind, host or pod, nic)``; the kind is ``egress``, ``ingress``, ``up`` or ``down``.
PortName = tuple[str, int, int]


@dataclass(frozen=True)
class Test:
    """Concurrent flows that saturate some ports.

    Attributes:
        fills: the saturated ports. flows: ``(sender, receiver, bytes per second)``. uses: all ports that carry traffic.
    """

    fills: tuple[PortName, ...]
    flows: tuple[tuple[int, int, float], ...]
    uses: frozenset[PortName]


def plan_tests(topology: Topology) -> list[list[Test]]:
    """Rounds of tests that together saturate every port once. Tests of one round use disjoint ports."""
    nics: dict[tuple[int, int], int] = {}
    for rank in range(len(topology.host_of_rank)):
        nics.setdefault((topology.host_of_rank[rank], topology.nic_of_rank[rank]), rank)
    tests: list[Test] = []
    done: set[PortName] = set()
    places = sorted(nics)  # (host, nic)
    for shift, here in enumerate(places):
        port = topology.host(here[0]).nics[here[1]]
        for kind, other_kind, rate in (
            ("egress", "ingress", port.egress_bytes_per_second),
            ("ingress", "egress", port.ingress_bytes_per_second),
        ):
            if (kind, *here) in done:
                continue
            others = [there for there in places[shift + 1 :] + places[:shift] if there[0] != here[0]]
            pod = topology.host(here[0]).pod
            others = [there for there in others if topology.host(there[0]).pod == pod] or others
            if not others:  # a single host has no link to another host
                continue
            ends = _split_rate(rate, [(there, _rate(topology, there, other_kind)) for there in others])
            flows = [(nics[here], nics[there], part) for there, part in ends]
            if kind == "ingress":
                flows = [(b, a, part) for a, b, part in flows]
            fills = [(kind, *here)]
            if (
                len(ends) == 1
                and _rate(topology, ends[0][0], other_kind) == rate
                and (other_kind, *ends[0][0]) not in done
            ):
                fills.append((other_kind, *ends[0][0]))
            done.update(fills)
            uses = {(kind, *here), *((other_kind, *there) for there, _ in ends)}
            for there in [here, *(there for there, _ in ends)]:
                # on an asymmetric NIC another test in the opposite direction would delay the acknowledgements
                if _rate(topology, there, "egress") != _rate(topology, there, "ingress"):
                    uses |= {("egress", *there), ("ingress", *there)}
            tests.append(Test(tuple(fills), tuple(flows), frozenset(uses)))
    tests += _uplink_tests(topology, nics)
    rounds: list[list[Test]] = []
    for test in tests:
        for current in rounds:
            if all(test.uses.isdisjoint(other.uses) for other in current):
                current.append(test)
                break
        else:
            rounds.append([test])
    return rounds


def _uplink_tests(topology: Topology, nics: dict[tuple[int, int], int]) -> list[Test]:
    tests = []
    for number, pod in enumerate(topology.pods):
        inner = [place for place in sorted(nics) if topology.host(place[0]).pod == number]
        outer = [place for place in sorted(nics) if topology.host(place[0]).pod != number]
        if not inner or not outer:
            continue
        for kind, rate in (("up", pod.egress_bytes_per_second), ("down", pod.ingress_bytes_per_second)):
            a_kind, b_kind = ("egress", "ingress") if kind == "up" else ("ingress", "egress")
            pairs = list(zip(inner, outer, strict=False))
            flows: list[tuple[int, int, float]] = []
            uses: set[PortName] = {(kind, number, 0)}
            left = rate
            for a, b in pairs:
                part = min(left, _rate(topology, a, a_kind), _rate(topology, b, b_kind))
                if part <= 0:
                    break
                flows.append((nics[a], nics[b], part) if kind == "up" else (nics[b], nics[a], part))
                uses |= {(a_kind, *a), (b_kind, *b)}
                uses.add(("down" if kind == "up" else "up", topology.host(b[0]).pod or 0, 0))
                left -= part
            tests.append(Test(((kind, number, 0),), tuple(flows), frozenset(uses)))
    return tests


def _rate(topology: Topology, place: tuple[int, int], kind: str) -> float:
    port = topology.host(place[0]).nics[place[1]]
    return port.egress_bytes_per_second if kind == "egress" else port.ingress_bytes_per_second


def _split_rate(rate: float, ends: list[tuple[tuple[int, int], float]]) -> list[tuple[tuple[int, int], float]]:
    """NICs that together carry ``rate``, with the part of each. Prefers one NIC of equal rate, then a faster one."""
    alone = next((there for there, capacity in ends if capacity == rate), None)
    alone = alone or next((there for there, capacity in ends if capacity > rate), None)
    if alone is not None:
        return [(alone, rate)]
    chosen, left = [], rate
    for there, capacity in sorted(ends, key=lambda end: -end[1]):
        if left > 0:
            chosen.append((there, min(capacity, left)))
            left -= capacity
    return chosen


def measure_links(rank: int, report: Callable[[Any], None], topology: Topology) -> dict[str, Any]:
    """Run all tests on every rank.

    Returns:
        ``"rates"``: bytes per second of each port; ``"inside"``: bytes per second between two ranks of one host;
        ``"start"``, ``"latency"``, ``"inside_latency"``: seconds.
    """
    rates: dict[PortName, float] = {}
    retries = RetryBudget(RETRY_SECONDS)
    for tests in plan_tests(topology):
        rounds: list[tuple[float, list[float]]] = []
        while len(rounds) < MAX_ROUNDS and sum(stolen <= MAX_STEAL_SHARE for stolen, _ in rounds) < MIN_QUIET_ROUNDS:
            rounds.append(_run_round(rank, tests))
            found = _medians(rounds)
            errors = [abs(rate / expected_payload_rate(test) - 1) for rate, test in zip(found, tests, strict=True)]
            if max(errors) <= TOLERANCE:
                break
            if rounds[-1][0] > MAX_STEAL_SHARE and rank == 0:
                retries.wait_until_quiet()
        for test, rate in zip(tests, found, strict=True):
            rates.update(dict.fromkeys(test.fills, rate))
    return {"rates": rates, "start": _measure_start(rank, topology), **_measure_inside(rank, topology)}


def _medians(rounds: list[tuple[float, list[float]]]) -> list[float]:
    """Median rate of each test over the undisturbed rounds, or else over the least disturbed ones."""
    least = max(MAX_STEAL_SHARE, min(stolen for stolen, _ in rounds))
    return [
        statistics.median(seen) for seen in zip(*(rates for stolen, rates in rounds if stolen <= least), strict=True)
    ]


def expected_payload_rate(test: Test) -> float:
    """Expected payload of all flows of a test, in bytes per second."""
    return PAYLOAD_SHARE * sum(part for _, _, part in test.flows)


def _run_round(rank: int, tests: list[Test]) -> tuple[float, list[float]]:
    """Run the tests once. Returns the largest steal-time share of any machine, and the rate of each test."""
    works: list[tuple[int, list[Any]]] = []
    buffers = []
    mine = [(number, flow) for number, test in enumerate(tests) for flow in test.flows]
    sizes = {flow: int(flow[2] * TRAIN_SECONDS / TRAIN_MESSAGES) for _, flow in mine}
    receiving = [(number, flow) for number, flow in mine if flow[1] == rank]
    sending = [(number, flow) for number, flow in mine if flow[0] == rank]
    dist.barrier()
    begun, stolen_before = time.monotonic(), steal_seconds()
    for number, flow in receiving:
        buffer = torch.empty(sizes[flow], dtype=torch.uint8)
        buffers.append(buffer)
        works.append((number, [dist.irecv(buffer, flow[0]) for _ in range(TRAIN_MESSAGES)]))
    sends = []
    for _, flow in sending:
        buffer = torch.zeros(sizes[flow], dtype=torch.uint8)
        buffers.append(buffer)
        sends += [dist.isend(buffer, flow[1]) for _ in range(TRAIN_MESSAGES)]
    arrivals: list[tuple[int, list[float]]] = [(number, []) for number, _ in works]
    for nth in range(TRAIN_MESSAGES):
        for (_, train), (_, times) in zip(works, arrivals, strict=True):
            train[nth].wait()
            times.append(time.monotonic())
    for work in sends:
        work.wait()
    stolen = steal_share(steal_seconds() - stolen_before, time.monotonic() - begun)
    nth_of_train = range(TRAIN_MESSAGES - WARMUP_MESSAGES)
    slopes = [
        (number, sizes[flow] / float(theilslopes(times[WARMUP_MESSAGES:], nth_of_train).slope))
        for (number, times), (_, flow) in zip(arrivals, receiving, strict=True)
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (stolen, slopes))
    rates = [0.0] * len(tests)
    for number, rate in (found for _, seen in gathered for found in seen):
        rates[number] += rate
    return max(share for share, _ in gathered), rates


def _measure_start(rank: int, topology: Topology) -> float:
    """Seconds of one transfer of one element per rank, from the first half of the ranks to the second half."""
    half = len(topology.host_of_rank) // 2
    if not half:
        return 0.0
    src, dst = Layout(Mesh.of(half), "S0"), Layout(Mesh.of(half, first_rank=half), "S0")
    plan = make_plan(src, dst, (half,), "float32", strategy="send_recv", topology=topology)
    stopwatch, laps = Stopwatch(), Laps(START_TURNS)
    source = torch.zeros(1) if rank < half else None
    mover = Mover(plan) if rank < 2 * half else None
    for number in range(MAX_TRIES * START_TURNS + 1):
        if number and not laps.needs_more():
            break
        stopwatch.start()
        if mover is not None:
            mover(source)
        lap = stopwatch.stop()
        if number:
            laps.done.append(lap)
    if mover is not None:
        mover.close()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, laps)
    return statistics.median(lap.seconds for lap in merge_laps(gathered).kept())


def _measure_inside(rank: int, topology: Topology) -> dict[str, float | None]:
    """Rate and latency between two ranks of one host, and latency between two hosts."""
    found: dict[str, float | None] = {"inside": None, "latency": None, "inside_latency": None}
    hosts = topology.host_of_rank
    inside = next(((a, b) for a in range(len(hosts)) for b in range(a + 1, len(hosts)) if hosts[a] == hosts[b]), None)
    across = next(((0, b) for b in range(1, len(hosts)) if hosts[b] != hosts[0]), None)
    for name, pair in (("inside_latency", inside), ("latency", across)):
        if pair is not None:
            found[name] = _ping_pong(rank, *pair, nbytes=1, count=200)
    if inside is not None:
        found["inside"] = 2**24 / (_ping_pong(rank, *inside, nbytes=2**24, count=10) or 1.0)
    return found


def _ping_pong(rank: int, a: int, b: int, nbytes: int, count: int) -> float:
    """Median one-way seconds."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    times = []
    dist.barrier()
    if rank in (a, b):
        for _ in range(count):
            begun = time.perf_counter()
            if rank == a:
                dist.send(buffer, b)
                dist.recv(buffer, b)
            else:
                dist.recv(buffer, a)
                dist.send(buffer, a)
            times.append((time.perf_counter() - begun) / 2)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, statistics.median(times) if times else None)
    return float(gathered[a])


def measure_cluster(cluster: Cluster, expected: Topology) -> Topology:
    """``expected`` with the rates and latencies measured on an emulated cluster."""
    found = cluster.run(measure_links, cluster.topology, timeout_seconds=MEASURE_SECONDS)
    return measured_topology(expected, found[0])


def measured_topology(topology: Topology, found: dict[str, Any]) -> Topology:
    """``topology`` with the rates and latencies that :func:`measure_links` returned."""
    rates = found["rates"]
    hosts = []
    for number in range(topology.num_hosts):
        host = topology.host(number)
        ports = tuple(
            Port(
                rates.get(("egress", number, nic), port.egress_bytes_per_second),
                rates.get(("ingress", number, nic), port.ingress_bytes_per_second),
            )
            for nic, port in enumerate(host.nics)
        )
        hosts.append(Host(ports, host.pod))
    pods = tuple(
        Port(
            rates.get(("up", number, 0), pod.egress_bytes_per_second),
            rates.get(("down", number, 0), pod.ingress_bytes_per_second),
        )
        for number, pod in enumerate(topology.pods)
    )
    return replace(
        topology,
        hosts=tuple(hosts),
        pods=pods,
        inside_bytes_per_second=found["inside"],
        latency_seconds=found["latency"] or 0.0,
        inside_latency_seconds=found["inside_latency"] or 0.0,
        start_seconds=found["start"],
        turn_seconds=0.0,  # the burst that an idle shaped link accumulates hides the cost of a turn
    )


def mean_topology(before: Topology, after: Topology) -> Topology:
    """The mean of two measurements of the same links."""

    def mean(a: Port, b: Port) -> Port:
        return Port(
            (a.egress_bytes_per_second + b.egress_bytes_per_second) / 2,
            (a.ingress_bytes_per_second + b.ingress_bytes_per_second) / 2,
        )

    hosts = tuple(
        replace(before.host(h), nics=tuple(map(mean, before.host(h).nics, after.host(h).nics)))
        for h in range(before.num_hosts)
    )
    start = (before.start_seconds + after.start_seconds) / 2
    return replace(before, hosts=hosts, pods=tuple(map(mean, before.pods, after.pods)), start_seconds=start)


def deviations(a: Topology, b: Topology) -> dict[str, float]:
    """Relative difference of each port's rate: ``a / b - 1``."""
    found = {}
    for number in range(a.num_hosts):
        for nic, (ours, theirs) in enumerate(zip(a.host(number).nics, b.host(number).nics, strict=True)):
            found[f"host {number} NIC {nic} out"] = ours.egress_bytes_per_second / theirs.egress_bytes_per_second - 1
            found[f"host {number} NIC {nic} in"] = ours.ingress_bytes_per_second / theirs.ingress_bytes_per_second - 1
    for number, (ours, theirs) in enumerate(zip(a.pods, b.pods, strict=True)):
        found[f"pod {number} out"] = ours.egress_bytes_per_second / theirs.egress_bytes_per_second - 1
        found[f"pod {number} in"] = ours.ingress_bytes_per_second / theirs.ingress_bytes_per_second - 1
    return found
