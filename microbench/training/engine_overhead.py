"""CPU time of a step of the pipeline engine, compared with torch's pipeline runtime, on the same schedule.

Stages are small, so that most of a step is the work of the runtimes. Both train copies of the same stages on the same
microbatches, on processes of this machine over Gloo, in turns. The CPU time is that of all threads of a process. Each
turn compares the gradients of both. Bar: the engine takes at most 1.05 times the CPU time.

A thread of Gloo spins while another thread holds the lock of its connection. If that one is preempted, the spin takes
milliseconds, so the CPU time without Gloo's threads is shown too. On a loaded machine only that one is comparable.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules as torch_schedules

from microbench.harness.table import Table
from reshard import Layout, Mesh
from reshard.scheduler import (
    Edge,
    Pipeline,
    Schedule,
    Stage,
    StageOutput,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
)
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding import TensorSpec
from reshard.testing import run_processes

#: CPU seconds of all threads, CPU seconds without Gloo's threads, and elapsed seconds of a step.
Times = tuple[float, float, float]

#: Turns before the measured ones.
WARM_UP = 3
#: Samples of a microbatch, and width of each layer. A layer is a linear map and a tanh.
SAMPLES, WIDTH = 8, 64
#: Name -> class of torch, stages of each rank, and the builder of the same schedule.
CASES: dict[str, tuple[Any, int, Callable[[Pipeline, int, int], Schedule]]] = {
    "1F1B": (torch_schedules.Schedule1F1B, 1, lambda pipeline, num, _: one_f_one_b(pipeline, num)),
    "interleaved 1F1B": (torch_schedules.ScheduleInterleaved1F1B, 2, interleaved_1f1b),
    "interleaved zero bubble": (torch_schedules.ScheduleInterleavedZeroBubble, 2, interleaved_zero_bubble),
}


class _Hidden(torch.nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        layers = [layer for _ in range(num_layers) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class _HiddenWithLoss(torch.nn.Module):
    def __init__(self, stage: _Hidden) -> None:
        super().__init__()
        self.layers = stage.layers

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> StageOutput:
        return StageOutput(loss=torch.nn.functional.mse_loss(self.layers(x), target))


def make_pipeline(pp_rank_of_stage: Sequence[int]) -> Pipeline:
    """A chain of equal stages on these ranks."""
    meshes = [Mesh([rank]) for rank in pp_rank_of_stage]
    edges = []
    for src in range(len(meshes) - 1):
        here, there = (Layout(mesh, "R R") for mesh in meshes[src : src + 2])
        spec = TensorSpec((SAMPLES, WIDTH), "float32", here, there, name="x")
        edges.append(Edge(src, src + 1, 0.1, 0.1, tensors=(spec,)))
    return Pipeline(tuple(Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in meshes), tuple(edges))


def _gloo_seconds() -> float:
    """CPU seconds of the threads of Gloo in this process; 0 without ``/proc``."""
    total = 0.0
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            if "gloo" in (task / "comm").read_text():
                total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


def measure(rank: int, case: str, num_ranks: int, num_microbatches: int, num_layers: int, turns: int) -> Any:
    """Times of the steps of each runtime on this rank, as ``{name: [times]}``."""
    make_torch, per_rank, build = CASES[case]
    pp_rank_of_stage = [stage % num_ranks for stage in range(per_rank * num_ranks)]
    num_stages, own = len(pp_rank_of_stage), [stage for stage, its in enumerate(pp_rank_of_stage) if its == rank]
    torch.manual_seed(0)
    stages = [_Hidden(num_layers) for _ in pp_rank_of_stage]
    theirs = {stage: copy.deepcopy(stages[stage]) for stage in own}
    ours = {stage: _HiddenWithLoss(stages[stage]) if stage == num_stages - 1 else stages[stage] for stage in own}
    inputs, targets = torch.randn(2, num_microbatches * SAMPLES, WIDTH)
    parts = [tensor.split(SAMPLES) for tensor in (inputs, targets)]
    feed = {0: [{"x": x} for x in parts[0]], num_stages - 1: [{"target": y} for y in parts[1]]}
    if num_stages == 1:
        raise ValueError("a pipeline of one stage sends nothing")
    torch_stages = [PipelineStage(theirs[stage], stage, num_stages, torch.device("cpu")) for stage in own]
    runtime = make_torch(
        torch_stages if per_rank > 1 else torch_stages[0], num_microbatches, torch.nn.functional.mse_loss
    )

    def step_torch() -> None:
        args = (inputs,) if 0 in own else ()
        is_last = num_stages - 1 in own
        runtime.step(*args, target=targets if is_last else None, losses=[] if is_last else None, return_outputs=False)

    pipeline = make_pipeline(pp_rank_of_stage)
    measured: dict[str, list[Times]] = {"reshard": [], "torch": []}
    with ScheduleEngine(build(pipeline, num_microbatches, num_ranks), pipeline, ours) as engine:
        methods = {"reshard": lambda: engine.step(feed), "torch": step_torch}
        for turn in range(turns + WARM_UP):
            for name in sorted(methods, reverse=bool(turn % 2)):
                for module in (*ours.values(), *theirs.values()):
                    module.zero_grad()
                dist.barrier()
                gloo, cpu, since = _gloo_seconds(), time.process_time(), time.perf_counter()
                methods[name]()
                cpu, elapsed = time.process_time() - cpu, time.perf_counter() - since
                took = cpu, cpu - (_gloo_seconds() - gloo), elapsed
                if turn >= WARM_UP:
                    measured[name].append(took)
                kept = theirs if name == "torch" else ours
                gradients = [p.grad for stage in own for p in kept[stage].parameters()]
                if name == sorted(methods, reverse=bool(turn % 2))[0]:
                    first = gradients
            for one, other in zip(first, gradients, strict=True):
                torch.testing.assert_close(one, other)
    return measured


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2, help="layers of each stage (default: 2)")
    parser.add_argument("--turns", type=int, default=31)


def run(options: argparse.Namespace) -> None:
    """Print a row per schedule: the medians of all turns, of means over ranks, and the median ratios of a turn."""
    columns = {"schedule": "<24", "engine CPU ms": ">.2f", "torch CPU ms": ">.2f", "ratio": ">6.3f"}
    without = {"engine without Gloo": ">.2f", "torch without Gloo": ">.2f", "ratio without Gloo": ">6.3f"}
    table = Table({**columns, **without, "engine ms": ">.1f", "torch ms": ">.1f"})
    for case in options.case:
        ranks = run_processes(
            measure,
            options.ranks,
            case,
            options.ranks,
            options.microbatches,
            options.layers,
            options.turns,
            timeout_seconds=600.0,
        )
        means = {
            name: [
                [sum(values) / len(ranks) for values in zip(*turn, strict=True)]
                for turn in zip(*(rank[name] for rank in ranks), strict=True)
            ]
            for name in ("reshard", "torch")
        }
        cells = []
        for kind in range(3):
            cells += [1e3 * statistics.median(turn[kind] for turn in means[name]) for name in means]
            if kind < 2:
                turns = zip(means["reshard"], means["torch"], strict=True)
                cells.append(statistics.median(ours[kind] / theirs[kind] for ours, theirs in turns))
        table.add(case, *cells)
