"""Stages under torch.compile, activation checkpointing and autocast."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import reshard.scheduler as rs
from reshard.testing import run_processes
from tests.scheduler.model_stages.test_parallel_stages import Layer, make_case
from tests.support.whole_models import check_equal, pipe_of, train_alone


def checkpointed(module):
    """Activation checkpointing of each layer."""
    apply_activation_checkpointing(module, check_fn=lambda each: isinstance(each, Layer))
    return module


def compiled(backend):
    return functools.partial(torch.compile, backend=backend)


def run(first, second=None, dp=1, cuts=("layers.1",)):
    stages = [rs.Placement(dp=dp, prepare=first), rs.Placement(prepare=second)]
    check_equal(make_case(), pipe_of(list(cuts), stages), dp + 1)


@pytest.mark.slow
def test_a_compiled_and_a_checkpointed_stage_equal_one_process():
    run(compiled("eager"), checkpointed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # by torch.compile itself
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_stages_equal_one_process(backend):
    run(compiled(backend), compiled(backend), dp=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch.compile itself
@pytest.mark.parametrize("prepare", ["compile", "checkpoint"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_prepared_hugging_face_models_equal_one_process(model, prepare):
    models = pytest.importorskip("tests.scheduler.model_stages.test_transformers")
    make, layers = (
        (models.make_gpt2, models.gpt2_layers) if model == "gpt2" else (models.make_llama, models.llama_layers)
    )

    def wrap(module):
        blocks = [
            submodule
            for submodule in module.modules()
            if type(submodule).__name__ in ("GPT2Block", "LlamaDecoderLayer")
        ]
        apply_activation_checkpointing(module, check_fn=lambda each: each in blocks)
        return module

    prepared = compiled("aot_eager") if prepare == "compile" else wrap
    stages = [rs.Placement(dp=2, prepare=prepared), rs.Placement(prepare=prepared)]
    check_equal(models.make_case(make, mask=True, ignored=True), pipe_of(layers(2), stages), 3)


def recompute(rank, models):
    """How often this rank computes the layer of its stage in a step of two microbatches."""
    torch.set_num_threads(1)
    counts = []

    def wrap(module):
        layers = [submodule for submodule in module.modules() if type(submodule).__name__ == "LlamaDecoderLayer"]
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: counts.append(1))
        apply_activation_checkpointing(module, check_fn=lambda each: each in layers)
        return module

    stages = [rs.Placement(prepare=wrap)] * 2
    batch = models.make_batch(0)
    with rs.Pipe(models.make_llama(), models.llama_layers(1), stages=stages).compile(batch, 2) as engine:
        counts.clear()
        engine.step(batch)
        in_step = len(counts)
        engine.evaluate(batch)
        return in_step, len(counts) - in_step


@pytest.mark.nightly
def test_checkpointed_blocks_are_computed_again():
    models = pytest.importorskip("tests.scheduler.model_stages.test_transformers")
    models.make_llama()  # imports the model once, not on each rank
    assert run_processes(recompute, 2, models) == [(4, 2), (12, 6)]


def make_cast_case(dtype, tolerance):
    return replace(make_case(), autocast=dtype, tolerance=tolerance)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.integration)])
def test_losses_under_autocast_equal_one_process(dtype):
    case = make_cast_case(dtype, 1e-2)
    expected, _ = train_alone(case)
    for results in run_processes(train_cast, 3, case):
        for own, alone in zip(results, expected, strict=True):
            assert own == pytest.approx(alone, rel=case.tolerance)


def train_cast(rank, case):
    torch.set_num_threads(1)
    pipe = pipe_of(["layers.1"], "2x1,1x1")(case)
    results = []
    with pipe.compile(case.batches[0], 4) as engine:
        optimizer = torch.optim.SGD(engine.parameters(), case.rate, momentum=0.9)
        for batch in case.batches:
            optimizer.zero_grad()
            result = engine.step(batch)
            assert result.finite
            norm = engine.clip_grad_norm_(case.max_norm)
            optimizer.step()
            results.append([result.loss, norm, engine.evaluate(case.held_out).loss])
    return results


class Half(nn.Module):
    """A linear layer, whose output is in the dtype of autocast."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x)).float().square().mean()


def overflow(rank):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = {"x": torch.ones(4, 4)}
    results = []
    with rs.Pipe(Half(), ["second"], stages="2x1,1x1", autocast=torch.float16).compile(batch, 2) as engine:
        (edge,) = engine._engine.pipeline.edges
        assert [spec.dtype for spec in edge.tensors] == ["float16"]
        parameter = engine.parameters()[0]
        for number in range(3):
            hook = None
            if number == 1 and rank == 2:  # only the last stage overflows
                hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
            scale = engine._loss_scale.value
            for item in engine.parameters():
                item.grad = None
            result = engine.step(batch)
            results.append((result.finite, engine._loss_scale.value / scale))
            if hook is not None:
                hook.remove()
    return results


@pytest.mark.integration
def test_overflow_halves_the_scale_on_all_ranks():
    for results in run_processes(overflow, 3):
        assert results == [(True, 1.0), (False, 0.5), (True, 1.0)]
