"""Split backwards in the engine: no saved tensor may change between the input- and the weight-gradient pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reshard import Layout, Mesh
from reshard.errors import ArgumentError
from reshard.scheduler import Edge, Pipeline, Stage, StageOutput
from reshard.scheduler.ir.actions import Action, Kind
from reshard.scheduler.ir.schedule import Schedule
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding.tensor_spec import TensorSpec
from reshard.testing.processes import run_processes

WIDTH, NUM_MICROBATCHES = 4, 3


class Part(nn.Module):
    """A stage that uses parameters once and twice, directly or as views, and a layer with a gradient hook twice."""

    def __init__(self, stage, views=True):
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.views = stage, views
        self.frozen = nn.Parameter(torch.ones(WIDTH).double(), requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.pos, self.once, self.first = (nn.Parameter(torch.randn(WIDTH).double()) for _ in range(3))
        self.b.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, x):
        first, once, pos = (item.view(1, WIDTH) if self.views else item for item in (self.first, self.once, self.pos))
        y = self.a(x.view(1, WIDTH) + first) + once + pos
        y = self.b(torch.tanh(self.b(torch.tanh(y) * self.frozen)))
        y = y + (self.pos[None] if self.views else self.pos)
        return StageOutput(loss=y.pow(2).sum()) if self.stage else {"x": y}


def _fail(gradient):
    raise ValueError("backward fails on purpose")


class FailingBackward(Part):
    """A stage whose backward raises."""

    def forward(self, x):
        outputs = super().forward(x)
        (outputs.loss if self.stage else outputs["x"]).register_hook(_fail)
        return outputs


class RunningMean(Part):
    """A stage whose layer reads a buffer that the next forward changes in place."""

    def __init__(self, stage):
        super().__init__(stage)
        self.register_buffer("mean", torch.zeros(1, WIDTH).double())

    def forward(self, x):
        self.mean = self.mean.add_(x.detach().mean(0))
        y = torch.tanh(x + self.a(self.mean))
        return StageOutput(loss=y.pow(2).sum()) if self.stage else {"x": y}


def _inputs():
    torch.manual_seed(7)
    return [torch.randn(1, WIDTH).double() for _ in range(NUM_MICROBATCHES)]


def _row(order):
    """Parse the actions of a row: capitals are on stage 0, lower-case letters on stage 1. ``F2``: microbatch 2."""
    kinds = {"f": Kind.F, "i": Kind.I, "w": Kind.W, "b": Kind.B}
    return tuple(Action(kinds[action[0].lower()], int(action[0].islower()), int(action[1])) for action in order.split())


ORDERS = {
    "split": "F0 f0 i0 I0 F1 f1 i1 I1 w0 W0 F2 f2 i2 I2 w1 W1 w2 W2",
    "whole": "F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2",
}


def _run(rank, order, module_class):
    mesh = Mesh([0])
    x = TensorSpec((1, WIDTH), "float64", Layout(mesh), Layout(mesh), "x")
    pipeline = Pipeline((Stage(1, 1, 1, mesh=mesh),) * 2, (Edge(0, 1, 1, 1, tensors=(x,)),))
    modules = {stage: module_class(stage) for stage in (0, 1)}
    with ScheduleEngine(
        Schedule("by hand", (_row(ORDERS[order]),), (0, 0), NUM_MICROBATCHES), pipeline, modules
    ) as engine:
        try:
            engine.step({0: [{"x": x} for x in _inputs()]}, loss_weights=[1.0] * NUM_MICROBATCHES)
        except (ArgumentError, ValueError) as error:
            return "; ".join([str(error), *error.__notes__])
    return [p.grad.numpy() for module in modules.values() for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_that_share_memory_are_separated(order):
    parts = [Part(stage, views=False) for stage in (0, 1)]
    for x in _inputs():
        parts[1](parts[0](x)["x"]).loss.backward()
    wanted = [p.grad for part in parts for p in part.parameters() if p.requires_grad]
    (found,) = run_processes(_run, 1, order, Part)
    for given, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(given), expected, rtol=1e-10, atol=1e-12)


def test_in_place_change_between_the_passes_is_an_error():
    (error,) = run_processes(_run, 1, "split", RunningMean)
    assert "was changed in place between the input-gradient and the weight-gradient pass" in error
    assert "in 1W0, microbatch 0 of stage 1 of the schedule 'by hand'" in error


def test_failed_split_backward_suggests_whole_backwards():
    (error,) = run_processes(_run, 1, "split", FailingBackward)
    assert "needs whole backwards: auto_schedule(..., can_split=False)" in error
    (error,) = run_processes(_run, 1, "whole", FailingBackward)
    assert "backward fails on purpose" in error and "can_split" not in error
