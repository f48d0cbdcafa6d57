"""Loss and speed of training with compression.

The GPT of ``reshard train`` trains on the text that Python ships, with four pipeline stages, the last of two replicas.
All contenders of a seed begin with the same parameters and train on the same batches.

``loss`` trains on local processes, because links do not change a value. A line prints the mean loss on all held-out
text over the seeds, and its difference to training without codecs: mean, standard error, and each seed. "no codec
again" has twice as many microbatches, which only changes the order of sums: its differences are what rounding alone
causes.

``speed`` trains for a few steps with one rank per emulated host. Contenders take turns. A line prints the median of the
turns, which are medians of steps, and the share of the step that is no computation: the one by which a step without
codecs is longer than on links of 10 Gbit/s.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from microbench.harness.case_options import add_number
from microbench.harness.turns import equal_hosts, run_on_hosts
from reshard.cli.progress_bars import print_line, track
from reshard.scheduler.model_stages.training_engine import PipelineEngine
from reshard.scheduler.training.loop import TrainingJob, train
from reshard.scheduler.training.models.model_presets import find_preset
from reshard.scheduler.training.train_command import add_arguments, make_job
from reshard.testing.processes import run_processes

STAGES, NUM_RANKS = "1x1,1x1,1x1,2x1", 5
NUM_SAMPLES, MICROBATCHES, SEQUENCE = 16, 4, 64
#: Batches of 16 samples that hold all of the held-out text.
EVAL_BATCHES = 22
RAW, AGAIN = "no codec", "no codec again"
#: Links that take next to no time.
FAST = "10 Gbit/s"
#: Policy of each contender; edges are encoded whatever the simulation says, so that only the codecs differ.
CONTENDERS = {
    RAW: None,
    "int8 everywhere": "dp=int8x128,pp=int8x128,force-pp",
    "int4 everywhere": "dp=int4x128,pp=int4x128,force-pp",
    "hybrid": "dp=int4x128-bf16,pp=int8x128,force-pp",
}


class Run(NamedTuple):
    """Held-out loss at the end, and seconds of the median step."""

    held_out: float
    seconds: float


def run_job(rank: int, job: TrainingJob) -> Run:
    """Train on one rank."""
    torch.set_num_threads(1)
    seconds: list[float] = []
    step = PipelineEngine.step

    def timed(*arguments: Any, **options: Any) -> Any:
        begun = time.monotonic()
        result = step(*arguments, **options)
        seconds.append(time.monotonic() - begun)
        return result

    PipelineEngine.step = timed  # type: ignore[method-assign]
    try:
        held_out = train(rank, job, shows=False).held_out
    finally:
        PipelineEngine.step = step  # type: ignore[method-assign]
    return Run(held_out, statistics.median(seconds))


def run_reporting_job(rank: int, report: Callable[[Any], None], job: TrainingJob) -> Run:
    """:func:`run_job` on an emulated host."""
    return run_job(rank, job)


def _make_job(name: str, steps: int, seed: int, eval_batches: int, learning_rate: float | None = None) -> TrainingJob:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    num_microbatches = 2 * MICROBATCHES if name == AGAIN else MICROBATCHES
    words = ["gpt3-125m", "--shrink", "8", "--steps", str(steps), "--seed", str(seed), "--batch", str(NUM_SAMPLES)]
    words += ["--microbatches", str(num_microbatches), "--sequence", str(SEQUENCE), "--autocast", "none"]
    words += ["--schedule", "1f1b", "--eval-batches", str(eval_batches)]
    policy = CONTENDERS.get(name)
    words += [] if policy is None else ["--compression", policy]
    words += [] if learning_rate is None else ["--learning-rate", str(learning_rate)]
    return make_job(parser.parse_args(words), find_preset("gpt3-125m"), STAGES)


def measure_losses(names: list[str], steps: int, seeds: int, learning_rate: float | None) -> dict[str, list[float]]:
    """Held-out losses of each contender, one for each seed."""
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in track(range(seeds), "seeds"):
        for name in names:
            job = _make_job(name, steps, seed, EVAL_BATCHES, learning_rate)
            runs = run_processes(run_job, NUM_RANKS, job, timeout_seconds=3600.0)
            losses[name].append(runs[0].held_out)
            print_line(f"{name:16} seed {seed}  held-out {runs[0].held_out:.4f}")
    return losses


def show_losses(losses: Mapping[str, list[float]]) -> None:
    """Print a line per contender."""
    for name, values in losses.items():
        differences = [loss - raw for loss, raw in zip(values, losses[RAW], strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        listed = " ".join(f"{difference:+.4f}" for difference in differences)
        print_line(
            f"{name:16} held-out {statistics.fmean(values):.4f}  difference {statistics.fmean(differences):+.4f} "
            f"+- {error:.4f}  ({listed})"
        )


def measure_speeds(names: list[str], rate: str, steps: int, turns: int) -> dict[str, list[float]]:
    """Seconds of the step of each contender, one for each turn; without codecs, also on fast links."""
    links = dict.fromkeys(names, rate) | {FAST: FAST}
    seconds: dict[str, list[float]] = {name: [] for name in links}
    for _ in track(range(turns), "turns"):
        for name, link in links.items():
            job = _make_job(name, steps, 0, 1)
            runs = run_on_hosts(equal_hosts(link, NUM_RANKS, 1), run_reporting_job, job, timeout_seconds=3600.0)
            seconds[name].append(max(run.seconds for run in runs))
    return seconds


def show_speeds(seconds: Mapping[str, list[float]]) -> None:
    """Print a row per contender."""
    base, fast = statistics.median(seconds[RAW]), statistics.median(seconds[FAST])
    for name, values in seconds.items():
        step = statistics.median(values)
        print_line(
            f"{name:16} {step * 1e3:6.0f} ms ({min(values) * 1e3:.0f} to {max(values) * 1e3:.0f})  "
            f"{NUM_SAMPLES / step:6.1f} samples/s  {base / step:.2f}x"
        )
    print_line(f"communication takes {1 - fast / base:.0%} of a step without codecs")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("measure", choices=("loss", "speed"))
    parser.add_argument("--steps", type=int, help="steps of a run (loss: 400, speed: 10)")
    add_number(parser, "--seeds", 3, "loss: runs of each contender")
    parser.add_argument("--learning-rate", type=float, help="loss: peak learning rate (0.003, that of the preset)")
    add_number(parser, "--turns", 5, "speed: runs of each contender")
    parser.add_argument("--rate", default="0.2 Gbit/s", help="speed: rate of each host's link (0.2 Gbit/s)")


def run(options: argparse.Namespace) -> None:
    """Print a line per contender."""
    is_loss = options.measure == "loss"
    steps = options.steps or (400 if is_loss else 10)
    names = list(CONTENDERS)
    print_line(f"{STAGES}, {steps} steps")
    if is_loss:
        show_losses(measure_losses([RAW, AGAIN, *names[1:]], steps, options.seeds, options.learning_rate))
    else:
        show_speeds(measure_speeds(names, options.rate, steps, options.turns))
