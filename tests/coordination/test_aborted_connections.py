"""An abort ends every wait on a Gloo group, even if some of its connections are closed already."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.coordination.call_group import find_call_group
from reshard.errors import RemoteError
from reshard.runtime.transport import abort_group
from reshard.testing import LaunchError, run_processes


def _wait_for_each_other(rank, victim):
    group = dist.ProcessGroupGloo(dist.distributed_c10d._get_default_store(), rank, 3, timedelta(seconds=60))
    group.barrier().wait()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    other = 3 - rank - victim
    waiting = group.recv([torch.empty(1)], other, 7)
    while True:  # until the connection to the dead rank is closed
        try:
            group.send([torch.empty(1)], victim, 8).wait(timedelta(seconds=60))
        except RuntimeError:
            break
    begun = time.monotonic()
    abort_group(group)
    with pytest.raises(RuntimeError):
        waiting.wait(timedelta(seconds=20))
    return time.monotonic() - begun


def test_abort_ends_waits_for_live_ranks_after_another_rank_died():
    with pytest.raises(LaunchError) as caught:
        run_processes(_wait_for_each_other, 3, 0, grace_seconds=60)
    assert len(caught.value.results) == 2
    assert max(caught.value.results.values()) < 5


class _SlowConnections:
    """Connections over which data arrives until their abort ends."""

    def __init__(self):
        self.begun, self.released = threading.Event(), threading.Event()

    def abort(self):
        """End when the test says so."""
        self.begun.set()
        assert self.released.wait(20)


def test_no_thread_reports_a_failed_transfer_before_the_abort_of_another_thread_ends():
    with reshard.join(dist.HashStore(), 0, 2) as group:
        call_group = find_call_group(group, (0, 1))
        connections = _SlowConnections()
        call_group._connections = call_group.generation, connections
        threads = [
            threading.Thread(target=call_group.record_error, args=(call_group.generation, RemoteError(text)))
            for text in ("first", "second")
        ]
        threads[0].start()
        assert connections.begun.wait(20)
        threads[1].start()
        threads[1].join(0.2)
        assert threads[1].is_alive()
        connections.released.set()
        for thread in threads:
            thread.join(20)
        assert str(call_group.broken) == "first"
        call_group._connections = None
