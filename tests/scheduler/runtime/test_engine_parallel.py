"""Stages with DDP, FSDP or tensor parallelism, and parameters tied between stages."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard import Layout, Mesh
from reshard.errors import ArgumentError, RemoteError
from reshard.scheduler import Edge, Pipeline, Stage, StageOutput, auto_schedule, one_f_one_b, zb_h1
from reshard.scheduler.gradients.tied_params import TiedParameter
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding.tensor_spec import TensorSpec
from reshard.testing.processes import run_processes

ROWS, WIDTH, NUM, VOCABULARY = 4, 8, 4, 6


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        return {"x": self.down(self.up(x).relu())}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x, targets):
        return StageOutput(loss=nn.functional.cross_entropy(self.head(self.down(self.up(x).relu())), targets))


def make_modules():
    torch.manual_seed(0)
    return [First().double(), Last().double()]


def data():
    torch.manual_seed(1)
    return [torch.randint(0, VOCABULARY, (2, ROWS)) for _ in range(NUM)]


def single_process(tied):
    first, last = make_modules()
    if tied:
        last.head.weight = first.embed.weight
    losses = []
    for tokens, targets in data():
        loss = last(first(tokens)["x"], targets).loss
        losses.append(float(loss.detach()))
        (loss / NUM).backward()
    return losses, [{n: p.grad for n, p in module.named_parameters()} for module in (first, last)]


def make_pipeline(meshes, specs):
    layouts = [Layout(mesh, spec) for mesh, spec in zip(meshes, specs, strict=True)]
    edge = Edge(0, 1, 0.5, 0.5, tensors=(TensorSpec((ROWS, WIDTH), "float64", *layouts, "x"),))
    return Pipeline(tuple(Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in meshes), (edge,))


def whole(gradient):
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).numpy().copy()


def run_rank(rank, sizes, how, build, tied, adds_up=False):
    """Run steps with stage 0 on the first ranks and stage 1 on the others, each plain or under DDP, FSDP or TP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    meshes = [Mesh(range(sizes[0])), Mesh(range(sizes[0], sum(sizes)))]
    specs = ["S0 R" if kind in ("ddp", "fsdp") and size > 1 else "R R" for kind, size in zip(how, sizes, strict=True)]
    pipeline = make_pipeline(meshes, specs)
    groups = [dist.new_group(mesh.ranks) for mesh in meshes]
    stage = int(rank >= sizes[0])
    module = make_modules()[stage]
    place, size = rank - stage * sizes[0], sizes[stage]
    kind = how[stage]
    if kind == "ddp":
        module = nn.parallel.DistributedDataParallel(module, process_group=groups[stage])
    elif kind in ("fsdp", "tp", "tp local"):
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh.from_group(groups[stage], "cpu")
        if kind == "fsdp":
            fully_shard(module, mesh=mesh)
        else:
            out = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
            # a local output is a tensor that the asynchronous all-reduce has not filled yet
            plan = {"up": ColwiseParallel(), "down": out if (stage, kind) == (0, "tp") else RowwiseParallel()}
            parallelize_module(module, mesh, plan)
    del init_device_mesh, Replicate

    def mine(array):
        return array.chunk(size)[place] if specs[stage] == "S0 R" else array

    feed = {stage: [{"tokens": mine(a)} if stage == 0 else {"targets": mine(b)} for a, b in data()]}
    prefix = "module." if kind == "ddp" else ""
    ties = []
    if tied:
        names = {s: ("module." * (how[s] == "ddp")) + n for s, n in ((0, "embed.weight"), (1, "head.weight"))}
        ties = [TiedParameter(names, (VOCABULARY, WIDTH), "float64")]
    shards = sizes[1] if specs[1] == "S0 R" else 1
    schedule = build(pipeline, NUM)
    with ScheduleEngine(
        schedule, pipeline, {stage: module}, ties=ties, num_loss_shards=shards, timeout_seconds=30
    ) as engine:
        for _ in range(2):
            module.zero_grad()
            step = engine.step(feed)
        if adds_up:  # accumulate the gradients of two steps
            step = engine.step(feed)
    for thread in threading.enumerate():
        if thread.name == "reshard-progress":
            thread.join(5)
            assert not thread.is_alive()
    return step.loss, {n.removeprefix(prefix): whole(p.grad) for n, p in module.named_parameters()}


def run_cases(rank, cases):
    return [run_rank(rank, *case) for case in cases]


@pytest.mark.integration
def test_gradients_equal_a_single_process():
    losses, grads = single_process(False)
    cases = [
        ((2, 1), ("ddp", "plain"), zb_h1, False),
        ((1, 2), ("plain", "ddp"), auto_schedule, False),
        ((2, 1), ("tp", "plain"), zb_h1, False),
        ((2, 1), ("tp local", "plain"), one_f_one_b, False),
        ((1, 2), ("plain", "tp"), one_f_one_b, False),
        ((2, 1), ("fsdp", "plain"), one_f_one_b, False),
        ((1, 2), ("plain", "fsdp"), one_f_one_b, False),
    ]
    for (sizes, how, *_), results in zip(cases, zip(*run_processes(run_cases, 3, cases), strict=True), strict=True):
        for rank, (_, named) in enumerate(results):
            for name, gradient in named.items():
                expected = grads[int(rank >= sizes[0])][name]
                found = torch.from_numpy(gradient)
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14, msg=f"{how}, {name}")
        found = [loss for loss, _ in results[sizes[0] :]]
        assert sum(found) / len(found) == pytest.approx(sum(losses) / NUM, rel=1e-12), how


@pytest.mark.integration
def test_gradients_accumulate_and_tied_weights_get_equal_ones():
    losses, tied_grads = single_process(True)
    _, grads = single_process(False)
    cases = [
        ((2, 1), ("ddp", "plain"), zb_h1, True),
        ((2, 1), ("ddp", "plain"), one_f_one_b, True, True),
        ((2, 1), ("fsdp", "plain"), one_f_one_b, False, True),
    ]
    once, twice, sharded = zip(*run_processes(run_cases, 3, cases), strict=True)
    assert once[2][0] == pytest.approx(sum(losses) / NUM, rel=1e-12)
    for results, factor in ((once, 1), (twice, 2)):
        for rank, (_, named) in enumerate(results):
            for name, gradient in named.items():
                tied = name in ("embed.weight", "head.weight")
                expected = tied_grads[0]["embed.weight"] if tied else tied_grads[int(rank >= 2)][name]
                torch.testing.assert_close(torch.from_numpy(gradient), factor * expected, rtol=1e-10, atol=1e-14)
    for rank, (_, named) in enumerate(sharded):
        for name, gradient in named.items():
            expected = grads[int(rank >= 2)][name]
            torch.testing.assert_close(torch.from_numpy(gradient), 2 * expected, rtol=1e-10, atol=1e-14)


class PartlyUsed(nn.Module):
    """A stage with a layer that only the first replica uses, and a layer that no replica uses."""

    def __init__(self, is_used):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(3, 3) for _ in range(3))
        self.is_used = is_used

    def forward(self, x):
        y = self.always(x)
        return StageOutput(loss=(self.sometimes(y) if self.is_used else y).mean())


def run_partly_used(rank, finds_unused):
    meshes = [Mesh([0]), Mesh([1, 2])]
    groups = [dist.new_group(mesh.ranks) for mesh in meshes]
    x = TensorSpec((4, 3), "float32", Layout(meshes[0], "R R"), Layout(meshes[1], "S0 R"), "x")
    pipeline = Pipeline(tuple(Stage(1, 1, 1, mesh=mesh) for mesh in meshes), (Edge(0, 1, 1, 1, tensors=(x,)),))
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    if rank:
        module = nn.parallel.DistributedDataParallel(
            PartlyUsed(rank == 1), process_group=groups[1], find_unused_parameters=finds_unused
        )
    feed = {0: [{"input": torch.ones(4, 3)}] * 2}
    with ScheduleEngine(one_f_one_b(pipeline, 2), pipeline, {int(rank > 0): module}, num_loss_shards=2) as engine:
        engine.step(feed)
    return {n: None if p.grad is None else p.grad.numpy().copy() for n, p in module.named_parameters()}


@pytest.mark.parametrize("finds_unused", [False, True])
def test_parameters_unused_by_all_replicas_have_no_gradient(finds_unused):
    _, first, second = run_processes(run_partly_used, 3, finds_unused, timeout_seconds=60)
    assert {name for name, gradient in first.items() if gradient is None} == {
        "module.never.weight",
        "module.never.bias",
    }
    for name, gradient in first.items():
        if gradient is not None:
            assert abs(gradient).sum() > 0
            torch.testing.assert_close(torch.from_numpy(gradient), torch.from_numpy(second[name]))


def run_wrapped(rank):
    """Use wrappers that would give wrong gradients; returns the error of each."""
    mesh = Mesh([0, 1])
    pipeline = Pipeline((Stage(1, 1, 1, mesh=mesh),), ())
    schedule, errors = one_f_one_b(pipeline, 1), []

    def ddp(module, **options):
        return nn.parallel.DistributedDataParallel(module, **options)

    for module, shards in (
        (nn.Sequential(ddp(nn.Linear(3, 3))), 1),
        (ddp(nn.Linear(3, 3), static_graph=True), 1),
        (ddp(nn.Linear(3, 1)), 1),
        (nn.Linear(3, 3), 0),
        (nn.Linear(3, 3), 3),
    ):
        try:
            with ScheduleEngine(schedule, pipeline, {0: module}, num_loss_shards=shards, timeout_seconds=20) as engine:
                engine.step({0: [{"input": torch.ones(1, 3)}]})
        except ArgumentError as error:
            errors.append(str(error))
    return errors


def test_wrappers_that_would_give_wrong_gradients_are_rejected():
    first, second = run_processes(run_wrapped, 2, timeout_seconds=60)
    for item in (first, second):
        assert "the module of stage 0 has '0', which is wrapped by DistributedDataParallel; only the whole" in item[0]
        assert "static_graph=True" in item[1]
        assert (
            "stage 0 gives a loss on 2 replicas under DDP, which see different data, but num_loss_shards is 1"
            in item[2]
        )
        assert "num_loss_shards is 0; it must be an integer from 1 to 2" in item[3]
        assert "num_loss_shards is 3" in item[4]


def run_timeline(rank):
    """Run a pipeline on ranks 1 and 3 of the world. Rank 3 then ends without a second call of ``timeline``."""
    if rank in (0, 2):
        return None
    meshes = [Mesh([1]), Mesh([3])]
    x = TensorSpec((1, 3), "float32", Layout(meshes[0]), Layout(meshes[1]), "input")
    pipeline = Pipeline(tuple(Stage(1, 1, 1, mesh=mesh) for mesh in meshes), (Edge(0, 1, 1, 1, tensors=(x,)),))
    stage = int(rank == 3)
    with ScheduleEngine(
        one_f_one_b(pipeline, 2), pipeline, {stage: nn.Linear(3, 1 if stage else 3)}, timeout_seconds=20
    ) as engine:
        engine.step({0: [{"input": torch.ones(1, 3)}] * 2})
        timeline = engine.timeline()
        pp_ranks = sorted({span.pp_rank for span in timeline.spans}), len(timeline.transfers)
        with pytest.raises(ArgumentError, match="no pp rank 7"):
            timeline.exposed_seconds(7)
        if rank == 3:
            return pp_ranks, None
        try:
            engine.timeline()
        except RemoteError as error:
            return pp_ranks, str(error)


def test_timeline_needs_all_ranks_of_the_pipeline_and_no_others():
    _, (pp_ranks, error), _, (others, _) = run_processes(run_timeline, 4, timeout_seconds=60)
    assert pp_ranks == others == ([0, 1], 4)
    assert "rank 3 is gone" in error
