"""Ranks that die in a transfer which bears it: the others end with their shards, an offer, or what is lost, alike."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import reshard
from reshard import Layout, Mesh, Topology
from reshard.cli.demo import count_unlike, shard_of_positions
from reshard.coordination.connections import GlooTransport
from reshard.coordination.process_group import serve_store
from reshard.testing.processes import LaunchError, run_processes

SHAPE = (512, 1024)
#: Everything twice at the sources, on hosts of their own; what enters a host is passed on inside it.
SRC, DST = Layout(Mesh.of("2x2"), "R S1"), Layout(Mesh.of("2x2", first_rank=4), "S0 R")
TOPOLOGY = Topology((0, 0, 1, 1, 2, 2, 3, 3))
ONCE = Layout(Mesh.of("4"), "S0")


def _die_at(moment):
    """Be killed at the n-th operation of the transfer; "planning" is before it, when all have agreed on what to move."""
    if moment == "planning":
        reshard.api.call.plan_tensors = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
        return
    count = [0]

    def fatal(plain):
        def operation(self, *args):
            count[0] += 1
            if count[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, *args)

        return operation

    GlooTransport.send, GlooTransport.recv = fatal(GlooTransport.send), fatal(GlooTransport.recv)


def _move(rank, victims, src, on_loss, strategy="multicast", **options):
    source, wanted = (shard_of_positions(layout, rank, SHAPE, "float32") for layout in (src, DST))
    options = {"strategy": strategy, "topology": TOPOLOGY, "timeout_seconds": 20, "staging_bytes": 2**18} | options
    first = reshard.reshard(source, src, DST, shape=SHAPE, **options)  # all have met
    assert wanted is None or not count_unlike(first, wanted)
    if rank in victims:
        _die_at(victims[rank])
    kept, begun = None if source is None else source.clone(), time.monotonic()
    said = {"rank": rank}
    try:
        out = reshard.reshard(source, src, DST, shape=SHAPE, on_loss=on_loss, **options)
    except reshard.RankLostError as error:
        said |= {"error": str(error), "ranks": error.ranks, "regions": error.regions}
        if error.plan is not None:
            reshard.check_plan(error.plan)
            said["plan"] = error.plan.plan_hash
            out = error.recover()
            said["unlike"] = 0 if wanted is None else count_unlike(out, wanted)
    else:
        said["unlike"] = 0 if wanted is None else count_unlike(out, wanted)
    said["seconds"] = time.monotonic() - begun
    assert kept is None or torch.equal(kept, source)
    return said


def _run(victims, src, on_loss, **options):
    with pytest.raises(LaunchError) as caught:
        run_processes(_moved, 8, victims, src, on_loss, options, timeout_seconds=90, grace_seconds=60)
    assert {failure.rank for failure in caught.value.failures} == set(victims), caught.value
    return [caught.value.results[rank] for rank in range(8) if rank not in victims]


def _moved(rank, victims, src, on_loss, options):
    return _move(rank, victims, src, on_loss, **options)


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param({0: 2}, id="the first source"),
        pytest.param({3: 1}, id="a source"),
        pytest.param({4: 3}, id="one that passes on"),
        pytest.param({7: 1}, id="a destination"),
        pytest.param({0: 1, 5: 2}, id="the first source and a destination", marks=pytest.mark.slow),  # 5 s of silence
        pytest.param({0: "planning"}, id="the first while it plans"),
        pytest.param({6: "planning", 1: 2}, id="one while it plans, and one later"),
    ],
)
def test_the_others_carry_on(victims):
    for one in _run(victims, SRC, "recover"):
        assert one["unlike"] == 0 and "error" not in one, one
        assert one["seconds"] < 15, one


def test_the_others_are_offered_to():
    said = _run({2: 2}, SRC, "offer")
    assert len({(one["error"], one["plan"]) for one in said}) == 1, said
    assert said[0]["ranks"] == (2,) and "recover()" in said[0]["error"]
    assert all(one["unlike"] == 0 for one in said)


def test_what_nobody_holds_is_named():
    said = _run({1: 1}, ONCE, "recover")
    assert len({one["error"] for one in said}) == 1, said
    assert said[0]["error"].startswith("rank 1 is lost, and with it "), said
    assert said[0]["ranks"] == (1,) and said[0]["regions"]


def _moves_well(rank):
    return _move(rank, {}, SRC, "recover"), _move(rank, {}, SRC, "offer", verify=True)


def test_without_losses_it_is_a_transfer_like_any_other():
    for both in run_processes(_moves_well, 8):
        assert [one["unlike"] for one in both] == [0, 0]


def _wrong(rank, on_loss):
    try:
        reshard.reshard(torch.ones(4), Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2")), on_loss=on_loss[rank])
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"


def test_wrong_arguments():
    assert (
        run_processes(_wrong, 2, ["never", "never"])
        == ["ArgumentError: on_loss is 'never'; it must be one of 'raise', 'offer', 'recover'"] * 2
    )
    said = run_processes(_wrong, 2, ["raise", "offer"])
    assert said == ["DisagreementError: ranks disagree on on_loss: rank 0 passes raise, rank 1 passes offer"] * 2


def _stops(rank):
    """Rank 3 is stopped; the others go on without it when its time is up."""
    if rank == 3:
        plain = GlooTransport.send

        def stop(self, *args):
            os.kill(os.getpid(), signal.SIGSTOP)
            return plain(self, *args)

        reshard.reshard(shard_of_positions(SRC, rank, SHAPE, "float32"), SRC, DST, shape=SHAPE)
        GlooTransport.send = stop
        reshard.reshard(
            shard_of_positions(SRC, rank, SHAPE, "float32"),
            SRC,
            DST,
            shape=SHAPE,
            on_loss="recover",
            timeout_seconds=2,
        )
    source, wanted = (shard_of_positions(layout, rank, SHAPE, "float32") for layout in (SRC, DST))
    reshard.reshard(source, SRC, DST, shape=SHAPE)
    out = reshard.reshard(source, SRC, DST, shape=SHAPE, on_loss="recover", timeout_seconds=2)
    return 0 if wanted is None else count_unlike(out, wanted)


@pytest.mark.slow
def test_a_silent_rank_counts_as_lost_when_its_time_is_up():
    with pytest.raises(LaunchError) as caught:
        run_processes(_stops, 8, timeout_seconds=40, grace_seconds=20)
    assert [failure.rank for failure in caught.value.failures] == [3]
    assert set(caught.value.results.values()) == {0}


def _serve(listener):
    store = serve_store(listener)
    time.sleep(600)
    del store


def _spawned(rank, port, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=8)
    said = _move(rank, {2: 2}, SRC, "recover")
    (folder / f"{rank}.part").write_text(json.dumps(said))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")


def test_carries_on_under_torch_multiprocessing(tmp_path):
    """Its launcher ends the others when one dies, but only once it is asked to join them."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(listener,), daemon=True)
    server.start()
    listener.close()
    context = torch.multiprocessing.start_processes(
        _spawned, (port, tmp_path), nprocs=8, join=False, start_method="fork"
    )
    survivors, deadline = set(range(8)) - {2}, time.monotonic() + 60
    while not all((tmp_path / f"{rank}.json").exists() for rank in survivors) and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="process 2 terminated with signal SIGKILL"):
        context.join(grace_period=10)
    server.terminate()
    server.join()
    for rank in survivors:
        assert json.loads((tmp_path / f"{rank}.json").read_text())["unlike"] == 0


PAIR, HALVES = Layout(Mesh.of("2")), Layout(Mesh.of("2", first_rank=2), "S0")


def _step(rank, step, timeout_seconds=20.0, **options):
    """Start a transfer of an array that holds the number of a step."""
    source = torch.full((4, 3), float(step)) if rank < 2 else None
    options = {"shape": (4, 3), "on_loss": "recover", "timeout_seconds": timeout_seconds} | options
    return reshard.reshard_async(source, PAIR, HALVES, **options)


def _said(begin):
    try:
        out = begin()
        return None if out is None else sorted(set(out.flatten().tolist()))
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"


def _is_late(rank, late):
    given, seconds = [_said(_step(rank, 0).wait)], []
    for step in range(1, 5):
        if step == 1 and rank == late:
            time.sleep(3)
        begun = time.monotonic()
        given.append(_said(lambda step=step: _step(rank, step, 1.0).wait()))
        seconds.append(time.monotonic() - begun)
        if step == 3 and rank != late:
            time.sleep(2)  # so that the late one calls again while the others do
    given.append(_said(lambda: _step(rank, 5, on_loss="raise").wait()))
    return given, seconds


@pytest.mark.parametrize("late", [0, *(pytest.param(late, marks=pytest.mark.slow) for late in (1, 3))])
def test_a_rank_that_comes_late_is_lost_for_good_and_told_so(late):
    """The others go on without it and without waiting for it again; what it brings is of another step."""
    by_rank = run_processes(_is_late, 4, late)
    for rank, (given, seconds) in enumerate(by_rank):
        if rank == late:
            assert all("go on without it" in text or f"without rank {late}" in text for text in given[1:5]), given
        else:
            assert given[:5] == [None if rank < 2 else [float(step)] for step in range(5)], (late, rank, given)
            assert seconds[0] < 7 and max(seconds[1:]) < 1, (late, rank, seconds)
            assert f"rank {late} was lost in an earlier call" in given[5], given


def _crossed(rank, orders):
    handles = {step: _step(rank, step) for step in (1, 2)}
    waited = [_said(handles[step].wait) for step in orders[rank]]
    return waited, _said(lambda: _step(rank, 3).wait())


@pytest.mark.parametrize("orders", [[(1, 2), (1, 2), (2, 1), (1, 2)], [(1, 2), (1, 2), (1,), (1, 2)]])
def test_transfers_that_bear_losses_are_waited_for_alike_or_refused(orders):
    said = run_processes(_crossed, 4, orders)
    texts = [text for waited, then in said for text in (*waited, then)]
    assert all("create a new group" in then for _, then in said), said
    assert any("ranks disagree on what comes next: rank 0 waits for transfer" in str(text) for text in texts), said
    for rank in (2, 3):  # what did arrive is of its own step
        for step, text in zip(orders[rank], said[rank][0], strict=True):
            assert text == [float(step)] or "DisagreementError" in text, said


def _first_is_late(rank):
    """The others give up the first rank at different times, and it comes while some still wait for it."""
    given = [_said(_step(rank, 0).wait)]
    dist.barrier()
    time.sleep({0: 2.25, 1: 0.0, 2: 1.7, 3: 1.7}[rank])
    for step in range(1, 5 if rank else 2):
        given.append(_said(lambda step=step: _step(rank, step, 1.0).wait()))
    return given


def test_ranks_that_lose_the_first_one_at_different_times_stay_in_one_call():
    for rank, given in enumerate(run_processes(_first_is_late, 4)):
        if rank == 0:
            assert given[0] is None and "goes on without rank 0" in given[1], given
        else:
            wanted = [None if rank < 2 else [float(step)] for step in range(5)]
            assert given == wanted or all("Error" in str(one) for one in given[1:]), (rank, given)


def _others_know(rank):
    """Rank 1 is lost to ranks 0, 2 and 3; rank 4 has yet to hear of it when all call."""
    large, small = Layout(Mesh.of("3")), Layout(Mesh([1, 2, 4], {"x": 3}))
    options = {"shape": (3, 2), "dtype": "float32", "on_loss": "recover", "timeout_seconds": 1.0}
    if rank == 1:
        time.sleep(4)
    else:
        if rank < 4:
            source = torch.ones(3, 2) if rank < 2 else None
            reshard.reshard(source, PAIR, HALVES, **options)
        else:
            time.sleep(1.3)
        source = torch.full((3, 2), 7.0) if rank < 3 else None
        if rank in (0, 2, 4):
            return _said(reshard.reshard_async(source, large, small, **options).wait)
    return None


def test_who_is_lost_is_heard_from_those_who_know():
    assert run_processes(_others_know, 5) == [None, None, [7.0], None, [7.0]]
