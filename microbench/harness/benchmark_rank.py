"""The program of one benchmark rank: run the contenders of each row in turn, and check every element."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from microbench.harness.steal_time import (
    MAX_TRIES,
    Lap,
    Laps,
    RetryBudget,
    idle_seconds,
    merge_laps,
    steal_seconds,
    steal_share,
)
from microbench.peers.base import NotApplicable
from microbench.peers.contenders import PEERS, make_ours
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.errors import ReshardError
from reshard.plan import Plan
from reshard.sharding import TensorSpec

#: Delay between the agreement on a start time and the start. All ranks must receive the time within it.
SETTLE_SECONDS = 0.02
#: Maximum time that a row spends on repeated turns and on waiting until steal time ends.
ROW_RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class Contender:
    """One contender of a row.

    Attributes:
        plan: the plan to run, or None for a contender in :data:`PEERS`.
        repeats: timed turns wanted after the first turn, which includes set-up.
    """

    name: str
    plan: Plan | None
    repeats: int


@dataclass(frozen=True)
class BenchmarkJob:
    """One row to run: its tensors, its contenders, and its time budget for repeated turns and pauses."""

    key: str
    tensors: tuple[TensorSpec, ...]
    turns: tuple[Contender, ...]
    spare_seconds: float = ROW_RETRY_SECONDS


class Stopwatch:
    """Times a collective operation from a common start until the last rank ends.

    Ranks on one kernel share its clock. They agree on a start time and sleep until then. Ranks on several machines
    start after a barrier. Each rank measures its own duration, and the caller takes the maximum.
    """

    def __init__(self) -> None:
        boots: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(boots, Path("/proc/sys/kernel/random/boot_id").read_text())
        self.shares_clock = len(set(boots)) == 1
        self.begun = 0.0
        self._idle = self._stolen = 0.0

    def start(self) -> None:
        """Wait for the common start."""
        dist.barrier()
        if self.shares_clock:
            agreed = torch.tensor([time.monotonic() + SETTLE_SECONDS], dtype=torch.float64)
            dist.broadcast(agreed, 0)
            self.begun = float(agreed)
            time.sleep(max(0.0, self.begun - time.monotonic()))
        else:
            self.begun = time.monotonic()
        self._idle, self._stolen = idle_seconds(), steal_seconds()

    def stop(self) -> Lap:
        """End the measurement on this rank. Return its lap after all ranks have stopped."""
        seconds = time.monotonic() - self.begun
        dist.barrier()
        passed = time.monotonic() - self.begun
        busy = max(0.0, 1 - (idle_seconds() - self._idle) / (passed * (os.cpu_count() or 1)))
        stolen = torch.tensor([steal_share(steal_seconds() - self._stolen, passed)], dtype=torch.float64)
        dist.all_reduce(stolen, dist.ReduceOp.MAX)
        return Lap(seconds, busy, float(stolen))


def run_jobs(rank: int, report: Callable[[Any], None], jobs: Sequence[BenchmarkJob]) -> None:
    """Run the rows in order.

    Rank 0 reports ``("start", key, contender)`` before and ``("turn", key, contender)`` after each turn, and
    ``("row", key, results)`` after each row.
    """
    import warnings

    warnings.filterwarnings("ignore")  # contenders warn; the tests check for warnings of reshard
    stopwatch = Stopwatch()
    for job in jobs:
        result = _run_job(rank, report if rank == 0 else lambda value: None, job, stopwatch)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, result)
        if rank == 0:
            report(("row", job.key, _merge(gathered)))


def _run_job(
    rank: int, report: Callable[[Any], None], job: BenchmarkJob, stopwatch: Stopwatch
) -> dict[str, dict[str, Any]]:
    sources = [shard_of_positions(spec.src, rank, spec.shape, spec.dtype) for spec in job.tensors]
    expected = [shard_of_positions(spec.dst, rank, spec.shape, spec.dtype) for spec in job.tensors]
    outs = [None if shard is None else torch.zeros_like(shard) for shard in expected]
    results: dict[str, dict[str, Any]] = {}
    retries = RetryBudget(min(job.spare_seconds, ROW_RETRY_SECONDS))
    may_repeat = torch.tensor([not retries.is_spent])
    contenders: dict[str, Callable[[], None]] = {}
    for number in range(MAX_TRIES * max(turn.repeats for turn in job.turns) + 1):
        for turn in job.turns:
            if number and ("refused" in results[turn.name] or not results[turn.name]["laps"].needs_more()):
                continue
            if number > turn.repeats and not may_repeat:
                continue
            for out in outs:
                if out is not None:
                    out.zero_()
            report(("start", job.key, turn.name))
            stopwatch.start()
            if number == 0:  # the first turn includes set-up
                results[turn.name] = {"laps": Laps(turn.repeats), "wrong": 0, "first_use_seconds": 0.0}
                try:
                    contenders[turn.name] = _make(turn, job, rank, sources, outs)
                except (NotApplicable, ReshardError, ValueError, NotImplementedError) as error:
                    results[turn.name]["refused"] = f"{error}"
                    stopwatch.stop()
                    continue
            contenders[turn.name]()
            took = stopwatch.stop()
            report(("turn", job.key, turn.name))
            if number:
                results[turn.name]["laps"].done.append(took)
            else:
                results[turn.name]["first_use_seconds"] = took.seconds
            for out, wanted in zip(outs, expected, strict=True):
                if out is not None and wanted is not None and not _same(out, wanted):
                    results[turn.name]["wrong"] += count_unlike(out, wanted)
            if number and took.is_disturbed and rank == 0:
                retries.spend(took.seconds)
                retries.wait_until_quiet()
            may_repeat[0] = not retries.is_spent
            dist.broadcast(may_repeat, 0)
    return results


def _make(
    turn: Contender, job: BenchmarkJob, rank: int, sources: Sequence[Any], outs: Sequence[Any]
) -> Callable[[], None]:
    if turn.plan is not None:
        return make_ours(turn.plan, rank, sources, outs)
    return PEERS[turn.name](job.tensors, rank, sources, outs)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


def _merge(gathered: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge the results of all ranks. The duration of a turn is that of its slowest rank."""
    merged: dict[str, dict[str, Any]] = {}
    for name in gathered[0]:
        rows = [result[name] for result in gathered]
        refused = next((row["refused"] for row in rows if "refused" in row), None)
        if refused is not None:
            merged[name] = {"refused": refused}
            continue
        laps = merge_laps([row["laps"] for row in rows])
        kept = laps.kept()
        merged[name] = {
            "seconds": [lap.seconds for lap in kept],
            "busy": statistics.median(lap.busy for lap in kept),
            "disturbed": sum(lap.is_disturbed for lap in kept),
            "repeated": len(laps.done) - len(kept),
            "wrong": sum(row["wrong"] for row in rows),
            "first_use_seconds": max(row["first_use_seconds"] for row in rows),
        }
    return merged
