"""Measure the link rates of a cluster with plain Gloo traffic.

A port is one direction of a NIC or uplink. Each test saturates one port, or two of equal rate. The other ends of its
flows have enough capacity. Tests without a common port form a round and run at the same time. A flow is a train of
messages. Its rate is the Theil-Sen slope through the arrival times, which short stalls of the machine hardly change.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import PAYLOAD_SHARE
from microbench.harness.benchmark_rank import Stopwatch
from microbench.harness.steal_time import (
    MAX_STEAL_SHARE,
    MAX_TRIES,
    Laps,
    RetryBudget,
    merge_laps,
    steal_seconds,
    steal_share,
)
from reshard import Layout, Mesh, Mover, make_plan
from reshard.planner import plan_tensors
from reshard.sharding import TensorSpec
from reshard.topology import Host, Link, Topology

#: Duration and number of messages of a flow. The first ``WARMUP_MESSAGES`` arrivals do not count.
TRAIN_SECONDS = 0.6
TRAIN_MESSAGES = 24
WARMUP_MESSAGES = 4
#: A round is repeated until all rates are within this fraction of the expected rates, until ``MIN_QUIET_REPEATS`` runs
#: of it were undisturbed by steal time, or until it has run ``MAX_REPEATS`` times.
TOLERANCE = 0.01
MIN_QUIET_REPEATS = 3
MAX_REPEATS = 8
#: Tensors of the transfer that measures the ranks of a host together, their rows and columns, and the repetitions. They
#: are more bytes than the caches of a host hold.
INSIDE_TENSORS, INSIDE_SIDE = 24, 2048
INSIDE_REPEATS = 5
#: Longest time that a measurement waits for steal time to end, and the timeout of the whole measurement.
CALIBRATION_RETRY_SECONDS = 60.0
MEASURE_SECONDS = 600.0
#: Number of transfers whose median is the start-up time.
START_REPEATS = 9
#: ``(kind, host, nic)`` with kind ``egress`` or ``ingress``, or ``(kind, pod, 0)`` with kind ``up`` or ``down``.
PortName = tuple[str, int, int]
#: ``(host, nic)``.
NicName = tuple[int, int]


@dataclass(frozen=True)
class PortTest:
    """Concurrent flows that saturate some ports.

    Attributes:
        fills: the saturated ports.
        flows: ``(sender, receiver, bytes per second)``.
        uses: the ports that no other test of the round may use.
    """

    fills: tuple[PortName, ...]
    flows: tuple[tuple[int, int, float], ...]
    uses: frozenset[PortName]


def plan_tests(topology: Topology) -> list[list[PortTest]]:
    """Plan rounds of tests that together saturate every port once. Tests of one round use disjoint ports."""
    rank_of_nic: dict[NicName, int] = {}
    for rank, nic in enumerate(zip(topology.host_of_rank, topology.nic_of_rank, strict=True)):
        rank_of_nic.setdefault(nic, rank)
    rates = _rates_of(topology)
    tests: list[PortTest] = []
    done: set[PortName] = set()
    nics = sorted(rank_of_nic)
    for position, nic in enumerate(nics):
        for kind, other_kind in (("egress", "ingress"), ("ingress", "egress")):
            if (kind, *nic) in done:
                continue
            rate = rates[kind, *nic]
            others = [other for other in nics[position + 1 :] + nics[:position] if other[0] != nic[0]]
            pod = topology.host(nic[0]).pod
            others = [other for other in others if topology.host(other[0]).pod == pod] or others
            if not others:  # a single host has no link to another host
                continue
            peers = _split_rate(rate, [(other, rates[other_kind, *other]) for other in others])
            flows = [(rank_of_nic[nic], rank_of_nic[peer], part) for peer, part in peers]
            if kind == "ingress":
                flows = [(b, a, part) for a, b, part in flows]
            fills = [(kind, *nic)]
            if len(peers) == 1 and rates[other_kind, *peers[0][0]] == rate and (other_kind, *peers[0][0]) not in done:
                fills.append((other_kind, *peers[0][0]))
            done.update(fills)
            uses = {(kind, *nic), *((other_kind, *peer) for peer, _ in peers)}
            for end in [nic, *(peer for peer, _ in peers)]:
                # on an asymmetric NIC another test in the opposite direction would delay the acknowledgements
                if rates["egress", *end] != rates["ingress", *end]:
                    uses |= {("egress", *end), ("ingress", *end)}
            tests.append(PortTest(tuple(fills), tuple(flows), frozenset(uses)))
    tests += _uplink_tests(topology, rank_of_nic, rates)
    rounds: list[list[PortTest]] = []
    for test in tests:
        for current in rounds:
            if all(test.uses.isdisjoint(other.uses) for other in current):
                current.append(test)
                break
        else:
            rounds.append([test])
    return rounds


def _uplink_tests(
    topology: Topology, rank_of_nic: dict[NicName, int], rates: Mapping[PortName, float]
) -> list[PortTest]:
    """Tests that saturate the uplinks of pods, with flows between NICs inside and NICs outside the pod."""
    tests = []
    for number in range(len(topology.pods)):
        inner = [nic for nic in sorted(rank_of_nic) if topology.host(nic[0]).pod == number]
        outer = [nic for nic in sorted(rank_of_nic) if topology.host(nic[0]).pod != number]
        if not inner or not outer:
            continue
        for kind in ("up", "down"):
            a_kind, b_kind = ("egress", "ingress") if kind == "up" else ("ingress", "egress")
            pairs = list(zip(inner, outer, strict=False))
            flows: list[tuple[int, int, float]] = []
            uses: set[PortName] = {(kind, number, 0)}
            left = rates[kind, number, 0]
            for a, b in pairs:
                part = min(left, rates[a_kind, *a], rates[b_kind, *b])
                if part <= 0:
                    break
                sender, receiver = (a, b) if kind == "up" else (b, a)
                flows.append((rank_of_nic[sender], rank_of_nic[receiver], part))
                uses |= {(a_kind, *a), (b_kind, *b)}
                uses.add(("down" if kind == "up" else "up", topology.host(b[0]).pod or 0, 0))
                left -= part
            tests.append(PortTest(((kind, number, 0),), tuple(flows), frozenset(uses)))
    return tests


def _split_rate(rate: float, nics: list[tuple[NicName, float]]) -> list[tuple[NicName, float]]:
    """Choose NICs that together carry ``rate``, and the part of each. Prefers one NIC of equal rate, then a faster one.

    Args:
        nics: the candidates, each with its rate.
    """
    alone = next((nic for nic, capacity in nics if capacity == rate), None)
    alone = alone or next((nic for nic, capacity in nics if capacity > rate), None)
    if alone is not None:
        return [(alone, rate)]
    chosen, left = [], rate
    for nic, capacity in sorted(nics, key=lambda candidate: -candidate[1]):
        if left > 0:
            chosen.append((nic, min(capacity, left)))
            left -= capacity
    return chosen


def measure_links(rank: int, report: Callable[[Any], None], topology: Topology) -> dict[str, Any]:
    """Run all tests on every rank.

    Returns:
        ``"rates"``: bytes per second of each port; ``"inside"`` and ``"inside_total"``: bytes per second between two
        ranks of a host, and between all ranks of a host together, or None;
        ``"start"``: seconds of a minimal transfer; ``"latency"``, ``"inside_latency"``: seconds of a message, or None.
    """
    rates: dict[PortName, float] = {}
    retries = RetryBudget(CALIBRATION_RETRY_SECONDS)
    for tests in plan_tests(topology):
        runs: list[tuple[float, list[float]]] = []
        while len(runs) < MAX_REPEATS and sum(stolen <= MAX_STEAL_SHARE for stolen, _ in runs) < MIN_QUIET_REPEATS:
            runs.append(_run_round(rank, tests))
            medians = _medians(runs)
            errors = [abs(rate / expected_payload_rate(test) - 1) for rate, test in zip(medians, tests, strict=True)]
            if max(errors) <= TOLERANCE:
                break
            if runs[-1][0] > MAX_STEAL_SHARE and rank == 0:
                retries.wait_until_quiet()
        for test, rate in zip(tests, medians, strict=True):
            rates.update(dict.fromkeys(test.fills, rate))
    start = _measure_start(rank, topology)
    return {"rates": rates, "start": start, **_measure_inside(rank, topology, start)}


def _medians(runs: list[tuple[float, list[float]]]) -> list[float]:
    """Median rate of each test over the undisturbed runs of a round, or else over the least disturbed runs."""
    limit = max(MAX_STEAL_SHARE, min(stolen for stolen, _ in runs))
    kept = [rates for stolen, rates in runs if stolen <= limit]
    return [statistics.median(rates_of_test) for rates_of_test in zip(*kept, strict=True)]


def expected_payload_rate(test: PortTest) -> float:
    """Expected payload rate of all flows of a test together, in bytes per second."""
    return PAYLOAD_SHARE * sum(part for _, _, part in test.flows)


def _run_round(rank: int, tests: list[PortTest]) -> tuple[float, list[float]]:
    """Run the tests once. Returns the largest steal-time share of any machine, and the rate of each test."""
    from scipy.stats import theilslopes  # takes most of a second to import

    works: list[tuple[int, list[Any]]] = []
    buffers = []
    all_flows = [(number, flow) for number, test in enumerate(tests) for flow in test.flows]
    sizes = {flow: int(flow[2] * TRAIN_SECONDS / TRAIN_MESSAGES) for _, flow in all_flows}
    receiving = [(number, flow) for number, flow in all_flows if flow[1] == rank]
    sending = [(number, flow) for number, flow in all_flows if flow[0] == rank]
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
    for number, rate in (pair for _, seen in gathered for pair in seen):
        rates[number] += rate
    return max(share for share, _ in gathered), rates


def _measure_start(rank: int, topology: Topology) -> float:
    """Seconds of a transfer of one element per rank from the first half of the ranks to the second half."""
    half = len(topology.host_of_rank) // 2
    if not half:
        return 0.0
    src, dst = Layout(Mesh.of(half), "S0"), Layout(Mesh.of(half, first_rank=half), "S0")
    plan = make_plan(src, dst, (half,), "float32", strategy="send_recv", topology=topology)
    stopwatch, laps = Stopwatch(), Laps(START_REPEATS)
    source = torch.zeros(1) if rank < half else None
    mover = Mover(plan) if rank < 2 * half else None
    for number in range(MAX_TRIES * START_REPEATS + 1):  # the first one is a warm-up
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


def _measure_inside(rank: int, topology: Topology, start: float) -> dict[str, float | None]:
    """Rates and latency between ranks of one host, and latency between two hosts; None without such ranks."""
    rates: dict[str, float | None] = dict.fromkeys(("inside", "inside_total", "latency", "inside_latency"))
    hosts = topology.host_of_rank
    inside = next(((a, b) for a in range(len(hosts)) for b in range(a + 1, len(hosts)) if hosts[a] == hosts[b]), None)
    across = next(((0, b) for b in range(1, len(hosts)) if hosts[b] != hosts[0]), None)
    for name, pair in (("inside_latency", inside), ("latency", across)):
        if pair is not None:
            rates[name] = _ping_pong(rank, *pair, nbytes=1, count=200)
    if inside is not None:
        rates["inside"] = _measure_inside_rate(rank, inside, topology, start)
        ranks = topology.ranks_of_host(hosts[inside[0]])
        rates["inside_total"] = _measure_inside_rate(rank, ranks, topology, start)
    return rates


class InsideTransfer:
    """A transfer of several tensors from the first half of a host's ranks to its second half, by a Mover.

    A call moves ``nbytes`` bytes. As in a model with tensor parallelism, one tensor in four is sharded along another
    dim, so that its regions are packed.

    Args:
        rank: this rank.
        ranks: two or more ranks of the host. Other ranks call too, and do nothing.
    """

    def __init__(self, rank: int, ranks: Sequence[int], topology: Topology) -> None:
        half = len(ranks) // 2
        src, dst = Mesh(list(ranks[:half])), Mesh(list(ranks[half : 2 * half]))
        specs = [
            TensorSpec(
                (INSIDE_SIDE, INSIDE_SIDE),
                "bfloat16",
                Layout(src, "S0 R"),
                Layout(dst, "R S0" if i % 4 == 3 else "S0 R"),
                str(i),
            )
            for i in range(INSIDE_TENSORS)
        ]
        self.nbytes = sum(INSIDE_SIDE**2 * spec.itemsize for spec in specs)
        self._mover = None
        self._source: dict[str, torch.Tensor] | None = None
        self._out: dict[str, torch.Tensor] | None = None
        if rank in ranks[: 2 * half]:
            self._mover = Mover(plan_tensors(specs, strategy="send_recv", topology=topology))
            shapes = [
                (spec.src_tiles if rank in spec.src.ranks else spec.dst_tiles).local_shape(rank) for spec in specs
            ]
            shards = {str(i): torch.zeros(shape, dtype=torch.bfloat16) for i, shape in enumerate(shapes)}
            self._source, self._out = (shards, None) if rank in src.ranks else (None, shards)

    def __call__(self) -> None:
        if self._mover is not None:
            self._mover(self._source, out=self._out)

    def close(self) -> None:
        """Close the Mover."""
        if self._mover is not None:
            self._mover.close()


def _measure_inside_rate(rank: int, ranks: Sequence[int], topology: Topology, start: float) -> float:
    """Bytes per second of these ranks of a host together, after the first ``start`` seconds of a transfer."""
    transfer = InsideTransfer(rank, ranks, topology)
    seconds = []
    for _ in range(INSIDE_REPEATS + 1):  # the first one is a warm-up
        dist.barrier()
        begun = time.perf_counter()
        transfer()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    transfer.close()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, statistics.median(seconds[1:]))
    return transfer.nbytes / max(max(gathered) - start, 1e-9)


def _ping_pong(rank: int, a: int, b: int, nbytes: int, count: int) -> float:
    """Median seconds of a message from one rank to the other."""
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


def measure_cluster(cluster: EmulatedCluster, expected: Topology) -> Topology:
    """``expected`` with the rates and latencies measured on an emulated cluster."""
    measured = cluster.run(measure_links, cluster.topology, timeout_seconds=MEASURE_SECONDS)
    return measured_topology(expected, measured[0])


def measured_topology(topology: Topology, measured: dict[str, Any]) -> Topology:
    """``topology`` with the rates and latencies that :func:`measure_links` returned."""
    return replace(
        _with_rates(topology, measured["rates"]),
        inside_bytes_per_second=measured["inside"],
        inside_total_bytes_per_second=measured["inside_total"],
        latency_seconds=measured["latency"] or 0.0,
        inside_latency_seconds=measured["inside_latency"] or 0.0,
        start_seconds=measured["start"],
        sender_change_seconds=0.0,  # a shaped link that was idle passes a burst at once, which hides this delay
    )


def mean_topology(before: Topology, after: Topology) -> Topology:
    """The mean rates and start-up time of two measurements of the same links; latencies are those of ``before``."""
    again = _rates_of(after)
    mean = {name: (rate + again[name]) / 2 for name, rate in _rates_of(before).items()}
    return replace(_with_rates(before, mean), start_seconds=(before.start_seconds + after.start_seconds) / 2)


def deviations(a: Topology, b: Topology) -> dict[PortName, float]:
    """Relative difference of each port's rate: ``a / b - 1``."""
    rates = _rates_of(b)
    return {name: rate / rates[name] - 1 for name, rate in _rates_of(a).items()}


def _rates_of(topology: Topology) -> dict[PortName, float]:
    """The rate of each port, in bytes per second."""
    rate_of: dict[PortName, float] = {}
    for number in range(topology.num_hosts):
        for nic, link in enumerate(topology.host(number).nics):
            rate_of["egress", number, nic] = link.egress_bytes_per_second
            rate_of["ingress", number, nic] = link.ingress_bytes_per_second
    for number, pod in enumerate(topology.pods):
        rate_of["up", number, 0], rate_of["down", number, 0] = pod.egress_bytes_per_second, pod.ingress_bytes_per_second
    return rate_of


def _with_rates(topology: Topology, rates: Mapping[PortName, float]) -> Topology:
    """The topology with other rates of the given ports."""
    known = {**_rates_of(topology), **rates}
    hosts = []
    for number in range(topology.num_hosts):
        host = topology.host(number)
        nics = (Link(known["egress", number, nic], known["ingress", number, nic]) for nic in range(len(host.nics)))
        hosts.append(Host(tuple(nics), host.pod))
    pods = tuple(Link(known["up", number, 0], known["down", number, 0]) for number in range(len(topology.pods)))
    return replace(topology, hosts=tuple(hosts), pods=pods)
