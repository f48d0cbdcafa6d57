"""Predicted against measured steps of training plans on emulated hosts.

Devices sleep for the seconds of their stages, and the tensors of the edges cross rate-limited links. The first training
plan of each model corrects its profile, as ``tune`` does. All others are predicted before they run. Sums of gradients
are left out: timed stages have no parameters. ``--fresh SEED`` draws other training plans, some of them with several
stages on the same ranks, and measures them in turns.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import nominal
from microbench.harness.case_options import select
from microbench.harness.steal_time import merge_laps
from microbench.harness.turns import equal_hosts
from microbench.training.training_rank import Method, Training, train_in_turns
from microbench.training_plans.by_hand import make_by_hand, parse_stages
from reshard.cli.progress_bars import print_line, track
from reshard.scheduler import Pipeline, Schedule
from reshard.scheduler.autoparallel import Cluster, Layer, LayerGraph, LayerProfile, Tensor, TrainingPlan
from reshard.scheduler.autoparallel.costs.search_problem import SearchProblem, Stages
from reshard.scheduler.autoparallel.inputs.layer_profile import ClassTimes, LayerTimes
from reshard.scheduler.autoparallel.searching import choose_training_plan
from reshard.scheduler.autoparallel.tuning import correct_profile
from reshard.scheduler.simulation.replay import PipelineTimeline
from reshard.sharding import Mesh
from reshard.topology import Topology

NUM_SAMPLES, MICROBATCHES, REPEATS = 16, 8, 3
#: Stages of all models, which have 8 layers. The first ones correct the profile.
CASES = (
    "4:2, 4:2",
    "3:2, 5:2",
    "5:2, 3:2",
    "2:2, 6:2",
    "6:2, 2:2",
    "2:1, 2:1, 2:1, 2:1",
    "4:2, 2:1, 2:1",
    "1:1, 3:1, 4:2",
    "3:1, 1:1, 1:1, 3:1",
)
#: Devices of the stages that :func:`draw_cases` draws from, and rounds in which it measures its training plans.
DEVICES, ROUNDS = ((2, 2), (2, 2), (2, 1, 1), (1, 1, 2), (1, 1, 1, 1)), 3
MB = 250_000  # elements of a megabyte


@dataclass(frozen=True)
class AccuracyModel:
    """Eight layers: seconds of the forward of one sample, and megabytes of a sample after each but the last.

    ``skips``: (writer, reader, megabytes).
    """

    name: str
    seconds: tuple[float, ...]
    megabytes: tuple[float, ...]
    skips: tuple[tuple[int, int, float], ...] = ()

    def graph(self) -> LayerGraph:
        """The layers, without parameters, and the tensors between them."""
        layers = [Layer(f"layers.{index}", f"{s:g} s", 0.0, 0, 0.0) for index, s in enumerate(self.seconds)]
        tensors = [
            Tensor(f"x{index}", (1, round(mb * MB)), "float32", index, (index + 1,))
            for index, mb in enumerate(self.megabytes)
        ]
        tensors += [
            Tensor(f"skip{writer}", (1, round(mb * MB)), "float32", writer, (reader,))
            for writer, reader, mb in self.skips
        ]
        return LayerGraph(tuple(layers), tuple(tensors), name=self.name)

    def profile(self, graph: LayerGraph) -> LayerProfile:
        """The seconds that the stages sleep."""
        classes = {f"{s:g} s": {1: ClassTimes((LayerTimes(1, s, s, s, 2 * s),))} for s in self.seconds}
        return LayerProfile(graph.key, "timed", graph.dtype, classes)


MODELS = (
    AccuracyModel("GPT", (0.006,) * 8, (0.5,) * 7),
    AccuracyModel("vision backbone", (0.006,) * 8, (4.0, 4.0, 2.0, 2.0, 1.0, 0.5, 0.5)),
    AccuracyModel(
        "U-Net",
        (0.004, 0.006, 0.008, 0.008, 0.008, 0.008, 0.006, 0.004),
        (1.0, 0.5, 0.25, 0.25, 0.25, 0.5, 1.0),
        ((0, 7, 1.0), (1, 6, 0.5), (2, 5, 0.25)),
    ),
)


def draw_cases(seed: int, number: int = 8) -> tuple[str, ...]:
    """Random stages of 8 layers, as texts, after the first of :data:`CASES`, which corrects the profile.

    Stages on two meshes of two devices may take two turns on each of them.
    """
    chance, drawn = random.Random(seed), dict.fromkeys(CASES[:1])
    while len(drawn) < 1 + number:
        devices = chance.choice(DEVICES)
        turns = 2 if devices == (2, 2) and chance.random() < 0.5 else 1
        cuts = [0, *sorted(chance.sample(range(1, 8), turns * len(devices) - 1)), 8]
        layers = [end - first for first, end in itertools.pairwise(cuts)]
        parts = [f"{count}:{size}" for count, size in zip(layers, devices, strict=False)]
        parts += [f"{count}@{stage}" for stage, count in enumerate(layers[len(devices) :])]
        if (text := ", ".join(parts)) not in CASES:
            drawn[text] = None
    return tuple(drawn)


def make_pipeline(problem: SearchProblem, stages: Stages) -> Pipeline:
    """The pipeline of a training plan with meshes and tensors, as the engine runs it."""
    made = problem.pipeline(stages, MICROBATCHES)
    meshes = [Mesh(tuple(range(s.first_rank, s.end_rank)), {"dp": s.num_ranks, "tp": 1}) for s in stages]
    parts = tuple(
        replace(stage, mesh=mesh, activation_bytes=1) for stage, mesh in zip(made.stages, meshes, strict=True)
    )
    return Pipeline(parts, tuple(problem.edges(stages, MICROBATCHES)))


def measure(
    cluster: EmulatedCluster,
    problem: SearchProblem,
    stages: Stages,
    schedules: Mapping[str, Schedule],
    topology: Topology,
    repeats: int = REPEATS,
) -> tuple[dict[str, list[float]], dict[str, PipelineTimeline]]:
    """Seconds of the kept steps under each schedule, in turns, and the timeline of the least disturbed step of each."""
    methods = tuple(Method(name, schedule, None) for name, schedule in schedules.items())
    training = Training(make_pipeline(problem, stages), methods, topology, None, repeats)
    results: list[dict[str, Any]] = cluster.run(train_in_turns, training, timeout_seconds=300.0)
    laps = {name: merge_laps([result["laps"][name] for result in results]) for name in schedules}
    return {name: [lap.seconds for lap in item.kept()] for name, item in laps.items()}, results[0]["timelines"]


def measure_strategy(
    cluster: EmulatedCluster,
    problem: SearchProblem,
    training_plan: TrainingPlan,
    topology: Topology,
    repeats: int = REPEATS,
) -> tuple[list[float], PipelineTimeline]:
    """Seconds of the kept steps of a training plan, and the timeline of the least disturbed one."""
    schedules = {"training_plan": training_plan.schedule}
    seconds, timelines = measure(cluster, problem, training_plan.stages, schedules, topology, repeats)
    return seconds["training_plan"], timelines["training_plan"]


def run_model(
    model: AccuracyModel, shaped: Topology, cases: Sequence[str], rounds: int = 1
) -> tuple[list[tuple[str, float, float]], float]:
    """``(training plan, predicted, measured)`` of all cases, and the measured seconds of the choice of the search."""
    plain = nominal(shaped)
    graph = model.graph()
    devices = Cluster(plain, 1e9)
    true = SearchProblem(graph, devices, model.profile(graph), NUM_SAMPLES, microbatch_counts=(MICROBATCHES,))
    rows: list[tuple[str, float, float]] = []
    with EmulatedCluster(shaped) as cluster:
        _, first = make_by_hand(true, devices, parse_stages(cases[0]), MICROBATCHES)
        _, timeline = measure_strategy(cluster, true, first, plain)
        problem = true.changed(profile=correct_profile(true, first, [timeline]))
        print_line(f"{model.name}: a message takes {1e3 * problem.profile.message_seconds:.2f} ms")
        plans = {text: make_by_hand(problem, devices, parse_stages(text), MICROBATCHES)[1] for text in cases[1:]}
        times: dict[str, list[float]] = {text: [] for text in plans}
        for text in track(list(plans) * rounds, "training plans"):
            times[text] += measure_strategy(cluster, true, plans[text], plain, REPEATS // rounds)[0]
        for text, seconds in times.items():
            rows.append((text, plans[text].seconds, statistics.median(seconds)))
            print_line(
                f"{model.name:16}{text:22}{plans[text].schedule.name:24} predicted {plans[text].seconds:.3f} s, "
                f"measured {rows[-1][2]:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), ratio "
                f"{plans[text].seconds / rows[-1][2]:.3f}",
            )
        chosen = choose_training_plan(problem)
        taken = statistics.median(measure_strategy(cluster, true, chosen, plain)[0])
        best = min(rows, key=lambda row: row[2])
        print_line(
            f"{model.name}: the choice, predicted {chosen.seconds:.3f} s, takes {taken:.3f} s; the best of the others "
            f"takes {best[2]:.3f} s ({best[0]}): {chosen}",
        )
    return rows, taken


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="1 Gbit/s", help="rate of each NIC (1 Gbit/s)")
    parser.add_argument("--model", action="append", help="run only models with this text; may be repeated")
    parser.add_argument(
        "--fresh", type=int, metavar="SEED", help="draw other training plans, and measure them in turns"
    )


def run(options: argparse.Namespace) -> None:
    """Print every training plan, the part that is predicted within 5 and 10 %, and the rank correlation."""
    from scipy.stats import spearmanr

    models = {model.name: model for model in MODELS}
    every, correlations = [], []
    for number, name in enumerate(select(models, options.model)):
        fresh = options.fresh is not None
        cases, rounds = (draw_cases(options.fresh + number), ROUNDS) if fresh else (CASES, 1)
        rows, _ = run_model(models[name], equal_hosts(options.rate, 2, 2), cases, rounds)
        every += rows
        correlations.append(float(spearmanr([row[1] for row in rows], [row[2] for row in rows])[0]))
    ratios = [predicted / measured for _, predicted, measured in every]
    within = [sum(abs(ratio - 1) <= part for ratio in ratios) for part in (0.05, 0.1)]
    print_line(
        f"{len(ratios)} training plans: {within[0]} within 5 %, {within[1]} within 10 %, least {min(ratios):.3f}, most "
        f"{max(ratios):.3f}; rank correlation of each model "
        f"{', '.join(f'{correlation:.3f}' for correlation in correlations)}"
    )
