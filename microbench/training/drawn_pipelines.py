"""Steps of random pipelines under our schedules and under others, among them torch's, on emulated hosts.

Draws pipelines as ``tests.campaigns.schedules`` does. Each pp rank is a host with one device, whose stages sleep for
their costs, and the tensors of the edges cross its link. For each other schedule there is one of ours that keeps at
most as many bytes on each pp rank. All of them run in turns. Bar: no other schedule is faster by more than 2 %, and
each step is predicted within 10 %.

Torch's schedules run on this engine, in the order that its classes export. The order of ``Schedule1F1B`` is that of
``1f1b``. Schedules that are predicted to take far longer than ours do not run, except the four of torch in ``ALWAYS``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import nominal
from microbench.harness.machine_description import stderr
from microbench.harness.steal_time import merge_laps
from microbench.harness.table import Table
from microbench.harness.turns import equal_hosts
from microbench.training.training_rank import Method, Training, measure_stages, train_in_turns
from reshard import Layout, Mesh
from reshard.cli.progress_bars import print_line, track
from reshard.scheduler import Edge, Pipeline, Schedule, Stage, auto_schedule, simulate_schedule
from reshard.scheduler.transfer_costs import price_edge
from reshard.sharding import TensorSpec
from reshard.topology import Topology
from tests.campaigns.schedules import Case, draw_case, others

RATE, BYTES_PER_SECOND = "1 Gbit/s", 1.25e8
#: Schedules that always run. ``1f1b`` stands for torch's ``Schedule1F1B``.
ALWAYS = ("1f1b", "torch InterleavedZeroBubble", "torch ZBVZeroBubble", "torch DualPipeV")
#: Another schedule runs if its predicted time is at most this many times that of ours.
NEAR = 1.1
#: The bars: a step of ours over one of the other, and the relative error of a prediction.
MAX_RATIO, MAX_ERROR = 1.02, 0.1


@dataclass(frozen=True)
class Overhead:
    """Seconds that a computation takes beyond its sleep, and that a transfer takes beyond its plan."""

    computation: float
    message: float


def make_pipeline(case: Case, seconds: float, overhead: Overhead = Overhead(0.0, 0.0)) -> Pipeline:
    """The pipeline of a case with a mesh for each stage and tensors on its edges.

    Args:
        seconds: of a forward of cost 1.
        overhead: added to the costs.
    """
    extra = overhead.computation
    meshes = [Mesh([pp_rank]) for pp_rank in case.pp_rank_of_stage]
    stages = []
    for stage, mesh in zip(case.pipeline.stages, meshes, strict=True):
        forward, back, weight = (
            seconds * cost for cost in (stage.forward_seconds, stage.input_grad_seconds, stage.weight_grad_seconds)
        )
        passes = forward + extra, back + extra, weight + extra
        stages.append(Stage(*passes, stage.activation_bytes, mesh=mesh, whole_backward_seconds=back + weight + extra))
    plain = nominal(hosts_of(case))
    edges = []
    for edge in case.pipeline.edges:
        src, dst = meshes[edge.src], meshes[edge.dst]
        numel = max(64, round(edge.forward_seconds * seconds * BYTES_PER_SECOND / 4))
        spec = TensorSpec((1, numel), "float32", Layout(src, "R R"), Layout(dst, "R R"), name=f"x{edge.src}_{edge.dst}")
        made = Edge(edge.src, edge.dst, tensors=(spec,))
        if src != dst:
            made = price_edge(made, plain)
            there, back = made.forward_seconds + overhead.message, made.backward_seconds + overhead.message
            made = replace(made, forward_seconds=there, backward_seconds=back)
        edges.append(made)
    return Pipeline(tuple(stages), tuple(edges))


def hosts_of(case: Case) -> Topology:
    """One host for each pp rank, with one device and one link."""
    return equal_hosts(RATE, max(case.pp_rank_of_stage) + 1, 1)


def measure_overhead(seconds: float) -> Overhead:
    """The overhead of a chain of four pp ranks, by steps without communication."""
    case = Case(0, Pipeline.of_costs([1.0] * 4, [2.0] * 4, [0.0] * 3), (0, 1, 2, 3), "plain", 8)
    topology = hosts_of(case)
    training = Training(make_pipeline(case, seconds), (), nominal(topology), None, 1)
    with EmulatedCluster(topology) as cluster:
        measured = cluster.run(measure_stages, training, case.num_microbatches, timeout_seconds=300.0)
    forward = statistics.median(result["stage"][0] for result in measured)
    return Overhead(max(0.0, forward - seconds), measured[0]["transfer"])


@dataclass(frozen=True)
class Comparison:
    """Another schedule and the one of ours within its peaks: names of both methods, and the schedules."""

    other: str
    ours: str
    schedules: tuple[Schedule, Schedule]


def make_comparisons(case: Case, pipeline: Pipeline) -> list[Comparison]:
    """The comparisons of a case. Equal schedules run once, under one name."""
    case = replace(case, pipeline=pipeline)
    ours_within: dict[tuple[float, ...], tuple[str, Schedule]] = {}
    found: dict[object, Comparison] = {}
    for name, other in others(case):
        limits = other.peak_bytes(pipeline)
        if limits not in ours_within:
            ours_within[limits] = (
                f"ours {len(ours_within)}",
                auto_schedule(
                    pipeline,
                    case.num_microbatches,
                    activation_limit_bytes=limits,
                    pp_rank_of_stage=case.pp_rank_of_stage,
                ),
            )
        our_name, ours = ours_within[limits]
        is_near = predict(other, pipeline) <= NEAR * predict(ours, pipeline)
        if is_near or name in ALWAYS:
            known = found.get(other.rank_actions)
            both = name if known is None else f"{known.other}, {name}"
            found[other.rank_actions] = Comparison(both, our_name, (other, ours))
    return list(found.values())


def predict(schedule: Schedule, pipeline: Pipeline) -> float:
    """Simulated seconds of a step."""
    return simulate_schedule(schedule, pipeline).makespan_seconds


def run_case(case: Case, seconds: float, overhead: Overhead, repeats: int, table: Table) -> list[tuple[float, float]]:
    """Measure a case and add its rows to the table.

    Returns:
        For each other schedule: the measured time of ours over its own, and the relative error of the prediction that
        is farther off.
    """
    pipeline = make_pipeline(case, seconds, overhead)
    comparisons = make_comparisons(case, pipeline)
    schedules = {item.other: item.schedules[0] for item in comparisons}
    schedules |= {item.ours: item.schedules[1] for item in comparisons}
    predicted = {name: predict(schedule, pipeline) for name, schedule in schedules.items()}
    stderr(f"{case}: {len(schedules)} schedules, about {sum(predicted.values()) * (repeats + 1):.0f} s")
    methods = tuple(Method(name, schedule, None) for name, schedule in schedules.items())
    topology = hosts_of(case)
    training = Training(make_pipeline(case, seconds), methods, nominal(topology), None, repeats)
    with EmulatedCluster(topology) as cluster:
        results: list[dict[str, Any]] = cluster.run(train_in_turns, training, timeout_seconds=600.0)
    measured = {
        name: statistics.median(lap.seconds for lap in merge_laps([r["laps"][name] for r in results]).kept())
        for name in schedules
    }
    timelines, pp_ranks = results[0]["timelines"], range(max(case.pp_rank_of_stage) + 1)
    exposed = {name: statistics.mean(map(timelines[name].exposed_seconds, pp_ranks)) for name in schedules}
    found = []
    for item in comparisons:
        other, ours = item.schedules
        pair = item.other, item.ours
        peaks = (str(max(schedule.peak_bytes(pipeline))) for schedule in (other, ours))
        shown = ([1e3 * values[name] for name in pair] for values in (predicted, measured, exposed))
        ratio = measured[item.ours] / measured[item.other]
        cells = (value for values in shown for value in values)
        table.add(str(case), item.other, *peaks, *cells, ratio)
        found.append((ratio, max(abs(predicted[name] / measured[name] - 1) for name in pair)))
    return found


def summarize(found: Sequence[tuple[float, float]]) -> tuple[str, bool]:
    """The last line, and whether both bars are met."""
    lost = sum(ratio > MAX_RATIO for ratio, _ in found)
    off = sum(error > MAX_ERROR for _, error in found)
    text = (
        f"{len(found)} comparisons: in {lost}, the other is faster by more than {100 * (MAX_RATIO - 1):.0f} %; ours / "
        f"other {min(r for r, _ in found):.3f} to {max(r for r, _ in found):.3f}; {off} predictions are off by more "
        f"than {100 * MAX_ERROR:.0f} %, the worst by {100 * max(error for _, error in found):.1f} %"
    )
    return text, not lost and not off


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=12, help="number of pipelines (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--pp-ranks", type=int, default=4, help="most pp ranks (default: 4)")
    parser.add_argument("--stages", type=int, default=8, help="most stages (default: 8)")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of the forwards of a pp rank (default: 20)")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each schedule (default: 7)")


def run(options: argparse.Namespace) -> int:
    """Print a row for each other schedule of each pipeline; returns 1 if a bar is missed."""
    seconds = options.milliseconds / 1e3
    overhead = measure_overhead(seconds)
    print_line(
        f"overhead: {1e3 * overhead.computation:.2f} ms a computation, {1e3 * overhead.message:.2f} ms a message"
    )
    columns = {"pipeline": "<50", "schedule": "<40", "peak": ">", "peak of ours": ">"}
    for what in ("predicted", "measured", "exposed"):
        columns |= {f"{what} ms": ">.1f", f"{what} of ours": ">.1f"}
    table = Table({**columns, "ours/other": ">.3f"})
    found = []
    for seed in track(range(options.seed, options.seed + options.number), "pipelines"):
        case = draw_case(seed, options.pp_ranks, options.stages)
        per_pp_rank = len(case.pp_rank_of_stage) // (max(case.pp_rank_of_stage) + 1)
        found += run_case(case, seconds / per_pp_rank, overhead, options.repeats, table)
    text, is_met = summarize(found)
    print_line(text)
    return 0 if is_met else 1
