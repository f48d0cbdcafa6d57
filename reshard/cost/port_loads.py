"""The bytes that each port of the network passes in a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.plan.model import Plan
from reshard.topology.model import MAX_NICS, Topology


@dataclass(frozen=True)
class Load:
    """Bytes through one direction of a NIC or a pod uplink, and its rate."""

    port: str
    nbytes: int
    bytes_per_second: float

    @property
    def seconds(self) -> float:
        """The least time that the port is busy."""
        return self.nbytes / self.bytes_per_second


def find_loads(plan: Plan, topology: Topology | None = None) -> list[Load]:
    """The loads of all ports in use: first the NICs of each host, out and in, then the uplinks of pods.

    Args:
        plan: the plan. topology: other rates than the plan's own, such as measured ones.
    """
    topology, transfers = topology or plan.topology, plan.transfers
    host, nic = topology.host_by_rank, np.array(topology.nic_of_rank, dtype=np.int64)
    crosses = np.flatnonzero(host[transfers.sender] != host[transfers.receiver])
    nbytes = plan.message_bytes[transfers.transfer_of_edge[crosses]]
    sender, receiver = transfers.sender[crosses], transfers.receiver[crosses]
    total: dict[tuple[int, int, int, int], int] = {}  # (0 NIC or 1 pod, number, NIC, 0 out or 1 in) -> bytes

    def add(kind: int, number: np.ndarray, place: np.ndarray, side: int, amount: np.ndarray) -> None:
        keys, row = np.unique(number * MAX_NICS + place, return_inverse=True)
        sums = np.zeros(len(keys), dtype=np.int64)
        np.add.at(sums, row.ravel(), amount)
        for key, part in zip(keys.tolist(), sums.tolist(), strict=True):
            total[kind, key // MAX_NICS, key % MAX_NICS, side] = part

    add(0, host[sender], nic[sender], 0, nbytes)
    add(0, host[receiver], nic[receiver], 1, nbytes)
    if topology.pods:
        pod = np.array([topology.host(h).pod or 0 for h in range(topology.num_hosts)], dtype=np.int64)
        apart = pod[host[sender]] != pod[host[receiver]]
        nothing = np.zeros(int(apart.sum()), dtype=np.int64)
        add(1, pod[host[sender[apart]]], nothing, 0, nbytes[apart])
        add(1, pod[host[receiver[apart]]], nothing, 1, nbytes[apart])
    loads = []
    for (kind, number, place, side), amount in sorted(total.items()):
        port = topology.pods[number] if kind else topology.host(number).nics[place]
        name = f"pod {number} {('up', 'down')[side]}" if kind else f"host {number} {('out', 'in')[side]}"
        if not kind and len(topology.host(number).nics) > 1:
            name += f", NIC {place}"
        rate = port.ingress_bytes_per_second if side else port.egress_bytes_per_second
        loads.append(Load(name, amount, rate))
    return loads
