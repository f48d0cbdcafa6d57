"""Stages on grids in the pipeline engine: one 2.5-D, the next 1-D, with split backwards."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from reshard import Layout, Mesh
from reshard.parallel import Grid, parallelize, plain_state_dict
from reshard.scheduler import Edge, Pipeline, Stage, StageOutput, one_f_one_b, zb_h1
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding import TensorSpec
from reshard.testing import run_processes

from .models import SEQUENCE, make_batch, make_gpt, relative_error

HIDDEN, ROWS, MICROBATCHES, STEPS = 24, 4, 3, 3
#: Ranks of each stage, as [depth][row][col].
MESHES = ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [[[8, 9]]])
AXES = ("depth", "row", "col")


class First(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embed, self.block = model.embed, model.blocks[0]

    def forward(self, tokens):
        return {"x": self.block(self.embed(tokens))}

    def to_grid(self, conversion, path):
        return conversion.convert_children(self, path)


class Last(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.block, self.norm, self.head, self.loss = model.blocks[1], model.norm, model.head, model.loss

    def forward(self, x, targets):
        return StageOutput(loss=self.loss(self.head(self.norm(self.block(x))), targets))

    def to_grid(self, conversion, path):
        return conversion.convert_children(self, path)


def make_stages():
    model = make_gpt(is_tied=False)
    return [First(model), Last(model)]


def batches():
    tokens, targets = make_batch(ROWS * MICROBATCHES)
    return tokens.clamp(min=0).split(ROWS), targets.clamp(min=0).split(ROWS)


def make_pipeline():
    layouts = []
    for ranks in MESHES:
        array = torch.tensor(ranks)
        mesh = Mesh(array.flatten().tolist(), dict(zip(AXES, array.shape, strict=True)))
        layouts.append(Layout(mesh, (("depth", "row"), (), ("col",))))
    x = TensorSpec((ROWS, SEQUENCE, HIDDEN), "float64", *layouts, "x")
    return Pipeline(tuple(Stage(1, 1, 1, mesh=layout.mesh) for layout in layouts), (Edge(0, 1, tensors=(x,)),))


def check_engine(rank, make_schedule):
    torch.set_num_threads(1)
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=AXES) for ranks in MESHES]
    mine = 0 if rank < 8 else 1
    grid = Grid(meshes[mine])
    module = parallelize(make_stages()[mine], grid, has_local_input=True)
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    pipeline = make_pipeline()
    lo, hi = grid.local_rows(ROWS)
    tokens, targets = batches()
    name, values = (("tokens", tokens), ("targets", targets))[mine]
    feed = {mine: [{name: value[lo:hi]} for value in values]}
    losses = []
    with ScheduleEngine(make_schedule(pipeline, MICROBATCHES), pipeline, {mine: module}, timeout_seconds=60) as engine:
        for _ in range(STEPS):
            losses.append(engine.step(feed).loss)
            optimizer.step()
            optimizer.zero_grad()
    return mine, losses, plain_state_dict(module)


@pytest.mark.nightly
@pytest.mark.parametrize("make_schedule", [zb_h1, pytest.param(one_f_one_b, marks=pytest.mark.slow)])
def test_unlike_grids_train_as_one_process(make_schedule):
    results = run_processes(check_engine, 10, make_schedule)
    stages = make_stages()
    optimizer = torch.optim.SGD([each for stage in stages for each in stage.parameters()], 0.5)
    expected = []
    for _ in range(STEPS):
        loss = sum(stages[1](stages[0](x)["x"], y).loss for x, y in zip(*batches(), strict=True)) / MICROBATCHES
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    for mine, losses, state in results:
        if mine == 1:
            assert losses == pytest.approx(expected, abs=1e-12)
        for name, value in stages[mine].state_dict().items():
            if "k.bias" not in name:
                assert relative_error(state[name], value) < 1e-11, name
