"""Trace one transfer: measured post and arrival times of each message, next to the simulated timeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import reshard
from microbench.cases.rows import Row, read_cluster
from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import nominal
from microbench.harness.benchmark_rank import Stopwatch
from microbench.harness.calibrate import measure_cluster
from reshard.cli.demo_transfers import shard_of_positions
from reshard.cost import Timeline, simulate
from reshard.plan import Plan
from reshard.planner import plan_tensors
from reshard.runtime.cpu.program_executor import NOTIFY_TAG


@dataclass(frozen=True)
class Trace:
    """One traced transfer.

    Attributes:
        measured: ``(posted, arrived)`` of each message id, in seconds after the start. ``posted`` is the time by which
            both the sender and the receiver have posted the message.
        seconds: duration of the transfer.
        timeline: the simulation of the same plan on the measured links.
    """

    plan: Plan
    measured: dict[int, tuple[float, float]]
    seconds: float
    timeline: Timeline


class _TimedWork:
    """The work of one receive; it also records when ``wait`` returns."""

    def __init__(self, work: Any, record: Callable[[float], None]) -> None:
        self._work, self._record = work, record

    def wait(self, timeout: Any) -> Any:
        done = self._work.wait(timeout)
        self._record(time.monotonic())
        return done


class _Recorder:
    """A transport that records the post and arrival times of the messages of a Mover's program."""

    def __init__(self, mover: reshard.Mover) -> None:
        transfers: Any = mover._transfers
        transport = transfers.transport
        self._transport = transport
        self._program = mover._agreed.program
        self._hosts = mover.plan.topology.host_of_rank
        self.abort = self._transport.abort
        self.reset()

    def reset(self) -> None:
        """Clear all records before the next transfer."""
        self.sent: dict[int, float] = {}
        self.awaited: dict[int, float] = {}
        self.arrived: dict[int, float] = {}
        program = self._program
        # sends to other hosts, then sends inside the host; the executor keeps the order of each list
        self._next = [iter(program.sends_across), iter(program.sends_inside)]
        self._next_recv = iter(program.recvs)

    def send(self, buffer: torch.Tensor, rank: int, tag: int) -> Any:
        if tag >= NOTIFY_TAG:
            return self._transport.send(buffer, rank, tag)
        op = next(self._next[self._hosts[rank] == self._hosts[self._program.rank]])
        self.sent[op.id] = time.monotonic()
        return self._transport.send(buffer, rank, tag)

    def recv(self, buffer: torch.Tensor, rank: int, tag: int) -> Any:
        if tag >= NOTIFY_TAG:
            return self._transport.recv(buffer, rank, tag)
        op = next(self._next_recv)
        self.awaited[op.id] = time.monotonic()
        work = self._transport.recv(buffer, rank, tag)
        return _TimedWork(work, lambda now: self.arrived.__setitem__(op.id, now))


def trace_row(row: Row, strategy: str, repeats: int = 3) -> Trace:
    """Run a benchmark row on its cluster ``repeats`` times. Returns the trace of the last run."""
    shaped = read_cluster(row.cluster)
    plan = plan_tensors(row.tensors, strategy=strategy, topology=nominal(shaped))
    with EmulatedCluster(shaped) as cluster:
        links = measure_cluster(cluster, nominal(shaped))
        results = cluster.run(_record, plan, repeats, timeout_seconds=600.0)
    sent: dict[int, float] = {}
    awaited: dict[int, float] = {}
    arrived: dict[int, float] = {}
    for _, *times in results:
        for merged, seconds in zip((sent, awaited, arrived), times, strict=True):
            merged.update(seconds)
    measured = {ident: (max(sent[ident], awaited[ident]), arrived[ident]) for ident in sorted(arrived)}
    return Trace(plan, measured, max(result[0] for result in results), simulate(plan, links))


def _record(
    rank: int, report: Callable[[Any], None], plan: Plan, repeats: int
) -> tuple[float, dict[int, float], dict[int, float], dict[int, float]]:
    """Run the plan on one rank. Returns the last duration, and when each message was sent, awaited and received."""
    source: Any = {spec.name: shard_of_positions(spec.src, rank, spec.shape, spec.dtype) for spec in plan.tensors}
    out: Any = {spec.name: shard_of_positions(spec.dst, rank, spec.shape, spec.dtype) for spec in plan.tensors}
    if plan.tensors[0].name is None:
        source, out = source[None], out[None]
    stopwatch = Stopwatch()
    mover = reshard.Mover(plan) if rank in plan.ranks else None
    recorder = None if mover is None or len(plan.ranks) == 1 else _Recorder(mover)
    if mover is not None and recorder is not None:
        mover._transfers.transport = recorder  # type: ignore[union-attr,assignment]
    seconds = 0.0
    for _ in range(repeats):
        if recorder is not None:
            recorder.reset()
        stopwatch.start()
        if mover is not None:
            mover(source, out=out)
        seconds = stopwatch.stop().seconds
    dist.barrier()
    if recorder is None:
        return seconds, {}, {}, {}
    sent, awaited, arrived = (
        {ident: index - stopwatch.begun for ident, index in times.items()}
        for times in (recorder.sent, recorder.awaited, recorder.arrived)
    )
    return seconds, sent, awaited, arrived
