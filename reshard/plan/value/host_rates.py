"""The rates of the NICs that the ranks of a transfer use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reshard.sharding import TensorSpec
from reshard.topology import Link, Topology


class HostRates(NamedTuple):
    """The total rates of several NICs, which may be above the limit on one port."""

    egress_bytes_per_second: float
    ingress_bytes_per_second: float

    @classmethod
    def of(cls, links: Sequence[Link]) -> HostRates:
        """The sums of the rates of links."""
        return cls(
            sum(link.egress_bytes_per_second for link in links), sum(link.ingress_bytes_per_second for link in links)
        )


def used_nics(tensors: Sequence[TensorSpec], topology: Topology) -> dict[int, list[Link]]:
    """The NICs of each host that ranks of either layout use."""
    numbers = used_nic_numbers(tensors, topology)
    return {host: [topology.host(host).nics[number] for number in used] for host, used in numbers.items()}


def used_nic_numbers(tensors: Sequence[TensorSpec], topology: Topology) -> dict[int, list[int]]:
    """The numbers of the NICs of each host that ranks of either layout use, ascending."""
    used: dict[int, set[int]] = {}
    for spec in tensors:
        for rank in (*spec.src.ranks, *spec.dst.ranks):
            used.setdefault(topology.host_of_rank[rank], set()).add(topology.nic_of_rank[rank])
    return {host: sorted(numbers) for host, numbers in used.items()}
