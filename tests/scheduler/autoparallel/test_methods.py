"""Search methods against all plans of small problems, each in its own model."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from reshard.scheduler import simulate_schedule
from reshard.scheduler.autoparallel import ChoiceRules, Cluster, Layer, LayerChoice, LayerGraph, LayerProfile, Tensor
from reshard.scheduler.autoparallel.costs.device_peaks import peak_of_stage
from reshard.scheduler.autoparallel.costs.iteration import evaluate, step_seconds
from reshard.scheduler.autoparallel.costs.layer_costs import LayerCost, late_bytes, slowest_of, working_bytes
from reshard.scheduler.autoparallel.costs.search_problem import Candidate, SearchProblem
from reshard.scheduler.autoparallel.costs.step_bounds import step_bound
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.methods import alpa, bmw, joint, knapsack, recurrence_tables
from reshard.scheduler.autoparallel.methods.auto_method import METHODS, auto, decide
from reshard.scheduler.autoparallel.methods.bounds import step_bound_of_any
from reshard.scheduler.autoparallel.result.reports import balance_degrees
from reshard.scheduler.schedules.classic import eager_1f1b, one_f_one_b
from reshard.topology import Topology
from tests.reference.recurrence import best_stages as reference_stages
from tests.scheduler.autoparallel.random_searches import all_plans, make_problem, min_seconds, seconds_at


def check_joint(seed, **kinds):
    """For some paces, the recurrence finds the least of all plans; with lazy prices, the least over all paces."""
    problem = make_problem(seed, **kinds)
    tables = recurrence_tables.make_tables(problem, problem.microbatch_counts[0])
    plans, grid = list(all_plans(tables)), joint.bottleneck_times(tables)
    assert plans
    for limit in grid[:: max(1, len(grid) // 6)]:
        trip, excess, _ = tables.best_stages(limit, {})
        least = min(seconds_at(tables, plan, limit, False) for plan in plans)
        found = trip + (tables.num_microbatches - 1) * limit + excess if trip < math.inf else math.inf
        assert found == pytest.approx(least, rel=1e-9)
    first = next(joint.best_plans(problem), None)
    while grid[-1] < 1e4 * joint.bottleneck_times(tables)[-1]:
        grid.append(grid[-1] * joint.PACE_STEP)
    least = min(min_seconds(tables, plan, grid) for plan in plans)
    assert (math.inf if first is None else first.predicted_seconds) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("seed", range(24))
def test_joint_finds_the_best_of_all_plans(seed):
    check_joint(seed)


@pytest.mark.parametrize("seed", range(8))
def test_joint_finds_the_best_of_all_plans_with_grids(seed):
    problem = make_problem(seed, grids=True)
    tables = recurrence_tables.make_tables(problem, problem.microbatch_counts[0])
    assert any(option.choice.grid for option in tables.options)
    check_joint(seed, grids=True)


@pytest.mark.parametrize("seed", range(8))
def test_joint_finds_the_best_of_all_plans_with_ties(seed):
    assert make_problem(1000 + seed, ties=True).graph.ties
    check_joint(1000 + seed, ties=True, grids=seed % 2 == 1)


@pytest.mark.parametrize("seed", range(12))
def test_joint_finds_the_best_of_all_plans_behind_slow_links(seed):
    check_joint(seed, slow_links=True)


def chain_of_equal_layers(sizes, cut_bytes, *, memory=1e9, params=1000):
    """Layers of 0.01 s a sample, one sample in each of 8 microbatches, and hosts with links of 1 MB/s."""
    names = [f"layers.{index}" for index in range(len(cut_bytes) + 1)]
    layers = tuple(Layer(name, "layer", 1e9 / 3, params, 1000.0, 1000.0) for name in names)
    tensors = tuple(
        Tensor(f"x{cut}", (nbytes // 4,), "float32", cut - 1, (cut,)) for cut, nbytes in enumerate(cut_bytes, 1)
    )
    graph = LayerGraph(layers, tensors, name="chain")
    ranks = tuple(host for host, size in enumerate(sizes) for _ in range(size))
    cluster = Cluster(Topology.uniform(ranks, 1e6), memory)
    profile = LayerProfile.estimate(graph, flops_per_second=1e11, efficiency=1.0)
    return SearchProblem(graph, cluster, profile, 8, rules=ChoiceRules(recompute=(False,)), microbatch_counts=(8,))


@pytest.mark.parametrize(
    ("sizes", "slow_cut"), [((2, 1), 4), ((1, 2), 2)], ids=["the first host has two", "the last host has two"]
)
def test_a_stage_may_use_all_of_a_port_that_no_other_stage_uses(sizes, slow_cut):
    """The edge takes 0.75 times as long as each of equal stages."""
    problem = chain_of_equal_layers(sizes, [15_000 if cut == slow_cut else 40 for cut in range(1, 6)])
    found = joint.joint(problem)[0]
    assert [stage.num_layers for stage in found.stages] == [2, 2, 2]
    uneven = (2, 3, 1) if slow_cut == 4 else (1, 3, 2)
    ends = itertools.accumulate(uneven)
    others = [
        StagePlan(end - n, end, r, r + 1, (LayerChoice(),) * n)
        for r, (n, end) in enumerate(zip(uneven, ends, strict=True))
    ]
    assert evaluate(problem, found).seconds < evaluate(problem, Candidate("by hand", tuple(others), 8)).seconds


def test_joint_finds_plans_whose_edges_take_longer_than_all_computation():
    problem = chain_of_equal_layers((1, 1), [800_000], memory=2e7, params=1_000_000)
    found = joint.joint(problem)
    assert [stage.num_layers for stage in found[0].stages] == [1, 1]
    assert found[0].predicted_seconds > 8 * 0.8


@pytest.mark.parametrize("seed", range(4))
def test_joint_searches_few_bottleneck_times_and_gives_distinct_plans(seed, monkeypatch):
    problem = make_problem(seed, slow_links=True).changed(microbatch_counts=(1, 2, 4))
    searched, recurrence = [], recurrence_tables.Tables.best_stages

    def best_stages(tables, bottleneck_seconds, prices):
        searched.append((tables.num_microbatches, bottleneck_seconds))
        return recurrence(tables, bottleneck_seconds, prices)

    monkeypatch.setattr(recurrence_tables.Tables, "best_stages", best_stages)
    found = joint.joint(problem)
    seconds = [candidate.predicted_seconds for candidate in found]
    assert seconds == sorted(seconds) and seconds[-1] <= 1.5 * seconds[0]
    assert len({candidate.text for candidate in found}) == len(found)
    counts = [candidate.num_microbatches for candidate in found]
    assert max(map(counts.count, counts)) <= joint.PER_COUNT
    tables = [recurrence_tables.make_tables(problem, count) for count in problem.microbatch_counts]
    assert len(set(searched)) < 0.5 * sum(len(joint.bottleneck_times(item)) for item in tables if item is not None)


@pytest.mark.parametrize("seed", range(8))
def test_native_recurrence_equals_its_reference(seed):
    problem = make_problem(100 + seed, grids=seed % 2 == 1, ties=seed > 3)
    tables = recurrence_tables.make_tables(problem, problem.microbatch_counts[0])
    rng = random.Random(seed)
    prices = {}
    for plan in rng.sample(list(all_plans(tables)), 2):
        stages = [tables.stage(*transfer) for transfer in plan]
        joint.price_edges(tables, stages, prices)
    grid = joint.bottleneck_times(tables)
    for limit in rng.sample(grid, 6):
        at = sorted(prices)
        trip, excess, stages = reference_stages(
            len(problem.graph.layers), problem.graph.is_chain, tables.option_class, tables.forward, tables.backward,
            tables.activation, tables.fixed, tables.sync, tables.ending, tables.allowed, tables.next_at, tables.port_in,
            tables.port_out, tables.memory, tables.received, tables.sent, tables.cut_bytes, tables.factor,
            tables.latency, at,
            [prices[i][0] for i in at], [prices[i][1] for i in at], tables.num_microbatches, limit,
        )  # fmt: skip
        assert tables.best_stages(limit, prices) == (trip, excess, tuple(tables.stage(*stage) for stage in stages))


@pytest.mark.parametrize("seed", range(8))
def test_no_round_trip_is_below_the_bound(seed):
    """The bound is the least round trip if neither edges nor sums of gradients take time."""
    problem = make_problem(600 + seed, grids=seed % 2 == 1)
    tables = recurrence_tables.make_tables(problem, problem.microbatch_counts[0])
    free = replace(tables, cut_bytes=np.zeros_like(tables.cut_bytes), sync=np.zeros_like(tables.sync))
    slowest = joint.bottleneck_times(tables)[-1] * 1e6
    assert tables.min_trip() == pytest.approx(free.best_stages(slowest, {})[0], rel=1e-8)
    assert tables.min_trip() <= tables.best_stages(slowest, {})[0]


@pytest.mark.parametrize("seed", range(12))
def test_alpa_finds_the_best_of_all_plans_in_its_model(seed):
    problem = make_problem(200 + seed, ties=seed > 7)
    count = problem.microbatch_counts[0]
    tables = recurrence_tables.make_tables(problem, count)

    def seconds(plan):
        costs = [problem.stage_cost(tables.stage(*transfer), count) for transfer in plan]
        for index, cost in enumerate(costs):
            if cost.memory_bytes(min(count, len(costs) - index)) > cost.limit_bytes:
                return math.inf
        times = [cost.seconds + cost.ending_seconds / count for cost in costs]
        return sum(times) + (count - 1) * max(times)

    least = min(map(seconds, all_plans(tables)))
    found, stages = alpa.best_stages(tables)
    assert found == pytest.approx(least, rel=1e-5)
    if stages:
        costs = [problem.stage_cost(stage, count) for stage in stages]
        times = [cost.seconds + cost.ending_seconds / count for cost in costs]
        assert sum(times) + (count - 1) * max(times) == pytest.approx(found)


def test_alpa_allows_the_slowest_of_times_that_count_as_equal(monkeypatch):
    tables = recurrence_tables.make_tables(make_problem(200), make_problem(200).microbatch_counts[0])
    least = alpa.best_stages(tables)[0]
    monkeypatch.setattr(alpa, "SAME", 1e9)
    assert least <= alpa.best_stages(tables)[0] < math.inf


@pytest.mark.parametrize("seed", range(16))
def test_knapsack_finds_the_best_of_all_choices(seed):
    has_ties = seed > 7
    problem = make_problem(300 + seed, executable=False, ties=has_ties, max_layers=3 + has_ties)
    count, ranks = problem.microbatch_counts[0], (0, problem.cluster.num_ranks)
    num = min(3, len(problem.graph.layers) - has_ties)  # with ties, other stages have some of the layers
    choices = problem.choices(ranks[1], problem.num_samples // count)
    if not choices:
        assert knapsack.pack_stage(problem, 0, num, ranks, count, 2) is None
        return
    limit = problem.cluster.memory_of(*ranks)
    step = (limit - knapsack.held_back(problem, 0, num, ranks, count, choices, 2)) / knapsack.STEPS
    place, least = problem.place(*ranks), math.inf
    unique = [1.0] * num  # part of the parameters of each layer that no later layer of the stage shares
    for tied, number in problem.graph.ties:
        for layer in [item for item in tied if item < num][:-1]:
            unique[layer] -= number / problem.graph.layers[layer].num_params
    for picked in itertools.product(choices, repeat=num):
        costs = [problem.layer_cost(layer, choice, place, count) for layer, choice in enumerate(picked)]
        needed = [u * c.state_bytes + 2 * c.activation_bytes for u, c in zip(unique, costs, strict=True)]
        if step <= 0 or sum(math.ceil(item / step - 1e-9) for item in needed) > knapsack.STEPS:
            continue
        cost = problem.stage_cost(StagePlan(0, num, *ranks, picked), count)
        least = min(least, cost.seconds + cost.ending_seconds / count)
    found = knapsack.pack_stage(problem, 0, num, ranks, count, 2)
    assert (math.inf if found is None else found.seconds) == pytest.approx(least, rel=1e-9)
    if found is not None:
        assert found.memory_bytes <= limit


def test_partition_balances_the_largest_sum():
    rng = random.Random(0)
    for _ in range(30):
        num, degree = rng.randint(3, 7), rng.randint(1, 3)
        weights = [[rng.uniform(1, 10) for _ in range(num)] for _ in range(degree)]

        def largest(cuts, weights=weights):
            return max(sum(weights[s][a:b]) for s, (a, b) in enumerate(itertools.pairwise(cuts)))

        every = [(0, *cuts, num) for cuts in itertools.combinations(range(1, num), degree - 1)]
        assert largest(bmw.partition(weights, degree)) == pytest.approx(min(map(largest, every)))


def test_bmw_moves_layers_only_where_they_help():
    problem = make_problem(401)
    for candidate in bmw.bmw(problem):
        times = [problem.stage_cost(stage, candidate.num_microbatches).seconds for stage in candidate.stages]
        time, _ = balance_degrees(times, times)
        assert 0 <= time <= 1 - 1 / len(times) + 1e-9


@pytest.mark.parametrize(("seed", "grids"), [(0, False), (1, False), (3, False), (4, False), (3, True), (4, True)])
def test_auto_is_never_behind_a_candidate(seed, grids):  # with seed 2, nothing fits the memory
    problem = make_problem(500 + seed, grids=grids)
    candidates = auto(problem)
    best = decide(problem, candidates, moves=True)[0]
    for method in METHODS.values():
        for candidate in method(problem):
            found = evaluate(problem, candidate)
            assert found is None or found.short_bytes or best.seconds <= found.seconds * (1 + 1e-9)
            assert found is None or step_bound(problem, candidate) <= found.seconds * (1 + 1e-9)
            assert found is None or found.short_bytes or step_bound_of_any(problem) <= found.seconds


def test_gradients_count_from_the_first_backward():
    problem = make_problem(1)
    plain = problem.layer_cost(0, LayerChoice(), problem.place(0, 1), 4)
    costs = [replace(plain, gradient_bytes=g, activation_bytes=a) for g, a in ((4.0, 3.0), (1.0, 5.0))]
    assert late_bytes(costs) == 4.0  # of the last layer, before its activations are released
    costs = [replace(plain, gradient_bytes=g, activation_bytes=a) for g, a in ((4.0, 3.0), (6.0, 5.0))]
    assert late_bytes(costs) == 4.0  # of the last layer only, as 4 + 6 - 5 is less than 6
    stage = problem.stage_cost(StagePlan(0, 1, 0, 1, (LayerChoice(),)), 4)
    assert peak_of_stage(stage, 3).memory_bytes == stage.memory_bytes(3)
    assert peak_of_stage(stage, 4).memory_bytes == stage.memory_bytes(4) - late_bytes([plain])


def test_buffers_hold_only_microbatches_that_are_left_in_the_step():
    problem = make_problem(1)
    plain = problem.stage_cost(StagePlan(0, 1, 0, 1, (LayerChoice(),)), 4)
    stage = replace(plain, state_bytes=10.0, late_bytes=1.0, buffer_bytes=6.0, received_bytes=4.0, num_microbatches=4)
    assert [sum(stage.peak_parts(held)) for held in (1, 2, 3, 4)] == [16.0, 15.0, 13.0, 11.0]
    assert stage.peak_parts(1) == (10.0, 6.0)  # with all gradients
    assert stage.peak_parts(3) == (9.0, 4.0)  # in the first backward: later, no tensor is left to receive
    assert all(peak_of_stage(stage, held).memory_bytes <= stage.memory_bytes(held) for held in range(1, 5))
    alone = replace(stage, num_microbatches=1, late_bytes=3.0)
    assert alone.peak_parts(1) == (7.0, 2.0)


def test_a_layer_is_recomputed_with_its_own_parameters_not_with_those_of_the_largest_layer():
    problem = make_problem(1)
    plain = problem.layer_cost(0, LayerChoice(), problem.place(0, 1), 4)

    def working(*layers):
        names = "recompute_bytes", "gathered_bytes", "activation_bytes"
        return working_bytes([replace(plain, **dict(zip(names, layer, strict=True))) for layer in layers])

    assert working((0.0, 1.0, 5.0), (0.0, 10.0, 1.0)) == 21.0  # without recomputation
    assert working((9.0, 1.0, 2.0), (0.0, 10.0, 1.0)) == 21.0  # 8 + 2 * 1 + 10 is less than two gathers of the largest
    assert working((19.0, 1.0, 2.0), (0.0, 10.0, 1.0)) == 30.0  # 18 + 2 * 1 + 10
    assert working((9.0, 10.0, 2.0), (0.0, 10.0, 1.0)) == 38.0  # equal layers: 8 + 3 * 10
    assert working((9.0, 0.0, 2.0), (0.0, 0.0, 1.0)) == 8.0  # without ZeRO 3


def test_the_slowest_pass_of_input_gradients_is_not_deferred():
    def cost(backward, weight):
        return LayerCost(1.0, backward, weight, *[0.0] * 9)

    both = slowest_of([cost(10.0, 5.0), cost(9.0, 1.0)])
    assert (both.backward_seconds, both.weight_grad_seconds) == (10.0, 2.0)
    assert slowest_of([cost(10.0, 0.0), cost(9.0, 0.0)]).weight_grad_seconds == 0.0


def test_an_evaluation_is_the_simulation_of_its_schedule_and_no_known_one_is_faster():
    problem = make_problem(1)
    for candidate in auto(problem):
        count, best = candidate.num_microbatches, evaluate(problem, candidate)
        pipeline, (costs, _) = problem.pipeline(candidate.stages, count), problem.costs(candidate.stages, count)
        assert best.schedule.in_flight == best.in_flight
        assert best.seconds == step_seconds(simulate_schedule(best.schedule, pipeline), costs)
        for build in (one_f_one_b, eager_1f1b):
            schedule = build(pipeline, count)
            held = zip(costs, schedule.in_flight, strict=True)
            if all(peak_of_stage(cost, depth).memory_bytes <= cost.limit_bytes for cost, depth in held):
                assert best.seconds <= step_seconds(simulate_schedule(schedule, pipeline), costs) * (1 + 1e-9)
        assert evaluate(problem, candidate, below_seconds=best.seconds * 1.001) == best
        assert evaluate(problem, candidate, below_seconds=best.seconds) is None


def test_a_candidate_is_a_value():
    problem = make_problem(0)
    candidate = joint.joint(problem)[0]
    assert candidate == Candidate(**vars(candidate))
    assert hash(candidate) is not None
