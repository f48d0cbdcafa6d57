"""The choice of the search, compared with six training plans of a U-Net on two local ranks.

The steps of all training plans are measured in turn, several times, so that other jobs disturb all alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace

from microbench.harness.case_options import add_number
from microbench.training_plans.by_hand import U_TRANSFORMER, make_by_hand, parse_stages
from reshard.cli.progress_bars import print_line, track
from reshard.scheduler.autoparallel import Cluster, TrainingPlan
from reshard.scheduler.autoparallel.searching import choose_training_plan
from reshard.scheduler.training.loop import TrainingJob
from reshard.scheduler.training.plan_search import SearchOptions, make_job_problem, measure_steps
from reshard.testing import run_processes
from reshard.topology import Topology

#: Stages, as :func:`parse_stages` reads them, and microbatches.
VARIANTS = (("14:2", 1), ("14:2", 4), ("14:2 zero", 1), ("14:2 zero", 4), ("7:1, 7:1", 4), ("7:1, 7:1", 8))


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--rounds", 5, "rounds of measurements", high=1000)


def run(options: argparse.Namespace) -> None:
    """Print predicted and measured seconds of a step, and how far the choice is behind the best."""
    job = TrainingJob("variants", U_TRANSFORMER, 2, "")
    problem = make_job_problem(job, SearchOptions(2, None, "10GB"))
    cluster = Cluster(Topology.uniform((0, 0)), 1e10)
    choice = choose_training_plan(problem.changed(cluster=cluster))
    plans: dict[str, TrainingPlan] = {"the choice": choice}
    for text, count in VARIANTS:
        plans[f"{text}, {count} microbatches"] = make_by_hand(problem, cluster, parse_stages(text), count)[1]
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in track(range(options.rounds), "rounds"):
        for name, plan in plans.items():
            measured = run_processes(measure_steps, plan.num_ranks, replace(job, training_plan=plan))
            seconds[name].append(measured[0].seconds)
    print_line(f"choice: {choice}; spread of the profile {problem.spread()[0]:.1%}; load {os.getloadavg()[0]:.1f}")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, plan in plans.items():
        print_line(f"{name:28} predicted {plan.seconds:.4f} s, measured {medians[name]:.4f} s")
    best = min(medians.values())
    print_line(f"the choice takes {medians['the choice'] / best:.3f} times as long as the fastest of all")
