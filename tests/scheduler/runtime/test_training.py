"""Trainers: sizes of the 2023 study's models on meta devices, and training of small models in parallel."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from reshard import Topology
from reshard.scheduler.training.gpt import GPT_CONFIGS
from reshard.scheduler.training.train import MODELS, Job, make_schedule, train
from reshard.scheduler.training.u_transformer import NUM_LAYERS, U_TRANSFORMER_CONFIGS
from reshard.testing.processes import run_processes

MIB = 2**20


def edge_mib(edges):
    return [sum(math.prod(spec.shape) * spec.itemsize for spec in edge.tensors) / MIB for edge in edges]


@pytest.mark.parametrize(
    ("name", "parameters", "mib"),
    [("1.3B", 1.3e9, [64.0]), ("2.6B", 2.6e9, [40.0]), ("2.6B, 64 microbatches", 2.6e9, [80.0])],
)
def test_gpt_has_the_sizes_of_the_study(name, parameters, mib):
    config = GPT_CONFIGS[name]
    with torch.device("meta"):
        stages = [config.make_stage(stage) for stage in range(config.pp)]
        rows = torch.zeros(config.microbatch // config.dp, config.sequence, dtype=torch.long)
        x = stages[0].half()(tokens=rows)["x"]
        assert stages[1].half()(x=x, targets=rows).loss.shape == ()
    total = sum(p.numel() for stage in stages for p in stage.parameters())
    total -= config.vocabulary * config.hidden  # the study counts the tied embedding once
    assert total == pytest.approx(parameters, rel=0.03)
    edges = config.edges(config.meshes())
    assert edge_mib(edges) == mib
    spec = edges[0].tensors[0]
    assert tuple(x.shape) == spec.src_shards.local_shape(0)
    assert str(x.dtype) == f"torch.{spec.dtype}"


@pytest.mark.parametrize(("name", "parameters"), [("470M", 470e6), ("1B", 1e9), ("2B", 2e9)])
def test_u_transformer_has_the_sizes_of_the_study(name, parameters):
    config = U_TRANSFORMER_CONFIGS[name]
    assert sum(config.split) == NUM_LAYERS == 13
    with torch.device("meta"):
        stages = [config.make_stage(stage) for stage in range(2)]
        each = config.microbatch // len(config.meshes()[0].ranks)
        outputs = stages[0](pictures=torch.zeros(each, 3, 32, 32))
        assert stages[1](**outputs, clean=torch.zeros(each, 3, 32, 32)).loss.shape == ()
    total = sum(p.numel() for stage in stages for p in stage.parameters())
    assert total == pytest.approx(parameters, rel=0.15)
    (edge,) = config.edges(config.meshes())
    assert {spec.name for spec in edge.tensors} == set(outputs)
    for spec in edge.tensors:
        assert tuple(outputs[spec.name].shape) == spec.src_shards.local_shape(0)


def test_skips_of_the_largest_u_transformer_take_546_mib():
    config = U_TRANSFORMER_CONFIGS["2B"]
    assert config.microbatch == 64
    nbytes = sum(64 * width * side * side * 4 for _, _, (width, side) in config.skips().values())
    assert nbytes / MIB == 546


@pytest.mark.parametrize("model", MODELS)
def test_every_configuration_can_be_planned(model):
    for config in MODELS[model].values():
        meshes = config.meshes()
        ranks = [rank for mesh in meshes for rank in mesh.ranks]
        assert ranks == list(range(len(ranks)))
        Topology(tuple(ranks)).check_covers(ranks)
        small = replace(config, num_microbatches=4)
        schedule, pipeline = make_schedule(small, meshes, "1f1b", True)
        assert all(edge.forward_seconds > 0 for edge in pipeline.edges)
        assert schedule.num_microbatches == 4


def single_process(config, steps):
    torch.manual_seed(0)
    whole = replace(config, pp=1, dp=1, tp=1) if hasattr(config, "tp") else replace(config, split=(13,), mesh=(1, 1))
    module = whole.make_stage(0)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for row in whole.feed(number)[0]:
            loss = module(**row).loss / whole.num_microbatches
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


def run(config, schedule, steps):
    size = sum(len(mesh.ranks) for mesh in config.meshes())
    results = run_processes(train, size, Job(config, schedule, steps), False, timeout_seconds=300)
    return next(losses for losses in results if losses)


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        (GPT_CONFIGS["small"], "auto"),
        (U_TRANSFORMER_CONFIGS["small, 4 stages"], "zb_h1"),
        pytest.param(GPT_CONFIGS["small, 2 x 2"], "1f1b", marks=pytest.mark.slow),
    ],
    ids=["gpt", "u_transformer, 4 stages", "gpt, 2 x 2 devices"],
)
def test_losses_equal_single_process_training(config, schedule):
    torch.set_num_threads(1)
    config = replace(config, batch=16, num_microbatches=4)
    assert run(config, schedule, 3) == pytest.approx(single_process(config, 3), rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_loss_curves_of_all_schedules_are_equal_and_fall(model):
    config = replace(MODELS[model]["small"], batch=16, num_microbatches=4)
    expected = single_process(config, 50)
    assert expected[-1] < 0.6 * expected[0]
    for schedule in ("auto", "1f1b", "eager", "zb_h1"):
        assert run(config, schedule, 50) == pytest.approx(expected, rel=1e-2)
