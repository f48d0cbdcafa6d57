"""Steps that compute what has arrived, compared with steps in planned order, where the times of stages vary.

Stages sleep on processes of this machine. Each forward, input-gradient pass and weight-gradient pass takes its mean
time multiplied by a random factor: normal, with mean 1, and at least 0.1. Both orders run in turns, with the same
factors. So do steps on a virtual clock, since a loaded machine makes steps longer.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from microbench.harness.table import Table
from microbench.training.timed_stages import TimedStage
from microbench.training.virtual_clock import simulate_step
from reshard import Layout, Mesh
from reshard.scheduler import (
    Edge,
    Pipeline,
    Schedule,
    Stage,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
)
from reshard.scheduler.runtime.ready_order import ORDERS, OrderMode
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding import TensorSpec
from reshard.testing import run_processes

#: Turns before the measured ones.
WARM_UP = 1
#: Samples of a microbatch, and features of each.
SHAPE = (8, 64)
#: Name -> stages of each rank, and the builder of the schedule from a pipeline, numbers of microbatches and of ranks.
CASES: dict[str, tuple[int, Callable[[Pipeline, int, int], Schedule]]] = {
    "1F1B": (1, lambda pipeline, num, _: one_f_one_b(pipeline, num)),
    "interleaved 1F1B": (2, interleaved_1f1b),
    "ZB-H1": (1, lambda pipeline, num, _: zb_h1(pipeline, num)),
    "interleaved zero bubble": (2, interleaved_zero_bubble),
}


class VaryingCosts:
    """The costs of a stage, each time multiplied by a random factor. Each pass has its own sequence of factors."""

    def __init__(self, costs: Stage, deviation: float, seed: str) -> None:
        self._costs, self._deviation = costs, deviation
        self._random = {name: random.Random(f"{seed} {name}") for name in ("forward", "input_grad", "weight_grad")}

    def __getattr__(self, name: str) -> float:
        factor = max(0.1, self._random[name.removesuffix("_seconds")].gauss(1.0, self._deviation))
        return float(getattr(self._costs, name)) * factor


def make_pipeline(pp_rank_of_stage: list[int], seconds: float) -> Pipeline:
    """A chain of stages on these ranks, whose passes take equally long."""
    meshes = [Mesh([rank]) for rank in pp_rank_of_stage]
    edges = []
    for src in range(len(meshes) - 1):
        spec = TensorSpec(SHAPE, "float32", Layout(meshes[src], "R R"), Layout(meshes[src + 1], "R R"), name="x")
        edges.append(Edge(src, src + 1, seconds / 50, seconds / 50, tensors=(spec,)))
    stages = (Stage(seconds, seconds, seconds, activation_bytes=1, mesh=mesh) for mesh in meshes)
    return Pipeline(tuple(stages), tuple(edges))


def make_case(case: str, options: argparse.Namespace) -> tuple[Pipeline, Schedule]:
    """The pipeline and the schedule of a case."""
    per_rank, build = CASES[case]
    pp_rank_of_stage = [stage % options.ranks for stage in range(per_rank * options.ranks)]
    pipeline = make_pipeline(pp_rank_of_stage, options.milliseconds / 1e3 / per_rank)
    return pipeline, build(pipeline, options.microbatches, options.ranks)


def draw_costs(pipeline: Pipeline, percent: float, turn: int) -> dict[int, VaryingCosts]:
    """``{stage: its costs}`` of a turn."""
    return {
        stage: VaryingCosts(costs, percent / 100, f"{percent} {turn} {stage}")
        for stage, costs in enumerate(pipeline.stages)
    }


def measure(rank: int, case: str, options: argparse.Namespace) -> dict[float, dict[OrderMode, list[float]]]:
    """Seconds of the steps of each order, for each standard deviation in percent."""
    torch.set_num_threads(1)
    pipeline, schedule = make_case(case, options)
    groups = [dist.new_group([number]) for number in range(options.ranks)]
    own = [stage for stage, its in enumerate(schedule.pp_rank_of_stage) if its == rank]
    modules = {stage: TimedStage(pipeline, stage, rank, groups[rank]) for stage in own}
    feed = {0: [{"x": torch.zeros(SHAPE, requires_grad=True)} for _ in range(options.microbatches)]}
    engines = {order: ScheduleEngine(schedule, pipeline, modules, order=order) for order in ORDERS}
    measured: dict[float, dict[OrderMode, list[float]]] = {}
    for percent in options.percent:
        measured[percent] = {order: [] for order in ORDERS}
        for turn in range(options.turns + WARM_UP):
            for order in ORDERS[:: -1 if turn % 2 else 1]:
                costs: dict[int, Any] = draw_costs(pipeline, percent, turn)
                for stage, module in modules.items():
                    module.costs = costs[stage]
                dist.barrier()
                slowest = torch.tensor(engines[order].step(feed).seconds)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if turn >= WARM_UP:
                    measured[percent][order].append(float(slowest))
    for engine in engines.values():
        engine.close()
    return measured


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument(
        "--milliseconds", type=float, default=20.0, help="mean time of each pass of a rank (default: 20)"
    )
    parser.add_argument("--percent", type=float, nargs="*", default=[0.0, 5.0, 20.0, 50.0], help="standard deviations")
    parser.add_argument("--turns", type=int, default=9)


def simulate(case: str, percent: float, options: argparse.Namespace) -> list[float]:
    """Seconds in ready order over those in planned order, of each measured turn, on a virtual clock."""
    pipeline, schedule = make_case(case, options)
    ratios = []
    for turn in range(WARM_UP, WARM_UP + options.turns):
        planned, ready = (
            simulate_step(schedule, pipeline, draw_costs(pipeline, percent, turn), order) for order in ORDERS
        )
        ratios.append(ready / planned)
    return ratios


def run(options: argparse.Namespace) -> None:
    """Print a row per schedule and deviation: the medians of both orders, and the ratios of both steps of a turn."""
    columns = {"schedule": "<24", "percent": ">g", "planned ms": ">.1f", "ready ms": ">.1f"}
    columns |= {"ready/planned": ">.3f", "smallest": ">.3f", "largest": ">.3f"}
    table = Table({**columns, "on virtual clock": ">.3f", "its smallest": ">.3f", "its largest": ">.3f"})
    for case in options.case:
        measured = run_processes(measure, options.ranks, case, options, timeout_seconds=1800.0)[0]
        for percent, times in measured.items():
            medians = [1e3 * statistics.median(times[order]) for order in ORDERS]
            ratios = [ready / planned for planned, ready in zip(times["planned"], times["ready"], strict=True)]
            figures = [
                pick(series)
                for series in (ratios, simulate(case, percent, options))
                for pick in (statistics.median, min, max)
            ]
            table.add(case, percent, *medians, *figures)
