"""Groups release threads and file descriptors when closed, garbage-collected, or with their process group."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.api.mover import check_transfers
from reshard.scheduler import one_f_one_b
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.testing.processes import run_processes
from tests.support.stages_with_replicas import NUM, First, Last, feed, make_pipeline, wrap

ROWS, COLS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
NUM_GROUPS = 30


def _move(rank, group):
    out = reshard.reshard(torch.full((2, 4), float(rank)), ROWS, COLS, group=group, timeout_seconds=20)
    assert out[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def _mover(group):
    return reshard.Mover(reshard.make_plan(ROWS, COLS, (4, 4), "float32"), group, timeout_seconds=20)


def _joined(rank, port, name):
    return reshard.join(dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False)), rank, 2)


def _count_resources():
    return tuple(len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))


def _close(rank, port, name):
    with _joined(rank, port, name) as group:
        _move(rank, group)
    group.close()


def _close_with_a_mover(rank, port, name):
    group = _joined(rank, port, name)
    mover = _mover(group)
    mover(torch.ones(2, 4))
    group.close()
    return mover  # kept alive: a mover of a closed group holds no resources


def _drop_group_keep_handle(rank, port, name):
    group = _joined(rank, port, name)
    _move(rank, group)
    handle = reshard.reshard_async(torch.full((2, 4), 1.0), ROWS, COLS, group=group)
    handle.wait()
    return handle


def _destroy_world(rank, port, name):
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    _move(rank, None)
    group = dist.new_group([0, 1])
    _mover(group)(torch.ones(2, 4))
    dist.destroy_process_group(group)
    _move(rank, None)
    dist.destroy_process_group()


def _repeat_and_count(rank, port, use):
    gc.disable()  # release must not depend on the cyclic garbage collector
    kept = [use(rank, port, f"warm-up {number}") for number in range(2)]
    before = _count_resources()
    kept += [use(rank, port, str(number)) for number in range(NUM_GROUPS)]
    deadline = time.monotonic() + 5
    while _count_resources() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return before, _count_resources(), len(kept)  # using kept here keeps its objects alive until now


@pytest.mark.slow
@pytest.mark.parametrize("use", [_close, _close_with_a_mover, _drop_group_keep_handle, _destroy_world])
def test_many_groups_leak_no_descriptors_or_threads(use):
    for (descriptors, threads), after, _num_kept in run_processes(_repeat_and_count, 2, use, init_group=False):
        assert after[0] <= descriptors
        assert after[1] <= threads


def _use_closed_group(rank, port):
    group = _joined(rank, port, "closed")
    mover, other = _mover(group), _mover(group)
    big = torch.full((2000, 4000), float(rank))
    handle = reshard.reshard_async(big, ROWS, COLS, group=group)
    mover_handle = mover.start(torch.full((2, 4), float(rank)))
    group.close()  # finishes transfers in progress
    assert handle.done()
    assert mover_handle.done()
    assert handle.wait()[:, 0].mean().item() == 0.5
    assert mover_handle.wait()[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    calls = [
        lambda: _move(rank, group),
        lambda: mover(torch.ones(2, 4)),
        lambda: other.start(torch.ones(2, 4)),
        lambda: check_transfers(mover),
        lambda: _mover(group),
        lambda: reshard.find_topology(group),
    ]
    for call in calls:
        with pytest.raises(reshard.errors.ArgumentError, match="group of 2 ranks is closed"):
            call()
    return True


def test_closed_group_finishes_transfers_and_refuses_new_calls():
    assert run_processes(_use_closed_group, 2, init_group=False) == [True, True]


def _close_process_groups(rank):
    closed, destroyed, untouched = (dist.new_group([0, 1]) for _ in range(3))
    for group in (closed, destroyed, untouched):
        _move(rank, group)
    for _ in range(2):
        reshard.close_group(closed)
    dist.destroy_process_group(destroyed)
    reshard.close_group(destroyed)
    for group, text in ((closed, "is closed"), (destroyed, "was destroyed")):
        with pytest.raises(reshard.errors.ArgumentError, match=text):
            _move(rank, group)
    _move(rank, untouched)
    dist.barrier(closed)  # torch can still use the process group
    reshard.close_group()
    with pytest.raises(reshard.errors.ArgumentError, match="is closed"):
        _move(rank, None)
    _move(rank, untouched)
    return True


def test_closing_one_process_group_keeps_the_others_usable():
    assert run_processes(_close_process_groups, 2) == [True, True]


def _close_in_a_call(rank, port):
    group = _joined(rank, port, "busy")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank == 0:
        calls = threading.Thread(target=_move, args=(rank, group))
        calls.start()
        while not group.attempts:
            time.sleep(0.01)
        with pytest.raises(reshard.errors.ArgumentError, match="another thread is in a call"):
            group.close()
        store.set("refused", "")
        calls.join()
    else:
        store.wait(["refused"])
        _move(rank, group)
    _move(rank, group)
    group.close()
    return True


def test_group_cannot_be_closed_during_a_call():
    assert run_processes(_close_in_a_call, 2, init_group=False) == [True, True]


def _train_then_close(rank, num_replicas):
    pipeline, inner = make_pipeline(num_replicas), Last() if rank else First()
    modules = {int(rank > 0): wrap(rank, num_replicas, inner)}
    engine = ScheduleEngine(one_f_one_b(pipeline, NUM), pipeline, modules, num_loss_shards=num_replicas)
    engine.step(feed(rank, num_replicas))
    reshard.close_group()
    with pytest.raises(reshard.errors.ArgumentError, match="is closed"):
        engine.step(feed(rank, num_replicas))
    engine.close()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reshard")]


def test_engine_stops_when_its_group_closes():
    assert run_processes(_train_then_close, 3, 2) == [[]] * 3


def _interrupt_close(rank, port):
    with _joined(rank, port, "first") as group:
        _move(rank, group)
    del group
    before = _count_resources()
    group = _joined(rank, port, "second")
    _move(rank, group)
    (call_group,) = group.call_groups.values()

    def interrupt():
        raise KeyboardInterrupt

    call_group.rounds.links.close = interrupt
    del call_group
    with pytest.raises(KeyboardInterrupt):
        group.close()
    group.close()
    end = time.monotonic() + 10
    while any(now > then for now, then in zip(_count_resources(), before, strict=True)) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    return before, _count_resources()


def test_an_interrupted_close_of_a_group_leaves_nothing_open():
    for before, after in run_processes(_interrupt_close, 2, init_group=False):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
