"""A pipeline of two small stages with data-parallel replicas, and its gradients in a single process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reshard import Layout, Mesh
from reshard.scheduler import Edge, Pipeline, Stage, StageOutput
from reshard.sharding.tensor_spec import TensorSpec

WIDTH, NUM, ROWS = 4, 3, 12


class First(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.gives_loss = False

    def forward(self, x):
        out = self.layer(x)
        return StageOutput({"x": out}, (out**2).mean()) if self.gives_loss else {"x": out}


class Last(nn.Module):
    """The second stage. Tests may set ``fault``, which runs in every ``NUM``-th forward, before the computation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.fault, self.calls = None, 0

    def forward(self, x, target):
        self.calls += 1
        if self.fault is not None and self.calls % NUM == 0:
            self.fault()
        return StageOutput(loss=((torch.tanh(self.layer(x)) - target) ** 2).mean())


def data():
    torch.manual_seed(10)
    return [torch.randn(2, ROWS, WIDTH, dtype=torch.float64) for _ in range(NUM)]


def make_pipeline(replicas, first=1):
    meshes = [Mesh(range(first)), Mesh(range(first, first + replicas))]
    src, dst = ("S0 R" if mesh.size > 1 else "R R" for mesh in meshes)
    x = TensorSpec((ROWS, WIDTH), "float64", Layout(meshes[0], src), Layout(meshes[1], dst), "x")
    return Pipeline(tuple(Stage(1, 1, 1, mesh=mesh) for mesh in meshes), (Edge(0, 1, 1, 1, tensors=(x,)),))


def wrap(rank, replicas, module, first=1, **options):
    """The module of a rank, wrapped in DDP if its stage has replicas."""
    groups = [dist.new_group(range(first)), dist.new_group(range(first, first + replicas))]
    size = first if rank < first else replicas
    return DistributedDataParallel(module, process_group=groups[rank >= first], **options) if size > 1 else module


def feed(rank, replicas, first=1):
    mine = max(rank - first, 0)
    return {
        0: [{"x": x.chunk(first)[min(rank, first - 1)]} for x, _ in data()],
        1: [{"target": target.chunk(replicas)[mine]} for _, target in data()],
    }


def gradients(module):
    return {n.removeprefix("module."): p.grad.to_dense().numpy().copy() for n, p in module.named_parameters()}


def single_process(first_gives_loss=False):
    first, last = First(), Last()
    first.gives_loss = first_gives_loss
    for x, target in data():
        out = first(x)
        x, first_loss = (out.tensors["x"], out.loss) if first_gives_loss else (out["x"], 0.0)
        loss = last(x, target).loss + first_loss
        (loss / NUM).backward()
    return gradients(first), gradients(last)


def check(got, wanted):
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(torch.from_numpy(got[name]), torch.from_numpy(gradient), rtol=1e-10, atol=1e-15)
