"""A training plan that a search has found trains on real processes, and gives the same results as one process."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

import reshard.scheduler as rs
from reshard.compression import Policy
from reshard.errors import ArgumentError
from reshard.scheduler.autoparallel import (
    Cluster,
    LayerChoice,
    LayerGraph,
    LayerProfile,
    TrainingPlan,
    profile_layers,
    search,
    trace_module,
)
from reshard.scheduler.autoparallel.costs.search_problem import Candidate
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.ir.text import format_schedule
from reshard.scheduler.training.models.making import make_model
from reshard.scheduler.training.models.model_presets import GPTConfig
from reshard.topology import CodecRate, Topology
from tests.support.whole_models import Case, check_equal

CONFIG = GPTConfig(4, 2, 8, sequence=8, vocabulary=32, is_tied=False)


def make_gpt():
    torch.manual_seed(0)
    return make_model(CONFIG, "cpu")


def make_case():
    generator = torch.Generator().manual_seed(1)

    def batch():
        tokens = torch.randint(CONFIG.vocabulary, (8, 9), generator=generator)
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    return Case(
        make_gpt, [batch() for _ in range(2)], batch(), lambda model, batch: (model(**batch), {}), num_microbatches=None
    )


def find_training_plan(hosts, fixed=None, memory_limit_bytes=1e9, flops=1e9, **options):
    graph = LayerGraph.transformer(
        layers=CONFIG.num_layers,
        hidden=CONFIG.hidden,
        heads=CONFIG.num_heads,
        sequence=8,
        vocabulary=32,
        dtype="float32",
    )
    profile = LayerProfile.estimate(graph, flops_per_second=flops, efficiency=1.0)
    topology = hosts if isinstance(hosts, Topology) else Topology.uniform(hosts, 1e8)
    cluster = Cluster(topology, memory_limit_bytes)
    fixed = fixed or {}
    return search(
        graph, cluster, profile, num_samples=8, fixed=fixed if "grid" in fixed else {"tp": 1, **fixed}, **options
    )


def pipe_of_training_plan(case, text):
    return rs.Pipe(case.make_model(), training_plan=TrainingPlan.from_json(text))


def check_trains(training_plan):
    check_equal(
        make_case(), functools.partial(pipe_of_training_plan, text=training_plan.to_json()), training_plan.num_ranks
    )


@pytest.mark.integration
def test_a_training_plan_trains_as_one_process():
    training_plan = find_training_plan((0, 0, 1))
    assert training_plan.num_ranks == 3
    assert len(training_plan.stages) > 1
    check_trains(training_plan)


@pytest.mark.nightly
def test_a_stage_on_a_grid_beside_a_plain_one_trains_as_one_process():
    training_plan = find_training_plan((0,) * 5, {"grid": (2, 2, 1), "num_microbatches": 1}, flops=1e7)
    assert sorted(str(stage.choices[0]) for stage in training_plan.stages) == ["grid=2x2x1", "tp=1"]
    check_trains(training_plan)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 2, 1), (2, 2, 2)], ids=str)
def test_a_first_stage_on_a_grid_that_a_search_has_chosen_trains_as_one_process(grid):
    on_grid = math.prod(grid)
    training_plan = find_training_plan((0,) * on_grid + (1,), {"grid": grid, "num_microbatches": 2}, flops=1e7)
    assert [stage.num_ranks for stage in training_plan.stages] == [on_grid, 1]
    assert {choice.grid for choice in training_plan.stages[0].choices} == {grid}
    check_trains(training_plan)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("pp_ranks", "schedule"),
    [((0, 1, 0, 1), "interleaved_zero_bubble"), ((0, 1, 1, 0), "dualpipe_v")],
    ids=["looped", "V"],
)
def test_interleaved_stages_train_as_one_process(pp_ranks, schedule):
    def by_hand(problem):
        ranks, cuts = ((0, 2), (2, 3)), (0, 1, 3, 4, 6)
        stages = (
            StagePlan(first, end, *ranks[r], (LayerChoice(),) * (end - first))
            for first, end, r in zip(cuts, cuts[1:], pp_ranks, strict=False)
        )
        return [Candidate("interleaved", tuple(stages), 4)]

    training_plan = find_training_plan((0, 0, 1), {"num_microbatches": 4}, flops=3e9, method=by_hand)
    assert training_plan.schedule.name == schedule
    assert training_plan.pp_ranks == training_plan.schedule.pp_rank_of_stage == pp_ranks
    check_trains(training_plan)


@pytest.mark.slow
def test_a_training_plan_trains_with_its_codecs():
    topology = replace(Topology.uniform((0, 1, 2), 1e6), codec_rates=(CodecRate("int8x128", 1e10, 1e10),))
    policy = Policy(dp="int8x128", pp="int8x128")
    training_plan = find_training_plan(topology, {"num_microbatches": 4}, compression=policy)
    assert training_plan.compression is not None
    case = replace(make_case(), tolerance=0.02)
    make_pipe = functools.partial(pipe_of_training_plan, text=training_plan.to_json())
    with pytest.raises(AssertionError):  # values are rounded
        check_equal(make_case(), make_pipe, training_plan.num_ranks)
    check_equal(case, make_pipe, training_plan.num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("dimension", ["zero", "tp"])
def test_codecs_of_zero_and_grids_train(dimension):
    topology = replace(Topology.uniform((0, 1, 2, 3), 1e6), codec_rates=(CodecRate("int8x128", 1e10, 1e10),))
    choice = LayerChoice(zero=3) if dimension == "zero" else LayerChoice.on_grid(2, 2)

    def one_stage(problem):
        return [Candidate("one stage", (StagePlan(0, 6, 0, 4, (choice,) * 6),), 2)]

    policy = Policy(**{dimension: "int8x128"})
    training_plan = find_training_plan(topology, {"num_microbatches": 2}, method=one_stage, compression=policy)
    assert training_plan.compression.dimensions == (dimension,)
    case = replace(make_case(), tolerance=0.02)
    make_pipe = functools.partial(pipe_of_training_plan, text=training_plan.to_json())
    with pytest.raises(AssertionError):  # values are rounded
        check_equal(make_case(), make_pipe, training_plan.num_ranks)
    check_equal(case, make_pipe, training_plan.num_ranks)


def made_by_hand(stages):
    """A training plan with these stages, the 1F1B schedule and four microbatches."""
    plain = find_training_plan((0,) * stages[-1].end_rank, {"num_microbatches": 4})
    names = [name for stage in plain.layer_names for name in stage]
    num = len(stages)
    schedule = format_schedule(rs.one_f_one_b(rs.Pipeline.of_costs([1] * num, [1] * num, [0] * (num - 1)), 4))
    layer_names = tuple(tuple(names[stage.first_layer : stage.end_layer]) for stage in stages)
    reports = (plain.reports[-1],) * num  # the predictions are not those of these stages
    found = {"stages": stages, "layer_names": layer_names, "reports": reports, "edges": (), "schedule_text": schedule}
    return replace(plain, num_microbatches=4, **found)


PLAIN, RECOMPUTED = LayerChoice(), LayerChoice(recompute=True)
SHARDED, SHARDED_RECOMPUTED = LayerChoice(zero=3), LayerChoice(zero=3, recompute=True)
ZERO_GRID, ZERO_GRID_RECOMPUTED = (LayerChoice.on_grid(1, 2, 2, zero=3, recompute=flag) for flag in (False, True))
GRID, GRID_RECOMPUTED = LayerChoice.on_grid(2, 1, 2), LayerChoice.on_grid(2, 1, 2, recompute=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [
        (StagePlan(0, 6, 0, 2, (SHARDED,) * 6),),
        (StagePlan(0, 2, 0, 1, (PLAIN, RECOMPUTED)), StagePlan(2, 6, 1, 3, (SHARDED_RECOMPUTED,) * 2 + (SHARDED,) * 2)),
        (StagePlan(0, 3, 0, 2, (LayerChoice(2),) * 3), StagePlan(3, 6, 2, 3, (RECOMPUTED,) * 3)),
        (
            StagePlan(0, 3, 0, 4, (LayerChoice(2, 3), LayerChoice(2, 3, True), LayerChoice(2, 3))),
            StagePlan(3, 6, 4, 6, (PLAIN,) * 3),
        ),
        (
            StagePlan(0, 3, 0, 2, (SHARDED, SHARDED_RECOMPUTED, SHARDED)),
            StagePlan(3, 6, 2, 6, (GRID_RECOMPUTED, GRID, GRID)),
        ),
        (StagePlan(0, 3, 0, 4, (ZERO_GRID, ZERO_GRID_RECOMPUTED, ZERO_GRID)), StagePlan(3, 6, 4, 5, (PLAIN,) * 3)),
    ],
    ids=[
        "zero 3",
        "uneven, mixed",
        "tensor parallel, recompute",
        "both and zero 3",
        "zero 3 and a grid, recompute",
        "zero 3 on a grid",
    ],
)
def test_every_choice_trains_as_one_process(stages):
    check_trains(made_by_hand(stages))


def test_pipe_refuses_what_it_cannot_run():
    training_plan = find_training_plan((0, 0), {"num_microbatches": 2})
    with pytest.raises(ArgumentError, match="its own cuts and placements"):
        rs.Pipe(make_gpt(), ["blocks.1"], training_plan=training_plan)
    stage = StagePlan(0, 6, 0, 2, (LayerChoice(zero=3), *(LayerChoice(),) * 5))
    mixed = replace(training_plan, stages=(stage,), layer_names=(tuple("abcdef"),))
    with pytest.raises(ArgumentError, match="stage 0 mixes 2 kinds of parallelism"):
        rs.Pipe(make_gpt(), training_plan=mixed)


class Untraceable(torch.nn.Module):
    """A model whose forward depends on data."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 16), torch.nn.Linear(16, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x, y):
        if x.isnan().any():
            raise ValueError("the batch has NaNs")
        return (self.second(self.first(x).relu()) * self.scale - y).square().mean()


def make_untraceable():
    torch.manual_seed(0)
    return Untraceable()


@pytest.mark.parametrize(
    "choice",
    [LayerChoice(), LayerChoice(recompute=True), LayerChoice(zero=3), LayerChoice(zero=3, recompute=True)],
    ids=str,
)
def test_a_model_that_cannot_be_traced_is_one_layer_and_trains(choice):
    batch = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), "y": torch.ones(4, 4)}
    with pytest.warns(UserWarning, match="Untraceable is one layer, which no stage divides: .*torch.fx cannot trace"):
        traced = trace_module(make_untraceable(), batch, ["second"])
    profile = profile_layers(traced, sample_counts=(1, 2), repeats=1)
    cluster = Cluster(Topology.uniform((0, 0), 1e9), 1e9)
    fixed = {"num_microbatches": 2, "zero": choice.zero, "recompute": choice.recompute, "idle": False}
    training_plan = search(traced.graph, cluster, profile, num_samples=4, fixed=fixed)
    assert training_plan.layer_names == (("Untraceable",),)
    training_plan = replace(training_plan, stages=(StagePlan(0, 1, 0, 2, (choice,)),))
    if choice.recompute:
        (placement,) = training_plan.placements()
        module, runs = make_untraceable(), []
        module.first.register_forward_hook(lambda *_: runs.append(1))
        placement.prepare(module)(**batch).backward()
        assert len(runs) == 2  # forward, and again in the backward
    case = Case(
        make_untraceable, [batch, batch], batch, lambda model, batch: (model(**batch), {}), num_microbatches=None
    )
    check_equal(case, functools.partial(pipe_of_training_plan, text=training_plan.to_json()), 2)
