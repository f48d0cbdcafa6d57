"""The program of one rank when comparing schedules: one engine per method, iterations in turns."""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from microbench.harness.benchmark_rank import Stopwatch
from microbench.harness.steal_time import Laps, RetryBudget
from microbench.training.timed_stages import TimedStage
from microbench.training.training_workload import TrainingWorkload
from reshard.scheduler import Pipeline, Schedule, one_f_one_b, zb_h1
from reshard.scheduler.ir.actions import Kind
from reshard.scheduler.passes.transfer_overlap import block_transfers
from reshard.scheduler.runtime.schedule_engine import Feed, ScheduleEngine
from reshard.scheduler.simulation.replay import PipelineTimeline
from reshard.topology import Topology

Modules = dict[int, torch.nn.Module]
#: Signal-only steps from which the costs of stages are measured.
MEASURED_STEPS = 3
#: A method runs at most ``MAX_TRIES * Training.repeats`` iterations.
MAX_TRIES = 2
#: Limit on all waits of a run for the machine to become quiet.
RUN_RETRY_SECONDS = 300.0


@dataclass(frozen=True)
class Method:
    """A schedule, and the strategy that plans its transfers; ``signal_only`` sends messages without tensor data."""

    name: str
    schedule: Schedule
    strategy: str | None
    signal_only: bool = False


@dataclass(frozen=True)
class Training:
    """The task of all ranks.

    Attributes:
        pipeline: stages and edges with tensors, meshes and costs.
        topology: what transfers are planned for.
        workload: the model and its batches; None for stages that sleep for the pipeline's costs.
        repeats: iterations of each method.
    """

    pipeline: Pipeline
    methods: tuple[Method, ...]
    topology: Topology
    workload: TrainingWorkload | None
    repeats: int
    timeout_seconds: float = 120.0


def train_in_turns(rank: int, report: Callable[[Any], None], training: Training) -> dict[str, Any]:
    """Run iterations of all methods in turns, after one warm-up.

    Returns:
        Per method: ``"laps"``; ``"timelines"`` of the least disturbed iteration, on rank 0 only; ``"losses"`` and
        ``"squares"``, the loss and the sum of squared gradients of this rank's stages in iteration ``repeats``.
    """
    warnings.filterwarnings("ignore")
    pin(rank, training)
    report_first = report if rank == 0 else lambda value: None
    stopwatch = Stopwatch()
    groups = [dist.new_group(stage.mesh.ranks) for stage in training.pipeline.stages if stage.mesh is not None]
    engines = {method.name: _make_engine(rank, training, method, groups) for method in training.methods}
    laps = {method.name: Laps(training.repeats, MAX_TRIES) for method in training.methods}
    retries = RetryBudget(RUN_RETRY_SECONDS)
    timelines: dict[str, PipelineTimeline] = {}
    losses: dict[str, float | None] = {}
    squares: dict[str, float] = {}
    for number in range(MAX_TRIES * training.repeats + 1):
        feed = _local_feed(rank, training, number)
        for method in training.methods:
            if not laps[method.name].needs_more():
                continue
            engine, modules = engines[method.name]
            for module in modules.values():
                module.zero_grad()
            stopwatch.start()
            step = engine.step(feed)
            took = stopwatch.stop()
            if number:
                laps[method.name].done.append(took)
                if took == min(laps[method.name].done, key=lambda lap: lap.steal_share):
                    timelines[method.name] = engine.timeline()
            if number == training.repeats:
                losses[method.name], squares[method.name] = step.loss, sum_squares(modules.values())
            if took.is_disturbed and rank == 0:
                retries.wait_until_quiet()
            report_first((method.name, took))
    for engine, _ in engines.values():
        engine.close()
    return {
        "laps": laps,
        "timelines": timelines if rank == 0 else {},
        "losses": losses,
        "squares": squares,
    }


def sum_squares(modules: Iterable[torch.nn.Module]) -> float:
    """Sum of squares of all gradients."""
    gradients = (p.grad for module in modules for p in module.parameters() if p.grad is not None)
    return float(sum(gradient.double().square().sum() for gradient in gradients))


def train_alone(workload: TrainingWorkload, step: int) -> tuple[float, float]:
    """Loss and sum of squared gradients of one step in a single process."""
    model, total = workload.make_model(), 0.0
    for microbatch in workload.microbatches(step):
        loss = model(**microbatch) / workload.num_microbatches
        loss.backward()
        total += float(loss.detach())
    return total, sum_squares([model])


def measure_stages(
    rank: int, report: Callable[[Any], None], training: Training, num_microbatches: int
) -> dict[str, Any]:
    """Measure stage and message costs in signal-only steps of ``num_microbatches``.

    Returns:
        ``"stage"``: seconds of this rank's forward, input-gradient, weight-gradient and whole backward pass;
        ``"transfer"``: seconds of one message; ``"blocked"``: seconds of one message that both ends wait for.
    """
    pin(rank, training)
    groups = [dist.new_group(stage.mesh.ranks) for stage in training.pipeline.stages if stage.mesh is not None]
    seconds_of: dict[Kind, list[float]] = {}
    pipeline = training.pipeline
    plain = one_f_one_b(pipeline, num_microbatches)
    schedules = zb_h1(pipeline, num_microbatches), plain, block_transfers(plain, pipeline)
    split, whole, blocked = (
        _make_engine(rank, training, Method("", schedule, None, signal_only=True), groups) for schedule in schedules
    )
    messages: dict[bool, list[float]] = {False: [], True: []}
    with split[0], whole[0], blocked[0]:
        for number in range(MEASURED_STEPS + 1):  # in turns, so that changes of machine speed affect all engines alike
            for engine, _ in (split, whole, blocked):
                dist.barrier()
                feed = _local_feed(rank, training, number)
                engine.step({stage: inputs[:num_microbatches] for stage, inputs in feed.items()})
                timeline = engine.timeline()
                if not number:
                    continue
                for span in timeline.spans if engine is not blocked[0] else ():
                    if span.pp_rank == engine.pp_rank and not (engine is whole[0] and span.action.kind is Kind.F):
                        seconds_of.setdefault(span.action.kind, []).append(span.end - span.start)
                messages[engine is blocked[0]] += [
                    transfer.end - max(transfer.start, transfer.ready) for transfer in timeline.transfers
                ]
    costs = [statistics.median(seconds_of[kind]) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)]
    transfer, waited_for = (statistics.median(messages[is_blocked]) for is_blocked in (False, True))
    return {"stage": costs, "transfer": transfer, "blocked": waited_for}


def pin(rank: int, training: Training) -> None:
    """With real computation, pin each rank to one core if there are enough cores."""
    cores = sorted(os.sched_getaffinity(0))
    if training.workload is not None and dist.get_world_size() <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def _make_engine(
    rank: int, training: Training, method: Method, groups: Sequence[Any]
) -> tuple[ScheduleEngine, Modules]:
    pipeline = training.pipeline
    stages = [s for s, stage in enumerate(pipeline.stages) if stage.mesh is not None and rank in stage.mesh.ranks]
    if training.workload is None:
        modules: Modules = {stage: TimedStage(pipeline, stage, rank, groups[stage]) for stage in stages}
    else:
        modules = {stage: training.workload.make_stages()[stage] for stage in stages}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ranks of stage .* hold shards")  # timed stages do not train
        engine = ScheduleEngine(
            method.schedule,
            pipeline,
            modules,
            topology=training.topology,
            strategy=method.strategy,
            signal_only=method.signal_only,
            timeout_seconds=training.timeout_seconds,
        )
    return engine, modules


def _local_feed(rank: int, training: Training, step: int) -> Feed:
    if training.workload is None:
        return {}
    return training.workload.feed(step)
