"""The choice of the search, compared with all divisions into stages, measured.

Six cases: three models of five layers on two clusters of four devices. One step of an even division corrects the
profile, as ``tune`` does, and the search chooses. Then every division of the layers and devices into at least two
stages runs, each under the schedule that is predicted to be its fastest. So does the choice of ``alpa``, as Alpa runs
it: 1F1B with blocking transfers. At the end, the choice and the fastest divisions run again, with more steps, because
the least of many medians is too small by chance; these steps count.

Devices sleep for the seconds of their stages, and tensors cross rate-limited links, as in
:mod:`microbench.training_plans.accuracy`. Layers have no parameters, so all ranks of a stage are replicas whose
gradients cost nothing. One stage of four replicas cannot be: a microbatch has two samples.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import nominal
from microbench.training_plans.accuracy import (
    MICROBATCHES,
    NUM_SAMPLES,
    REPEATS,
    AccuracyModel,
    make_pipeline,
    measure,
    measure_strategy,
)
from microbench.training_plans.by_hand import make_by_hand, parse_stages
from reshard.cli.progress_bars import print_line, track
from reshard.scheduler import one_f_one_b
from reshard.scheduler.autoparallel import Cluster, LayerChoice, TrainingPlan
from reshard.scheduler.autoparallel.costs.search_problem import SearchProblem, Stages
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.searching import choose_training_plan
from reshard.scheduler.autoparallel.tuning import correct_profile
from reshard.scheduler.passes.transfer_overlap import block_transfers
from reshard.topology import topology_from_json

MODELS = (
    AccuracyModel("GPT", (0.004,) * 5, (0.5,) * 4),
    AccuracyModel("vision backbone", (0.004,) * 5, (2.0, 1.0, 0.5, 0.25)),
    AccuracyModel("U-Net", (0.003, 0.004, 0.005, 0.004, 0.003), (1.0, 0.5, 0.5, 1.0), ((0, 4, 1.0), (1, 3, 0.5))),
)
#: Stages of two devices are on one host: between hosts, the barriers of timed stages would wait behind the tensors.
CLUSTERS = {
    f"two hosts, {rate}": {"hosts": [{"devices": 2, "nics": [rate]}] * 2} for rate in ("1 Gbit/s", "500 Mbit/s")
}
FIRST = "3:2, 2:2"
#: Steps of the divisions that run again, and their number, without the choice.
FINAL_REPEATS, NUM_FINAL = 7, 2


def divisions(problem: SearchProblem) -> Iterator[Stages]:
    """All divisions of the layers and devices into stages of replicas that divide the samples of a microbatch."""
    cluster, num_samples, num_layers = problem.cluster, NUM_SAMPLES // MICROBATCHES, len(problem.graph.layers)

    def meshes(first: int) -> Iterator[tuple[int, ...]]:
        if first == cluster.num_ranks:
            yield ()
        for size in cluster.mesh_sizes:
            if num_samples % size == 0 and first + size <= cluster.num_ranks and cluster.is_mesh(first, first + size):
                yield from ((size, *rest) for rest in meshes(first + size))

    for sizes in meshes(0):
        for cuts in itertools.combinations(range(1, num_layers), len(sizes) - 1):
            ends, ranks = (*cuts, num_layers), list(itertools.accumulate(sizes, initial=0))
            yield tuple(
                StagePlan(first, end, ranks[index], ranks[index + 1], (LayerChoice(),) * (end - first))
                for index, (first, end) in enumerate(itertools.pairwise((0, *ends)))
            )


def describe(training_plan: TrainingPlan) -> str:
    """Layers and ranks of all stages, and the schedule."""
    stages = ", ".join(f"{stage.num_layers}:{stage.num_ranks}" for stage in training_plan.stages)
    return f"{stages} ({training_plan.schedule.name})"


def run_case(model: AccuracyModel, kind: str) -> tuple[float, float]:
    """The slowdown of the choice relative to the fastest division, and its speedup over Alpa's."""
    shaped = topology_from_json(CLUSTERS[kind])
    plain, graph = nominal(shaped), model.graph()
    devices = Cluster(plain, 1e9)
    true = SearchProblem(graph, devices, model.profile(graph), NUM_SAMPLES, microbatch_counts=(MICROBATCHES,))
    title = f"{model.name}, {kind}"
    with EmulatedCluster(shaped) as cluster:

        def seconds_of(training_plan: TrainingPlan, repeats: int) -> float:
            return statistics.median(measure_strategy(cluster, true, training_plan, plain, repeats)[0])

        _, first = make_by_hand(true, devices, parse_stages(FIRST), MICROBATCHES)
        profile = correct_profile(true, first, [measure_strategy(cluster, true, first, plain)[1]])
        problem = true.changed(profile=profile)
        chosen, alpa = choose_training_plan(problem), choose_training_plan(problem, "alpa")
        measured: list[tuple[float, TrainingPlan]] = []
        for stages in track([*divisions(problem)], title):
            _, training_plan = make_by_hand(problem, devices, stages, MICROBATCHES, thorough=True)
            measured.append((seconds_of(training_plan, REPEATS), training_plan))
        measured.sort(key=lambda division: division[0])
        pipeline = make_pipeline(true, alpa.stages)  # blocking transfers stop the compute stream
        schedules = {"alpa": block_transfers(one_f_one_b(pipeline, MICROBATCHES), pipeline)}
        slow = statistics.median(measure(cluster, true, alpa.stages, schedules, plain)[0]["alpa"])
        final = [(seconds_of(item, FINAL_REPEATS), item) for item in (chosen, *(s for _, s in measured[:NUM_FINAL]))]
    took, (best, training_plan) = final[0][0], min(final, key=lambda division: division[0])
    print_line(
        f"{title}: {len(measured)} divisions, {measured[0][0]:.3f} to {measured[-1][0]:.3f} s; "
        f"choice {describe(chosen)} predicted {chosen.seconds:.3f} s, takes {took:.3f} s; "
        f"fastest {describe(training_plan)} {best:.3f} s; loss {took / best - 1:.1%}; "
        f"alpa {describe(alpa)} with blocking 1F1B {slow:.3f} s, {slow / took:.2f} times as long"
    )
    return took / best - 1, slow / took


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", type=int, choices=range(1, 7), help="run one case only (default: all six)")


def run(options: argparse.Namespace) -> None:
    """Print a line for each case, the largest loss, and the gains over Alpa's choice."""
    cases = [(model, kind) for kind in CLUSTERS for model in MODELS]
    results = [run_case(*case) for case in (cases if options.case is None else cases[options.case - 1 :][:1])]
    print_line(
        f"largest loss of the choice {max(loss for loss, _ in results):.1%}; over alpa with blocking 1F1B: "
        f"{', '.join(f'{gain:.2f}' for _, gain in results)}"
    )
