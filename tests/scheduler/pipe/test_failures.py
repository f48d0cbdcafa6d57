"""A killed rank, also the one that serves the store of ``env://``, is named by one error on every survivor."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

import reshard.scheduler as rs
from reshard.errors import ReshardError
from reshard.testing.processes import LaunchError, run_processes
from tests.scheduler.pipe.test_pipe import make_batch, make_chain
from tests.support.interpreters import find_free_port

NUM_RANKS = 3


def _train_until_a_rank_dies(rank, _, port, victim, killed_at):
    """The victim kills itself after three steps. The others return the text of their error and its delay."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "RANK": str(rank)}
    dist.init_process_group("gloo")  # rank 0 serves the store
    engine = rs.Pipe(make_chain(), ["layers.2"], stages="1x1,2x1").compile(make_batch(0), 4)
    number = 0
    try:
        while True:
            engine.step(make_batch(number))
            engine.clip_grad_norm_(1.0)
            number += 1
            if number == 3 and rank == victim:
                killed_at.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
    except ReshardError as error:
        return str(error), time.monotonic() - float(killed_at.read_text())


@pytest.mark.parametrize("victim", range(NUM_RANKS))
def test_killed_rank_is_named_by_every_survivor(victim, tmp_path):
    with pytest.raises(LaunchError) as caught:
        arguments = find_free_port(), victim, tmp_path / "killed"
        run_processes(_train_until_a_rank_dies, NUM_RANKS, *arguments, grace_seconds=30, init_group=False)
    assert [failure.rank for failure in caught.value.failures] == [victim], caught.value
    assert len(caught.value.results) == NUM_RANKS - 1
    for text, seconds in caught.value.results.values():
        assert f"rank {victim} is gone" in text
        assert seconds < 5
