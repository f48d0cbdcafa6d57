"""Costs of the gradients that stages exchange for parameters that they share."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import reshard.scheduler as rs
from reshard.compression import Policy
from reshard.cost import simulate
from reshard.scheduler.autoparallel import Cluster, LayerChoice, LayerGraph, LayerProfile, search, trace_module
from reshard.scheduler.autoparallel.costs.iteration import evaluate
from reshard.scheduler.autoparallel.costs.search_problem import Candidate, SearchProblem
from reshard.scheduler.autoparallel.costs.step_bounds import step_bound
from reshard.scheduler.autoparallel.costs.tied_costs import TiedCosts
from reshard.scheduler.autoparallel.inputs.layer_graph import is_shared
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.methods import recurrence_tables
from reshard.scheduler.autoparallel.modules.apply import make_placements
from reshard.scheduler.training.models.making import make_model
from reshard.scheduler.training.models.model_presets import GPTConfig
from reshard.testing import run_processes
from reshard.topology import CodecRate, Topology
from tests.scheduler.autoparallel.random_searches import all_plans, make_problem

#: Imported here once, so that forked processes need not import them.
for _name in ("torch.distributed.tensor", "torch.distributed.device_mesh", "torch._dynamo"):
    importlib.import_module(_name)

NIC = 1e9
SHARED = 40_000  # parameters


def make_graph(tied=(0, 5)):
    graph = LayerGraph.transformer(layers=4, hidden=64, heads=4, sequence=32, vocabulary=1000, dtype="float32")
    return replace(graph, ties=((tied, SHARED),))


def make_problem_of(hosts, ties=((0, 5), SHARED), **options):
    graph = replace(make_graph(), ties=(ties,))
    profile = LayerProfile.estimate(graph, flops_per_second=1e12)
    cluster = Cluster(replace(Topology.uniform(hosts, NIC), latency_seconds=0.0, inside_latency_seconds=0.0), 1e9)
    return SearchProblem(graph, cluster, profile, 8, microbatch_counts=(4,), **options)


def plan(*stages):
    """Stages of (end layer, end rank, choice), from layer 0 and rank 0."""
    made, first, rank = [], 0, 0
    for end, stop, choice in stages:
        made.append(StagePlan(first, end, rank, stop, (choice,) * (end - first)))
        first, rank = end, stop
    return tuple(made)


TWO = plan((3, 1, LayerChoice()), (6, 2, LayerChoice()))


def test_two_stages_send_their_gradients_to_each_other_at_once():
    problem = make_problem_of((0, 1))
    (each,) = problem.ties.exchanges(TWO)
    assert (each.layers, each.stages, each.nbytes, each.codec) == ((0, 5), (0, 1), 4 * SHARED, None)
    assert each.seconds == pytest.approx(4 * SHARED / NIC)
    # received, both in one tensor, and their sum
    assert each.stage_bytes == (4 * 4 * SHARED,) * 2
    costs, _ = problem.costs(TWO, 4)
    plain = problem.changed(graph=replace(problem.graph, ties=()))
    for cost, other in zip(costs, plain.costs(TWO, 4)[0], strict=True):
        assert replace(cost, tie_seconds=0.0, tie_bytes=0.0) == other
        assert cost.ending_bytes == cost.state_bytes + each.stage_bytes[0]


def test_the_sum_over_stages_starts_when_the_last_stage_is_ready():
    problem = make_problem_of((0, 1))
    for stages in (
        TWO,
        plan((1, 1, LayerChoice()), (6, 2, LayerChoice())),
        plan((5, 1, LayerChoice()), (6, 2, LayerChoice())),
    ):
        found = evaluate(problem, Candidate("by hand", stages, 4))
        ends = [max(span.end for span in found.timeline.spans if span.pp_rank == pp_rank) for pp_rank in (0, 1)]
        (each,) = found.exchanges
        assert found.seconds == pytest.approx(max(ends) + each.seconds)
        busy, exposed, idle, sums = found.seconds_by_kind()
        assert sums == each.seconds
        assert busy + exposed + idle + sums == pytest.approx(found.seconds)
        assert step_bound(problem, found.candidate) <= found.seconds


def test_one_stage_with_all_of_the_layers_exchanges_nothing():
    problem = make_problem_of((0, 1))
    whole = plan((6, 2, LayerChoice()))
    assert problem.ties.exchanges(whole) == ()
    assert problem.stage_cost(whole[0], 4).tie_seconds == 0


def test_each_of_three_stages_pays_for_two_sends():
    problem = make_problem_of((0, 1, 2), ((0, 2, 5), SHARED))
    (each,) = problem.ties.exchanges(plan((1, 1, LayerChoice()), (3, 2, LayerChoice()), (6, 3, LayerChoice())))
    assert each.stages == (0, 1, 2)
    assert each.seconds == pytest.approx(2 * 4 * SHARED / NIC)
    assert each.stage_bytes == (6 * 4 * SHARED,) * 3
    (each,) = problem.ties.exchanges(plan((3, 1, LayerChoice()), (4, 2, LayerChoice()), (6, 3, LayerChoice())))
    assert each.stages == (0, 2)  # two of the layers are in one stage
    assert each.seconds == pytest.approx(4 * SHARED / NIC)


def test_stages_of_a_v_share_parameters_with_earlier_ranks_or_with_their_own():
    ranks, cuts = ((0, 1), (1, 2), (1, 2), (0, 1)), (0, 1, 3, 5, 6)
    stages = tuple(
        StagePlan(first, end, *own, (LayerChoice(),) * (end - first))
        for first, end, own in zip(cuts, cuts[1:], ranks, strict=False)
    )
    (later_first,) = make_problem_of((0, 1), ((1, 5), SHARED)).ties.exchanges(stages)
    assert (later_first.stages, later_first.seconds) == ((1, 3), pytest.approx(4 * SHARED / NIC))
    (same,) = make_problem_of((0, 1)).ties.exchanges(stages)
    assert (same.stages, same.seconds) == ((0, 3), 0)


def test_sums_of_stages_that_share_parameters_on_the_same_ranks_are_not_early():
    ranks, cuts = ((0, 2), (2, 4), (2, 4), (0, 2)), (0, 1, 3, 5, 6)
    stages = tuple(
        StagePlan(first, end, *own, (LayerChoice(),) * (end - first))
        for first, end, own in zip(cuts, cuts[1:], ranks, strict=False)
    )
    costs, _ = make_problem_of((0, 0, 1, 1)).costs(stages, 4)  # layers 0 and 5 share parameters
    assert [cost.early_sync_seconds == cost.sync_seconds > 0 for cost in costs] == [False, True, True, False]
    assert [cost.early_sync_seconds for cost in costs[::3]] == [0, 0]


@pytest.mark.parametrize(
    ("choice", "parts"),
    [
        (LayerChoice(), 1),
        (LayerChoice(zero=3), 4),
        (LayerChoice(2, 3), 2),  # no tensor parallelism for the embedding
        (LayerChoice.on_grid(1, 2, 2), 2),
        (LayerChoice.on_grid(2, 2), 4),
        (LayerChoice.on_grid(2, 1, 2, zero=3), 4),
    ],
    ids=str,
)
def test_the_cost_of_a_tie_follows_the_part_of_each_rank(choice, parts):
    problem = make_problem_of((0, 0, 0, 0, 1, 1, 1, 1))
    (each,) = problem.ties.exchanges(plan((3, 4, choice), (6, 8, LayerChoice(zero=3))))
    assert each.stage_bytes == (4 * 4 * SHARED / parts, 4 * SHARED)
    # the first stage receives each byte through its NIC once, however many ranks need it
    assert each.seconds == pytest.approx(4 * SHARED / NIC, rel=0.1)


def test_codecs_of_gradients_code_the_sums_over_stages():
    problem = make_problem_of((0, 1))
    rates = (CodecRate("int8x128", 1e12, 1e12),)
    cluster = replace(problem.cluster, topology=replace(problem.cluster.topology, codec_rates=rates))
    encoded = problem.changed(cluster=cluster, compression=Policy(dp="int8x128"), compress_all=True)
    (each,), (raw,) = (match.ties.exchanges(TWO) for match in (encoded, problem))
    assert each.codec == "int8x128"
    assert each.seconds == pytest.approx(raw.seconds * 33 / 128, rel=0.01)  # 4 bytes become 1, and 4 of each 128
    match = search(
        problem.graph, cluster, problem.profile, num_samples=8, fixed={"num_microbatches": 4}, compression=Policy(dp="int8x128"),
        method=lambda problem: (Candidate("two", TWO, 4),),
    )  # fmt: skip
    assert match.compression == Policy(dp="int8x128")  # no stage has replicas


@pytest.mark.parametrize("seed", range(12))
def test_no_sum_over_stages_is_below_the_bound_of_a_stage(seed):
    problem = make_problem(1000 + seed, ties=True, grids=seed % 2 == 1)
    count = problem.microbatch_counts[0]
    tables, shared = recurrence_tables.make_tables(problem, count), 0
    for item in list(all_plans(tables))[:: 1 + seed]:
        stages = tuple(tables.stage(*stage) for stage in item)
        if not all(problem.can_have(stage.choices[0], stage.first_layer, stage.end_layer) for stage in stages):
            continue
        costs, exchanges = problem.costs(stages, count)
        ties = [
            tied for tied, _ in problem.graph.ties if any(is_shared(tied, s.first_layer, s.end_layer) for s in stages)
        ]
        assert [exchange.layers for exchange in exchanges] == ties
        shared += len(ties)
        for stage, cost in zip(stages, costs, strict=True):
            least = problem.stage_cost(stage, count)
            assert least.tie_seconds <= cost.tie_seconds * (1 + 1e-9)
            assert least.tie_bytes <= cost.tie_bytes
            assert (cost.tie_seconds > 0) == (cost.tie_bytes > 0)
    assert shared


def test_explain_says_what_stages_share():
    problem = make_problem_of((0, 1))
    match = search(
        problem.graph, problem.cluster, problem.profile, num_samples=8, fixed={"num_microbatches": 4},
        method=lambda problem: (Candidate("two", TWO, 4),),
    )  # fmt: skip
    text = match.explain()
    assert (
        "layers embed and norm share parameters: stages 0 and 1 add their gradients of 156.2 KiB once in a step" in text
    )
    assert "and 0.00016 s over stages" in text
    assert type(match).from_json(match.to_json()) == match
    assert match.wider_links_seconds < match.seconds


BATCH = {name: torch.zeros(8, 8, dtype=torch.long) for name in ("tokens", "targets")}
TIED = GPTConfig(4, 2, 8, sequence=8, vocabulary=32)


def make_gpt():
    torch.manual_seed(0)
    return make_model(TIED, "cpu")


def pipe_of(stages):
    names = ["first", *(f"blocks.{number}" for number in range(TIED.num_layers)), "norm"]
    placements = make_placements(stages, [names[stage.first_layer : stage.end_layer] for stage in stages])
    return rs.Pipe(make_gpt(), [names[stage.first_layer] for stage in stages[1:]], stages=placements)


def find_movers(rank, stages):
    """What the engine on each rank has of the shared parameter, and the seconds of its Movers."""
    engine = pipe_of(stages).compile(BATCH, num_microbatches=2)
    (tie,) = engine._engine._state.ties._ties
    local = {stage: getattr(item, "_local_tensor", item).numel() for stage, item in tie.mine.items()}
    topology = topology_of(stages)
    return local, [simulate(mover.plan, topology).makespan_seconds for mover in tie.raw.values()]


def topology_of(stages):
    return Topology.uniform([host for host, stage in enumerate(stages) for _ in range(stage.num_ranks)], 1e6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [
        LayerChoice(),
        LayerChoice(zero=3),
        LayerChoice(2),
        LayerChoice.on_grid(2, 1),
        LayerChoice.on_grid(1, 1, 2, zero=3),
    ],
    ids=str,
)
def test_the_cost_is_that_of_the_moves_of_the_engine(choice):
    stages = plan((3, 2, choice), (6, 3, LayerChoice()))
    graph = trace_module(make_gpt(), BATCH, ["blocks.*", "norm"]).graph
    (each,) = TiedCosts(graph, Cluster(topology_of(stages), 1e9), 4.0, 0.0).exchanges(stages)
    found = run_processes(find_movers, 3, stages)
    assert each.seconds == pytest.approx(max(seconds for _, made in found for seconds in made))
    for local, _ in found:
        for stage, numel in local.items():
            assert each.stage_bytes[stage] == 4 * 4 * numel
