"""A rank that the system allows no further thread fails the call on all ranks, and later calls work."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh, weights
from reshard.errors import RemoteError, ResourceError
from reshard.testing.processes import run_processes

ROWS, COLUMNS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
#: The threads of the first transfer of a group, in order; two connect.
NAMES = ("store", "monitor", *["timeout"] * 2, "progress", "queue")


@contextlib.contextmanager
def limited_threads(num):
    """Let the system refuse all threads after so many."""
    start, started = threading.Thread.start, []

    def refuse(thread):
        started.append(thread.name)
        if len(started) > num:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse
    try:
        yield
    finally:
        threading.Thread.start = start


def move(rank, step, group):
    source = (torch.arange(24.0).view(4, 6) + 100 * step)[2 * rank : 2 * rank + 2]
    moved = reshard.reshard(source, ROWS, COLUMNS, group=group, timeout_seconds=20)
    return moved.tolist() == (torch.arange(24.0).view(4, 6) + 100 * step)[:, 3 * rank : 3 * rank + 3].tolist()


def check_refused(rank):
    move(rank, 0, dist.group.WORLD)
    dist.barrier()
    reshard.close_group()
    before = threading.active_count()
    for num, name in enumerate(NAMES):
        group = dist.new_group([0, 1])
        with limited_threads(num) if rank == 1 else contextlib.nullcontext():
            try:
                assert move(rank, 1, group)
                assert (rank, name) == (0, "queue")  # rank 1 had sent all before
            except reshard.ReshardError as error:
                is_named = rank == 1 or num > 1  # once it has a monitor, rank 1 publishes why it failed
                assert isinstance(error, ResourceError if is_named else RemoteError)
                assert (f"cannot start the thread reshard-{name}" if is_named else "rank 1 left a call") in str(error)
        assert move(rank, 2, group)
        dist.barrier()
        reshard.close_group(group)
        dist.destroy_process_group(group)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    return threading.active_count() - before


@pytest.mark.integration
def test_refused_thread_is_an_error_on_all_ranks_and_the_next_call_works():
    assert run_processes(check_refused, 2) == [0, 0]


def check_refused_publisher(rank, _):
    before, refused = threading.active_count(), []
    for num in range(9):
        with limited_threads(num):
            try:
                weights.Publisher(torch.nn.Linear(2, 3), dist.HashStore()).close()
            except ResourceError as error:
                refused.append(str(error).split()[4])
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    return refused, threading.active_count() - before


def test_a_publisher_that_may_start_no_thread_is_an_error_and_leaves_none():
    ((refused, left),) = run_processes(check_refused_publisher, 1, init_group=False)
    assert "reshard-trainer" in refused and left == 0
