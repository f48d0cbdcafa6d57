"""Gradient synchronization of stage replicas: failures, module buffers, several stages with a loss, and dead ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reshard
from reshard import Mesh, ReshardError
from reshard.errors import RemoteError
from reshard.scheduler import Pipeline, Stage, one_f_one_b
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.scheduler.torch_compat import is_connection_error
from reshard.testing.processes import LaunchError, run_processes
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


def catch(call):
    begun = time.monotonic()
    try:
        call()
    except ReshardError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    except ValueError as error:
        return str(error), time.monotonic() - begun
    return "done", time.monotonic() - begun


def fail():
    raise ValueError("injected fault")


def run_failing(rank, where):
    """Run a step in which rank 2 fails, then two steps with a new engine.

    Before each engine's first step, the replicas call the module once outside the engine, which arms DDP's reducer.
    """
    pipeline = make_pipeline(2)
    inner = Last() if rank else First()
    inner.register_buffer("scale", torch.ones(3))
    module = wrap(rank, 2, inner)
    schedule, outcomes = one_f_one_b(pipeline, NUM), []
    for attempt in range(2):
        with ScheduleEngine(
            schedule, pipeline, {int(rank > 0): module}, num_loss_shards=2, timeout_seconds=60
        ) as engine:
            fed = feed(rank, 2)
            if rank:
                module(torch.ones(1, WIDTH, dtype=torch.float64), target=0.0).loss.detach()
            inner.zero_grad()
            if attempt == 0 and rank == 2:
                if where == "forward":
                    inner.fault = fail
                elif where == "backward":
                    hook = inner.layer.bias.register_post_accumulate_grad_hook(lambda _: fail())
                else:
                    del fed[1][-1]
            outcomes.append(catch(lambda fed=fed, engine=engine: engine.step(fed)))
            if attempt == 1:
                module.zero_grad()
                engine.step(fed)
            elif rank == 2:
                inner.fault, inner.calls = None, 0
                if where == "backward":
                    hook.remove()
    return outcomes, gradients(module)


@pytest.mark.parametrize("where", ["forward", "backward", "feed"])
def test_new_engine_works_after_a_replica_failed(where):
    wanted = single_process()
    for rank, (outcomes, got) in enumerate(run_processes(run_failing, 3, where, timeout_seconds=120)):
        assert ("injected fault" in outcomes[0][0] or "is fed 2 microbatches" in outcomes[0][0]) and outcomes[0][1] < 20
        assert outcomes[1][0] == "done"
        check(got, wanted[rank > 0])


def run_buffers(rank, kinds):
    """Run a step for each kind of buffer. Returns the outcome of the step and the buffer's content after it, by kind."""
    inner = Last() if rank else First()
    module = wrap(rank, 2, inner)
    pipeline, buffers = make_pipeline(2), {}
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
            "frozen": lambda whole=whole: whole,
        }[kind]()
        if rank:
            inner.register_buffer("held", made)

        def step(kind=kind, whole=whole):
            with ScheduleEngine(
                one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, num_loss_shards=2
            ) as engine:
                if kind == "reshaped" and rank == 2:
                    inner.held = whole[:2]
                next(inner.parameters()).requires_grad_(kind != "frozen" or rank != 2)
                engine.step(feed(rank, 2))

        outcome, seconds = catch(step)
        inner.requires_grad_(True)
        assert seconds < 20
        if kind == "sliced" and rank == 2:
            untouched = torch.arange(24.0).reshape(4, 6)[:, 1::2] + 200  # the columns that the buffer skips
            assert whole[:, 1::2].equal(untouched)
        buffers[kind] = outcome, made.resolve_conj().tolist()
    return buffers


@pytest.mark.integration
def test_replicas_receive_the_buffers_of_the_first_replica():
    shared = ["sliced", "transposed on one", "int16", "conjugated", "empty"]
    refused = {
        "expanded": "buffer 'held' of stage 1 has overlapping elements (strides (0, 1))",
        "of other shapes": "ranks disagree on buffers of stage 1: rank 1 passes held torch.float32 [3, 6], rank 2",
        "reshaped": "replicas of stage 1 have different buffers; rank ",
        "frozen": "replicas of stage 1 have different frozen parameters; rank ",
    }
    none, one, two = run_processes(run_buffers, 3, [*shared[:2], *refused, *shared[2:]])
    for kind in shared:
        assert none[kind][0] == one[kind][0] == two[kind][0] == "done", kind
        assert one[kind][1] == two[kind][1], kind
    for kind, text in refused.items():
        assert all(text in found[kind][0] for found in (none, one, two)), none[kind]


def run_losses(rank, numbers):
    """Run a step for each ``num_loss_shards``. Both stages return a loss: stage 0 on ranks 0 and 1, stage 1 on rank 2."""
    pipeline = make_pipeline(1, first=2)
    inner = First() if rank < 2 else Last()
    inner.gives_loss = True
    module = wrap(rank, 1, inner, first=2)
    schedule, losses = one_f_one_b(pipeline, NUM), []
    for shards in numbers:
        inner.zero_grad()
        try:
            with ScheduleEngine(schedule, pipeline, {int(rank > 1): module}, num_loss_shards=shards) as engine:
                step = engine.step(feed(rank, 1, first=2))
            losses.append(("done", gradients(inner), step.loss))
        except ReshardError as error:
            losses.append((str(error), None, None))
    return losses


def test_stages_with_a_loss_may_have_different_numbers_of_replicas():
    refused = [
        (2, "stage 1 gives a loss on 1 rank, but num_loss_shards is 2"),
        (1, "stage 0 gives a loss on 2 replicas under DDP, which see different data, but num_loss_shards is 1"),
        ({0: 2, 1: 2}, "num_loss_shards of stage 1 is 2; it must be an integer from 1 to 1"),
        ({2: 1}, "num_loss_shards names stage 2; there are stages 0 to 1"),
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


def run_with_dead_replica(rank, raises):
    pipeline = make_pipeline(3)
    inner = Last() if rank else First()
    module = wrap(rank, 3, inner)
    with ScheduleEngine(
        one_f_one_b(pipeline, NUM), pipeline, {int(rank > 0): module}, num_loss_shards=3, timeout_seconds=60
    ) as engine:
        engine.step(feed(rank, 3))
        if rank == 2:
            if raises:
                raise ValueError("injected fault")
            os._exit(7)
        return catch(lambda: engine.step(feed(rank, 3)))


@pytest.mark.parametrize("raises", [False, True])
def test_every_rank_raises_an_error_that_names_the_dead_replica(raises):
    with pytest.raises(LaunchError) as caught:
        run_processes(run_with_dead_replica, 4, raises, timeout_seconds=120, grace_seconds=60)
    assert sorted(caught.value.results) == [0, 1, 3]
    for error, seconds in caught.value.results.values():
        assert error.startswith(RemoteError.__name__) and "rank 2" in error, error
        assert seconds < 20


def run_single_stage(rank):
    """Run a pipeline of one stage, so that no transfers between stages can report the error of rank 1."""
    pipeline = Pipeline((Stage(1, 1, 1, mesh=Mesh([0, 1])),), ())
    inner = Last()
    sharded = fully_shard(Last().requires_grad_(rank == 0), mesh=init_device_mesh("cpu", (2,)))
    error, _ = catch(lambda: ScheduleEngine(one_f_one_b(pipeline, NUM), pipeline, {0: sharded}, num_loss_shards=2))
    assert "ranks 0 and 1 of stage 0 froze different parameters" in error
    inner.fault = fail if rank else None
    fed = {0: [{"x": x.chunk(2)[rank], "target": target.chunk(2)[rank]} for x, target in data()]}
    module = DistributedDataParallel(inner)
    with ScheduleEngine(
        one_f_one_b(pipeline, NUM), pipeline, {0: module}, num_loss_shards=2, timeout_seconds=60
    ) as engine:
        return catch(lambda: engine.step(fed))


def test_replicas_of_a_single_stage_receive_errors():
    (error, seconds), _ = run_processes(run_single_stage, 2)
    assert "rank 1 in 0F2, microbatch 2 of stage 0: ValueError: injected fault" in error and seconds < 20


def run_replicas_across_stages(rank, wrapper):
    pipeline = make_pipeline(1)
    module = Last() if rank else First()
    module = (
        DistributedDataParallel(module) if wrapper == "DDP" else fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    )
    return catch(lambda: ScheduleEngine(one_f_one_b(pipeline, NUM), pipeline, {rank: module}, timeout_seconds=60))[0]


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP"])
def test_replicas_on_ranks_of_other_stages_are_rejected(wrapper):
    for error in run_processes(run_replicas_across_stages, 2, wrapper):
        assert f"the module of stage 0 is wrapped by {wrapper} over ranks 0-1, but rank 1 is not of that stage" in error


def run_in_joined_group(rank):
    """Run a step in a joined group that numbers the ranks of the default group in reverse."""
    store = dist.PrefixStore("joined", dist.distributed_c10d._get_default_store())
    group = reshard.join(store, 2 - rank, 3)
    groups = [dist.new_group([2]), dist.new_group([0, 1])]
    mine = 2 - rank
    module = DistributedDataParallel(Last(), process_group=groups[1]) if mine else First()
    pipeline = make_pipeline(2)
    with ScheduleEngine(
        one_f_one_b(pipeline, NUM), pipeline, {int(mine > 0): module}, group=group, num_loss_shards=2
    ) as engine:
        engine.step(feed(mine, 2))
    dist.barrier()
    return gradients(module)


def test_replicas_in_a_joined_group_equal_one_process():
    wanted = single_process()
    for rank, got in enumerate(run_processes(run_in_joined_group, 3)):
        check(got, wanted[rank < 2])


def test_connection_errors_are_recognized():
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4731"
    assert is_connection_error(RuntimeError(text)) and is_connection_error(dist.DistBackendError("NCCL error"))
    for error in (RemoteError(text), RuntimeError("mat1 and mat2 shapes"), ValueError("gloo")):
        assert not is_connection_error(error)
