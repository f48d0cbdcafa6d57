"""Schedules on a device whose host blocks in every call until all enqueued transfers and collectives are done.

Small messages are buffered by the sockets of the stand-in for NCCL, so their sends end at once. Sends of large ones end
only when they are received.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.scheduler import (
    Edge,
    Pipeline,
    Stage,
    StageOutput,
    auto_schedule,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from reshard.scheduler.gradients.tied_params import TiedParameter
from reshard.scheduler.passes import transfer_overlap
from reshard.scheduler.passes.transfer_overlap import defer_recvs
from reshard.scheduler.runtime import engine_arguments
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.scheduler.schedules.classic import eager_1f1b
from reshard.sharding.tensor_spec import TensorSpec
from reshard.testing.processes import run_processes
from tests.support.nccl.streams import BlockingStream, use_streams

NUM, SMALL, LARGE = 4, 2, 2**18  # microbatches; float32 elements of a message, 8 bytes or 1 MiB
CHAIN, SKIPS = ((0, 1), (1, 2), (2, 3)), ((0, 1), (1, 2), (2, 3), (0, 3), (0, 2))


class AddParts(torch.autograd.Function):
    """The sum over the ranks of a stage, as in tensor parallelism: one collective in the forward, one in the backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Part(torch.nn.Module):
    """Adds what a stage receives, times a weight."""

    def __init__(self, stage, outputs, group=None):
        super().__init__()
        self.stage, self.outputs, self.group = stage, outputs, group
        self.weight = torch.nn.Parameter(torch.full((1,), stage + 1.0))

    def forward(self, **inputs):
        x = sum(inputs.values()) * self.weight
        if self.group is not None:
            x = AddParts.apply(x, self.group) / self.group.size()
        if not self.outputs:
            return StageOutput(loss=x.mean())
        return {f"from{self.stage}to{other}": x for other in self.outputs}


def make_pipeline(meshes, edges, size):
    def spec(a, b):
        return TensorSpec((size,), "float32", Layout(meshes[a]), Layout(meshes[b]), f"from{a}to{b}")

    return Pipeline(
        tuple(Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in meshes),
        tuple(Edge(a, b, 0.5, 0.5, tensors=(spec(a, b),)) for a, b in edges),
    )


def interleaved(pipeline, num):
    return interleaved_1f1b(pipeline, num, 2)


def in_v(pipeline, num):
    return auto_schedule(pipeline, num, pp_rank_of_stage=[0, 1, 1, 0])


#: Name of a case -> (ranks of each stage, edges, builder).
CASES = {
    "1f1b": ([[0], [1], [2], [3]], CHAIN, one_f_one_b),
    "eager_1f1b": ([[0], [1], [2], [3]], CHAIN, eager_1f1b),
    "gpipe": ([[0], [1], [2], [3]], CHAIN, gpipe),
    "zb_h1": ([[0], [1], [2], [3]], CHAIN, zb_h1),
    "auto": ([[0], [1], [2], [3]], SKIPS, auto_schedule),
    "skips": ([[0], [1], [2], [3]], SKIPS, one_f_one_b),
    "interleaved": ([[0, 1], [2, 3], [0, 1], [2, 3]], CHAIN, interleaved),
    "V": ([[0, 2], [1, 3], [1, 3], [0, 2]], SKIPS, in_v),
    "zb_v": ([[0, 2], [1, 3], [1, 3], [0, 2]], SKIPS, zb_v),
    "dualpipe_v": ([[0, 2], [1, 3], [1, 3], [0, 2]], CHAIN, dualpipe_v),
}


def step(pipeline, schedule, rank, timeout_seconds=60.0):
    groups = {ranks: dist.new_group(ranks) for ranks in {tuple(stage.mesh.ranks) for stage in pipeline.stages}}
    modules = {
        s: Part(s, pipeline.outputs[s], groups[tuple(stage.mesh.ranks)] if stage.mesh.size > 1 else None)
        for s, stage in enumerate(pipeline.stages)
        if rank in stage.mesh.ranks
    }
    size = pipeline.edges[0].tensors[0].shape[0]
    feed = {0: [{"x": torch.full((size,), m + 1.0)} for m in range(schedule.num_microbatches)]}
    ties = [TiedParameter({0: "weight", 3: "weight"}, (1,))]
    with ScheduleEngine(schedule, pipeline, modules, ties=ties, timeout_seconds=timeout_seconds) as engine:
        with BlockingStream.host():
            losses = [engine.step(feed).losses for _ in range(2)]
        return losses, {s: float(module.weight.grad) for s, module in modules.items()}


def single_process(pipeline):
    """The losses of a step, and the gradients of two."""
    parts = [Part(s, outputs) for s, outputs in enumerate(pipeline.outputs)]
    parts[3].weight = parts[0].weight
    losses = []
    for m in range(NUM):
        inputs = [{"x": torch.full((2,), m + 1.0)}, {}, {}, {}]
        for s, part in enumerate(parts):
            out = part(**inputs[s])
            for other in pipeline.outputs[s]:
                inputs[other][f"from{s}to{other}"] = out[f"from{s}to{other}"]
        losses.append(float(out.loss.detach()))
        (2 * out.loss / NUM).backward()
    return losses, [float(part.weight.grad) for part in parts]


def run_cases(rank, size, names):
    results = {}
    for name in names:
        ranks, edges, build = CASES[name]
        pipeline = make_pipeline([Mesh(item) for item in ranks], edges, size)
        results[name] = step(pipeline, build(pipeline, NUM), rank)
    return results


@pytest.mark.integration
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (LARGE, ["skips", "V"]),
        *(pytest.param(size, list(CASES), marks=pytest.mark.nightly) for size in (SMALL, LARGE)),
    ],
)
def test_no_schedule_hangs_and_all_compute_the_same(monkeypatch, standin, size, names):
    use_streams(monkeypatch, standin, BlockingStream)
    results = run_processes(run_cases, 4, size, names)
    for name in names:
        ranks, edges, _ = CASES[name]
        losses, grads = single_process(make_pipeline([Mesh(item) for item in ranks], edges, SMALL))
        for rank, by_name in enumerate(results):
            found, by_stage = by_name[name]
            assert found == [pytest.approx(losses)] * 2 or rank not in ranks[3], name
            assert by_stage == {s: pytest.approx(grads[s]) for s in range(4) if rank in ranks[s]}, name


def recvs_ahead(pipeline, num):
    """Receives two ahead of their consumers, wherever that is."""
    schedule = one_f_one_b(pipeline, num)
    rank_actions = tuple(tuple(transfer_overlap._move_recvs(actions, pipeline, 2)) for actions in schedule.rank_actions)
    return reshard.scheduler.Schedule("ahead", rank_actions, schedule.pp_rank_of_stage, num)


def at_consumer(pipeline, num):
    return defer_recvs(one_f_one_b(pipeline, num), pipeline)


def run_one(rank, build, size, is_checked, timeout_seconds):
    pipeline = make_pipeline([Mesh([number]) for number in range(4)], CHAIN, size)
    if not is_checked:
        engine_arguments.check_one_order = lambda schedule: None
    try:
        step(pipeline, build(pipeline, NUM), rank, timeout_seconds)
    except reshard.ReshardError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("build", [recvs_ahead, at_consumer])
def test_schedules_without_one_order_are_refused_on_all_ranks(monkeypatch, standin, build):
    use_streams(monkeypatch, standin, BlockingStream)
    ((kind, text),) = set(run_processes(run_one, 4, build, SMALL, True, 60.0))
    assert kind == "ScheduleError" and "in different orders" in text


@pytest.mark.integration
@pytest.mark.parametrize(("build", "size"), [(recvs_ahead, SMALL), (at_consumer, LARGE)])
def test_device_shows_which_schedules_hang(monkeypatch, standin, build, size):
    use_streams(monkeypatch, standin, BlockingStream)
    errors = run_processes(run_one, 4, build, size, False, 2.0)
    assert any("longer than 2 s" in text or "did not finish in time" in text for _, text in errors), errors
    if build is at_consumer:
        assert run_processes(run_one, 4, build, SMALL, False, 60.0) == [None] * 4


class Noisy(torch.nn.Module):
    """A stage with batch statistics and dropout, which counts its forwards and is in the middle of a backward hook."""

    def __init__(self, is_last):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.norm, self.is_last = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), is_last
        self.sums, self.reached = [], []
        self.layer.weight.register_post_accumulate_grad_hook(lambda each: self.reached.append(each.grad.norm()))

    def forward(self, x):
        self.sums.append(float(x.detach().abs().sum()))
        x = torch.nn.functional.dropout(self.norm(self.layer(x)), 0.5)
        return StageOutput(loss=(x**2).mean()) if self.is_last else {"x": x}


def run_noisy(rank):
    meshes = [Mesh([0]), Mesh([1])]
    x = TensorSpec((6, 4), "float32", *map(Layout, meshes), "x")
    pipeline = Pipeline(tuple(Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in meshes), (Edge(0, 1, tensors=(x,)),))
    module = Noisy(rank == 1)
    torch.manual_seed(4)
    feed = {0: [{"x": torch.randn(6, 4)} for _ in range(2)]}
    torch.manual_seed(5 + rank)
    with ScheduleEngine(one_f_one_b(pipeline, 2), pipeline, {rank: module}, timeout_seconds=60) as engine:
        losses = [engine.step(feed).losses for _ in range(2)]
    state = {name: item.tolist() for name, item in module.state_dict().items()}
    return losses, state, module.layer.weight.grad.tolist(), module.sums, len(module.reached)


def test_stages_run_once_before_their_first_transfers_without_effect(monkeypatch, standin):
    plain = run_processes(run_noisy, 2)
    use_streams(monkeypatch, standin, BlockingStream)
    for rank, (*results, sums, num_reached) in enumerate(run_processes(run_noisy, 2)):
        *wanted, plain_sums, plain_reached = plain[rank]
        assert results == wanted and num_reached == plain_reached == 4
        assert sums[1:] == plain_sums and (sums[0] == 0.0) == (rank == 1)
