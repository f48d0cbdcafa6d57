"""Wrong arguments of a ScheduleEngine and of its steps raise errors that name the argument."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from reshard import Layout, Mesh, RegionLayout, ReshardError, Topology, join
from reshard.errors import ArgumentError, ScheduleError
from reshard.scheduler import (
    Edge,
    Pipeline,
    Stage,
    StageOutput,
    check_schedule,
    gpipe,
    one_f_one_b,
    simulate_schedule,
    to_svg,
)
from reshard.scheduler.gradients import replica_sync
from reshard.scheduler.gradients.tied_params import TiedParameter
from reshard.scheduler.ir.actions import Action, Kind
from reshard.scheduler.runtime.engine_arguments import EngineOptions, find_ranks_of_pp_ranks, weigh_last
from reshard.scheduler.runtime.local_tensors import localize
from reshard.scheduler.runtime.p2p import find_device_type
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding.tensor_spec import TensorSpec

NUM = 4


class Model(torch.nn.Module):
    """A whole model in one stage."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x):
        return StageOutput(loss=(self.layer(x) ** 2).mean())


def _spec(name="x", shape=(2, 3), dtype="float32"):
    return TensorSpec(shape, dtype, Layout(Mesh([0])), Layout(Mesh([1])), name)


ONE = Pipeline((Stage(1.0, 1.0, 1.0, mesh=Mesh([0])),), ())
TWO = Pipeline(tuple(Stage(1.0, 1.0, 1.0, mesh=Mesh([r])) for r in (0, 1)), (Edge(0, 1, 0.5, 0.5, tensors=(_spec(),)),))


@pytest.fixture(scope="module")
def group():
    """A group of one rank."""
    return join(dist.HashStore(), 0, 1)


def _feed():
    torch.manual_seed(1)
    return {0: [{"x": torch.randn(2, 3)} for _ in range(NUM)]}


@pytest.mark.parametrize("weights", [None, [1, 2, 3, 4], torch.tensor([0.5, 0, 0, 0.25])])
def test_losses_are_weighted(group, weights):
    model, alone = Model(), Model()
    with ScheduleEngine(one_f_one_b(ONE, NUM), ONE, {0: model}, group=group) as engine:
        step = engine.step(_feed(), loss_weights=weights)
    losses = [alone(**inputs).loss for inputs in _feed()[0]]
    total = sum(
        loss * weight for loss, weight in zip(losses, [0.25] * NUM if weights is None else weights, strict=True)
    )
    total.backward()
    assert step.loss == pytest.approx(float(total.detach()), rel=1e-6)
    assert torch.allclose(model.layer.weight.grad, alone.layer.weight.grad)


STEPS = {
    "three weights": ({"loss_weights": [1, 1, 1]}, r"loss_weights must be 4 finite numbers, not [1, 1, 1]"),
    "infinite": ({"loss_weights": [1, 1, 1, math.inf]}, "loss_weights must be 4 finite numbers, not [1, 1, 1, inf]"),
    "a number": ({"loss_weights": 5}, "loss_weights must be 4 numbers, not 5"),
    "feed": ({"feed": 5}, "feed must be {stage: [{name: tensor}, ...]}, not int"),
    "microbatches of none": ({"feed": {0: 5}}, "stage 0 is fed int; it needs a list with one entry per microbatch"),
    "no such stage": ({"feed": {1: []}}, "feed names stage 1; there are stages 0 to 0"),
    "microbatches of tensors": (
        {"feed": {0: [torch.ones(2, 3)] * NUM}},
        "stage 0 is fed 4 microbatches; it needs 4, each",
    ),
    "too many microbatches": (
        {"feed": {0: [{}] * 5}},
        "stage 0 is fed 5 microbatches; it needs 4, each {name: tensor}",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_wrong_arguments_of_a_step_are_named(group, name):
    given, error = STEPS[name]
    engine = ScheduleEngine(one_f_one_b(ONE, NUM), ONE, {0: Model()}, group=group)
    with engine, pytest.raises(ArgumentError, match=re.escape(error)):
        engine.step(**{"feed": _feed(), **given})


ENGINES = {
    "schedule": ({"schedule": "1f1b"}, "schedule must be a Schedule, not str"),
    "pipeline": ({"pipeline": None}, "pipeline must be a Pipeline, not NoneType"),
    "last pipeline": ({"last_pipeline": 5}, "last_pipeline must be a Pipeline, not int"),
    "another last pipeline": ({"last_pipeline": TWO}, "last_pipeline must have the stages and edges of the pipeline"),
    "ties": ({"ties": 5}, "ties must be a list of TiedParameter, not int"),
    "a tie": ({"ties": [5]}, "a tie must be a TiedParameter, not int"),
    "mesh": ({"pipeline": Pipeline((Stage(1.0, 1.0, 1.0),), ())}, "stage 0 has no mesh; a ScheduleEngine needs one for every stage"),
    "other ranks": (
        {"pipeline": Pipeline((Stage(1.0, 1.0, 1.0, mesh=Mesh([1])),), ())}, "rank"
    ),
    "another schedule": ({"schedule": one_f_one_b(TWO, NUM)}, "stage"),
    "loss shards": ({"num_loss_shards": 0}, "num_loss_shards"),
    "loss shards of a stage": ({"num_loss_shards": {3: 1}}, "num_loss_shards"),
    "topology": ({"topology": 5}, "topology must be a Topology, not int"),
    "time-out": ({"timeout_seconds": 0}, "timeout_seconds is 0"),
    "modules": ({"modules": {1: Model()}}, "rank 0 computes stages [0], but has modules for [1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_wrong_arguments_of_an_engine_are_named(group, name):
    given, error = ENGINES[name]
    arguments = {"schedule": one_f_one_b(ONE, NUM), "pipeline": ONE, "modules": {0: Model()}, **given}
    with pytest.raises(ReshardError, match=re.escape(error)):
        ScheduleEngine(**arguments, group=group, **({} if "timeout_seconds" in given else {"timeout_seconds": 20}))


def _with_last(*shapes):
    """A pipeline with two tensors on its edge, and the same with other shapes for the last microbatch."""
    edges = [replace(TWO.edges[0], tensors=(_spec("x", a), _spec("y", b))) for a, b in (((8, 3), (8, 5)), shapes)]
    return [replace(TWO, edges=(edge,)) for edge in edges]


@pytest.mark.parametrize(
    ("shapes", "weight"),
    [(((8, 3), (8, 5)), 1), (((2, 3), (2, 5)), 0.25), (((2, 3), (8, 5)), 0.25),
     (((2, 3), (4, 5)), "have 0.25, 0.5 times the size"), (((0, 3), (8, 5)), "tensors of last_pipeline are empty")],
)  # fmt: skip
def test_weight_of_the_last_microbatch_is_its_relative_size(shapes, weight):
    whole, last = _with_last(*shapes)
    if isinstance(weight, str):
        with pytest.raises(ArgumentError, match=weight):
            weigh_last(whole, last)
    else:
        assert weigh_last(whole, last) == weight


def test_each_rank_has_one_pp_rank():
    spec = TensorSpec((2, 3), "float32", Layout(Mesh([0])), Layout(Mesh([0])), "x")
    of_one = Pipeline((TWO.stages[0],) * 2, (Edge(0, 1, 0.5, 0.5, tensors=(spec,)),))
    apart, together = gpipe(TWO, 2), replace(gpipe(TWO, 2), pp_rank_of_stage=(0, 0), rank_actions=((),))
    assert find_ranks_of_pp_ranks(apart, TWO) == [(0,), (1,)] and find_ranks_of_pp_ranks(together, of_one) == [(0,)]
    for schedule, pipeline, error in (
        (apart, of_one, "rank 0 is on pp ranks 0 and 1; it must be on one pp rank"),
        (
            together,
            TWO,
            "pp rank 0 has stages on ranks 0 and on ranks 1; all stages of a pp rank must be on the same ranks",
        ),
        (replace(together, rank_actions=((), ())), of_one, "pp rank 1 has no stage"),
        (apart, replace(TWO, edges=(Edge(0, 1, 0.5, 0.5),)), "edge 0 -> 1 has no tensors"),
    ):
        with pytest.raises(ArgumentError, match=error):
            find_ranks_of_pp_ranks(schedule, pipeline)


def test_differences_between_engines_are_named():
    def described(pipeline=TWO, last=None, schedule=None, strategy="auto", topology=None):
        options = EngineOptions(topology, strategy, last, (), 1, None, None, False, 20.0, "planned")
        return dict(options.describe(schedule or gpipe(pipeline, 2), pipeline))

    wider = replace(TWO, edges=(replace(TWO.edges[0], tensors=(_spec(shape=(2, 4)),)),))
    without = replace(TWO, edges=(replace(TWO.edges[0], without_gradient=frozenset({"x"})),))
    same = described(last=TWO)
    for other, names in (
        (described(wider, last=TWO), {"edge 0 -> 1 of pipeline"}),
        (described(without, last=TWO), {"edge 0 -> 1 of pipeline"}),
        (described(last=wider), {"edge 0 -> 1 of last_pipeline"}),
        (described(), {"edge 0 -> 1 of last_pipeline"}),
        (described(last=TWO, schedule=replace(gpipe(TWO, 2), name="x")), {"the schedule", "the schedule's actions"}),
        (described(last=TWO, schedule=gpipe(TWO, 3)), {"the number of microbatches", "the schedule's actions"}),
        (described(last=TWO, strategy="multicast"), {"strategy"}),
        (described(last=TWO, topology=Topology((0, 1))), {"topology"}),
    ):
        assert {key for key in same.keys() | other.keys() if same.get(key) != other.get(key)} == names


def test_actions_of_unknown_stages_and_microbatches_are_rejected():
    for action in (Action(Kind.F, 2, 0), Action(Kind.F, 0, 2), Action(Kind.F, 0, -1), Action(Kind.SEND_F, 0, 0, 2)):
        schedule = gpipe(TWO, 2)
        wrong = replace(schedule, rank_actions=((*schedule.rank_actions[0], action), schedule.rank_actions[1]))
        with pytest.raises(ScheduleError, match="there are stages 0 to 1"):
            check_schedule(wrong, TWO)
        if action.microbatch == 0:
            with pytest.raises(ScheduleError, match="names stage 2; there are stages 0 to 1"):
                simulate_schedule(wrong, TWO)


def test_lists_are_stored_as_tuples():
    edge = Edge(0, 1, 0.5, 0.5, tensors=[_spec()], without_gradient=["x"])
    assert edge.tensors == (_spec(),) and edge.without_gradient == frozenset({"x"})
    pipeline = Pipeline(list(TWO.stages), [edge])
    assert pipeline.stages == TWO.stages and pipeline.edges == (edge,)
    assert TiedParameter({0: "a", 1: "b"}, [3, 4]).shape == (3, 4)


def test_picture_needs_a_schedule_and_a_timeline():
    schedule = gpipe(TWO, 2)
    with pytest.raises(ArgumentError, match="a PipelineTimeline is needed, not NoneType"):
        to_svg(schedule, None)
    with pytest.raises(ArgumentError, match="Schedule"):
        to_svg(None, simulate_schedule(schedule, TWO))


def test_modules_of_a_rank_are_on_one_type_of_device():
    assert find_device_type({}) == "cpu" and find_device_type({0: Model(), 1: Model()}) == "cpu"
    assert find_device_type({0: Model().to("meta")}) == "meta"
    with_buffer = Model()
    with_buffer.register_buffer("mask", torch.ones(2, device="meta"))
    for modules in ({0: Model(), 2: Model().to("meta")}, {1: with_buffer}):
        with pytest.raises(ArgumentError, match=r"on one type of device: 'layer.weight' of stage . is on cpu, '"):
            find_device_type(modules)


def test_gradients_are_reduced_in_buckets(monkeypatch):
    """Buckets fill up in order; a gradient larger than a bucket is alone."""
    monkeypatch.setattr(replica_sync, "REPLICA_BUCKET_BYTES", 40)
    sizes = [16, 16, 12, 28, 4, 80, 8, 40, 0, 8]
    parameters = [torch.zeros(size, dtype=torch.int8) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    buckets = replica_sync._buckets(parameters)
    assert [[item.nbytes for item in bucket] for bucket in buckets] == [
        [16, 16],
        [12, 28],
        [4],
        [80],
        [8],
        [40, 0],
        [8],
    ]


@pytest.fixture
def mesh_of_one():
    """A DeviceMesh of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensor_must_be_on_the_ranks_of_its_edge(mesh_of_one):
    given = DTensor.from_local(torch.full((2, 3), 2.0), mesh_of_one, [Partial()])
    here = _spec()
    assert torch.equal(localize(given, here), torch.full((2, 3), 2.0))
    regions = RegionLayout({0: [[(0, 2), (0, 3)]]})
    for src in (Layout(Mesh([1])), Layout(Mesh([0, 1]), "S0"), regions):
        with pytest.raises(ArgumentError, match=r"'x' is a DTensor on .*, but its edge has it on "):
            localize(given, replace(here, src=src))
    with pytest.raises(ArgumentError, match="'x' is list, not a tensor"):
        localize([1.0], here)
