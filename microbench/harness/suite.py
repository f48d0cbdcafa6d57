"""Run benchmark rows on emulated clusters and make records of the results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from microbench.cases.rows import Row, read_cluster
from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import nominal
from microbench.harness.benchmark_rank import ROW_RETRY_SECONDS, BenchmarkJob, Contender, run_jobs
from microbench.harness.calibrate import deviations, mean_topology, measure_cluster
from microbench.harness.steal_time import TimeBudget
from microbench.peers.base import are_replicated
from microbench.peers.contenders import PEERS
from reshard.cost import find_bound, simulate
from reshard.plan import Plan, PlanTransfers
from reshard.planner import AUTO, STRATEGIES, plan_tensors
from reshard.topology import Topology, topology_to_json

#: Limit on the relative change of a link rate during a run, and on its relative difference from the shaped rate.
MAX_DEVIATION = 0.03
#: Contenders predicted to take more than ``SLOW_RATIO`` times the lower bound run at most ``SLOW_REPEATS`` turns.
SLOW_RATIO, SLOW_REPEATS = 3.0, 3
OURS = AUTO
DEFAULT_CONTENDERS = (OURS, "send_recv", "local_all_gather", "awex")
#: Additional default contenders of some suites. They take 5 to 20 times the bound, so other suites omit them.
ALSO_BY_DEFAULT = {"peers": ("full_tensor + broadcast",), "one to many": ("gloo broadcast",)}
SLOW_PEERS = ("full_tensor + broadcast", "gloo broadcast")
ALL_CONTENDERS = (OURS, *STRATEGIES, *PEERS)

Record = dict[str, Any]


@dataclass
class Planned:
    """A row with its plans on the nominal topology.

    Attributes:
        key: id of the row in reports.
        same_as: contender -> contender with an equal plan, which runs in its place.
        turns: the contenders to run.
        bound_seconds: lower bound.
        expected_seconds: predicted duration of all turns.
    """

    row: Row
    key: str
    topology: Topology
    plans: dict[str, Plan]
    same_as: dict[str, str]
    turns: tuple[Contender, ...]
    bound_seconds: float
    expected_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        total = 0.0
        for turn in self.turns:
            once = self.guess(turn.name) if turn.plan is None else simulate(turn.plan, self.topology).makespan_seconds
            total += (turn.repeats + 1) * (once + 0.15)
        self.expected_seconds = total

    def guess(self, name: str) -> float:
        """Rough estimate, in seconds, of one turn of a contender without a plan."""
        slowest = min(self.topology.host(host).egress_bytes_per_second for host in range(self.topology.num_hosts))
        receivers = len({rank for spec in self.row.tensors for rank in spec.dst.ranks})
        if name == "gloo broadcast" and not are_replicated(self.row.tensors):
            return 0.0  # it does not support the row
        if name in SLOW_PEERS:
            return self.row.nbytes / slowest * receivers
        plan = self.plans.get("send_recv")
        return self.bound_seconds if plan is None else simulate(plan, self.topology).makespan_seconds


def plan_row(row: Row, key: str, contenders: Sequence[str], repeats: int, topology: Topology | None = None) -> Planned:
    """Plan a row with every strategy. Contenders with equal plans run once.

    Args:
        topology: what to plan for; the nominal topology of the row's cluster if None.
    """
    if topology is None:
        topology = nominal(read_cluster(row.cluster))
    plans: dict[str, Plan] = {}
    same_as: dict[str, str] = {}
    turns = []
    bound = 0.0
    for name in contenders:
        if name in PEERS:
            # contenders without a plan take about as long as plain sends
            likely = plans.get("send_recv") or plan_tensors(row.tensors, strategy="send_recv", topology=topology)
            slow = name in SLOW_PEERS or _is_slow(likely)
            turns.append(Contender(name, None, min(repeats, SLOW_REPEATS) if slow else repeats))
            continue
        plan = plan_tensors(row.tensors, strategy=name, topology=topology)
        bound = find_bound(plan).seconds
        equal = next((other for other, seen in plans.items() if _are_equal(seen, plan)), None)
        if equal is not None:
            same_as[name] = equal
            continue
        plans[name] = plan
        turns.append(Contender(name, plan, min(repeats, SLOW_REPEATS) if _is_slow(plan) else repeats))
    if not bound:
        bound = find_bound(plan_tensors(row.tensors, topology=topology)).seconds
    return Planned(row, key, topology, plans, same_as, tuple(turns), bound)


def _is_slow(plan: Plan) -> bool:
    return simulate(plan).makespan_seconds > SLOW_RATIO * find_bound(plan).seconds > 0


def _are_equal(a: Plan, b: Plan) -> bool:
    return all(
        np.array_equal(getattr(a.transfers, name), getattr(b.transfers, name))
        for name in PlanTransfers.__dataclass_fields__
    )


def run_cluster(
    name: str,
    planned: Sequence[Planned],
    write: Callable[[Record], None],
    advance: Callable[[float, str], None],
    budget: TimeBudget,
) -> None:
    """Run all rows of one cluster, measure its links before and after them, and write the records.

    Args:
        name: the cluster.
        planned: its rows.
        write: called with each record.
        advance: called with the expected seconds of completed work and a status text.
        budget: time of the whole run.
    """
    shaped = read_cluster(name)
    expected = nominal(shaped)
    rows: dict[str, dict[str, Any]] = {}
    crossed: dict[tuple[str, str], list[Any]] = {}
    by_key = {item.key: item for item in planned}
    begun = time.monotonic()
    with EmulatedCluster(shaped) as cluster:
        set_up = time.monotonic() - begun
        advance(0.0, f"{name}: measuring links")
        before = measure_cluster(cluster, expected)
        last = cluster.crossed_bytes()

        def on_report(_: int, report: tuple[Any, ...]) -> None:
            nonlocal last
            kind, key, content = report  # content: the row's result, or the contender of a turn
            if kind == "row":
                rows[key] = content
                advance(by_key[key].expected_seconds, f"{name}: {by_key[key].row.name}")
                return
            now = cluster.crossed_bytes()
            if kind == "turn":
                crossed[key, content] = [
                    [(b[0] - a[0], b[1] - a[1]) for a, b in zip(host_before, host_now, strict=True)]
                    for host_before, host_now in zip(last, now, strict=True)
                ]
            last = now

        for item in planned:  # new processes per row: even unused Gloo groups wake up a hundred times a second
            job = BenchmarkJob(item.key, item.row.tensors, item.turns, budget.spare_seconds(item.expected_seconds))
            limit = 120.0 + 2 * ROW_RETRY_SECONDS + 8 * item.expected_seconds
            cluster.run(run_jobs, [job], timeout_seconds=limit, on_report=on_report)
        advance(0.0, f"{name}: measuring links")
        after = measure_cluster(cluster, expected)
    links, record = compare_links(name, before, after, expected)
    write(record | {"set_up_seconds": round(set_up, 3)})
    for item in planned:
        for record_of_row in make_records(item, rows[item.key], crossed, links):
            write(record_of_row | {"valid": record["valid"]})


def compare_links(
    name: str, before: Topology, after: Topology, expected: Topology, *, is_given: bool = True
) -> tuple[Topology, Record]:
    """The mean of the links measured before and after the rows, and the record of the cluster.

    Args:
        is_given: whether the expected rates must be met.
    """
    moved = max(map(abs, deviations(after, before).values()), default=0.0)
    off = max(max(map(abs, deviations(side, expected).values()), default=0.0) for side in (before, after))
    links = mean_topology(before, after)
    return links, {
        "kind": "cluster",
        "cluster": name,
        "topology": topology_to_json(links),
        "set_up_seconds": 0.0,
        "latency_seconds": links.latency_seconds,
        "moved": round(moved, 4),
        "off": round(off, 4),
        "valid": moved <= MAX_DEVIATION and (off <= MAX_DEVIATION or not is_given),
    }


def make_records(
    one: Planned,
    measured: dict[str, Any],
    crossed: dict[tuple[str, str], list[Any]],
    links: Topology,
    *,
    is_shared: bool = True,
) -> list[Record]:
    """One record per contender of a row, with lower bound and prediction at the measured link rates.

    Args:
        measured: result of each contender, by name.
        crossed: bytes per NIC of each row key and contender.
        links: the measured topology.
        is_shared: all ranks share this machine's CPUs, so start-up time grows with ranks.
    """
    bound = find_bound(plan_tensors(one.row.tensors, topology=links)).seconds
    records = []
    for name in [*(turn.name for turn in one.turns), *one.same_as]:
        record: Record = {
            "kind": "row",
            "suite": one.row.suite,
            "row": one.row.name,
            "title": one.row.title,
            "cluster": one.row.cluster,
            "bytes": one.row.nbytes,
            "contender": name,
            "bound_seconds": bound,
        }
        result = measured.get(one.same_as.get(name, name), {})
        if name in one.same_as:
            record["same_as"] = one.same_as[name]
        if "refused" in result:
            records.append(record | {"refused": result["refused"]})
            continue
        seconds = result["seconds"]
        record |= {
            "seconds": [round(took, 6) for took in seconds],
            "median_seconds": statistics.median(seconds),
            "ratio": statistics.median(seconds) / bound if bound else None,
            "first_use_seconds": round(result["first_use_seconds"], 6),
            "busy": round(result["busy"], 3),
            "disturbed": result["disturbed"],
            "repeated": result["repeated"],
            "wrong": result["wrong"],
            "crossed_bytes": crossed.get((one.key, one.same_as.get(name, name))),
        }
        plan = one.plans.get(one.same_as.get(name, name))
        if plan is not None:
            predicted = simulate(plan, with_start(links, plan, is_shared)).makespan_seconds
            record["predicted_seconds"] = predicted
            record["predicted_ratio"] = predicted / bound if bound else None
            record["predicted_over_measured"] = predicted / record["median_seconds"]
        records.append(record)
    return records


def with_start(links: Topology, plan: Plan, is_shared: bool) -> Topology:
    """Scale the measured start-up time to the number of ranks of a plan, if all ranks share one machine."""
    if not is_shared:
        return links
    part = len(plan.ranks) / (len(links.host_of_rank) // 2 * 2 or 1)
    return replace(links, start_seconds=links.start_seconds * part)
