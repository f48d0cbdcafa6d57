"""Predicted against counted bytes of tensors.

Trains training plans on local processes, and counts the storages that each rank keeps: parameters, gradients, states of
    the
optimizer, activations, gathered parameters and receives.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from microbench.training_plans.by_hand import GPT, TIED_GPT, U_TRANSFORMER, make_by_hand, parse_stages
from reshard.cli.progress_bars import print_line, track
from reshard.scheduler.autoparallel import Cluster
from reshard.scheduler.training.loop import TrainingJob
from reshard.scheduler.training.peak_memory import count_peak_bytes, predicted_bytes
from reshard.scheduler.training.plan_search import SearchOptions, make_job_problem
from reshard.testing import run_processes
from reshard.topology import Topology

#: Training plans of each model: stages, as :func:`parse_stages` reads them, and microbatches.
CASES = {
    "GPT": (
        ("4:1, 4:1", 4),
        ("4:1 recompute, 4:1 recompute", 4),
        ("8:2", 4),
        ("8:2 zero", 4),
        ("8:2 zero recompute", 4),
        ("8:2 tp", 4),
        ("8:2 tp recompute", 4),
        ("3:1, 5:2", 4),
        ("3:2 zero, 5:1 half", 8),
        ("2:1, 3:1, 3:1", 8),
        ("4:2 tp, 4:1 half", 4),
        ("4:2 zero half, 4:2 zero", 2),
        ("8:4 2x2x1", 4),
        ("4:4 2x1x2, 4:1", 4),
        ("8:4 2x1x2 zero", 4),
        ("8:4 1x2x2 zero recompute", 4),
        ("4:2 1x2x1 half, 4:2 2x1x1 recompute", 4),
        ("2:1, 2:1, 2@0, 2@1", 4),
        ("2:1, 2:1, 2@1, 2@0", 4),
        ("2:2, 2:1 half, 2@0 half, 2@1", 4),
    ),
    "tied GPT": (("4:1, 4:1", 4), ("3:1, 5:2", 4), ("4:2 zero, 4:1", 4)),
    "U-Transformer": (("7:1, 7:1", 4), ("14:2", 4), ("7:1 recompute, 7:2", 4), ("9:2 zero half, 5:1", 4)),
}


PRESETS = {"GPT": GPT, "tied GPT": TIED_GPT, "U-Transformer": U_TRANSFORMER}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=list(CASES), help="model to train; may be repeated (all)")


def run(options: argparse.Namespace) -> None:
    """Print predicted and counted megabytes of the fullest rank of each training plan."""
    ratios = []
    for name in options.model or CASES:
        job = TrainingJob("memory", PRESETS[name], 2, "")
        problem = make_job_problem(job, SearchOptions(2, None, "10GB"))
        for text, count in track(CASES[name], "training plans"):
            stages = parse_stages(text)
            cluster = Cluster(Topology.uniform((0,) * max(stage.end_rank for stage in stages)), 1e10)
            _, training_plan = make_by_hand(problem, cluster, stages, count)
            counted = run_processes(
                count_peak_bytes, training_plan.num_ranks, replace(job, training_plan=training_plan)
            )
            pairs = list(zip(predicted_bytes(training_plan), counted, strict=True))
            predicted, most = max(pairs, key=lambda pair: pair[1])
            ratios += [first / second for first, second in pairs]
            every = ", ".join(f"{first / second:.3f}" for first, second in pairs)
            print_line(
                f"{name:14}{text:34}{count:3} microbatches, {training_plan.schedule.name:14} predicted "
                f"{predicted / 1e6:7.3f} MB, counted {most / 1e6:7.3f} MB, ratio of each rank {every}",
            )
    within = sum(0.95 <= ratio <= 1.05 for ratio in ratios)
    print_line(f"{within} of {len(ratios)} ranks within 5 %, least {min(ratios):.3f}, most {max(ratios):.3f}")
