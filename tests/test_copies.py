"""Copies of a stage under DDP: connections of their own, buffers, sparse gradients, losses of several stages, deaths."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from reshard.scheduler import Edge, Pipeline, Stage, one_f_one_b
from reshard.scheduler.copies import Copies, _sparse, is_of_a_connection
from reshard.scheduler.engine import Engine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reshard
from reshard import Layout, Mesh, RemoteError, ReshardError
from reshard.group import find_group
from reshard.launch import LaunchError, run_processes
from reshard.monitor import Monitor
from reshard.plan import TensorSpec

WIDTH, NUM, ROWS = 4, 3, 12


class First(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.gives_loss = False

    def forward(self, x):
        out = self.layer(x)
        return {"x": out, "loss": (out**2).mean()} if self.gives_loss else {"x": out}


class Last(nn.Module):
    """What it does on rank 2 in microbatch ``NUM - 1`` is for tests to set."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.fault, self.calls = None, 0

    def forward(self, x, target):
        self.calls += 1
        if self.fault is not None and self.calls % NUM == 0:
            self.fault()
        return {"loss": ((torch.tanh(self.layer(x)) - target) ** 2).mean()}


def data():
    torch.manual_seed(10)
    return [torch.randn(2, ROWS, WIDTH, dtype=torch.float64) for _ in range(NUM)]


def make_pipeline(copies, first=1):
    meshes = [Mesh(range(first)), Mesh(range(first, first + copies))]
    src, dst = ("S0 R" if mesh.size > 1 else "R R" for mesh in meshes)
    x = TensorSpec((ROWS, WIDTH), "float64", Layout(meshes[0], src), Layout(meshes[1], dst), "x")
    return Pipeline(tuple(Stage(1, 1, 1, mesh=mesh) for mesh in meshes), (Edge(0, 1, 1, 1, tensors=(x,)),))


def wrap(rank, copies, module, first=1, **options):
    """The module of a rank, under DDP where its stage has copies."""
    groups = [dist.new_group(range(first)), dist.new_group(range(first, first + copies))]
    size = first if rank < first else copies
    return DistributedDataParallel(module, process_group=groups[rank >= first], **options) if size > 1 else module


def feed(rank, copies, first=1):
    mine = max(rank - first, 0)
    return {
        0: [{"x": x.chunk(first)[min(rank, first - 1)]} for x, _ in data()],
        1: [{"target": target.chunk(copies)[mine]} for _, target in data()],
    }


def gradients(module):
    return {n.removeprefix("module."): p.grad.to_dense().numpy().copy() for n, p in module.named_parameters()}


def single_process(first_gives_loss=False):
    first, last = First(), Last()
    first.gives_loss = first_gives_loss
    for x, target in data():
        out = first(x)
        loss = last(out["x"], target)["loss"] + (out["loss"] if first_gives_loss else 0.0)
        (loss / NUM).backward()
    return gradients(first), gradients(last)


def check(got, wanted):
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(torch.from_numpy(got[name]), torch.from_numpy(gradient), rtol=1e-10, atol=1e-15)


def catch(call):
    begun = time.monotonic()
    try:
        call()
    except ReshardError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    except ValueError as error:
        return str(error), time.monotonic() - begun
    return "done", time.monotonic() - begun


def plant():
    raise ValueError("planted")


def run_failing(rank, where):
    """A step in which copy 2 fails, two with a new engine; and, before each, a forward that arms DDP's reducer."""
    pipeline = make_pipeline(2)
    inner = Last() if rank else First()
    inner.register_buffer("scale", torch.ones(3))
    module = wrap(rank, 2, inner)
    schedule, said = one_f_one_b(pipeline, NUM), []
    for attempt in range(2):
        with Engine(schedule, pipeline, {int(rank > 0): module}, num_loss_shards=2, timeout_seconds=20) as engine:
            fed = feed(rank, 2)
            if rank:
                module(torch.ones(1, WIDTH, dtype=torch.float64), target=0.0)["loss"].detach()
            inner.zero_grad()
            if attempt == 0 and rank == 2:
                if where == "forward":
                    inner.fault = plant
                elif where == "backward":
                    hook = inner.layer.bias.register_post_accumulate_grad_hook(lambda _: plant())
                else:
                    del fed[1][-1]
            said.append(catch(lambda fed=fed, engine=engine: engine.step(fed)))
            if attempt == 1:
                module.zero_grad()
                engine.step(fed)
            elif rank == 2:
                inner.fault, inner.calls = None, 0
                if where == "backward":
                    hook.remove()
    return said, gradients(module)


@pytest.mark.parametrize("where", ["forward", "backward", "feed"])
def test_a_new_engine_goes_on_after_a_copy_has_failed(where):
    wanted = single_process()
    for rank, (said, got) in enumerate(run_processes(run_failing, 3, where, timeout_seconds=60)):
        assert ("planted" in said[0][0] or "is fed 2 microbatches" in said[0][0]) and said[0][1] < 5
        assert said[1][0] == "done"
        check(got, wanted[rank > 0])


def run_buffers(rank, kinds):
    """For each kind of buffer what a step said, and what the buffer holds then; steps that fail are followed by others."""
    inner = Last() if rank else First()
    module = wrap(rank, 2, inner)
    pipeline, found = make_pipeline(2), {}
    for kind in kinds:
        whole = torch.arange(24.0).reshape(4, 6) + 100 * rank
        made = {
            "sliced": lambda whole=whole: whole[:, ::2],
            "transposed on one": lambda whole=whole: whole.T if rank == 1 else whole.reshape(6, 4).clone(),
            "int16": lambda whole=whole: whole.to(torch.int16),
            "conjugated": lambda whole=whole: torch.complex(whole, whole + 1).conj(),
            "empty": lambda whole=whole: whole[:0],
            "expanded": lambda whole=whole: whole[:1].expand(9, 6),
            "of other shapes": lambda whole=whole: whole[rank:],
            "reshaped": lambda whole=whole: whole,
        }[kind]()
        if rank:
            inner.register_buffer("held", made)

        def step(kind=kind, whole=whole):
            with Engine(one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, num_loss_shards=2) as engine:
                if kind == "reshaped" and rank == 2:
                    inner.held = whole[:2]
                engine.step(feed(rank, 2))

        said, seconds = catch(step)
        assert seconds < 20
        if kind == "sliced" and rank == 2:
            assert whole[:, 1::2].equal(torch.arange(24.0).reshape(4, 6)[:, 1::2] + 200)  # what lies between
        found[kind] = said, made.resolve_conj().tolist()
    return found


def test_copies_take_the_buffers_of_the_first_one_whatever_their_memory():
    shared = ["sliced", "transposed on one", "int16", "conjugated", "empty"]
    refused = {
        "expanded": "buffer 'held' of stage 1 has strides (0, 1)",
        "of other shapes": "ranks disagree on buffers of stage 1: rank 1 passes held torch.float32 [3, 6], rank 2",
        "reshaped": "copies of stage 1 have different buffers; rank ",
    }
    none, one, two = run_processes(run_buffers, 3, [*shared[:2], *refused, *shared[2:]])
    for kind in shared:
        assert none[kind][0] == one[kind][0] == two[kind][0] == "done", kind
        assert one[kind][1] == two[kind][1], kind
    for kind, text in refused.items():
        assert all(text in found[kind][0] for found in (none, one, two)), none[kind]


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(5, WIDTH, sparse=True).double()
        self.uses = True

    def forward(self, x, target):
        out = x + self.table(torch.arange(len(x)) % 3) if self.uses else x
        return {"loss": ((out - target) ** 2).mean()}


def run_sparse(rank):
    pipeline = make_pipeline(2)
    inner = Table() if rank else First()
    inner.uses = rank == 1
    with Engine(
        one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): wrap(rank, 2, inner)}, num_loss_shards=2
    ) as engine:
        engine.step(feed(rank, 2))
    return gradients(inner), rank and inner.table.weight.grad.is_sparse


def test_a_sparse_gradient_that_one_copy_has_is_that_of_all():
    first, last = First(), Table()
    for x, target in data():
        halves = zip(first(x)["x"].chunk(2), target.chunk(2), strict=True)
        for uses, (part, its) in zip((True, False), halves, strict=True):
            last.uses = uses
            (last(part, its)["loss"] / (2 * NUM)).backward(retain_graph=True)
    for got, is_sparse in run_processes(run_sparse, 3)[1:]:
        assert is_sparse
        check(got, gradients(last))


def test_sparse_gradients_get_the_dims_of_indices_that_copies_agree_on():
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


def run_losses(rank, numbers):
    """Stage 0 on ranks 0 and 1 gives a loss too; stage 1 is on rank 2 alone. What a step with each number gave."""
    pipeline = make_pipeline(1, first=2)
    inner = First() if rank < 2 else Last()
    inner.gives_loss = True
    module = wrap(rank, 1, inner, first=2)
    schedule, found = one_f_one_b(pipeline, NUM), []
    for shards in numbers:
        inner.zero_grad()
        try:
            with Engine(schedule, pipeline, {int(rank > 1): module}, num_loss_shards=shards) as engine:
                step = engine.step(feed(rank, 1, first=2))
            found.append(("done", gradients(inner), step.loss))
        except ReshardError as error:
            found.append((str(error), None, None))
    return found


def test_stages_with_a_loss_may_have_different_numbers_of_copies():
    refused = [
        (2, "stage 1 gives a loss on 1 rank, but num_loss_shards is 2"),
        (1, "stage 0 gives a loss on 2 copies under DDP, which see different data, but num_loss_shards is 1"),
        ({0: 2, 1: 2}, "num_loss_shards of stage 1 is 2; it must be an integer from 1 to 1"),
        ({2: 1}, "num_loss_shards names stage 2; there are 0 to 1"),
        ({0: True}, "num_loss_shards of stage 0 is True"),
    ]
    wanted = single_process(first_gives_loss=True)
    found = run_processes(run_losses, 3, [*(shards for shards, _ in refused), {0: 2}])
    for nth, (_, text) in enumerate(refused):
        assert all(text in steps[nth][0] for steps in found), found[0][nth][0]
    for rank, steps in enumerate(found):
        assert steps[-1][0] == "done", steps[-1][0]
        check(steps[-1][1], wanted[rank > 1])
    first = First()
    whole = sum(float((first(x)["x"].detach() ** 2).mean()) for x, _ in data()) / NUM
    assert (found[0][-1][2] + found[1][-1][2]) / 2 == pytest.approx(whole, rel=1e-12)


def run_dying(rank, orderly):
    pipeline = make_pipeline(3)
    inner = Last() if rank else First()
    module = wrap(rank, 3, inner)
    with Engine(
        one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, num_loss_shards=3, timeout_seconds=20
    ) as engine:
        engine.step(feed(rank, 3))
        if rank == 2:
            if orderly:
                raise ValueError("planted")
            os._exit(7)
        return catch(lambda: engine.step(feed(rank, 3)))


@pytest.mark.parametrize("orderly", [False, True])
def test_a_copy_that_ends_is_named_by_every_rank(orderly):
    with pytest.raises(LaunchError) as caught:
        run_processes(run_dying, 4, orderly, timeout_seconds=60, grace_seconds=20)
    assert sorted(caught.value.results) == [0, 1, 3]
    for said, seconds in caught.value.results.values():
        assert said.startswith(RemoteError.__name__) and "rank 2" in said, said
        assert seconds < 5


def run_alone(rank):
    """One stage, so that nothing crosses: what a copy raises reaches the other all the same."""
    pipeline = Pipeline((Stage(1, 1, 1, mesh=Mesh([0, 1])),), ())
    inner = Last()
    inner.fault = plant if rank else None
    fed = {0: [{"x": x.chunk(2)[rank], "target": target.chunk(2)[rank]} for x, target in data()]}
    module = DistributedDataParallel(inner)
    with Engine(one_f_one_b(pipeline, NUM), pipeline, {0: module}, num_loss_shards=2, timeout_seconds=20) as engine:
        return catch(lambda: engine.step(fed))


def test_copies_of_a_single_stage_hear_of_each_other():
    (said, seconds), _ = run_processes(run_alone, 2)
    assert "rank 1 in 0F2, microbatch 2 of stage 0: ValueError: planted" in said and seconds < 5


def run_joint(rank, wrapper):
    pipeline = make_pipeline(1)
    module = Last() if rank else First()
    module = (
        DistributedDataParallel(module) if wrapper == "DDP" else fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    )
    return catch(lambda: Engine(one_f_one_b(pipeline, NUM), pipeline, {rank: module}, timeout_seconds=20))[0]


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP"])
def test_copies_on_ranks_of_other_stages_are_refused(wrapper):
    for said in run_processes(run_joint, 2, wrapper):
        assert f"the module of stage 0 is wrapped by {wrapper} over ranks 0-1, but rank 1 is not of that stage" in said


def run_joined(rank):
    """Ranks of the pipeline are those of a group that knows no world, the other way round."""
    store = dist.PrefixStore("joined", dist.distributed_c10d._get_default_store())
    group = reshard.join(store, 2 - rank, 3)
    groups = [dist.new_group([2]), dist.new_group([0, 1])]
    mine = 2 - rank
    module = DistributedDataParallel(Last(), process_group=groups[1]) if mine else First()
    pipeline = make_pipeline(2)
    with Engine(
        one_f_one_b(pipeline, NUM), pipeline, {int(mine > 0): module}, group=group, num_loss_shards=2
    ) as engine:
        engine.step(feed(mine, 2))
    dist.barrier()
    return gradients(module)


def test_copies_in_a_joined_group():
    wanted = single_process()
    for rank, got in enumerate(run_processes(run_joined, 3)):
        check(got, wanted[rank < 2])


def run_flat(rank):
    pipeline = make_pipeline(2)
    module = wrap(rank, 2, Last() if rank else First())
    flat = torch.ones(sum(p.numel() for p in module.parameters()), dtype=torch.float64)
    for parameter, part in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True):
        parameter.grad = part.view(parameter.shape)
    with Engine(one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, num_loss_shards=2) as engine:
        engine.step(feed(rank, 2))
        watched = [each for each in Monitor.of(find_group(None))._watched if isinstance(each, Copies)]
    return gradients(module), flat.numpy().copy(), len(watched)


def test_gradients_stay_in_the_memory_that_they_are_in():
    wanted = single_process()
    for rank, (got, flat, num_watched) in enumerate(run_processes(run_flat, 3)):
        check({name: gradient - 1 for name, gradient in got.items()}, wanted[rank > 0])
        assert flat.tolist() == [number for gradient in got.values() for number in gradient.reshape(-1).tolist()]
        assert num_watched == 0  # a step that is over


def test_errors_of_connections_are_told_from_those_of_users():
    gone = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4731"
    assert is_of_a_connection(RuntimeError(gone)) and is_of_a_connection(dist.DistBackendError("NCCL error"))
    for error in (RemoteError(gone), RuntimeError("mat1 and mat2 shapes"), ValueError("gloo")):
        assert not is_of_a_connection(error)
