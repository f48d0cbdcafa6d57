"""A forked child cannot use its parent's groups and does not disturb them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import reshard
from reshard.testing.processes import LaunchError, run_processes
from tests.coordination.forking import move
from tests.support.interpreters import run_interpreters

SCRIPT = Path(__file__).with_name("forking.py")


@pytest.mark.nightly
def test_forked_child_is_refused_and_its_parent_continues():
    for output, errors in run_interpreters(SCRIPT, 2):
        assert output.splitlines()[-1] == "well"  # Gloo of torch 2.9 prints too
        assert errors.count("KeyError: 'raised by the child'") == 2, errors


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
        with pytest.raises(reshard.errors.RemoteError, match="rank 1 is gone"):
            move(rank, None)
    finally:
        os.kill(child, signal.SIGKILL)
    return True


def test_death_is_detected_although_a_forked_child_lives():
    with pytest.raises(LaunchError) as raised:
        run_processes(_die_before_forked_child, 2)
    assert raised.value.results == {0: True}
