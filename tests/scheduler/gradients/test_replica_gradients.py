"""Gradients of stage replicas: sparse gradients, gradients of other dtypes, and gradients in user memory."""

from __future__ import annotations

import torch
from torch import nn

from reshard.coordination.groups.process_group import find_group
from reshard.coordination.liveness.heartbeat import Monitor
from reshard.scheduler import StageOutput, one_f_one_b
from reshard.scheduler.gradients.replica_sync import ReplicaSync, _sparse
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.testing.processes import run_processes
from tests.support.stages_with_replicas import (
    NUM,
    WIDTH,
    First,
    Last,
    check,
    data,
    feed,
    gradients,
    make_pipeline,
    single_process,
    wrap,
)

#: Of parameters and their gradients, which can only differ since torch 2.10.
DTYPES = [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)][: 1 + hasattr(torch.Tensor, "grad_dtype")]


class Tables(nn.Module):
    """Embeddings with sparse and dense gradients, in the dtype of the parameter and in a wider one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.tables = nn.ModuleDict()
        for dtype, grad_dtype in DTYPES:
            for is_sparse in (True, False):
                table = nn.Embedding(5, WIDTH, sparse=is_sparse, dtype=dtype)
                table.weight.grad_dtype = grad_dtype
                self.tables[f"{dtype}, {is_sparse}".replace(".", " ")] = table
        self.uses = True

    def forward(self, x, target):
        out = x
        for table in self.tables.values():
            out = out + table(torch.arange(len(x)) % 3) if self.uses else out
        return StageOutput(loss=((out - target) ** 2).mean())


def run_used_once(rank):
    pipeline = make_pipeline(2)
    inner = Tables() if rank else First()
    inner.uses = rank == 1
    with ScheduleEngine(
        one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): wrap(rank, 2, inner)}, num_loss_shards=2
    ) as engine:
        engine.step(feed(rank, 2))
    return gradients(inner), [(p.grad.is_sparse, str(p.grad.dtype)) for p in inner.parameters()]


def test_gradient_of_one_replica_reaches_all_replicas():
    first, last = First(), Tables()
    for x, target in data():
        shards = zip(first(x)["x"].chunk(2), target.chunk(2), strict=True)
        for uses, (x_shard, target_shard) in zip((True, False), shards, strict=True):
            last.uses = uses
            (last(x_shard, target_shard).loss / (2 * NUM)).backward(retain_graph=True)
    for got, kinds in run_processes(run_used_once, 3)[1:]:
        assert kinds == [(s, str(dtype)) for _, dtype in DTYPES for s in (True, False)]
        check(got, gradients(last))


def test_sparse_gradients_are_converted_to_the_agreed_sparse_dim():
    parameter = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    empty = _sparse(parameter, 1)
    assert (empty.sparse_dim(), empty.dense_dim(), empty._nnz(), empty.dtype) == (1, 1, 0, torch.float64)
    assert torch.equal(empty.to_dense(), torch.zeros(4, 3, dtype=torch.float64))
    dense = torch.zeros(4, 3, dtype=torch.float64)
    dense[1, 2], dense[3] = 5.0, 7.0
    for given in (1, 2):
        for wanted in (1, 2):
            parameter.grad = dense.to_sparse(given)
            made = _sparse(parameter, wanted)
            assert made.sparse_dim() == wanted and made.is_coalesced() and torch.equal(made.to_dense(), dense)


def run_flat(rank):
    pipeline = make_pipeline(2)
    module = wrap(rank, 2, Last() if rank else First())
    flat = torch.ones(sum(p.numel() for p in module.parameters()), dtype=torch.float64)
    for parameter, part in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True):
        parameter.grad = part.view(parameter.shape)
    with ScheduleEngine(one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, num_loss_shards=2) as engine:
        engine.step(feed(rank, 2))
        watched = [item for item in Monitor.of(find_group(None))._watched if isinstance(item, ReplicaSync)]
    return gradients(module), flat.numpy().copy(), len(watched)


def test_gradients_keep_their_memory():
    wanted = single_process()
    for rank, (got, flat, num_watched) in enumerate(run_processes(run_flat, 3)):
        check({name: gradient - 1 for name, gradient in got.items()}, wanted[rank > 0])
        assert flat.tolist() == [number for gradient in got.values() for number in gradient.reshape(-1).tolist()]
        assert num_watched == 0  # the step has ended
