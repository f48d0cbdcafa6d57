"""Layers of torch models, and their measured times."""

from __future__ import annotations

import pickle
import subprocess
from dataclasses import replace

import pytest
import torch
from torch import nn

from reshard.errors import ArgumentError
from reshard.scheduler.autoparallel import (
    Cluster,
    LayerChoice,
    LayerGraph,
    LayerProfile,
    profile_layers,
    search,
    trace_module,
)
from reshard.scheduler.autoparallel.costs.search_problem import SearchProblem
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.modules import profiling, zero_times
from reshard.scheduler.autoparallel.modules.zero_times import ZeroTimes, measure_alone, measure_zero_times
from reshard.scheduler.training.models.making import make_model
from reshard.scheduler.training.models.model_presets import GPTConfig
from reshard.topology import Topology

CONFIG = GPTConfig(3, 2, 8, sequence=8, vocabulary=32, is_tied=False)
EXAMPLE = {name: torch.zeros(4, 8, dtype=torch.long) for name in ("tokens", "targets")}


@pytest.fixture(scope="module")
def traced():
    return trace_module(make_model(CONFIG), EXAMPLE, ["blocks.*", "norm"], max_tp=2)


def test_equal_blocks_are_one_class(traced):
    layers = traced.graph.layers
    assert [layer.name for layer in layers] == ["first", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert len({layer.key for layer in layers}) == 3
    assert traced.graph.is_chain
    assert {tensor.shape for tensor in traced.graph.tensors} == {(1, 8, 16)}
    assert sum(layer.num_params for layer in layers) == CONFIG.num_parameters


def test_work_is_that_of_the_products(traced):
    block, head = traced.graph.layers[1], traced.graph.layers[-1]
    # four projections and two of four times the width for 8 tokens; attention adds two products of 8 x 8 tokens
    assert block.forward_flops == 8 * 2 * 12 * 16 * 16 + 2 * (2 * 8 * 8 * 16)
    assert head.forward_flops == 8 * 2 * 16 * 32
    assert (block.tp_limit, block.tp_all_reduces, head.tp_limit) == (2, 2, 1)
    assert block.input_bytes == 8 * 16 * 4
    assert block.input_bytes < block.saved_bytes
    # only the normalization is recomputed, which saves two numbers for each token: the loss is outside the module
    assert head.saved_bytes - head.input_bytes == 8 * 2 * 4


def test_sizes_on_a_grid_are_those_of_the_products(traced):
    described = LayerGraph.transformer(layers=1, hidden=16, heads=2, sequence=8, vocabulary=32)
    sizes = [layer.grid_sizes for layer in traced.graph.layers]
    assert sizes == [described.layers[index].grid_sizes for index in (0, 1, 1, 1, 2)]
    # what is left are positions, biases and norms
    assert [layer.num_params - layer.grid_sizes.num_params for layer in traced.graph.layers[:2]] == [8 * 16, 13 * 16]


def test_layers_that_no_grid_can_cut_say_why():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixed, self.plain, self.last = nn.Conv1d(2, 2, 1), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.plain(self.mixed(x))).square().mean()

    graph = trace_module(Net(), torch.zeros(2, 2, 4), ["plain", "last"]).graph
    assert graph.layers[1].grid_sizes is not None
    match = search(
        graph,
        Cluster(Topology.uniform((0, 0), 1e9), 1e9),
        LayerProfile.estimate(graph, flops_per_second=1e6),
        num_samples=4,
        fixed={"grid": (1, 2, 1)},
    )
    assert all(not choice.grid for stage in match.stages for choice in stage.choices if stage.first_layer != 1)
    assert "layer 'first' cannot be on a grid: parallelize cannot cut 'mixed', a torch.nn.modules.conv.Conv1d" in (
        match.explain()
    )
    assert "modules: first" in match.explain()
    assert "layer 'last' cannot be on a grid: the model calls square between its modules" in match.explain()


def test_layers_of_a_class_that_no_grid_can_cut_are_one_class_and_one_line():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.blocks = nn.Linear(4, 4), nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            x = self.head(x)
            for block in self.blocks:
                x = block(x)
            return {"x": x, "loss": x.square().mean()}["loss"]

    graph = trace_module(Net(), torch.zeros(2, 4), "blocks.[0-3]").graph
    profile = LayerProfile.estimate(graph, flops_per_second=1e6)
    cluster = Cluster(Topology.uniform((0, 0), 1e9), 1e9)
    assert len(SearchProblem(graph, cluster, profile, 4).layer_classes) == 3
    lines = [
        line for line in search(graph, cluster, profile, num_samples=4).explain().splitlines() if "on a grid" in line
    ]
    assert [line.partition(" cannot")[0] for line in lines] == ["layer 'blocks.0'", "layer 'blocks.3'"]
    assert lines[0].endswith("; the same holds for 2 other layers of its class")


def test_tied_parameters_of_one_stage_count_once():
    tied = trace_module(make_model(replace(CONFIG, is_tied=True)), EXAMPLE, ["blocks.*", "norm"]).graph
    size = CONFIG.vocabulary * CONFIG.hidden
    assert tied.ties == (((0, 4), size),)
    assert LayerGraph.from_json(tied.to_json()) == tied
    profile = LayerProfile.estimate(tied, flops_per_second=1e9)
    problem = SearchProblem(tied, Cluster(Topology.uniform((0, 0), 1e9), 1e9), profile, 4, microbatch_counts=(2,))
    plain = (LayerChoice(),) * 5
    whole = problem.stage_cost(StagePlan(0, 5, 0, 1, plain), 2)
    parts = [
        problem.stage_cost(item, 2) for item in (StagePlan(0, 2, 0, 1, plain[:2]), StagePlan(2, 5, 1, 2, plain[2:]))
    ]
    assert whole.state_bytes == sum(part.state_bytes for part in parts) - 16 * size
    with pytest.raises(ArgumentError, match=r"a tie names layers \[0, 9\]; it needs some of 0 to 4"):
        replace(tied, ties=(((0, 9), 1),))


def test_a_layer_that_needs_data_makes_the_model_one_layer():
    class Gate(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.max() > 0 else x

    def loss(output):
        return output.square().mean()

    with pytest.warns(UserWarning, match="Sequential is one layer, .*stage 1 of the model does not run on tensors"):
        traced = trace_module(
            nn.Sequential(nn.Linear(4, 8), Gate(8, 8), nn.Linear(8, 1)), torch.ones(2, 4), "[12]", loss=loss
        )
    (layer,) = traced.graph.layers
    assert (layer.name, layer.num_params) == ("Sequential", 4 * 8 + 8 + 8 * 8 + 8 + 8 + 1)
    assert layer.forward_flops >= 2 * 4 * 8 + 2 * 8
    assert profile_layers(traced, sample_counts=(1,), repeats=1).classes.keys() == {layer.key}


def test_skips_are_tensors_with_several_readers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            y = self.a(x)
            return (self.c(self.b(y)) + y).square().mean()

    graph = trace_module(Net(), torch.zeros(2, 4), ["b", "c"]).graph
    assert {tensor.name: tensor.readers for tensor in graph.tensors} == {"a": (1, 2), "b": (2,)}
    assert not graph.is_chain
    whole = trace_module(Net(), torch.zeros(2, 4)).graph
    assert (len(whole.layers), whole.tensors) == (1, ())
    with pytest.raises(ArgumentError, match=r"Net has no module 'd'; .*; wildcards are those of fnmatch, such as"):
        trace_module(Net(), torch.zeros(2, 4), ["d"])


def test_a_profile_is_of_one_model(traced):
    profile = profile_layers(traced, sample_counts=(1, 2), repeats=1)
    assert profile.device == "cpu"
    assert not profile.is_guess
    assert LayerProfile.from_json(profile.to_json()) == profile
    for times in profile.classes.values():
        assert [layer_times.num_samples for layer_times in times[1].measured] == [1, 2]
    block = profile.classes[traced.graph.layers[1].key][1].measured
    assert block[1].saved_bytes == 2 * block[0].saved_bytes > 0  # of the microbatch alone, without parameters
    training_plan = search(traced.graph, Cluster(Topology.uniform((0, 0), 1e9), 1e9), profile, num_samples=4)
    assert not training_plan.is_guess
    other = trace_module(make_model(GPTConfig(3, 2, 4, sequence=8, vocabulary=32)), EXAMPLE, ["blocks.*"])
    with pytest.raises(ArgumentError, match="another model"):
        profile.check(other.graph)


def test_a_size_that_does_not_fit_is_recorded(traced, monkeypatch):
    real = profiling.run_layer

    def run(module, inputs, autocast):
        if next(iter(inputs.values())).shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(module, inputs, autocast)

    monkeypatch.setattr(profiling, "run_layer", run)
    profile = profile_layers(traced, sample_counts=(1, 2, 4, 8), repeats=1)
    for times in profile.classes.values():
        assert [layer_times.num_samples for layer_times in times[1].measured] == [1, 2]
        assert times[1].failed == (4, 8)
    with pytest.raises(ArgumentError, match=r"\[4, 8\] samples did not fit"):
        profile_layers(traced, sample_counts=(4, 8), repeats=1)


def test_layers_that_fully_shard_refuses_have_no_zero_times():
    single, half = torch.float32, torch.bfloat16
    refused = [
        (((4, 4), single), ((), single)),
        (((4, 4), single), ((4,), half)),
        (((4, 4), torch.int8),),
        (((4, 4), single), ((0, 4), single)),
        (((4, 4), torch.complex64),),
    ]
    *none, measured = measure_zero_times([*refused, (((4, 4), single), ((4,), single))], "cpu", 3)
    assert none == [ZeroTimes()] * len(refused)
    assert measured != ZeroTimes()  # at a high load, the difference of one of two measured steps may be 0


def test_another_process_measures_on_the_current_device_and_may_fail(monkeypatch):
    def run(*_, input, **__):
        layers, device, repeats = pickle.loads(input)
        assert (layers, device, repeats) == ([()], "cuda:3", 1)
        raise failure

    monkeypatch.setattr(zero_times.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(subprocess, "run", run)
    for failure in (OSError("no memory"), subprocess.SubprocessError("killed"), pickle.UnpicklingError("cut")):
        with pytest.warns(UserWarning, match=f"measuring them failed: {failure}"):
            assert measure_zero_times([()], "cuda", 1) == [ZeroTimes()]
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(zero_times, "_measure_in_group", lambda layers, device, repeats: [*used, device])
    assert measure_alone([()], "cuda:3", 1) == ["cuda:3", "cuda:3"]
