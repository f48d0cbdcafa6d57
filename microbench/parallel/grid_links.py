"""Measure the links of an emulated cluster as the collectives of grids use them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.harness.calibrate import measure_cluster
from reshard.coordination.device_mesh import new_group
from reshard.parallel.grid.grid_axis import Axis
from reshard.topology import Topology

#: Bytes of a message between two ranks of a host, and how many are measured.
MESSAGE_BYTES, REPEATS = 2**20, 50


def measure_grid_links(cluster: EmulatedCluster, expected: Topology) -> Topology:
    """Measure a cluster like ``measure_cluster``, with the rate of shared memory inside hosts whose ranks share it."""
    links = measure_cluster(cluster, expected)
    rate = cluster.run(measure_shared_memory, cluster.topology)[0]
    return links if rate is None else replace(links, inside_bytes_per_second=rate)


def measure_shared_memory(rank: int, report: Callable[[Any], None], topology: Topology) -> float | None:
    """The most bytes per second that a rank reads of what another rank on its host wrote, while no other rank works.

    None if no host has two ranks, or they do not share memory.
    """
    torch.set_num_threads(1)
    hosts = [topology.ranks_of_host(host) for host in range(topology.num_hosts)]
    pair = next((ranks[:2] for ranks in hosts if len(ranks) > 1), [])
    seconds = _time_reads(pair, pair.index(rank)) if rank in pair else _time_reads(pair, None)
    gathered: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, seconds)
    fastest = gathered[pair[1]] if pair else None
    return None if fastest is None else MESSAGE_BYTES / fastest


def _time_reads(pair: list[int], index: int | None) -> float | None:
    """Seconds of the fastest read; None unless this rank is in the pair, and the pair shares memory."""
    axis = None
    if index is not None:
        axis = Axis("pair", new_group(pair, backend="gloo"), pair, index)
        axis.split_by_host([0, 0])
    sizes, result, seconds = [MESSAGE_BYTES, 0], torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), []
    targets = [[part] for part in result.split(sizes)]
    for _ in range(REPEATS):
        if axis is None or not axis.shares_memory:
            dist.barrier()
            continue
        pending = axis.all_gather_into(result[: sizes[axis.index]], targets, result)
        dist.barrier()  # the first rank of the pair has written
        begun = time.perf_counter()
        pending.wait()
        seconds.append(time.perf_counter() - begun)
    return min(seconds, default=None)
