"""Several stages on the ranks of a mesh: the search against all such plans, and their memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from reshard.errors import ArgumentError
from reshard.scheduler.autoparallel import ChoiceRules, LayerChoice, TrainingPlan, search
from reshard.scheduler.autoparallel.costs.codec_costs import RAW, CodecCost, CodecCosts
from reshard.scheduler.autoparallel.costs.device_peaks import peak_of_stages
from reshard.scheduler.autoparallel.costs.iteration import exposed_sums
from reshard.scheduler.autoparallel.costs.layer_costs import StageCost, may_sum_early
from reshard.scheduler.autoparallel.costs.search_problem import Candidate
from reshard.scheduler.autoparallel.device_subsets import choose_part
from reshard.scheduler.autoparallel.inputs.stages import StagePlan, check_stages
from reshard.scheduler.autoparallel.methods import auto_method
from reshard.scheduler.autoparallel.methods.moves import neighbours
from tests.scheduler.autoparallel.random_searches import (
    least_interleaved_seconds,
    make_problem,
    make_problem_with_one_layer_off_grids,
)


def check_interleaved(seed):
    """The choice is as fast as any interleaved plan and any other choice. Returns its gain over the latter."""
    problem = make_problem(seed, max_layers=6)
    found = {}
    for limit in (1, 4):
        changed = problem.changed(rules=replace(problem.rules, max_stages_per_rank=limit))
        try:
            found[limit] = choose_part(changed)
        except ArgumentError:
            found[limit] = None
    seconds = {limit: math.inf if plan is None else plan.seconds for limit, plan in found.items()}
    assert seconds[4] <= seconds[1] * (1 + 1e-9)
    least = least_interleaved_seconds(problem, math.inf)
    assert seconds[4] <= least * (1 + 1e-9)
    assert found[4] is None or found[4].bound_seconds <= least
    return seconds[1] / seconds[4] if found[4] is not None else 1.0


@pytest.mark.parametrize(("seed", "gain"), [(0, 1.2), (5, 1.01), (9, 1.05), (16, 1.0)])
def test_no_interleaved_plan_is_faster_than_the_choice_or_below_the_bound(seed, gain):
    assert check_interleaved(seed) >= gain


@pytest.mark.parametrize("seed", [1, 5, 7])
def test_meshes_on_grids_have_the_layers_that_can_be_on_them(seed):
    problem = make_problem_with_one_layer_off_grids(seed)
    found = choose_part(problem)
    assert len(set(found.pp_ranks)) < len(found.stages)
    assert any(stage.choices[0].grid for stage in found.stages)
    assert found.seconds <= least_interleaved_seconds(problem, math.inf) * (1 + 1e-9)


def test_moves_improve_as_many_other_candidates_if_the_fastest_are_interleaved(monkeypatch):
    problem = make_problem(0, max_layers=6)
    plain = auto_method.evaluate_all(problem, auto_method.auto(problem))
    shared = auto_method.interleave(problem, plain, plain[0].seconds)
    assert shared
    starts = []
    monkeypatch.setattr(auto_method, "improve", lambda problem, start: starts.append(start) or start)
    auto_method.refine(problem, [*shared, *plain])
    assert starts[: auto_method.NUM_FINALISTS] == plain[: auto_method.NUM_FINALISTS]


def test_a_move_gives_one_choice_to_all_stages_on_the_same_ranks_if_a_later_one_differs():
    problems = (make_problem(seed, max_layers=6) for seed in range(100))
    problem = next(item for item in problems if len(item.graph.layers) == 5 and item.cluster.num_ranks == 2)
    plain, recompute = LayerChoice(), LayerChoice(recompute=True)
    first, other = StagePlan(0, 2, 0, 1, (plain,) * 2), StagePlan(2, 3, 1, 2, (recompute,))
    differs = Candidate("test", (first, other, StagePlan(3, 5, 0, 1, (recompute,) * 2)), problem.microbatch_counts[0])
    alike = (first, other, StagePlan(3, 5, 0, 1, (plain,) * 2))
    assert any(found.stages == alike for found in neighbours(problem, differs))


def test_an_interleaved_plan_says_which_stages_share_ranks_and_is_read_back():
    problem = make_problem(0, max_layers=6)
    found = search(problem.graph, problem.cluster, problem.profile, num_samples=8, fixed={"num_microbatches": 4})
    assert found.pp_ranks == (0, 1, 1, 0) and found.num_ranks == 3
    assert TrainingPlan.from_json(found.to_json()) == found
    text = found.explain()
    assert "step and memory: with stage 3, on the same ranks" in text
    assert "step of stages 1 and 2: " in text and "step of stages 0 and 3: " in text
    assert str(found).endswith("; stages on meshes 0, 1, 1, 0")
    assert all(report.memory_bytes <= report.limit_bytes for report in found.reports)
    assert found.balance[0] <= 0.5
    busy = sum(found.reports[stage].busy_seconds for stage in (0, 3))
    assert busy < found.seconds and found.placements()[0].ranks == found.placements()[3].ranks == (0, 1)


def test_rules_can_allow_one_stage_on_each_mesh_alone():
    problem = make_problem(0, max_layers=6)
    rules, fixed = ChoiceRules(max_stages_per_rank=1), {"num_microbatches": 4}
    found = search(problem.graph, problem.cluster, problem.profile, num_samples=8, fixed=fixed, rules=rules)
    assert len(set(found.pp_ranks)) == len(found.stages)
    with pytest.raises(ArgumentError, match="max_stages_per_rank of ChoiceRules is 0; it must be at least 1"):
        ChoiceRules(max_stages_per_rank=0)


def test_a_device_makes_early_sums_one_after_the_other_and_the_others_after_its_last_computation():
    """Stages 0 to 2 of a device end at 10, 4 and 7 s: sums from 4 to 9 s, to 13 s and to 15 s, and then a late second."""
    plain = StageCost(*[0.0] * 12)
    sums = [(2.0, 2.0), (5.0, 5.0), (5.0, 4.0), (3.0, 3.0)]  # all seconds of each stage, and the early ones
    costs = [replace(plain, sync_seconds=whole, early_sync_seconds=early) for whole, early in sums]
    assert exposed_sums([10.0, 4.0, 7.0, 1.0], costs, [0, 0, 0, 1]) == [2.0, 0.0, 4.0, 3.0]
    late = [replace(cost, early_sync_seconds=0.0) for cost in costs]
    assert exposed_sums([10.0, 4.0, 7.0, 1.0], late, [0, 0, 0, 1]) == [2.0, 5.0, 5.0, 3.0]


def test_only_raw_sums_under_ddp_are_early():
    others = (LayerChoice(2), LayerChoice(zero=1), LayerChoice(zero=3), LayerChoice.on_grid(1, 1, 2))
    assert may_sum_early(LayerChoice(), RAW) and not any(may_sum_early(choice, RAW) for choice in others)
    codec = CodecCost(0.25, 1e9, 1e9)
    assert not may_sum_early(LayerChoice(), CodecCosts(codec)) and may_sum_early(
        LayerChoice(), CodecCosts(codec, is_optional=True)
    )


def test_the_memory_of_a_device_adds_its_stages_over_time():
    """Two stages of one device: F0 F1 B1 B0, then a second microbatch."""
    small = StageCost(*[0.0] * 7, 100.0, 10.0, 5.0, 1.0, 1e3, late_bytes=40.0, num_microbatches=2)
    large = replace(small, activation_bytes=30.0, working_bytes=7.0, tie_bytes=3.0)
    codes = [8 * nth + code for nth in (0, 1) for code in (0, 4, 5, 1)]
    peak = peak_of_stages((small, large), (0, 1), codes)
    assert peak.state_bytes + peak.activation_bytes == 200 + 40  # with the second microbatch, all gradients exist
    assert (peak.working_bytes, peak.buffer_bytes, peak.ending_bytes) == (7, 2, 203)
    first = peak_of_stages((small, large), (0, 1), codes[:4])
    assert (first.state_bytes, first.activation_bytes) == (200, 0)  # after B0
    early = peak_of_stages((small, large), (0, 1), codes[:3])
    assert (early.state_bytes, early.activation_bytes) == (160, 10)  # after B1
    split = peak_of_stages((small, large), (0, 1), [0, 4, 6, 7, 2, 3])  # F0 F1 I1 W1 I0 W0
    assert (split.state_bytes, split.activation_bytes) == (200, 10)  # after I0, its activations are still kept


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (StagePlan(1, 2, 0, 1, (LayerChoice(),)), "begins with layer 1 and rank 0; .* or have the ranks of an earlier"),
        (StagePlan(1, 2, 0, 2, (LayerChoice(2),)), "stages 0 and 1 share ranks 0 to 1, but have tp=1 and tp=2"),
    ],
)
def test_stages_that_share_ranks_have_the_same_ranks_and_divide_layers_alike(second, text):
    first = StagePlan(0, 1, 0, 2, (LayerChoice(),))
    check_stages([first, replace(second, end_rank=2, choices=(LayerChoice(),))])
    with pytest.raises(ArgumentError, match=text):
        check_stages([first, second])


@pytest.mark.nightly
def test_stages_are_interleaved_on_parts_whose_other_plans_are_much_slower():
    from tests.campaigns.search import compare_clusters  # imports this module

    compare_clusters(1, 610)  # hosts in another order: 1.46 times as fast as without interleaved stages
