"""The bytes that a plan sends through each port: one direction of a NIC or of a pod uplink, or the inside of a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from reshard.formatting import format_bytes, format_rate
from reshard.plan.value.host_rates import used_nic_numbers
from reshard.topology import MAX_NICS, Topology

if TYPE_CHECKING:
    from reshard.plan.value.plan import Plan
    from reshard.plan.value.rotation_plan import RotationPlan


@dataclass(frozen=True)
class Load:
    """Bytes that a plan sends through a port, and the rate of the port.

    Attributes:
        port: name of the port, for example ``host 0 out, NIC 1``, ``pod 2 up`` or ``host 0 inside``.
    """

    port: str
    nbytes: int
    bytes_per_second: float

    @property
    def seconds(self) -> float:
        """Time that the port needs for its bytes at its full rate."""
        return self.nbytes / self.bytes_per_second


def describe_load(load: Load) -> str:
    """A load in words, such as ``Host 2 receives 4 MiB at 1.25 GB/s``."""
    place, _, nic = load.port.partition(", ")
    place, _, direction = place.rpartition(" ")
    does = {"out": "sends", "up": "sends", "inside": "moves"}.get(direction, "receives")
    through = f" through {nic}" if nic else ""
    amount = f"{format_bytes(load.nbytes)}{' inside' if direction == 'inside' else ''}"
    return f"{place.capitalize()} {does} {amount} at {format_rate(load.bytes_per_second)}{through}"


def find_loads(plan: Plan, topology: Topology | None = None) -> list[Load]:
    """The loads of all ports that a plan uses: first the NICs, then the pod uplinks, and the inside of each host.

    The inside of a host has a load where the topology has a rate of all its ranks together.

    Args:
        plan: the plan.
        topology: used in place of the plan's topology, for example with measured rates.
    """
    if not plan.is_listed and topology in (None, plan.topology):
        return _loads_of_rotation(cast("RotationPlan", plan))
    topology, transfers = topology or plan.topology, plan.transfers
    host, nic = topology.host_array, np.array(topology.nic_of_rank, dtype=np.int64)
    crosses = np.flatnonzero(host[transfers.sender] != host[transfers.receiver])
    nbytes = plan.message_bytes[transfers.transfer_of_edge[crosses]]
    sender, receiver = transfers.sender[crosses], transfers.receiver[crosses]
    # Bytes by (0: NIC or 1: pod uplink, number of the host or pod, number of the NIC, 0: out or 1: in).
    total: dict[tuple[int, int, int, int], int] = {}

    def add(kind: int, number: np.ndarray, nic_number: np.ndarray, direction: int, amount: np.ndarray) -> None:
        keys, row = np.unique(number * MAX_NICS + nic_number, return_inverse=True)
        sums = np.zeros(len(keys), dtype=np.int64)
        np.add.at(sums, row.ravel(), amount)
        for key, port_bytes in zip(keys.tolist(), sums.tolist(), strict=True):
            total[kind, key // MAX_NICS, key % MAX_NICS, direction] = port_bytes

    add(0, host[sender], nic[sender], 0, nbytes)
    add(0, host[receiver], nic[receiver], 1, nbytes)
    if topology.pods:
        pod = np.array([topology.host(h).pod or 0 for h in range(topology.num_hosts)], dtype=np.int64)
        apart = pod[host[sender]] != pod[host[receiver]]
        no_nic = np.zeros(int(apart.sum()), dtype=np.int64)
        add(1, pod[host[sender[apart]]], no_nic, 0, nbytes[apart])
        add(1, pod[host[receiver[apart]]], no_nic, 1, nbytes[apart])
    loads = []
    for (kind, number, nic_number, direction), amount in sorted(total.items()):
        link = topology.pods[number] if kind else topology.host(number).nics[nic_number]
        name = f"pod {number} {('up', 'down')[direction]}" if kind else f"host {number} {('out', 'in')[direction]}"
        if not kind and len(topology.host(number).nics) > 1:
            name += f", NIC {nic_number}"
        rate = link.ingress_bytes_per_second if direction else link.egress_bytes_per_second
        loads.append(Load(name, amount, rate))
    if topology.inside_total_bytes_per_second is None:
        return loads
    passed = (host[transfers.sender] == host[transfers.receiver]) & (transfers.sender != transfers.receiver)
    nbytes = plan.message_bytes[transfers.transfer_of_edge[passed]]
    return loads + _loads_inside(topology, np.bincount(host[transfers.sender[passed]], nbytes))


def _loads_inside(topology: Topology, nbytes: np.ndarray) -> list[Load]:
    """The loads of the insides of hosts, from the bytes that move inside each of them."""
    rate = topology.inside_total_bytes_per_second
    if rate is None:
        return []
    return [Load(f"host {host} inside", round(float(nbytes[host])), rate) for host in np.flatnonzero(nbytes).tolist()]


def _loads_of_rotation(plan: RotationPlan) -> list[Load]:
    """The loads of NICs of a plan in closed form: those of a host that ranks use have equal loads."""
    hosts, loads = plan.loads, []
    for host, nics in sorted(used_nic_numbers(plan.tensors, plan.topology).items()):
        for nic in nics:
            link = plan.topology.host(host).nics[nic]
            name = f", NIC {nic}" if len(plan.topology.host(host).nics) > 1 else ""
            for direction, nbytes, rate in (
                ("out", hosts.out[host], link.egress_bytes_per_second),
                ("in", hosts.into[host], link.ingress_bytes_per_second),
            ):
                if nbytes:
                    loads.append(Load(f"host {host} {direction}{name}", round(float(nbytes) / len(nics)), rate))
    return loads + _loads_inside(plan.topology, hosts.inside_total)
