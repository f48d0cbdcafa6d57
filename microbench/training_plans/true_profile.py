"""Gains from the placement of transfers, and from a true profile.

A GPT with the proportions of GPT-2 XL (48 layers of width 1600, 1,024 tokens, a head for 50,257 tokens) on two emulated
hosts of two devices. Devices sleep for the seconds of their layers; tensors cross rate-limited links. The model is that
of devices of 60 TFLOPS and links of ``--link``. All its seconds are multiplied by one factor, so the ratio of
communication to computation stays the same.

Transfers run in two ways. *Blocking* transfers are on the compute stream, so a send blocks the next computation of its
producer. *Overlapped* transfers have streams of their own and start when their producers end, as ``overlap_transfers``
places them. A timer around a blocking stage counts blocked time as computation, so its profile is wrong; the profile of
overlapped stages holds only computation. The search runs on each profile without the cost of edges (``alpa``) and with
it (``auto``). Every choice runs in both ways with 1F1B, and under the schedule that the search chose with it.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import nominal
from microbench.harness.case_options import add_number
from microbench.harness.turns import equal_hosts
from microbench.training_plans.accuracy import make_pipeline, measure
from microbench.training_plans.by_hand import make_by_hand, parse_stages
from reshard.cli.progress_bars import print_line, track
from reshard.scheduler import one_f_one_b
from reshard.scheduler.autoparallel import Cluster, Layer, LayerGraph, LayerProfile, Tensor, TrainingPlan
from reshard.scheduler.autoparallel.costs.search_problem import SearchProblem
from reshard.scheduler.autoparallel.inputs.layer_profile import ClassTimes, LayerTimes
from reshard.scheduler.autoparallel.searching import choose_training_plan
from reshard.scheduler.autoparallel.tuning import correct_profile
from reshard.scheduler.passes.transfer_overlap import block_transfers
from reshard.scheduler.simulation.replay import PipelineTimeline
from reshard.topology import Topology, parse_rate

NUM_SAMPLES, LAYERS = 8, 48
WIDTH, TOKENS, VOCABULARY = 1600, 1024, 50257
FLOPS_PER_SECOND = 60e12
FIRST = "12:1, 12:1, 12:1, 12:1"
BLOCKING, OVERLAPPED, CHOSEN = "blocking 1F1B", "overlapped 1F1B", "chosen schedule"


def layer_seconds() -> list[float]:
    """Forward seconds of one sample in each layer on the modelled device; the last layer has the head."""
    flops = [24 * TOKENS * WIDTH**2 + 4 * TOKENS**2 * WIDTH] * LAYERS
    flops[-1] += 2 * TOKENS * WIDTH * VOCABULARY
    return [flop / FLOPS_PER_SECOND for flop in flops]


def make_problem(topology: Topology, ratio: float, scale: float) -> SearchProblem:
    """The search for the layers.

    Each layer is a separate class, so that a profile of a step may give each stage other times.

    Args:
        ratio: rate of the emulated links over that of the modelled ones.
        scale: factor of the seconds of the model.
    """
    seconds = [scale * layer_second for layer_second in layer_seconds()]
    numel = round(scale * ratio * WIDTH * TOKENS * 2 / 4)
    graph = LayerGraph(
        tuple(Layer(f"layers.{index}", f"layer {index}", 0.0, 0, 0.0) for index in range(LAYERS)),
        tuple(Tensor(f"x{index}", (1, numel), "float32", index, (index + 1,)) for index in range(LAYERS - 1)),
        name="GPT of XL's proportions",
    )
    classes = {f"layer {index}": {1: ClassTimes((LayerTimes(1, s, s, s, 2 * s),))} for index, s in enumerate(seconds)}
    profile = LayerProfile(graph.key, "timed", graph.dtype, classes)
    return SearchProblem(graph, Cluster(topology, 1e9), profile, NUM_SAMPLES, microbatch_counts=(NUM_SAMPLES,))


def merge_waits(timeline: PipelineTimeline) -> PipelineTimeline:
    """The timeline as a timer around each computation sees it: blocked time counts as computation."""
    spans, waiting = [], dict[int, float]()
    for span in timeline.spans:
        if span.action.kind.is_transfer:
            waiting.setdefault(span.pp_rank, span.start)
        else:
            spans.append(replace(span, start=waiting.pop(span.pp_rank, span.start)))
    return replace(timeline, spans=tuple(spans))


def measure_ways(
    cluster: EmulatedCluster, problem: SearchProblem, training_plan: TrainingPlan, topology: Topology, repeats: int
) -> tuple[dict[str, list[float]], dict[str, PipelineTimeline]]:
    """Seconds of the steps in each way, and a timeline of each; the ways run in turns."""
    pipeline = make_pipeline(problem, training_plan.stages)
    plain = one_f_one_b(pipeline, NUM_SAMPLES)
    schedules = {BLOCKING: block_transfers(plain, pipeline), OVERLAPPED: plain, CHOSEN: training_plan.schedule}
    return measure(cluster, problem, training_plan.stages, schedules, topology, repeats)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="1 Gbit/s", help="rate of each emulated NIC (1 Gbit/s)")
    parser.add_argument("--link", default="10 Gbit/s", help="rate of each modelled NIC (10 Gbit/s)")
    add_number(parser, "--scale", 4.0, "factor of all modelled times", low=1e-3)
    add_number(parser, "--repeats", 5, "steps of each choice and schedule")


def run(options: argparse.Namespace) -> None:
    """Print the seconds of a step for each choice and way, and the gains over ``alpa`` on the wrong profile."""
    shaped = equal_hosts(options.rate, 2, 2)
    plain = nominal(shaped)
    true = make_problem(plain, parse_rate(options.rate) / parse_rate(options.link), options.scale)
    measured: dict[str, dict[str, float]] = {}
    with EmulatedCluster(shaped) as cluster:
        _, first = make_by_hand(true, true.cluster, parse_stages(FIRST), NUM_SAMPLES)
        seconds, timelines = measure_ways(cluster, true, first, plain, options.repeats)
        problems = {
            "wrong": true.changed(profile=correct_profile(true, first, [merge_waits(timelines[BLOCKING])])),
            "true": true.changed(profile=correct_profile(true, first, [timelines[OVERLAPPED]])),
        }
        choices = {"even division": first}
        choices |= {
            f"{name} profile, {method}": choose_training_plan(problem, method)
            for name, problem in problems.items()
            for method in ("alpa", "auto")
        }
        done = {(str(first.stages), first.schedule_text): seconds}
        for name, training_plan in track(choices.items(), "choices", len(choices)):
            key = str(training_plan.stages), training_plan.schedule_text
            if key not in done:
                done[key] = measure_ways(cluster, true, training_plan, plain, options.repeats)[0]
            measured[name] = {way: statistics.median(item) for way, item in done[key].items()}
            layers = ", ".join(str(stage.end_layer - stage.first_layer) for stage in training_plan.stages)
            cells = ", ".join(
                f"{way} {item:.3f} s ({min(done[key][way]):.3f} to {max(done[key][way]):.3f})"
                for way, item in measured[name].items()
            )
            print_line(f"{name:22} layers {layers:14} predicted {training_plan.seconds:.3f} s: {cells}")
    base = measured["wrong profile, alpa"][BLOCKING]
    for name, turn_seconds in measured.items():
        gains = ", ".join(f"{way} {100 * (base / item - 1):+.1f} %" for way, item in turn_seconds.items())
        print_line(f"{name:22} over the wrong profile, alpa, {BLOCKING}: {gains}")
