"""Movers: repeated transfers, wrong arrays and plans, threads, warnings, and what they leave behind."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.coordination.groups.process_group import find_group
from reshard.errors import ArgumentError
from reshard.testing.processes import run_processes
from tests.support.tensors import check_group_works, result_or_error, same_bytes, take_shard, whole_tensor

ROWS = Layout(Mesh.of("2"), "S0")
COLS = Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = whole_tensor((6, 4), torch.float32)


def _movers(rank):
    whole = whole_tensor((512, 1024), torch.float32)
    src, dst = Layout(Mesh.of("2"), "R S0"), Layout(Mesh.of("2", first_rank=2), "S0 R")
    plan = reshard.make_plan(src, dst, whole.shape, whole.dtype, staging_bytes=2**20)
    again = reshard.make_plan(dst, src, whole.shape, whole.dtype)
    source = take_shard(src, rank, whole)
    with reshard.Mover(plan) as mover, reshard.Mover(again) as back:
        out = None if rank < 2 else torch.zeros(256, 1024)
        for turn in range(3):
            there = mover(None if source is None else source + turn, out=out)
            assert there is out
            assert out is None or same_bytes(out, take_shard(dst, rank, whole) + turn)
            returned = back(there)
            assert returned is None or same_bytes(returned, source + turn)
        held = mover.staging_allocated_bytes
        assert 0 < held <= 2**20 if rank > 1 else held == 0  # rows are sent in place; received columns need staging
        # Several transfers in progress, which finish in order although every rank waits late.
        handles = [mover.start(None if source is None else source + turn) for turn in range(4)]
        for turn, handle in enumerate(handles):
            got = handle.wait(timeout_seconds=30)
            assert got is None or same_bytes(got, take_shard(dst, rank, whole) + turn)
        assert mover.staging_allocated_bytes == held
        last = mover.start(source)
        assert repr(last).startswith("Handle(transfer ")
        last.wait()
        assert repr(last).endswith(" of ranks 0-3: done)")
        dist.barrier()  # the next call fails and would end unfinished transfers of other ranks
        with pytest.raises(ArgumentError, match=r"out of the tensor: rank [23] passes float32 \[3\], but its shard"):
            mover(source, out=None if rank < 2 else torch.zeros(3))
    with pytest.raises(ArgumentError):
        mover(source)
    return True


def test_movers_repeat_transfers_within_their_staging_bytes():
    assert run_processes(_movers, 4) == [True] * 4


def _on_two_hosts(rank):
    group = find_group(None)
    group.hostname = f"host{rank // 2}"
    with pytest.raises(ArgumentError, match="timeout_seconds is 0"):
        reshard.find_topology(timeout_seconds=0 if rank == 1 else 60)
    found = reshard.find_topology()
    src, dst = Layout(Mesh.of("1")), Layout(Mesh([2, 1, 3], {"x": 3}))
    blind = reshard.make_plan(src, dst, (64,), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reshard.Mover(blind).close()
        aware = reshard.make_plan(src, dst, (64,), "float32", topology=found)
        with reshard.Mover(aware) as mover:
            out = mover(torch.arange(64.0) if rank == 0 else None)
    assert {item.filename for item in caught} <= {__file__}  # a warning points to the caller's line
    return found.host_of_rank, [str(item.message) for item in caught], rank == 0 or torch.equal(out, torch.arange(64.0))


def test_mover_warns_if_its_plan_ignores_hosts():
    for hosts, messages, is_right in run_processes(_on_two_hosts, 4):
        assert hosts == (0, 0, 1, 1)
        assert len(messages) == 1
        assert "on one host, but they are on 2" in messages[0]
        assert "find_topology" in messages[0]
        assert is_right


def _one_way_beside_two_way(rank):
    whole = whole_tensor((8, 12))
    topology = reshard.Topology((0, 0, 1, 1))
    one_way = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2), "R S0")
    two_way = Layout(Mesh.of("4"), "S0"), Layout(Mesh.of("4"), "R S0")
    plans = [reshard.make_plan(*pair, whole.shape, whole.dtype, topology=topology) for pair in (one_way, two_way)]
    movers = [reshard.Mover(plan) for plan in plans]
    for _ in range(3):  # both in progress at once
        handles = [
            mover.start(take_shard(src, rank, whole))
            for mover, (src, _) in zip(movers, (one_way, two_way), strict=True)
        ]
        for handle, (_, dst) in zip(handles, (one_way, two_way), strict=True):
            out, expected = handle.wait(), take_shard(dst, rank, whole)
            assert (out is None) == (expected is None)
            assert expected is None or same_bytes(out, expected)
    ours = movers[0]._agreed.call_group._connections[1]
    return [plan.both_ways for plan in plans], len(ours._groups)


def test_two_way_traffic_has_a_connection_per_direction():
    assert run_processes(_one_way_beside_two_way, 4) == [([False, True], 2)] * 4


def _dropped(rank):
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2"), "R S0")
    plan = reshard.make_plan(src, dst, (8, 8), "float32")
    before = threading.active_count()
    for _ in range(3):
        reshard.Mover(plan)(torch.ones(4, 8))
    gc.collect()
    deadline = time.monotonic() + 10
    # Two threads remain: the group's heartbeat and its store client.
    while threading.active_count() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count() - before


def test_dropped_movers_leak_no_thread():
    assert max(run_processes(_dropped, 2)) <= 2


def _use_mover_from_another_thread(rank):
    plan = reshard.make_plan(ROWS, COLS, (6, 4), "float32")
    results = []
    with reshard.Mover(plan, timeout_seconds=10) as mover:
        thread = threading.Thread(
            target=lambda: results.append(result_or_error(lambda: mover(take_shard(ROWS, rank, WHOLE))))
        )
        if rank == 1:
            thread.start()
            thread.join()
        else:
            results.append(result_or_error(lambda: mover(take_shard(ROWS, rank, WHOLE))))
    return results[0]


def test_mover_refuses_another_thread():
    errors = run_processes(_use_mover_from_another_thread, 4)
    assert "rank 1: thread" in errors[1], errors
    assert errors[2] == errors[3] == errors[1], errors


def _copy_mover(rank):
    with reshard.Mover(reshard.make_plan(ROWS, COLS, (6, 4), "float32")) as mover:
        handle = mover.start(take_shard(ROWS, rank, WHOLE))
        texts = [result_or_error(lambda item=item: copy.copy(item)) for item in (mover, handle)]
        handle.wait()
    return texts


def test_movers_and_handles_are_not_copied():
    """A transfer of a copy would wait for ever after the original is closed."""
    mover, handle = run_processes(_copy_mover, 4)[0]
    assert "a Mover cannot be copied" in mover and "the handle of a transfer cannot be copied" in handle


def _different_plans(rank):
    plan = reshard.make_plan(ROWS, COLS, (6, 4), "float32", strategy="send_recv" if rank == 2 else "multicast")
    try:
        reshard.Mover(plan)
        return "nothing was raised"
    except reshard.errors.DisagreementError as error:
        return str(error)


def test_movers_with_different_plans_report_the_first_difference():
    texts = run_processes(_different_plans, 4)
    assert len(set(texts)) == 1
    assert "disagree on strategy: ranks 0-1,3 pass multicast, rank 2 passes send_recv" in texts[0]


def _plans_outside_the_group(rank):
    """A Mover for a plan with ranks that the group lacks: on all ranks, and on rank 1 only."""
    found = []
    outside = Layout(Mesh([2, 9], {"x": 2}), "R S0")
    for dst in (outside, outside if rank == 1 else COLS):
        with pytest.raises(ArgumentError) as caught:
            reshard.Mover(reshard.make_plan(ROWS, dst, (6, 4), "float32"), timeout_seconds=20)
        found.append(str(caught.value))
        dist.barrier()
    check_group_works(rank, ROWS, COLS, WHOLE)
    return found


def test_a_mover_for_ranks_outside_its_group_is_an_error_on_every_rank():
    for on_all, on_one in run_processes(_plans_outside_the_group, 4, timeout_seconds=60):
        assert on_all == "the plan or a layout names rank 9, but the group of 4 ranks has ranks 0..3"
        assert on_one.removeprefix("rank 1: ") == on_all


def _wrong_array(rank):
    """Rank 1 passes a wrong array to a Mover."""
    plan = reshard.make_plan(ROWS, COLS, (6, 4), "float32")
    with reshard.Mover(plan, timeout_seconds=20) as mover:
        source = take_shard(ROWS, rank, WHOLE)
        begun = time.monotonic()
        try:
            mover(source.double() if rank == 1 else source)
            text = "nothing was raised"
        except reshard.ReshardError as error:
            text = str(error)
        assert time.monotonic() - begun < 10
    dist.barrier()
    check_group_works(rank, ROWS, COLS, WHOLE)
    return text


def test_wrong_array_for_a_mover_ends_the_transfer_on_every_rank():
    texts = run_processes(_wrong_array, 4)
    # Only a rank whose own messages had already completed may finish without the error.
    assert sum("rank 1 passes float64" in text for text in texts) >= 3, texts
