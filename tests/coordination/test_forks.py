"""A forked child cannot use its parent's groups and does not disturb them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import reshard
from reshard.testing.processes import LaunchError, run_processes
from tests.support.forking import move

SCRIPT = Path(__file__).parents[1] / "support" / "forking.py"


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.mark.parametrize("kind", ["joined", "world"])
def test_forked_child_is_refused_and_its_parent_continues(kind):
    port = _free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(port), kind],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    output = [process.communicate(timeout=90) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], output
    assert [out for out, _ in output] == ["well\n"] * 2, output
    assert all(err.count("KeyError: 'raised by the child'") == 1 for _, err in output), output


def _die_before_forked_child(rank):
    move(rank, None)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        store.set("child", str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(store.get("child"))
    try:
        with pytest.raises(reshard.RemoteError, match="rank 1 is gone"):
            move(rank, None)
    finally:
        os.kill(child, signal.SIGKILL)
    return True


def test_death_is_detected_although_a_forked_child_lives():
    with pytest.raises(LaunchError) as raised:
        run_processes(_die_before_forked_child, 2)
    assert raised.value.results == {0: True}
