"""Gathers and sums along an axis of uneven parts, flat and by hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from reshard.parallel import Grid
from reshard.parallel.grid.grid_axis import Axis
from reshard.testing import run_processes

SIZES = [[2, 2, 2, 2, 2, 2], [3, 0, 1, 4, 2, 1], [0, 0, 5, 0, 0, 0]]


def check_axis(rank, hosts, ranks):
    torch.set_num_threads(1)
    rank = ranks.index(rank)  # of the axis
    axis = Axis("row", dist.group.WORLD, ranks, rank)
    axis.split_by_host(hosts)
    for sizes in SIZES:
        whole = torch.arange(sum(sizes) * 3, dtype=torch.float64).view(-1, 3)
        own = whole.split(sizes)[rank]
        assert torch.equal(axis.all_gather(own.contiguous(), sizes).wait(), whole)
        summed = axis.reduce_scatter(whole * 2.0**rank, sizes).wait()
        assert torch.equal(summed, own * (2.0**6 - 1))
        sent = torch.cat([torch.full((sizes[other],), 10.0 * rank + other) for other in range(6)])
        received = axis.exchange(sent, sizes, [sizes[rank]] * 6)
        assert received.tolist() == [10.0 * other + rank for other in range(6) for _ in range(sizes[rank])]
    assert torch.equal(axis.all_reduce(torch.full((7, 2), 2.0**rank)), torch.full((7, 2), 2.0**6 - 1))
    assert axis.sum(torch.tensor([1.0, rank])).tolist() == [6.0, 15.0]
    assert axis.max(torch.tensor(rank)).item() == 5
    return axis.levels is not None


@pytest.mark.parametrize(
    ("hosts", "has_levels"),
    [
        ([0, 0, 0, 1, 1, 1], True),
        ([7, 8, 9, 7, 8, 9], True),
        ([0, 0, 0, 0, 1, 1], False),  # unequal
        ([0] * 6, False),
    ],
)
def test_gathers_sums_and_exchanges_of_an_axis_are_exact(hosts, has_levels):
    for ranks in ([0, 1, 2, 3, 4, 5], [4, 0, 5, 2, 1, 3]):
        assert run_processes(check_axis, 6, hosts, ranks) == [has_levels] * 6


def count_network_threads(rank):
    def count():
        return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))

    dist.all_reduce(torch.zeros(1))
    before = count()
    grids = [Grid.make(2, 2), Grid.make(1, 2, 2)]
    for grid in grids:
        for axis in ("depth", "row", "col"):
            assert grid.along(axis).all_reduce(torch.ones(5)).tolist() == [float(grid.along(axis).size)] * 5
    return count() - before


def test_grids_use_the_network_thread_of_the_default_group():
    # an idle thread of Gloo wakes up 100 times a second
    assert run_processes(count_network_threads, 4) == [0] * 4
