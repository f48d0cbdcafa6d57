"""Stages given as modules, with skips, several tensors on an edge, and shared parameters."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

import reshard.scheduler as rs
from reshard.errors import ArgumentError
from reshard.scheduler.model_stages.totals import combine_totals
from reshard.scheduler.runtime.step_executor import StageTotals
from reshard.testing import run_processes
from tests.support.whole_models import Case, check_equal

VOCABULARY, WIDTH = 11, 8


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        return {"x": x, "first": x.tanh(), "length": (tokens != 0).sum(1)}


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, first, scale=None):
        y = self.layer(x).relu() + first
        return rs.StageOutput({"x": y if scale is None else y * scale}, metrics={"size": y.detach().abs().mean()})


class Last(nn.Module):
    def __init__(self, embed):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = embed.weight

    def forward(self, x, first, length, targets):
        logits = self.head(x + first) / (1 + length[:, None, None])
        counted = targets != 0
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        count = counted.sum()
        return rs.StageOutput(loss=(losses * counted.flatten()).sum() / count.clamp(min=1), weight=count)


def make_stages():
    torch.manual_seed(0)
    first = First()
    return nn.ModuleList([first, Middle(), Last(first.embed)])


def run_alone(stages, batch):
    values = dict(batch)
    values |= stages[0](batch["tokens"])
    values |= stages[1](values["x"], values["first"], batch.get("scale")).tensors
    output = stages[2](values["x"], values["first"], values["length"], batch["targets"])
    return output.loss, {}


def make_batch(seed, num_samples=8):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, 6), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "scale": torch.rand(num_samples, 1, 1),
    }


@pytest.mark.nightly
def test_modules_equal_one_process():
    case = Case(make_stages, [make_batch(0), make_batch(1, 5), make_batch(2, 1)], make_batch(9, 3), run_alone)
    check_equal(case, lambda case: rs.Pipe(list(case.make_model()), stages="1x1,2x1,1x1"), 4, accumulate=1)


class Weighted(nn.Module):
    """The last stage, with a weight in float64 that is the number of tokens times ``factor``."""

    def __init__(self, factor):
        super().__init__()
        self.head, self.factor = nn.Linear(WIDTH, VOCABULARY), factor

    def forward(self, x, targets):
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return rs.StageOutput(loss=loss, weight=torch.tensor(targets.numel() * self.factor, dtype=torch.float64))


def check_weight(rank, factor):
    torch.manual_seed(0)
    first, last = First(), Weighted(factor)
    batch = {name: item for name, item in make_batch(0).items() if name != "scale"}
    with pytest.raises(ArgumentError, match=r"gives the weight \S+; it must be 0, or from 1e-30 to 1e\+30"):
        rs.Pipe([first, last], stages="1x1,1x1").compile(batch, num_microbatches=2)
    return True


@pytest.mark.nightly
@pytest.mark.parametrize("factor", [1e-310, 1e300])
def test_a_weight_that_float32_cannot_hold_is_an_error_on_all_ranks(factor):
    assert run_processes(check_weight, 2, factor) == [True, True]


class Masked(nn.Module):
    """The last stage, whose loss is a mean over targets that are not 0, so it is NaN if all are."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, targets):
        counted = targets.flatten() != 0
        losses = nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return rs.StageOutput(loss=(losses * counted).sum() / counted.sum(), weight=counted.sum())


def make_masked():
    torch.manual_seed(0)
    return nn.ModuleList([First(), Masked()])


def make_masked_batch(seed, masked_rows):
    batch = make_batch(seed)
    batch["targets"][:masked_rows] = 0
    return {name: batch[name] for name in ("tokens", "targets")}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "last",
    [
        rs.Placement(dp=2),
        rs.Placement(dp=2, wrap=rs.fsdp),
        pytest.param(
            rs.Placement(prepare=functools.partial(torch.compile, backend="aot_eager")), marks=pytest.mark.integration
        ),
    ],
    ids=["ddp", "fsdp", "compiled"],
)
def test_microbatches_of_weight_0_change_no_gradient(last):
    case = Case(
        make_masked,
        [make_masked_batch(seed, num_samples) for seed, num_samples in enumerate((0, 5, 7))],
        make_masked_batch(9, 3),
        lambda stages, batch: (stages[1](stages[0](batch["tokens"])["x"], batch["targets"]).loss, {}),
    )
    check_equal(case, lambda case: rs.Pipe(list(case.make_model()), stages=[rs.Placement(), last]), 1 + last.size)


def step_without_weight(rank):
    torch.set_num_threads(1)
    pipe = rs.Pipe(list(make_masked()), stages="1x1,1x1", autocast=torch.float16)
    with pipe.compile(make_masked_batch(0, 0), 4) as engine:
        results = [engine.step(make_masked_batch(1, 8))]
        norm = engine.clip_grad_norm_(1.0)
        results.append(engine.step(make_masked_batch(2, 1)))
        return [(math.isnan(result.loss), result.finite) for result in results], norm, engine._loss_scale.value


@pytest.mark.nightly
def test_a_batch_of_weight_0_has_no_gradient_and_keeps_the_loss_scale():
    assert run_processes(step_without_weight, 2) == [([(True, False), (False, True)], 0.0, 65536.0)] * 2


def test_stages_with_a_loss_may_all_have_weight_0():
    totals = combine_totals({stage: [StageTotals(0.0, {}, 0.0)] for stage in (0, 1)}, 8, True)
    assert math.isnan(totals.loss)
    assert (totals.finite, totals.gradients_finite) == (False, True)
    with pytest.raises(ArgumentError, match="stages 0 and 1 have a loss, and their weights sum to 0 and 4"):
        combine_totals({0: [StageTotals(0.0, {}, 0.0)], 1: [StageTotals(2.0, {}, 4.0)]}, 8, True)
