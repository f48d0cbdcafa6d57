"""Stages that only compute: their ranks have no parameters, but train, save and resume as all others do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reshard.scheduler as rs
from reshard.testing import run_processes


class Scaled(nn.Module):
    """The first and the third stage have no parameters."""

    def __init__(self):
        super().__init__()
        self.scale, self.first, self.act, self.last = nn.Tanh(), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.last(self.act(self.first(self.scale(x)))), y)


def make_model():
    torch.manual_seed(0)
    return Scaled()


def make_batch(seed, num_samples=8):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(num_samples, 6, generator=generator) for name in "xy"}


def make_optimizer(parameters):
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def train(rank, placements, folder):
    """Train in two engines, of which the second resumes. Returns losses, norms and learning rates."""
    torch.set_num_threads(1)
    results = []
    for until in (2, 4):
        with rs.Pipe(make_model(), ["first", "act", "last"], stages=placements).compile(make_batch(0), 4) as engine:
            optimizer, lr_scheduler = make_optimizer(engine.parameters())
            for step in range(engine.load(folder, optimizer, lr_scheduler, missing_ok=True), until):
                loss = engine.step(make_batch(step)).loss
                norm = engine.clip_grad_norm_(0.1)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                results.append([loss, norm, lr_scheduler.get_last_lr()[0]])
            engine.save(folder, optimizer, lr_scheduler, step=until)
            names = [name for name, _ in engine.named_parameters()]
    return results, names


def train_alone():
    model, results = make_model(), []
    optimizer, lr_scheduler = make_optimizer(model.parameters())
    for step in range(4):
        loss = model(**make_batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        results.append([float(loss.detach()), float(norm), lr_scheduler.get_last_lr()[0]])
    return results


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", [rs.ddp, pytest.param(rs.fsdp, marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
def test_stages_without_parameters_train_save_and_resume(wrap, tmp_path):
    placements = [rs.Placement(), rs.Placement(), rs.Placement(dp=2, wrap=wrap), rs.Placement()]
    ranks = run_processes(train, 5, placements, str(tmp_path))
    expected = train_alone()
    for results, _ in ranks:
        for own, alone in zip(results, expected, strict=True):
            assert own == pytest.approx(alone, rel=1e-5)
    assert [len(names) for _, names in ranks] == [0, 2, 0, 0, 2]
