"""On the stand-in for a GPU, all ranks name the rank that dies or does not start a transfer, and no other."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.runtime.cuda import nccl_exchange
from reshard.testing.processes import LaunchError, run_processes
from tests.runtime.test_stream import DST as TO, RANKS, SHAPE, SRC as FROM, _shards as shards

SRC, DST = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2), "R S0")
WITHIN_SECONDS = 20.0  # a silent rank counts as lost after 30 s


def _lose(rank, lost, width, at_start):
    """Kill a rank between two transfers, or while the others have begun one. Returns the error and its time."""
    source = torch.ones(4, width) if rank < 2 else None
    with reshard.Mover(reshard.make_plan(SRC, DST, (8, width), "float32"), timeout_seconds=60) as mover:
        mover.start(source).synchronize()
        dist.barrier()
        if rank == lost:
            time.sleep(0.0 if at_start else 0.3)
            os._exit(9)
        begun = time.monotonic()
        try:
            for _ in range(1000):  # small messages are buffered, so a transfer to a dead rank may succeed
                mover.start(source).synchronize()
        except reshard.ReshardError as error:
            return str(error), time.monotonic() - begun
    return "no error", 0.0


def _lose_while_connecting(rank, lost):
    """Kill a rank after the ranks have agreed, before it connects to another."""
    if rank == lost:
        nccl_exchange.NcclExchange.connect = lambda *_: os._exit(9)
    begun = time.monotonic()
    try:
        reshard.Mover(reshard.make_plan(SRC, DST, (8, 8), "float32"), timeout_seconds=60)
    except reshard.ReshardError as error:
        return str(error), time.monotonic() - begun
    return "no error", 0.0


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("lost", [0, 3])
def test_rank_that_dies_while_connecting_is_named(lost):
    with pytest.raises(LaunchError) as caught:
        run_processes(_lose_while_connecting, 4, lost, grace_seconds=30.0)
    for text, seconds in caught.value.results.values():
        assert text.startswith(f"rank {lost} is gone") and seconds < WITHIN_SECONDS, caught.value.results
    assert len(caught.value.results) == 3


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize(("lost", "width"), [(3, 8), (3, 2**19), (0, 8), (1, 2**19)])
def test_dead_rank_is_named(lost, width, at_start):
    with pytest.raises(LaunchError) as caught:
        run_processes(_lose, 4, lost, width, at_start, grace_seconds=30.0)
    results = caught.value.results
    assert sorted(results) == sorted({0, 1, 2, 3} - {lost})
    for text, seconds in results.values():
        assert text.startswith(f"rank {lost} is gone") and seconds < WITHIN_SECONDS, results


def _start_late(rank):
    """Rank 1 is busy with something else and does not start the second transfer."""
    source, _ = shards(rank)
    mover = reshard.Mover(reshard.make_plan(FROM, TO, SHAPE, "float32"))
    mover(source)
    dist.barrier()  # all ranks are connected
    mover._transfers.timeout_seconds = 3.0
    if rank == 1:
        time.sleep(6.0)
    try:
        mover.start(source).synchronize()
    except reshard.ReshardError as error:
        return str(error)
    time.sleep(4.0)  # this rank exchanges nothing with rank 1; it must not leave before its next heartbeat
    return "no error"


@pytest.mark.usefixtures("device")
def test_timeout_names_the_rank_that_has_not_started():
    texts = {text for text in run_processes(_start_late, RANKS) if text != "no error"}  # of ranks without its messages
    (text,) = texts
    wanted = r"rank \d: the transfer did not finish in time: it waits for rank 1, which has not started it"
    assert re.fullmatch(wanted, text)
