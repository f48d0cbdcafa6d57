"""Stages given as modules, with skips, several tensors on an edge, and shared parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reshard.scheduler as rs
from reshard.errors import ArgumentError
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


def make_batch(seed, rows=8):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, 6), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "scale": torch.rand(rows, 1, 1),
    }


@pytest.mark.integration
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
    batch = {name: each for name, each in make_batch(0).items() if name != "scale"}
    with pytest.raises(ArgumentError, match=r"gives the weight \S+; it must be 0, or from 1e-30 to 1e\+30"):
        rs.Pipe([first, last], stages="1x1,1x1").compile(batch, microbatches=2)
    return True


@pytest.mark.parametrize("factor", [1e-310, 1e300])
def test_a_weight_that_float32_cannot_hold_is_an_error_on_all_ranks(factor):
    assert run_processes(check_weight, 2, factor) == [True, True]
