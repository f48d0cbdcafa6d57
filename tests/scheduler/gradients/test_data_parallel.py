"""Stages under DDP and FSDP: gradients over several steps with all wrapper options, hooks, and failures."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reshard import Layout, Mesh, ReshardError
from reshard.compression import Policy
from reshard.errors import ArgumentError
from reshard.scheduler import Edge, Pipeline, Stage, StageOutput, interleaved_1f1b, one_f_one_b
from reshard.scheduler.gradients.replica_sync import restore_gradients, stash_gradients
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding.tensor_spec import TensorSpec
from reshard.testing.processes import run_processes

WIDTH, NUM = 6, 3


class First(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return {"x": self.layer(x)}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.frozen = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.table = nn.Embedding(5, WIDTH, sparse=True).double()
        self.register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x, target, rows):
        out = self.frozen(torch.tanh(self.layer(x) * self.scale)) + self.table(rows)
        return StageOutput(loss=((out - target) ** 2).mean())


def data(step):
    torch.manual_seed(10 + step)
    made = [torch.randn(2, 4, WIDTH, dtype=torch.float64) for _ in range(NUM)]
    return [(x, target, torch.randint(0, 3, (4,))) for x, target in made]


def single_process(steps, change=lambda last: None):
    first, last = First(), Last()
    change(last)
    for step in range(steps):
        for x, target, rows in data(step):
            (last(first(x)["x"], target, rows).loss / NUM).backward()
    return {name: _plain(p.grad) for name, p in last.named_parameters()}


def _plain(gradient):
    if gradient is None:
        return None
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return (gradient.to_dense() if gradient.is_sparse else gradient).numpy().copy()


def make_pipeline():
    """Stage 0 on rank 0, stage 1 on ranks 1 and 2 with half of the rows each."""
    meshes = [Mesh([0]), Mesh([1, 2])]
    x = TensorSpec((4, WIDTH), "float64", Layout(meshes[0], "R R"), Layout(meshes[1], "S0 R"), "x")
    return Pipeline(tuple(Stage(1, 1, 1, mesh=mesh) for mesh in meshes), (Edge(0, 1, 1, 1, tensors=(x,)),))


def feed(rank, step):
    mine = max(rank - 1, 0)
    return {
        0: [{"x": x} for x, _, _ in data(step)],
        1: [{"target": target.chunk(2)[mine], "rows": rows.chunk(2)[mine]} for _, target, rows in data(step)],
    }


def make_groups():
    return [dist.new_group(ranks) for ranks in ([0], [1, 2])]


def run_ddp(rank, options, change_before, change_after, steps):
    group = make_groups()[1]
    pipeline = make_pipeline()
    module = First()
    if rank:
        last = Last()
        change_before(last)
        module = DistributedDataParallel(last, process_group=group, **options)
        change_after(last)
    with ScheduleEngine(one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, num_loss_shards=2) as engine:
        for step in range(steps):
            engine.step(feed(rank, step))
    return {name.removeprefix("module."): _plain(p.grad) for name, p in module.named_parameters()}


def nothing(last):
    pass


def freeze(last):
    last.frozen.requires_grad_(False)


def unfreeze(last):
    last.frozen.requires_grad_(True)


def run_ddp_cases(rank, cases):
    return [run_ddp(rank, *case[:3], 3) for case in cases]


@pytest.mark.integration
def test_gradients_accumulate_over_steps():
    """Each step has different data, so that a gradient of an earlier step is not mistaken for a later one."""
    cases = [
        ({}, nothing, nothing, nothing),
        ({"gradient_as_bucket_view": True}, nothing, nothing, nothing),
        ({"find_unused_parameters": True}, nothing, nothing, nothing),
        ({}, freeze, nothing, freeze),
        ({}, nothing, freeze, freeze),
        ({}, freeze, unfreeze, nothing),
    ]
    for case, results in zip(cases, zip(*run_processes(run_ddp_cases, 3, cases), strict=True), strict=True):
        wanted = single_process(3, case[3])
        for got in results[1:]:
            assert got.keys() == wanted.keys()
            for name, gradient in wanted.items():
                assert (gradient is None) == (got[name] is None), (case, name)
                if gradient is not None:
                    torch.testing.assert_close(
                        torch.from_numpy(got[name]), torch.from_numpy(gradient), rtol=1e-10, atol=0
                    )


def run_with_hooks(rank):
    """Record hook calls, and a buffer that each replica changes."""
    group = make_groups()[1]
    pipeline, calls, scales = make_pipeline(), [], []
    module = First()
    if rank:
        last = Last()
        last.layer.weight.register_hook(lambda gradient: calls.append(float(gradient.abs().sum())))
        last.layer.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
        last.register_forward_hook(lambda *_: setattr(last, "scale", last.scale * rank))  # differs between the replicas
        module = DistributedDataParallel(last, process_group=group)
    with ScheduleEngine(one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, num_loss_shards=2) as engine:
        for step in range(2):
            engine.step(feed(rank, step))
            if rank:
                scales.append(float(module.module.scale[0]))
    return calls, scales


def test_hooks_run_only_in_backwards_and_buffers_are_synced_before_each_step():
    _, (calls, first), (_, second) = run_processes(run_with_hooks, 3)
    assert len(calls) == 2 * 2 * NUM and calls[1::2] == ["after"] * 2 * NUM
    assert all(seen > 0 for seen in calls[::2])
    assert first == [1.0, 1.0] and second == [
        2.0**NUM,
        2.0**NUM,
    ]  # not 2 ** (2 * NUM): the step began with the buffer of the first replica


def run_failing(rank, wrapper):
    """Run a good step, one with a wrong feed on rank 0, and one with a new engine; time the failed step."""
    groups = make_groups()
    pipeline = make_pipeline()
    module = First()
    if rank and wrapper == "ddp":
        module = DistributedDataParallel(Last(), process_group=groups[1])
    elif rank:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        module = Last()
        module.table = nn.Embedding(5, WIDTH).double()
        fully_shard(module, mesh=DeviceMesh.from_group(groups[1], "cpu"))
    outcomes, begun = [], time.monotonic()
    for attempt in range(2):
        try:
            with ScheduleEngine(
                one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, num_loss_shards=2, timeout_seconds=20
            ) as engine:
                engine.step(feed(rank, 0))
                if attempt == 0:
                    begun = time.monotonic()
                    wrong = feed(rank, 1)
                    if rank == 0:
                        del wrong[0][-1]
                    engine.step(wrong)
                outcomes.append("done")
        except ReshardError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
            seconds = time.monotonic() - begun
            module.zero_grad()
    return outcomes, seconds, {name: _plain(p.grad) for name, p in module.named_parameters()}


def test_new_engine_works_after_a_failed_step_under_ddp():
    wanted = single_process(1)
    for rank, (outcomes, seconds, gradients) in enumerate(run_processes(run_failing, 3, "ddp", timeout_seconds=60)):
        assert "stage 0 is fed 2 microbatches" in outcomes[0] and outcomes[1] == "done"
        assert seconds < 10
        for name, gradient in gradients.items() if rank else ():
            torch.testing.assert_close(
                torch.from_numpy(gradient), torch.from_numpy(wanted[name.removeprefix("module.")]), rtol=1e-10, atol=0
            )


def test_fsdp_module_of_a_failed_step_is_rejected():
    for outcomes, *_ in run_processes(run_failing, 3, "fsdp", timeout_seconds=60):
        assert "stage 0 is fed 2 microbatches" in outcomes[0]
        assert "stage 1 is sharded by FSDP, and was in a step that failed" in outcomes[1]


def run_without_loss_shards(rank):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    groups, pipeline, module = make_groups(), make_pipeline(), First()
    if rank:
        module = Last()
        module.table = nn.Embedding(5, WIDTH).double()
        fully_shard(module.layer, mesh=DeviceMesh.from_group(groups[1], "cpu"))
        fully_shard(module, mesh=DeviceMesh.from_group(groups[1], "cpu"))
    try:
        with ScheduleEngine(one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}) as engine:
            engine.step(feed(rank, 0))
    except ArgumentError as error:
        return str(error)


def test_fsdp_replicas_need_num_loss_shards():
    for error in run_processes(run_without_loss_shards, 3, timeout_seconds=60)[1:]:
        assert (
            "stage 1 gives a loss on 2 replicas under FSDP, which see different data, but num_loss_shards is 1" in error
        )


def run_on_two_meshes(rank, options):
    """Stage 1 on ranks 1 and 2, with a table that FSDP has on a mesh of one rank."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    groups, pipeline, module = make_groups(), make_pipeline(), First()
    alone = [dist.new_group([1]), dist.new_group([2])]
    if rank:
        module = Last()
        module.table = nn.Embedding.from_pretrained(module.table.weight.detach(), freeze=False)  # not sparse
        mesh = DeviceMesh.from_group(groups[1], "cpu")
        both, one = (FSDPMeshInfo(item, 0) for item in (mesh, DeviceMesh.from_group(alone[rank - 1], "cpu")))

        def place(parameter):
            return ShardPlacementResult(None, one if parameter is module.table.weight else both)

        if "compression" in options:
            module.float()
        fully_shard(module, mesh=mesh, shard_placement_fn=place)
    try:
        with ScheduleEngine(one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, **options) as engine:
            engine.step(feed(rank, 0))
    except ArgumentError as error:
        return str(error)
    return {name: _plain(p.grad) for name, p in module.named_parameters() if rank and "table" not in name}


@pytest.mark.integration
def test_fsdp_may_have_parameters_on_several_meshes():
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("all parameters of an FSDP module are on one mesh in this version of torch")
    for options, text in (
        ({}, "stage 1 gives a loss on 2 replicas under FSDP"),
        ({"compression": Policy(zero="int8x128")}, "the module of stage 1 has parameters on several meshes"),
    ):
        for error in run_processes(run_on_two_meshes, 3, options, timeout_seconds=60)[1:]:
            assert text in error
    wanted = single_process(1)
    for gradients in run_processes(run_on_two_meshes, 3, {"num_loss_shards": 2}, timeout_seconds=60)[1:]:
        assert gradients
        for name, gradient in gradients.items():
            torch.testing.assert_close(torch.from_numpy(gradient), torch.from_numpy(wanted[name]), rtol=1e-10, atol=0)


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, target=None):
        out = self.layer(x)
        return {"x": out} if target is None else StageOutput(loss=((out - target) ** 2).mean())


def run_shared(rank):
    """One layer in two stages of one row, both under DDP."""
    mesh = Mesh([0, 1])
    torch.manual_seed(3)
    layer = nn.Linear(WIDTH, WIDTH).double()
    shards = Layout(mesh, "S0 R")
    edge = Edge(0, 1, 1, 1, tensors=(TensorSpec((4, WIDTH), "float64", shards, shards, "x"),))
    pipeline = Pipeline((Stage(1, 1, 1, mesh=mesh), Stage(1, 1, 1, mesh=mesh)), (edge,))
    modules = {stage: DistributedDataParallel(Twice(layer)) for stage in (0, 1)}
    fed = {
        0: [{"x": x.chunk(2)[rank]} for x, _, _ in data(0)],
        1: [{"target": target.chunk(2)[rank]} for _, target, _ in data(0)],
    }
    schedule = interleaved_1f1b(pipeline, NUM, 1)  # one row has both
    with ScheduleEngine(schedule, pipeline, modules, num_loss_shards=2) as engine:
        engine.step(fed)
    return layer.weight.grad.numpy().copy()


def test_layer_shared_by_two_stages_is_reduced_once():
    torch.manual_seed(3)
    layer = nn.Linear(WIDTH, WIDTH).double()
    for x, target, _ in data(0):
        (((layer(layer(x)) - target) ** 2).mean() / NUM).backward()
    for got in run_processes(run_shared, 2):
        torch.testing.assert_close(torch.from_numpy(got), layer.weight.grad, rtol=1e-10, atol=1e-14)


def run_hooked(rank):
    group = make_groups()[1]
    module = DistributedDataParallel(Last(), process_group=group) if rank else First()
    if rank:
        module.register_comm_hook(None, lambda state, bucket: None)
    try:
        ScheduleEngine(one_f_one_b(make_pipeline(), NUM), make_pipeline(), {int(rank > 0): module}, timeout_seconds=20)
    except ReshardError as error:
        return str(error)


def test_ddp_communication_hooks_are_rejected():
    for error in run_processes(run_hooked, 3):
        assert "stage 1 is wrapped by DDP with a communication hook, which would not be called" in error


def run_plain(rank, wraps_a_layer):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    groups = make_groups()
    module = Last() if rank else First()
    if rank and wraps_a_layer:
        fully_shard(module.layer, mesh=DeviceMesh.from_group(groups[1], "cpu"))
    if rank == 2 and not wraps_a_layer:  # FSDP's ranks must freeze the same parameters
        module.requires_grad_(False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ScheduleEngine(one_f_one_b(make_pipeline(), NUM), make_pipeline(), {int(rank > 0): module}).close()
    return [f"{Path(item.filename).name}: {item.message}" for item in seen]


@pytest.mark.parametrize("wraps_a_layer", [False, True])
def test_unwrapped_replicas_with_different_data_get_a_warning(wraps_a_layer):
    first, second, third = run_processes(run_plain, 3, wraps_a_layer)
    assert not first and len(second) == 1 and len(third) == wraps_a_layer
    assert second[0].startswith("test_data_parallel.py: ranks of stage 1 hold shards of the tensors on its edges"), (
        second
    )


def test_stashed_gradients_are_added_in_any_layout():
    dense, sparse = torch.ones(3, 2), torch.sparse_coo_tensor([[1]], [[2.0, 3.0]], (3, 2), check_invariants=True)
    for earlier, later in ((dense, sparse), (sparse, dense), (sparse, sparse), (dense, dense)):
        parameter = nn.Parameter(torch.zeros(3, 2))
        parameter.grad = earlier.clone()
        kept = stash_gradients([parameter])
        assert parameter.grad is None
        parameter.grad = later.clone()
        restore_gradients(kept)
        assert parameter.grad.to_dense().equal(earlier.to_dense() + later.to_dense())
