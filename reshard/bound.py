"""The least time in which hosts with one network interface each can do the job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.plan import TensorSpec
from reshard.shards import NO_RANK
from reshard.topology import Topology

HostSet = tuple[int, ...]


def lower_bound(tensors: Sequence[TensorSpec], topology: Topology) -> float | None:
    """Seconds below which no plan can be, or None where no formula holds.

    The host-NIC model: a host sends and receives at most ``nic_bytes_per_second`` each way, and what moves
    inside a host costs nothing. For sources and destinations on different hosts the bound is the larger of

    * the most bytes that one destination host must receive, over the rate, and
    * over all sets X of source hosts, the bytes held only inside X over what X can send, which is the least
      possible largest share when every region is divided among the hosts that hold it.

    It is reached in the limit by schedules without relays. Where source and destination share a host no
    closed form is known, and the result is None.
    """
    src_hosts = {topology.host_of_rank[rank] for spec in tensors for rank in spec.src.ranks}
    dst_hosts = {topology.host_of_rank[rank] for spec in tensors for rank in spec.dst.ranks}
    if src_hosts & dst_hosts:
        return None
    arrives: dict[int, int] = {}
    held: dict[HostSet, int] = {}
    for spec in tensors:
        nbytes = spec.tasks.numel * spec.itemsize
        for hosts, total in _by_hosts(spec.dst_shards.ranks, spec.tasks.dst_tile, nbytes, topology).items():
            for host in hosts:
                arrives[host] = arrives.get(host, 0) + total
        for hosts, total in _by_hosts(spec.src_shards.ranks, spec.tasks.src_tile, nbytes, topology).items():
            held[hosts] = held.get(hosts, 0) + total
    return max(max(arrives.values(), default=0), least_largest_share(held)) / topology.nic_bytes_per_second


def _by_hosts(ranks: np.ndarray, tile: np.ndarray, nbytes: np.ndarray, topology: Topology) -> dict[HostSet, int]:
    """Bytes of the tasks of each tile, added up by the set of hosts that the tile's ranks are on."""
    total = np.zeros(len(ranks), dtype=np.int64)
    np.add.at(total, tile, nbytes)
    sums: dict[HostSet, int] = {}
    for row, count in zip(ranks.tolist(), total.tolist(), strict=True):
        if count:
            hosts = tuple(sorted({topology.host_of_rank[rank] for rank in row if rank != NO_RANK}))
            sums[hosts] = sums.get(hosts, 0) + count
    return sums


def least_largest_share(held: dict[HostSet, int]) -> float:
    """The least possible largest load when the bytes of each key are divided among the hosts in it.

    Solved as a linear program; its dual names the set of hosts that binds, from which the value is
    recomputed exactly.
    """
    hosts = sorted({host for key in held for host in key})
    if not hosts:
        return 0.0
    if all(len(key) == 1 for key in held):
        return float(max(held.values()))
    if len(held) == 1:
        return sum(held.values()) / len(hosts)
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    keys = sorted(held)
    scale = float(sum(held.values()))
    share = [(k, host) for k, key in enumerate(keys) for host in key]
    number = {host: i for i, host in enumerate(hosts)}
    columns = np.arange(len(share))
    load = coo_matrix(
        (
            np.concatenate([np.ones(len(share)), -np.ones(len(hosts))]),
            (
                [number[host] for _, host in share] + list(range(len(hosts))),
                np.concatenate([columns, np.full(len(hosts), len(share))]),
            ),
        ),
        shape=(len(hosts), len(share) + 1),
    )
    whole = coo_matrix((np.ones(len(share)), ([k for k, _ in share], columns)), shape=(len(keys), len(share) + 1))
    cost = np.zeros(len(share) + 1)
    cost[-1] = 1.0
    solved = linprog(
        cost, A_ub=load, b_ub=np.zeros(len(hosts)), A_eq=whole, b_eq=[held[key] / scale for key in keys], method="highs"
    )
    binding = {host for host, dual in zip(hosts, solved.ineqlin.marginals, strict=True) if dual < -1e-9}
    exact = sum(total for key, total in held.items() if binding.issuperset(key)) / max(len(binding), 1)
    value = float(solved.fun) * scale
    return exact if abs(exact - value) <= 1e-6 * scale else value
