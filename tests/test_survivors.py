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
from reshard.demo import count_unlike, shard_of_positions
from reshard.group import serve_store
from reshard.launch import LaunchError, run_processes
from reshard.transport import GlooTransport

SHAPE = (512, 1024)
#: Everything twice at the sources, on hosts of their own; what enters a host is passed on inside it.
SRC, DST = Layout(Mesh.of("2x2"), "R S1"), Layout(Mesh.of("2x2", first_rank=4), "S0 R")
TOPOLOGY = Topology((0, 0, 1, 1, 2, 2, 3, 3))
ONCE = Layout(Mesh.of("4"), "S0")


def _die_at(moment):
    """Be killed at the n-th operation of the transfer; "planning" is before it, when all have agreed on what to move."""
    if moment == "planning":
        reshard.call.plan_tensors = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
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
            out = error.carry_on()
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
    [{0: 2}, {3: 1}, {4: 3}, {7: 1}, {0: 1, 5: 2}, {0: "planning"}, {6: "planning", 1: 2}],
    ids=[
        "the first source",
        "a source",
        "one that passes on",
        "a destination",
        "a source and a destination",
        "the first while it plans",
        "one while it plans, and one later",
    ],
)
def test_the_others_carry_on(victims):
    for one in _run(victims, SRC, "carry_on"):
        assert one["unlike"] == 0 and "error" not in one, one
        assert one["seconds"] < 15, one


def test_the_others_are_offered_to():
    said = _run({2: 2}, SRC, "offer")
    assert len({(one["error"], one["plan"]) for one in said}) == 1, said
    assert said[0]["ranks"] == (2,) and "carry_on()" in said[0]["error"]
    assert all(one["unlike"] == 0 for one in said)


def test_what_nobody_holds_is_named():
    said = _run({1: 1}, ONCE, "carry_on")
    assert len({one["error"] for one in said}) == 1, said
    assert said[0]["error"].startswith("rank 1 is lost, and with it "), said
    assert said[0]["ranks"] == (1,) and said[0]["regions"]


def _moves_well(rank):
    return _move(rank, {}, SRC, "carry_on"), _move(rank, {}, SRC, "offer", verify=True)


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
        == ["ArgumentError: on_loss is 'never'; it must be one of 'raise', 'offer', 'carry_on'"] * 2
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
            on_loss="carry_on",
            timeout_seconds=2,
        )
    source, wanted = (shard_of_positions(layout, rank, SHAPE, "float32") for layout in (SRC, DST))
    reshard.reshard(source, SRC, DST, shape=SHAPE)
    out = reshard.reshard(source, SRC, DST, shape=SHAPE, on_loss="carry_on", timeout_seconds=2)
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
    said = _move(rank, {2: 2}, SRC, "carry_on")
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
