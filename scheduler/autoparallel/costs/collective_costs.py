"""The hosts and links of a stage, and the seconds of collectives among its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.topology import Link

from ..inputs.cluster import Cluster


@dataclass(frozen=True)
class StagePlace:
    """The hosts and links of the ranks of a stage, as costs of layers need them.

    Attributes:
        num_ranks: ranks of the stage.
        num_hosts: hosts that they are on.
        nic_bytes_per_second: slowest host of these; unused on one host.
        inside_bytes_per_second, inside_latency_seconds, latency_seconds: inside a host and between hosts.
        device_types: types of the devices, sorted; empty if all devices of the cluster are alike.
        pods: pod of each host, numbered in the order of the hosts; empty if all hosts share a pod.
        uplinks: bytes per second of the uplink of each of these pods, in its slower direction.
    """

    num_ranks: int
    num_hosts: int
    nic_bytes_per_second: float
    inside_bytes_per_second: float
    inside_latency_seconds: float
    latency_seconds: float
    pods: tuple[int, ...] = ()
    uplinks: tuple[float, ...] = ()
    device_types: tuple[str, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, first: int, end: int) -> StagePlace:
        """The place of ranks ``first`` to ``end - 1``."""
        latency, rate = cluster.topology.inside_latency_seconds, cluster.inside_bytes_per_second
        parts = cluster.hosts_of(first, end)
        nic = min(cluster.nic_bytes_per_second(host) for host, _, _ in parts)
        between = cluster.topology.latency_seconds
        pods = [cluster.topology.host(host).pod for host, _, _ in parts]
        known = [pod for pod in dict.fromkeys(pods) if pod is not None]
        links: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
        types = cluster.types_of(first, end)
        if len(known) > 1:
            numbers = tuple(known.index(pod) for pod in pods if pod is not None)
            links = (numbers, tuple(slower_rate(cluster.topology.pods[pod]) for pod in known))
        return cls(end - first, len(parts), nic if len(parts) > 1 else 0.0, rate, latency, between, *links, types)

    @property
    def ring_bytes_per_second(self) -> float:
        """The slowest rate of a ring through all hosts in their order: a NIC, or an uplink over how often it passes."""
        rate = self.nic_bytes_per_second
        leaves = [
            pod for pod, following in zip(self.pods, self.pods[1:] + self.pods[:1], strict=True) if pod != following
        ]
        return min([rate, *(uplink / leaves.count(pod) for pod, uplink in enumerate(self.uplinks))])

    def exchange_seconds(self, nbytes: float) -> float:
        """Seconds in which each host sends ``nbytes`` to each other host, all at once."""
        seconds = nbytes * (self.num_hosts - 1) / self.nic_bytes_per_second
        for pod, uplink in enumerate(self.uplinks):
            inside = self.pods.count(pod)
            seconds = max(seconds, nbytes * inside * (self.num_hosts - inside) / uplink)
        return seconds

    def replica_seconds(self, nbytes: float, tp: int, passes: float) -> float:
        """Seconds of a ring over the replicas of a layer, of which each rank has ``nbytes``.

        Between hosts, the rings of all ``tp`` ranks share the NICs. The part inside a host runs at the same time.
        """
        replicas = self.num_ranks // tp
        if replicas == 1 or nbytes == 0:
            return 0.0
        inside = replicas // self.num_hosts if self.num_hosts > 1 else replicas
        seconds = ring_seconds(nbytes, inside, self.inside_bytes_per_second, self.inside_latency_seconds, passes)
        if self.num_hosts > 1:
            between = ring_seconds(
                nbytes * tp, self.num_hosts, self.ring_bytes_per_second, self.latency_seconds, passes
            )
            seconds = max(seconds, between)
        return seconds


def slower_rate(link: Link) -> float:
    """The rate of a link in its slower direction, in bytes per second."""
    return min(link.egress_bytes_per_second, link.ingress_bytes_per_second)


def ring_seconds(
    nbytes: float, size: int, bytes_per_second: float, latency_seconds: float, passes: float = 2.0
) -> float:
    """Seconds of a ring collective, in which the data pass around the ring once or twice.

    Args:
        nbytes: bytes of the whole buffer of a rank.
        size: number of ranks.
        bytes_per_second, latency_seconds: rate and latency of one step between neighbours.
        passes: 2 for an all-reduce, 1 for an all-gather or a reduce-scatter.

    Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    if size <= 1:
        return 0.0
    return passes * (size - 1) * (latency_seconds + nbytes / size / bytes_per_second)
