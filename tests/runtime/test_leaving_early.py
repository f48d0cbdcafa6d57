"""A rank that has finished and left is not an error for ranks that are still at work."""

from __future__ import annotations

import time

import pytest
import torch

import reshard
from reshard.testing.processes import run_processes


def _receive_and_stay(rank):
    """Rank 0 has sent its data, and its process ends. Rank 1 still uses the communicator."""
    src, dst = (reshard.Layout(reshard.Mesh([item]), "R") for item in (0, 1))
    with reshard.Mover(reshard.make_plan(src, dst, (8,), "int8")) as mover:
        moved = mover.start(None if rank else torch.arange(8, dtype=torch.int8)).synchronize()
        if rank == 0:
            return None
        (exchange,) = mover._agreed.call_group._connections[1]._exchanges.values()
        deadline = time.monotonic() + 2
        while (error := exchange.find_error()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return moved.tolist(), error


@pytest.mark.usefixtures("device")
def test_a_rank_that_has_left_is_no_error_on_the_device():
    assert run_processes(_receive_and_stay, 2)[1] == ([*range(8)], None)
