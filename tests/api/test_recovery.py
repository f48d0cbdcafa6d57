"""Transfers that lose ranks: survivors get their shards, a recovery plan, or an error that names the lost regions."""

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
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.coordination.groups.process_group import serve_store
from reshard.plan import DEFAULT_STAGING_BYTES
from reshard.planner import planning
from reshard.runtime.transport import GlooTransport
from reshard.testing.processes import LaunchError, run_processes

SHAPE = (512, 1024)
#: The source has two replicas, on different hosts. Each host has two ranks, so destination hosts forward data.
SRC, DST = Layout(Mesh.of("2x2"), "R S1"), Layout(Mesh.of("2x2", first_rank=4), "S0 R")
TOPOLOGY = Topology((0, 0, 1, 1, 2, 2, 3, 3))
NO_REPLICAS = Layout(Mesh.of("4"), "S0")


def _die_at(moment):
    """Make this process kill itself: at send or receive number ``moment``, or when it plans (``"planning"``)."""
    if moment == "planning":
        reshard.api.preparation.prepare.plan_tensors = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
        return
    count = [0]

    def count_and_die(plain):
        def operation(self, *args):
            count[0] += 1
            if count[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, *args)

        return operation

    GlooTransport.send, GlooTransport.recv = count_and_die(GlooTransport.send), count_and_die(GlooTransport.recv)


def _move(rank, victims, src, on_loss, strategy="multicast", **options):
    """Move a tensor twice. In the second transfer, each rank in ``victims`` dies at its moment; see ``_die_at``."""
    source, wanted = (shard_of_positions(layout, rank, SHAPE, "float32") for layout in (src, DST))
    options = {"strategy": strategy, "topology": TOPOLOGY, "timeout_seconds": 20, "staging_bytes": 2**18} | options
    first = reshard.reshard(source, src, DST, shape=SHAPE, **options)  # connects all ranks
    assert wanted is None or not count_unlike(first, wanted)
    if rank in victims:
        _die_at(victims[rank])
    kept, start = None if source is None else source.clone(), time.monotonic()
    outcome = {"rank": rank}
    try:
        out = reshard.reshard(source, src, DST, shape=SHAPE, on_loss=on_loss, **options)
    except reshard.errors.RankLostError as error:
        outcome |= {"error": str(error), "ranks": error.ranks, "regions": error.regions}
        if error.plan is not None:
            reshard.check_plan(error.plan)
            outcome["plan"] = error.plan.plan_hash
            out = error.recover()
            outcome["unlike"] = 0 if wanted is None else count_unlike(out, wanted)
    else:
        outcome["unlike"] = 0 if wanted is None else count_unlike(out, wanted)
    outcome["seconds"] = time.monotonic() - start
    assert kept is None or torch.equal(kept, source)
    return outcome


def _run(victims, src, on_loss, move=None, **options):
    with pytest.raises(LaunchError) as caught:
        run_processes(move or _move_with, 8, victims, src, on_loss, options, timeout_seconds=90, grace_seconds=60)
    assert {failure.rank for failure in caught.value.failures} == set(victims), caught.value
    return [caught.value.results[rank] for rank in range(8) if rank not in victims]


def _move_with(rank, victims, src, on_loss, options):
    return _move(rank, victims, src, on_loss, **options)


def _move_in_closed_form(rank, victims, src, on_loss, options):
    """Like :func:`_move`, by a plan that does not list its messages. The plan of the recovery lists them."""
    planning.MAX_HOLDINGS, most = 0, planning.MAX_HOLDINGS
    source = shard_of_positions(src, rank, SHAPE, "float32")
    reshard.reshard(source, src, DST, shape=SHAPE, topology=TOPOLOGY, timeout_seconds=20)
    (call_group,) = [each for group in reshard.coordination.known_groups(None) for each in group.call_groups.values()]
    assert {plan.strategy for plan, _, _ in call_group.cache.values()} == {"rotation"}  # further calls use this plan
    planning.MAX_HOLDINGS = most
    return _move(rank, victims, src, on_loss, None, staging_bytes=DEFAULT_STAGING_BYTES)


@pytest.mark.integration
@pytest.mark.parametrize(
    "victims",
    [
        pytest.param({0: 2}, id="the first source"),
        pytest.param({3: 1}, id="a source"),
        pytest.param({4: 3}, id="a forwarding destination"),
        pytest.param({7: 1}, id="a destination"),
        pytest.param(
            {0: 1, 5: 2}, id="the first source and a destination", marks=pytest.mark.slow
        ),  # 5 s longer: the others wait for a rank that does not respond
        pytest.param({0: "planning"}, id="the first source while planning"),
        pytest.param({6: "planning", 1: 2}, id="one while planning and one later"),
    ],
)
def test_survivors_recover(victims):
    for outcome in _run(victims, SRC, "recover"):
        assert outcome["unlike"] == 0 and "error" not in outcome, outcome
        assert outcome["seconds"] < 15, outcome


@pytest.mark.integration
@pytest.mark.parametrize("victims", [{3: 1}, {4: 2}], ids=["a source", "a forwarding destination"])
def test_survivors_recover_from_a_plan_in_closed_form(victims):
    for outcome in _run(victims, SRC, "recover", _move_in_closed_form):
        assert outcome["unlike"] == 0 and "error" not in outcome, outcome


@pytest.mark.integration
def test_survivors_get_a_recovery_plan():
    outcomes = _run({2: 2}, SRC, "offer")
    assert len({(outcome["error"], outcome["plan"]) for outcome in outcomes}) == 1, outcomes
    assert outcomes[0]["ranks"] == (2,) and "recover()" in outcomes[0]["error"]
    assert all(outcome["unlike"] == 0 for outcome in outcomes)


@pytest.mark.integration
def test_lost_regions_are_named():
    outcomes = _run({1: 1}, NO_REPLICAS, "recover")
    assert len({outcome["error"] for outcome in outcomes}) == 1, outcomes
    assert outcomes[0]["error"].startswith("rank 1 is lost, and with it "), outcomes
    assert outcomes[0]["ranks"] == (1,) and outcomes[0]["regions"]


def _move_without_loss(rank):
    return _move(rank, {}, SRC, "recover"), _move(rank, {}, SRC, "offer", verify=True)


@pytest.mark.integration
def test_fault_tolerant_transfers_deliver_without_losses():
    for both in run_processes(_move_without_loss, 8):
        assert [outcome["unlike"] for outcome in both] == [0, 0]


def _pass_on_loss(rank, on_loss):
    try:
        reshard.reshard(torch.ones(4), Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2")), on_loss=on_loss[rank])
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"


def test_wrong_on_loss_is_rejected():
    assert (
        run_processes(_pass_on_loss, 2, ["never", "never"])
        == ["ArgumentError: on_loss is 'never'; it must be one of 'raise', 'offer', 'recover'"] * 2
    )
    errors = run_processes(_pass_on_loss, 2, ["raise", "offer"])
    assert errors == ["DisagreementError: ranks disagree on on_loss: rank 0 passes raise, rank 1 passes offer"] * 2


def _stop_rank_3(rank):
    """Rank 3 receives SIGSTOP in its second transfer. After the timeout, the others finish without it."""
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
def test_unresponsive_rank_is_lost_after_the_timeout():
    with pytest.raises(LaunchError) as caught:
        run_processes(_stop_rank_3, 8, timeout_seconds=40, grace_seconds=20)
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
    outcome = _move(rank, {2: 2}, SRC, "recover")
    (folder / f"{rank}.part").write_text(json.dumps(outcome))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")


@pytest.mark.integration
def test_survivors_recover_under_torch_multiprocessing(tmp_path):
    """Torch's launcher kills all ranks after one dies, but only when ``join`` is called."""
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
    """Start a transfer of an array filled with the step number."""
    source = torch.full((4, 3), float(step)) if rank < 2 else None
    options = {"shape": (4, 3), "on_loss": "recover", "timeout_seconds": timeout_seconds} | options
    return reshard.reshard_async(source, PAIR, HALVES, **options)


def _values_or_error(function):
    try:
        out = function()
        return None if out is None else sorted(set(out.flatten().tolist()))
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"


def _call_late(rank, late):
    store = torch.distributed.distributed_c10d._get_default_store()
    results = [_values_or_error(_step(rank, 0).wait)]
    for step in range(1, 5):
        if step == 1 and rank == late:
            store.wait([f"{other} ended step 2" for other in range(4) if other != late])
        if step == 4 and rank != late:
            store.wait(["the late rank called"])
        results.append(_values_or_error(lambda step=step: _step(rank, step, 1.0).wait()))
        if step == 2:
            store.set("the late rank called" if rank == late else f"{rank} ended step 2", "")
    results.append(_values_or_error(lambda: _step(rank, 5, on_loss="raise").wait()))
    return results


@pytest.mark.parametrize("late", [0, *(pytest.param(late, marks=pytest.mark.slow) for late in (1, 3))])
def test_late_rank_is_excluded_permanently(late):
    """The other ranks go on without the late rank, and never receive its data, because it is that of another step."""
    by_rank = run_processes(_call_late, 4, late)
    for rank, results in enumerate(by_rank):
        if rank == late:
            assert all(
                "go on without it" in str(text) or f"without rank {late}" in str(text) for text in results[1:5]
            ), results
        else:
            assert results[:5] == [None if rank < 2 else [float(step)] for step in range(5)], (late, rank, results)
            assert f"rank {late} was lost in an earlier call" in results[5], results


def _wait_in_order(rank, orders):
    handles = {step: _step(rank, step) for step in (1, 2)}
    waited = [_values_or_error(handles[step].wait) for step in orders[rank]]
    return waited, _values_or_error(lambda: _step(rank, 3).wait())


@pytest.mark.parametrize("orders", [[(1, 2), (1, 2), (2, 1), (1, 2)], [(1, 2), (1, 2), (1,), (1, 2)]])
def test_fault_tolerant_transfers_must_be_waited_for_in_one_order(orders):
    by_rank = run_processes(_wait_in_order, 4, orders)
    texts = [text for waited, then in by_rank for text in (*waited, then)]
    assert all("create a new group" in then for _, then in by_rank), by_rank
    assert any("ranks disagree on what comes next: rank 0 waits for transfer" in str(text) for text in texts), by_rank
    for rank in (2, 3):  # a handle returns the data of its own step, or an error
        for step, text in zip(orders[rank], by_rank[rank][0], strict=True):
            assert text == [float(step)] or "DisagreementError" in text, by_rank


def _late_rank_0(rank):
    """Rank 0 calls late: some ranks have already timed out on it, and others still wait for it."""
    results = [_values_or_error(_step(rank, 0).wait)]
    dist.barrier()
    time.sleep({0: 2.25, 1: 0.0, 2: 1.7, 3: 1.7}[rank])
    for step in range(1, 5 if rank else 2):
        results.append(_values_or_error(lambda step=step: _step(rank, step, 1.0).wait()))
    return results


def test_ranks_that_lose_rank_0_at_different_times_stay_in_one_call():
    for rank, results in enumerate(run_processes(_late_rank_0, 4)):
        if rank == 0:
            assert results[0] is None and "continues without rank 0" in results[1], results
        else:
            wanted = [None if rank < 2 else [float(step)] for step in range(5)]
            assert results == wanted or all("Error" in str(result) for result in results[1:]), (rank, results)


def _learn_of_loss(rank):
    """Ranks 0, 2 and 3 have excluded rank 1. Rank 4 learns this in its first call with ranks 0 and 2."""
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
            return _values_or_error(reshard.reshard_async(source, large, small, **options).wait)
    return None


@pytest.mark.integration
def test_lost_ranks_are_learned_from_other_ranks():
    assert run_processes(_learn_of_loss, 5) == [None, None, [7.0], None, [7.0]]
