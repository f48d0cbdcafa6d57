"""A model on the meta device gets the values of one process, and a rank holds data of its own stages only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reshard.scheduler as rs
from reshard.errors import ArgumentError
from reshard.scheduler.model_stages.partition.materialize import materialize
from tests.scheduler.model_stages import test_parallel_stages
from tests.support.whole_models import check_equal, pipe_of


def build(make_model, cuts, init, inputs, stage):
    """The model on the meta device, with data for one stage, after the random numbers of seed 7."""
    with torch.device("meta"):
        model = make_model()
    pipe = rs.Pipe(model, cuts, stages=",".join(["1x1"] * (len(cuts) + 1)), init=init(model) if init else None)
    stages = pipe.cut(inputs).build(model)
    torch.manual_seed(7)
    materialize(model, [stages[stage]], pipe.cut_before, pipe._init)
    return model, stages


def check_values(make_model, cuts, inputs, init, alone):
    """Compare every stage with ``alone(model)`` on a model with data."""
    expected_model = make_model()
    torch.manual_seed(7)
    alone(expected_model)
    expected = {
        **dict(expected_model.named_parameters(remove_duplicate=False)),
        **dict(expected_model.named_buffers(remove_duplicate=False)),
    }
    with torch.random.fork_rng():
        after = torch.rand(2)
    found = set()
    for number in range(len(cuts) + 1):
        model, stages = build(make_model, cuts, init, inputs, number)
        assert torch.equal(torch.rand(2), after)  # as many random numbers as in one process
        mine = stages[number]
        held = [*mine.named_parameters(remove_duplicate=False), *mine.named_buffers(remove_duplicate=False)]
        for name, tensor in held:
            assert torch.equal(tensor, expected[name]), name
            found.add(name)
        storages = {item.untyped_storage().data_ptr() for _, item in held}
        for module in (model, *stages):
            for item in (*module.parameters(), *module.buffers()):
                assert item.is_meta or item.untyped_storage().data_ptr() in storages
    assert found == set(expected)


def hugging_face(model):
    return model._init_weights


@pytest.mark.parametrize("tied", [False, True])
def test_llama_has_the_values_of_one_process(tied):
    models = pytest.importorskip("tests.scheduler.model_stages.test_transformers")
    inputs = ["input_ids", "labels"]
    check_values(
        lambda: models.make_llama(tied=tied),
        models.llama_layers(1, 3),
        inputs,
        hugging_face,
        lambda model: model.apply(model._init_weights),
    )


@pytest.mark.parametrize("way", ["_init_weights", "_initialize_weights"])
def test_gpt2_has_the_values_of_one_process(way):
    models = pytest.importorskip("tests.scheduler.model_stages.test_transformers")

    def alone(model):
        for module in model.modules():  # the constructor has marked them as initialized
            module.__dict__.pop("_is_hf_initialized", None)
        model.apply(getattr(model, way))

    inputs = ["input_ids", "labels"]
    check_values(models.make_gpt2, models.gpt2_layers(2), inputs, lambda model: getattr(model, way), alone)


def reset_parameters(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@pytest.mark.parametrize("tied", [False, True])
def test_reset_parameters_gives_the_values_of_one_process(tied):
    check_values(
        lambda: test_parallel_stages.make_mixer(tied=tied),
        ["layers.1", "layers.2"],
        ["tokens", "targets"],
        None,
        lambda model: model.apply(reset_parameters),
    )


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.second(self.first(x) * self.scale).sum()


def test_what_init_leaves_out_is_an_error():
    with pytest.raises(ArgumentError, match="init left 'scale' without values"):
        build(WithBuffer, ["second"], None, ["x"], 0)


class Table(nn.Module):
    """A linear layer with a table that init assigns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x):
        return self.linear(x) + self.table


class Tables(nn.Module):
    """Layers with tables; the first module to run is the last one to be initialized."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Table() for _ in range(6))
        self.first = Table()

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def assign_tables(module):
    if isinstance(module, Table):
        module.table = torch.rand(3)
    elif isinstance(module, nn.Linear):
        module.reset_parameters()


def test_tensors_that_init_assigns_after_others_were_dropped_stay():
    """Tensors of other stages are freed, and new ones may have their ids."""
    cuts = [f"layers.{number}" for number in range(1, 6)]
    check_values(Tables, cuts, ["x"], lambda _: assign_tables, lambda model: model.apply(assign_tables))


def train_from_meta(case):
    with torch.device("meta"):
        model = case.make_model()
    torch.manual_seed(3)
    stages = [rs.Placement(dp=2, wrap=rs.fsdp), rs.Placement(tp=2)]
    return rs.Pipe(model, ["layers.1"], stages=stages, init=initialize, tp_plan=test_parallel_stages.PLAN)


def initialize(module):
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.5)


class Initialized:
    """Makes the model with data, unless the default device is the meta device."""

    def __call__(self):
        model = test_parallel_stages.Mixer()
        if not model.embed.weight.is_meta:
            torch.manual_seed(3)
            model.apply(initialize)
        return model


@pytest.mark.slow
def test_training_from_the_meta_device_equals_one_process():
    check_equal(test_parallel_stages.make_case(Initialized()), train_from_meta, 4)


def test_init_is_refused_for_a_model_with_values():
    with pytest.raises(ArgumentError, match="init is only for a model on the meta device"):
        pipe_of(["layers.1"], "1x1,1x1", init=initialize)(test_parallel_stages.make_case())
