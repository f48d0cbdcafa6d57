"""Lower bounds on the step of a candidate: no schedule is faster, and slow candidates cost no plans."""

from __future__ import annotations

import itertools
import math

import pytest

from reshard.scheduler.autoparallel import Cluster, LayerChoice, LayerGraph, LayerProfile, Tensor
from reshard.scheduler.autoparallel.costs.iteration import evaluate
from reshard.scheduler.autoparallel.costs.search_problem import Candidate, SearchProblem
from reshard.scheduler.autoparallel.costs.step_bounds import may_be_faster, step_bound
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.methods.joint import joint
from reshard.topology import Host, Link, Topology
from tests.scheduler.autoparallel.random_searches import interleaved_candidates, make_problem


@pytest.mark.parametrize(
    ("seed", "options"), [(9, {}), (9, {"grids": True}), (9, {"ties": True}), (9, {"grids": True, "ties": True})]
)
def test_no_interleaved_candidate_is_faster_than_the_bounds_with_prices_of_its_edges(seed, options):
    problem = make_problem(seed, max_layers=6, **options)
    count = 0
    for candidate in itertools.islice(interleaved_candidates(problem), 0, 400, 40):
        found = evaluate(problem, candidate)
        if found is not None:
            assert may_be_faster(problem, candidate, found.seconds * (1 + 1e-6))
            count += 1
    assert count


@pytest.mark.parametrize(("seed", "options"), [(6, {}), (11, {"ties": True})])
def test_no_interleaved_candidate_with_early_sums_is_faster_than_the_bounds(seed, options):
    problem = make_problem(seed, max_layers=6, **options)
    fast = LayerProfile.estimate(problem.graph, flops_per_second=1e12)  # sums take a large part of a step
    problem, num_hidden = problem.changed(profile=fast), 0
    for candidate in itertools.islice(interleaved_candidates(problem), 0, 300, 3):
        found = evaluate(problem, candidate)
        if found is not None:
            assert step_bound(problem, candidate) <= found.seconds * (1 + 1e-9)
            assert may_be_faster(problem, candidate, found.seconds * (1 + 1e-6))
            num_hidden += sum(found.sum_seconds) < 0.9 * sum(cost.sync_seconds for cost in found.costs)
    assert num_hidden


@pytest.mark.parametrize("inside", [None, 1e8])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_no_edge_costs_less_than_its_bound(inside, has_gradient):
    """A host of one rank, and hosts of two and four; the bound is also tight where one message carries all bytes."""
    graph = LayerGraph.transformer(layers=1, hidden=256, heads=4, sequence=64, vocabulary=64)
    links = tuple(Host((Link.of(rate),)) for rate in (1e9, 1e8, 4e8))
    cluster = Cluster(Topology((0, 1, 1, 2, 2, 2, 2), links, inside_bytes_per_second=inside), 1e10)
    costs = SearchProblem(graph, cluster, LayerProfile.estimate(graph, flops_per_second=1e12), 16).edge_costs
    tensors = (Tensor("x", (64, 256), "float32", 0, (1,), has_gradient=has_gradient),)
    meshes = [(0, 1), (1, 2), (2, 3), (1, 3), (3, 5), (5, 7), (3, 7), (0, 3), (1, 7)]
    ends = [
        (first, end, shape)
        for first, end in meshes
        for shape in (1, 2, 4, (2, 1, 1), (1, 2, 1), (2, 2, 1))
        if (end - first) % (shape if isinstance(shape, int) else math.prod(shape)) == 0
    ]
    ends = [(a, b, (*s[:2], (b - a) // math.prod(s)) if isinstance(s, tuple) else s) for a, b, s in ends]
    ratios = []
    for src, dst in itertools.permutations(ends, 2):
        if src[1] <= dst[0] or dst[1] <= src[0]:
            price, bounds = costs.price(tensors, 24, src, dst), costs.bound_seconds(tensors, 24, src, dst)
            assert bounds[0] <= price.forward_seconds * (1 + 1e-9)
            assert bounds[1] <= price.backward_seconds * (1 + 1e-9)
            assert min(bounds) > 0 or not has_gradient
            ratios.append(bounds[0] / price.forward_seconds)
    assert max(ratios) > 1 - 1e-9


def make_slow_case(gbit):
    """Two hosts that exchange 4 MB in a microbatch, and four stages that take turns on them."""
    graph = LayerGraph.transformer(layers=4, hidden=256, heads=4, sequence=1024, vocabulary=512, dtype="float32")
    profile = LayerProfile.estimate(graph, flops_per_second=1e14)
    cluster = Cluster(Topology.uniform((0, 1), gbit * 1e9 / 8), 1e10)
    problem = SearchProblem(graph, cluster, profile, 16, microbatch_counts=(4,))
    ranks, cuts = ((0, 1), (1, 2), (0, 1), (1, 2)), (0, 2, 3, 4, 6)
    stages = tuple(
        StagePlan(first, end, *own, (LayerChoice(),) * (end - first))
        for first, end, own in zip(cuts, cuts[1:], ranks, strict=False)
    )
    return problem, Candidate("by hand", stages, 4)


def test_the_bytes_of_all_edges_through_a_port_rule_out_a_candidate_without_plans():
    problem, candidate = make_slow_case(1)
    nbytes = 4 * 1024 * 256 * 4  # of a microbatch of four samples
    port_seconds = 0.999 * 4 * 3 * nbytes / (1e9 / 8)  # of three edges, of which two send forwards and one gradients
    assert step_bound(problem, candidate) < 0.1 * port_seconds
    assert not may_be_faster(problem, candidate, port_seconds)
    assert evaluate(problem, candidate, below_seconds=port_seconds) is None
    assert problem.edge_costs.num_priced == 0
    seconds = evaluate(problem, candidate).seconds
    assert port_seconds < seconds < 1.5 * port_seconds


def test_edges_are_priced_until_the_bound_is_above_the_limit():
    problem, candidate = make_slow_case(1)
    seconds = evaluate(problem, candidate).seconds
    again, _ = make_slow_case(1)
    assert may_be_faster(again, candidate, seconds * (1 + 1e-9))
    assert again.edge_costs.num_priced == problem.edge_costs.num_priced > 0


def test_the_recurrence_stops_at_a_limit_before_it_prices_edges():
    problem, _ = make_slow_case(1)
    best = joint(problem)[0].predicted_seconds
    again, _ = make_slow_case(1)
    assert joint(again, 0.5 * best) == ()
    assert again.edge_costs.num_priced < problem.edge_costs.num_priced
    assert joint(again, math.nextafter(best, math.inf))[0].predicted_seconds == best
