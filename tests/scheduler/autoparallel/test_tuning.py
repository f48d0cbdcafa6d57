"""The loop of search and measurement, with a simulator in place of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reshard.scheduler import one_f_one_b, simulate_schedule, zb_h1
from reshard.scheduler.autoparallel import ChoiceRules, Cluster, Layer, LayerChoice, LayerGraph, LayerProfile, tune
from reshard.scheduler.autoparallel.costs.iteration import step_seconds
from reshard.scheduler.autoparallel.costs.search_problem import Candidate, SearchProblem
from reshard.scheduler.autoparallel.inputs.layer_profile import ClassTimes, LayerTimes
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.searching import choose_training_plan
from reshard.scheduler.autoparallel.tuning import Measurement, correct_profile, is_same
from reshard.scheduler.ir.actions import Kind
from reshard.scheduler.ir.text import format_schedule
from reshard.topology import Topology


def make_graph(num=6):
    half = {
        "tp_limit": 2,
        "tp_params": 5 * 10**6,
        "tp_saved_bytes": 5e4,
        "tp_all_reduces": 2,
        "tp_all_reduce_bytes": 1e4,
    }
    kinds = [f"kind {min(i, num - 2) // 2}" for i in range(num)]
    layers = [Layer(f"layers.{i}", kinds[i], 1e9, 10**7, 1e5, 1e4, **half) for i in range(num)]
    return LayerGraph.chain(layers, [(1, 25_000)] * (num - 1))


def make_profile(graph, seconds, message_seconds=0.0):
    """Seconds of a forward of one sample of each class; a backward takes twice that, half of it for the weights."""
    classes = {
        key: {1: ClassTimes((LayerTimes(1, s, s, s, 2 * s), LayerTimes(2, 2 * s, 2 * s, 2 * s, 4 * s)))}
        for key, s in seconds.items()
    }
    return LayerProfile(graph.key, "cpu", graph.dtype, classes, message_seconds=message_seconds)


def make_problem(seconds, message_seconds=0.0, hosts=(0, 1)):
    graph = make_graph()
    cluster = Cluster(Topology.uniform(hosts, 1e9), 1e9)
    profile, rules = make_profile(graph, seconds, message_seconds), ChoiceRules(max_stages_per_rank=1)
    return SearchProblem(graph, cluster, profile, 16, rules=rules, microbatch_counts=(4,))


def run_on(problem):
    """Measures a training plan where the times of a problem are true."""

    def measure(training_plan):
        costs = tuple(problem.stage_cost(stage, training_plan.num_microbatches) for stage in training_plan.stages)
        pipeline = problem.pipeline(training_plan.stages, training_plan.num_microbatches)
        timeline = simulate_schedule(training_plan.schedule, pipeline)
        seconds = step_seconds(timeline, costs, pp_ranks=training_plan.pp_ranks)
        return Measurement((seconds,), (timeline,))

    return measure


TRUE = {"kind 0": 2e-3, "kind 1": 1e-3, "kind 2": 4e-3}
WRONG = {"kind 0": 1e-3, "kind 1": 1e-3, "kind 2": 1e-3}


@pytest.mark.parametrize("build", [one_f_one_b, zb_h1])
def test_a_measured_step_corrects_the_profile(build):
    wrong, true = make_problem(WRONG), make_problem(TRUE, 2e-3)
    chosen = choose_training_plan(wrong)
    schedule = build(wrong.pipeline(chosen.stages, 4), 4)
    training_plan = replace(chosen, schedule_text=format_schedule(schedule))
    measured = run_on(true)(training_plan)
    assert training_plan.seconds < 0.7 * measured.seconds
    profile = correct_profile(wrong, training_plan, measured.timelines)
    assert len(training_plan.stages) == 2
    again = run_on(wrong.changed(profile=profile))(training_plan)
    assert again.seconds == pytest.approx(measured.seconds, rel=1e-3)
    assert profile.message_seconds == pytest.approx(2e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("choice", "pp_ranks"),
    [(LayerChoice(recompute=True), (0, 1)), (LayerChoice(2), (0, 1)), (LayerChoice(2), (0, 1, 1, 0))],
    ids=str,
)
def test_measured_steps_correct_times_of_shared_and_recomputed_layers_and_of_interleaved_stages(choice, pp_ranks):
    wrong, true = (make_problem(times, hosts=(0, 0, 1, 1)) for times in (WRONG, TRUE))
    cuts = (0, 3, 6) if len(pp_ranks) == 2 else (0, 2, 3, 5, 6)
    stages = tuple(
        StagePlan(first, end, 2 * r, 2 * r + 2, (choice,) * (end - first))
        for first, end, r in zip(cuts, cuts[1:], pp_ranks, strict=False)
    )
    training_plan = choose_training_plan(wrong, lambda problem: [Candidate("by hand", stages, 4)])
    measured = run_on(true)(training_plan)
    corrected = wrong.changed(profile=correct_profile(wrong, training_plan, measured.timelines))
    assert run_on(corrected)(training_plan).seconds == pytest.approx(measured.seconds, rel=1e-3)
    if not choice.recompute:
        assert any(span.action.kind is Kind.W for span in measured.timelines[0].spans)
    for stage in stages:
        seconds = [problem.stage_cost(stage, 4).weight_grad_seconds for problem in (corrected, true)]
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)


def test_the_loop_ends_with_the_true_choice():
    wrong, true = make_problem(WRONG), make_problem(TRUE, 1e-3)
    best = choose_training_plan(true)
    tuned = tune(wrong, choose_training_plan, run_on(true))
    assert len(tuned.rounds) <= 2
    assert tuned.gain > 1.1
    assert run_on(true)(tuned.training_plan).seconds <= 1.02 * best.seconds
    assert f"{tuned.gain:.3f} times as fast as the first choice" in str(tuned)
    settled = tune(true, choose_training_plan, run_on(true))
    assert settled.is_settled
    assert settled.gain == 1.0
    assert is_same(settled.training_plan, best)
