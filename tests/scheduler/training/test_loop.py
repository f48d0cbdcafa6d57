"""Training: equal to one process, resumable, and finite in half precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reshard.scheduler.training.loop import (
    MAX_NORM,
    TrainingJob,
    make_loaders,
    make_optimizer,
    make_pipe,
    rate_factors,
    train,
)
from reshard.scheduler.training.models.making import make_model
from reshard.scheduler.training.models.model_presets import PRESETS, GPTConfig, Preset, UTransformerConfig
from reshard.testing import run_processes
from tests.support.whole_models import find_shapes

GPT = Preset(GPTConfig(4, 4, 4, sequence=16, vocabulary=256), 8, 3e-3, num_microbatches=4)
U_TRANSFORMER = Preset(UTransformerConfig(8, side=8, num_heads=2, groups=4), 8, 3e-3, num_microbatches=4)


def train_alone(job):
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    model = make_model(job.preset.config, "cpu")
    loader, held_out = make_loaders(job)
    optimizer = make_optimizer([{"params": list(model.parameters())}], job.preset.learning_rate)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factors(job.steps, job.warmup))
    losses = []
    for _, batch in zip(range(job.steps), loader, strict=False):
        loss = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        rates.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, float(model(**held_out.batch(0)))


def train_staged(job):
    num_ranks = sum(int(stage[0]) * int(stage[2]) for stage in job.stages.split(","))
    find_shapes(make_pipe(job), make_loaders(job)[0].batch(0))
    results = run_processes(train, num_ranks, job, False, timeout_seconds=600)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "stages", "schedule", "steps"),
    [
        (GPT, "1x1,2x1", "auto", 5),
        (U_TRANSFORMER, "1x1,2x1", "1f1b", 5),
        pytest.param(GPT, "1x1,1x1", "zb_h1", 50, marks=pytest.mark.slow),
        pytest.param(GPT, "2x2,2x2", "auto", 50, marks=pytest.mark.slow),
        pytest.param(GPT, "1x2,2x2,1x4", "auto", 50, marks=pytest.mark.slow),
        pytest.param(U_TRANSFORMER, "1x1,2x1", "eager_1f1b", 50, marks=pytest.mark.slow),
        pytest.param(U_TRANSFORMER, "2x1,4x1,4x1", "auto", 50, marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process(preset, stages, schedule, steps):
    job = TrainingJob("test", preset, steps, stages, schedule=schedule, warmup=2)
    losses, held_out = train_alone(job)
    result = train_staged(job)
    assert result.skipped == ()
    assert list(result.losses) == pytest.approx(losses, abs=1e-5)
    assert result.held_out == pytest.approx(held_out, abs=1e-5)
    assert steps < 50 or losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("preset", "stages"), [(GPT, "1x1,1x1"), pytest.param(U_TRANSFORMER, "2x1,1x1", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_resumed_training_equals_uninterrupted_training(preset, stages, tmp_path):
    job = TrainingJob("test", preset, 6, stages, warmup=2, checkpoint=str(tmp_path), save_every=3)
    whole = train_staged(replace(job, checkpoint=None))
    newest = tmp_path / "step-00000006"
    assert train_staged(job) == whole
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    resumed = train_staged(replace(job, resume=True))
    assert resumed.start == 3
    assert resumed.losses == whole.losses[3:]
    assert resumed.held_out == whole.held_out
    finished = train_staged(replace(job, resume=True))
    assert (finished.start, finished.losses, finished.held_out) == (6, (), whole.held_out)


@pytest.mark.nightly
def test_half_precision_stays_finite():
    job = TrainingJob("test", replace(GPT, autocast="float16"), 5, "1x1,1x1", warmup=2)
    result = train_staged(job)
    assert result.skipped == ()
    losses, _ = train_alone(replace(job, preset=GPT))
    assert list(result.losses) == pytest.approx(losses, rel=5e-3)


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    factor = rate_factors(100, 10)
    assert [factor(step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert factor(55) == pytest.approx(0.55)
    assert [factor(step) for step in (100, 200)] == pytest.approx([0.1, 0.1])


def test_weight_decay_applies_to_matrices_only():
    model = make_model(GPT.config, "cpu")
    decayed, others = make_optimizer([{"params": list(model.parameters())}], 1e-3).param_groups
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in others["params"]} == {1}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == (0.9, 0.95)


#: How much each preset is shrunk to take 200 steps in a minute or two.
DIVISORS = {
    "gpt3-125m": 24,
    "gpt3-350m": 32,
    "gpt3-760m": 32,
    "gpt3-1.3b": 64,
    "gpt3-2.7b": 80,
    "gpt3-6.7b": 64,
    "gpt3-13b": 64,
    "gpt3-175b": 128,
    "study-gpt-1.3b": 32,
    "study-gpt-2.6b": 40,
    "u-transformer-470m": 40,
    "u-transformer-1b": 60,
    "u-transformer-2b": 84,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_takes_200_finite_steps(name):
    preset = PRESETS[name].shrunk(DIVISORS[name], 2)
    assert preset.autocast == PRESETS[name].autocast == ("float16" if "gpt" in name else "")
    preset = replace(preset, num_microbatches=4, num_samples=16)
    result = train_staged(TrainingJob(name, preset, 200, "1x1,1x1", warmup=20))
    assert len(result.losses) == 200
    assert result.skipped == ()
    assert result.held_out < 0.8 * result.losses[0]
