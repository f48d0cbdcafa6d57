"""Trainers and workers with the interface of SGLang."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reshard.errors import RemoteError
from reshard.sglang import Trainer
from reshard.sglang.order import LOADER, InstallOrder
from reshard.testing import run_processes
from tests.sglang.sglang_interface import Engine, Worker

pytestmark = pytest.mark.integration

SIZE = 2
NAMES = ("q.weight", "k.weight", "norm.weight")
SHAPES = ((6, 5), (6, 5), (5,))


def make_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in zip(NAMES, SHAPES, strict=True)}


class FusedModel(torch.nn.Module):
    """One worker's half of the rows of q and k in one parameter, and the norm."""

    def __init__(self, rank):
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(6, 5))
        self.norm = torch.nn.Parameter(torch.zeros(5))
        self.rank, self.fails = rank, 0

    def load_weights(self, weights):
        for number, (name, weight) in enumerate(weights):
            if self.fails and number == 1:
                self.fails -= 1
                raise ValueError("planted")
            if name == "norm.weight":
                self.norm.data.copy_(weight)
            else:
                begin = 3 * (name == "k.weight")
                self.qk.data[begin : begin + 3].copy_(weight[3 * self.rank : 3 * self.rank + 3])

    def holds(self, seed):
        whole, rows = make_weights(seed), slice(3 * self.rank, 3 * self.rank + 3)
        fused = torch.cat([whole["q.weight"][rows], whole["k.weight"][rows]])
        return torch.equal(self.qk.data, fused) and torch.equal(self.norm.data, whole["norm.weight"])


def train(rank, store, first_fails):
    """Returns the errors of the updates, and those of calls that no trainer makes."""
    mesh = init_device_mesh("cpu", (SIZE,))
    model = {name: distribute_tensor(weight, mesh, [Shard(0)]) for name, weight in make_weights(0).items()}
    engine = Engine(dist.PrefixStore("engine", store), SIZE)
    trainer = Trainer(model, store, [engine] if rank == 0 else [], host="127.0.0.1", timeout_seconds=30)
    errors = []
    for seed in (1,) if first_fails else (1, 2, 3, 4):
        for name, weight in make_weights(seed).items():
            model[name].copy_(distribute_tensor(weight, mesh, [Shard(0)]))
        try:
            errors.append(trainer.send_weights())
        except RemoteError as error:
            errors.append(str(error))
    if rank == 0 and not first_fails:
        never = InstallOrder("127.0.0.1", store.port, "default", trainer._order.trainer, 1 << 20, 1.0, 99, "never")
        engine.begin_weight_update()
        assert engine.update_weights_from_tensor(never.named_tensors(), load_format=LOADER) == (True, "Success")
        engine.end_weight_update()
        errors.append(store.get("never").decode())
        engine.stop()
    dist.barrier()
    trainer.close()
    return errors


def serve(rank, store, first_fails):
    """Returns the seeds of the weights that this worker ends with, and the error that has ended it."""
    model = FusedModel(rank)
    load, calls = model.load_weights, []

    def fail_in_the_third_update(weights):
        calls.append(model.holds)
        model.fails = int(rank == 1 and len(calls) == (1 if first_fails else 3))
        load(weights)

    model.load_weights = fail_in_the_third_update
    try:
        Worker(dist.PrefixStore("engine", store), model, dist.group.WORLD, [LOADER]).serve()
    except Exception as error:
        return str(error)
    return [seed for seed in range(5) if model.holds(seed)]


def run(rank, port, first_fails):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    job, rank = (train, rank) if rank < SIZE else (serve, rank - SIZE)
    dist.init_process_group("gloo", store=dist.PrefixStore(job.__name__, store), rank=rank, world_size=SIZE)
    return job(rank, store, first_fails)


def test_an_update_that_fails_leaves_the_old_version_on_all_workers():
    trained, other, *served = run_processes(run, 2 * SIZE, False, init_group=False)
    assert other == trained[:4]
    assert trained[:2] == [1, 2] and trained[3] == 4
    assert "engine 0 has not installed version 3" in trained[2] and "rank 1: ValueError: planted" in trained[2]
    assert "no newer version was complete" in trained[4]
    assert served == [[4], [4]]


def test_an_engine_that_has_no_old_version_ends_rather_than_serve_a_torn_one():
    trained, other, *served = run_processes(run, 2 * SIZE, True, init_group=False)
    assert other == trained
    assert "rank 1: ValueError: planted" in trained[0]
    for error in served:
        assert "has lost its version" in error
