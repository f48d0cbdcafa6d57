"""Death of a rank: the other ranks get a reshard error in bounded time, and exit."""

from __future__ import annotations

import os
import signal
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist

import reshard
import reshard.api.call
from reshard import Layout, Mesh
from reshard.coordination import explain_lost_store
from reshard.coordination.call_group import find_call_group
from reshard.coordination.groups.process_group import find_group
from reshard.runtime.transport import BrokenConnectionError, Connections
from reshard.testing.processes import LaunchError, run_processes
from tests.support.interpreters import find_free_port

ROWS = Layout(Mesh.of("2"), "S0")
COLS = Layout(Mesh.of("2", first_rank=2), "R S0")


def _dies_between_calls(rank, victim):
    source = torch.ones(3, 4) if rank < 2 else None
    reshard.reshard(source, ROWS, COLS, shape=(6, 4))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        reshard.reshard(source, ROWS, COLS, shape=(6, 4), timeout_seconds=60)
        return "nothing was raised"
    except reshard.ReshardError as error:
        assert time.monotonic() - start < 25
        return f"{type(error).__name__}: {error}"


def _dies_in_flight(rank, victim):
    """64 MiB move one way in small pieces; the victim is killed after it has started."""
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2))
    return _run_and_die(rank, victim, torch.ones(2048, 4096) if rank < 2 else None, src, dst)


def _dies_in_place(rank, victim):
    """The same, in both directions between all ranks."""
    return _run_and_die(rank, victim, torch.ones(1024, 4096), Layout(Mesh.of("4"), "S0"), Layout(Mesh.of("4"), "R S0"))


def _run_and_die(rank, victim, source, src, dst):
    topology = reshard.Topology((0, 1, 2, 3))
    plan = reshard.make_plan(src, dst, (4096, 4096), "float32", staging_bytes=2**18, topology=topology)
    assert plan.both_ways == (src.ranks == dst.ranks)
    mover = reshard.Mover(plan, timeout_seconds=60)
    if rank == victim:
        mover.start(source)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        mover(source)
        return "finished"
    except reshard.ReshardError as error:
        assert time.monotonic() - start < 25
        return f"{type(error).__name__}: {error}"


def _run(function, victim):
    with pytest.raises(LaunchError) as caught:
        run_processes(function, 4, victim, grace_seconds=60)
    assert [failure.rank for failure in caught.value.failures] == [victim]
    assert "exit code -9" in caught.value.failures[0].text
    return [caught.value.results[rank] for rank in range(4) if rank != victim]


def _dies_while_connecting(rank, victim, on_loss="raise"):
    make = Connections._make_group

    def die(self, *args):
        os.kill(os.getpid(), signal.SIGKILL)

    Connections._make_group = die if rank == victim else make
    src, dst = Layout(Mesh.of("2")), Layout(Mesh.of("2", first_rank=2), "S0")
    source = torch.arange(24.0).reshape(6, 4) if rank < 2 else None
    start = time.monotonic()
    try:
        out = reshard.reshard(source, src, dst, shape=(6, 4), timeout_seconds=30, on_loss=on_loss)
        text = "done" if out is None else str(out.flatten()[0].item())
    except reshard.ReshardError as error:
        text = f"{type(error).__name__}: {error}"
    assert time.monotonic() - start < 25
    return text


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_rank_killed_while_connecting_is_named(victim):
    for text in _run(_dies_while_connecting, victim):
        assert f"rank {victim}" in text, text


def _dies_while_connecting_fault_tolerant(rank, victim):
    return _dies_while_connecting(rank, victim, "recover")


@pytest.mark.parametrize("victim", [0, 1])
def test_others_recover_if_a_rank_dies_while_connecting(victim):
    assert _run(_dies_while_connecting_fault_tolerant, victim) == ["done", "0.0", "12.0"]


def _dies_between_uses(rank, victim):
    """The victim dies while the mover is connected and no transfer is in progress."""
    mover = reshard.Mover(reshard.make_plan(ROWS, COLS, (6, 4), "float32"), timeout_seconds=60)
    source = torch.ones(3, 4) if rank < 2 else None
    mover(source)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    start = time.monotonic()
    try:
        mover(source)
        return "finished"
    except reshard.ReshardError as error:
        assert time.monotonic() - start < 25
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("victim", [1, 2])
def test_rank_killed_between_uses_of_a_mover_is_named(victim):
    texts = _run(_dies_between_uses, victim)
    assert all(f"rank {victim}" in text or text == "finished" for text in texts), texts
    assert f"rank {victim}" in texts[-1], texts


@pytest.mark.parametrize("victim", [0, 2])
def test_rank_killed_between_calls_is_named(victim):
    for text in _run(_dies_between_calls, victim):
        assert f"rank {victim}" in text, text


@pytest.mark.parametrize("function", [_dies_in_flight, _dies_in_place])
@pytest.mark.parametrize("victim", [0, 3])
def test_rank_killed_in_flight_ends_the_transfer(function, victim):
    texts = _run(function, victim)
    assert any(text.startswith(("RemoteError", "TransferTimeoutError")) for text in texts), texts


def _leaves_early(rank):
    """Ranks 0 and 1 exit after their part; ranks 2 and 3 still exchange data."""
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2))
    whole = torch.arange(2**23, dtype=torch.float32)
    handle = reshard.reshard_async(whole[rank * 2**22 : (rank + 1) * 2**22] if rank < 2 else None, src, dst)
    if rank == 3:
        time.sleep(0.5)
    out = handle.wait(30)
    return out is None or torch.equal(out, whole)


def test_rank_that_exits_after_its_part_does_not_fail_the_others():
    assert run_processes(_leaves_early, 4) == [True] * 4


def _calls_after_the_store_is_gone(rank, _, port):
    """Rank 0 serves the store and leads the rounds. It detects the death and exits before rank 1 calls."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4", "RANK": str(rank)}
    dist.init_process_group("gloo")
    source = torch.ones(3, 4) if rank < 2 else None
    reshard.reshard(source, ROWS, COLS, shape=(6, 4))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(rank == 1)
    with pytest.raises(reshard.errors.RemoteError) as caught:
        reshard.reshard(source, ROWS, COLS, shape=(6, 4), timeout_seconds=60)
    return str(caught.value)


def test_rank_that_calls_after_the_others_have_left_names_the_dead_one():
    with pytest.raises(LaunchError) as caught:
        run_processes(_calls_after_the_store_is_gone, 4, find_free_port(), grace_seconds=30, init_group=False)
    assert [failure.rank for failure in caught.value.failures] == [3]
    for text in caught.value.results.values():
        assert text.startswith("rank 3 is gone"), text


def _explain_lost_connection(rank, lost):
    call_group = find_call_group(find_group(None), (0, 1, 2))
    if lost[rank] is None:
        return None
    error = call_group.find_root_cause(7, BrokenConnectionError(lost[rank], "broken"), threading.Event().wait)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        (
            [None, 0, 1],
            [
                None,
                "RemoteError: rank 0 is gone or unreachable: broken",
                "RemoteError: rank 0 is gone or unreachable: rank 1 lost its connection to it",
            ],
        ),
        ([None, 2, 1], [None, *["BrokenConnectionError: broken"] * 2]),  # a link failed, no rank died
    ],
)
def test_lost_connections_lead_to_the_dead_rank(lost, expected):
    """A rank that detects a death closes its connections. So its neighbors lose it as well, although it is alive."""
    assert run_processes(_explain_lost_connection, 3, lost) == expected


def test_deep_recursion_of_the_caller_is_no_lost_store():
    """A RecursionError is a RuntimeError, as the errors of torch's store are."""
    group = types.SimpleNamespace(rank=1, call_groups={})
    found = explain_lost_store(group, RecursionError("maximum recursion depth exceeded"))
    assert str(found) == "rank 1: RecursionError: maximum recursion depth exceeded"
