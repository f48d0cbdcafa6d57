"""The lower bound that the rates inside hosts set on regions that are held and needed on one host only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.formatting import format_bytes, format_rate
from reshard.ragged import NO_RANK
from reshard.sharding import TensorSpec
from reshard.topology import Topology


def bound_inside(tensors: Sequence[TensorSpec], topology: Topology) -> tuple[float, str]:
    """Seconds that no plan without relays can beat, and the rank or host that sets them, in words.

    Without relays, such a region reaches each rank of the host that lacks it inside this host. The seconds are the
    larger of two times: the bytes that reach a rank over ``inside_bytes_per_second``, and the bytes that reach all
    ranks of a host over ``inside_total_bytes_per_second``. A time is 0 if the topology has no such rate.
    """
    of_rank, total = topology.inside_bytes_per_second, topology.inside_total_bytes_per_second
    if of_rank is None and total is None:
        return 0.0, ""
    host = topology.host_array
    reaches = np.zeros(len(host), dtype=np.int64)
    for spec in tensors:
        _add_bytes(reaches, spec, host)
    on_host = np.zeros(topology.num_hosts, dtype=np.int64)
    np.add.at(on_host, host, reaches)
    bound = (0.0, "")
    limits = (of_rank, reaches, "rank {} must receive {} inside its host and can receive {}")
    limits_of_host = (total, on_host, "the ranks of host {} must move {} inside it and can move {} together")
    for rate, nbytes, words in (limits, limits_of_host):
        if rate is not None and nbytes.max(initial=0) / rate > bound[0]:
            place = int(nbytes.argmax())
            seconds = int(nbytes[place]) / rate
            bound = seconds, words.format(place, format_bytes(int(nbytes[place])), format_rate(rate))
    return bound


def _add_bytes(reaches: np.ndarray, spec: TensorSpec, host: np.ndarray) -> None:
    """Add the bytes of one tensor that reach each rank inside its host. Only regions on this host alone count."""
    tasks, (src, dst) = spec.tasks, (spec.src_tiles.ranks, spec.dst_tiles.ranks)
    src_host, dst_host = _hosts_of_tiles(src, host)[tasks.src_tile], _hosts_of_tiles(dst, host)[tasks.dst_tile]
    here = np.flatnonzero((src_host >= 0) & (src_host == dst_host))
    if not len(here):
        return
    holders, needing = src[tasks.src_tile[here]], dst[tasks.dst_tile[here]]
    lacks = needing != NO_RANK
    for column in holders.T:
        lacks &= needing != column[:, None]
    task, replica = np.nonzero(lacks)
    np.add.at(reaches, needing[task, replica], (tasks.numel[here] * spec.itemsize)[task])


def _hosts_of_tiles(ranks: np.ndarray, host: np.ndarray) -> np.ndarray:
    """``(tiles,)`` the host of all ranks of a tile, -1 if they are on several."""
    hosts = host[ranks]
    first = hosts[:, :1]
    return np.where(((hosts == first) | (ranks == NO_RANK)).all(axis=1), first[:, 0], -1)
