"""A model whose own modules have names that wrappers use, and engines on some of the ranks of the world."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import reshard.scheduler as rs
from reshard.testing import run_processes

from .test_pipe import make_batch, make_chain


class Outer(nn.Module):
    """Has ``weight``, and ``module.weight`` as DDP would call it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3))
        self.module = nn.Linear(3, 3)

    def forward(self, x):
        return (self.module(x) * self.weight).square().mean()


def _save(rank, wrap, folder):
    torch.set_num_threads(1)
    placement = rs.Placement(dp=2, wrap=wrap)
    batch = {"x": torch.ones(4, 3)}
    with rs.Pipe(Outer(), stages=[placement]).compile(batch, 2, schedule=rs.one_f_one_b) as engine:
        engine.save(folder, step=1)
        return engine.step(batch).loss, [name for name, _ in engine.named_parameters()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_child_of_the_model_may_be_called_module(tmp_path):
    model = Outer()
    for wrap in (rs.ddp, rs.fsdp):
        for loss, names in run_processes(_save, 2, wrap, str(tmp_path)):
            assert loss == pytest.approx(model(torch.ones(4, 3)).item(), rel=1e-6)
            assert names == [name for name, _ in model.named_parameters()]
        state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        reader = HuggingFaceStorageReader(str(tmp_path / "step-00000001"))
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert all(torch.equal(state["model"][name], value) for name, value in model.state_dict().items())


def _train_on_some(rank, ranks, all_placements):
    """Only the ranks of the group call ``compile``."""
    torch.set_num_threads(1)
    group = dist.new_group(ranks)
    if rank not in ranks:
        return None
    found = []
    for placements in all_placements:
        pipe = rs.Pipe(make_chain(), ["layers.2"], stages=placements)
        with pipe.compile(make_batch(0), 4, group=group, schedule=rs.one_f_one_b) as engine:
            found.append((engine.step(make_batch(5)).loss, engine.clip_grad_norm_(1e9)))
    return found


@pytest.mark.slow
def test_placements_name_ranks_of_the_group():
    model = make_chain()
    loss, _ = model(**make_batch(5))
    loss.backward()
    expected = loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    plan = {"layers.3": ColwiseParallel(output_layouts=Replicate())}
    cases = [
        [rs.Placement(dp=2), rs.Placement()],
        [rs.Placement(dp=2, wrap=rs.fsdp), rs.Placement()],
        [rs.Placement(), rs.Placement(tp=2, tp_plan=plan)],
    ]
    results = run_processes(_train_on_some, 5, [3, 1, 4], cases, timeout_seconds=60)
    assert results[0] is results[2] is None
    for rank in (1, 3, 4):
        for found in results[rank]:
            assert found == pytest.approx(expected, rel=2e-6)


def compile_often(rank, num):
    """Losses, and threads and descriptors. Ranks 0 and 1, a grid first, are then in more process groups than rank 2."""
    batch = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(0))}
    losses, resources = [], []
    on_grid = [rs.Placement(grid=(1, 2, 1)), rs.Placement()]
    for stages in [on_grid, [rs.Placement(), rs.Placement(dp=2)]] * num:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = rs.Pipe(model, ["1"], stages=stages, loss=lambda output: output.square().mean())
        with pipe.compile({"input": batch["x"]}, 2, timeout_seconds=20) as engine:
            losses.append(engine.step({"input": batch["x"]}).loss)
        del engine, pipe, model
        gc.collect()
        resources.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")])
    return losses, resources


@pytest.mark.slow
def test_engines_after_each_other_on_unlike_meshes_train_and_leak_nothing():
    for losses, resources in run_processes(compile_often, 3, 4):
        assert losses == pytest.approx([losses[0]] * 8, rel=1e-6)
        for kind in (0, 1):
            assert (
                max(resource[kind] for resource in resources[4:])
                <= max(resource[kind] for resource in resources[:4]) + 10
            )  # 30 if groups leak
