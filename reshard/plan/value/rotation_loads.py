"""The bytes that each host of a plan in closed form sends and receives, from the layouts alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.plan.value.even_exchange import EvenExchange
from reshard.plan.value.host_rates import HostRates, used_nics
from reshard.sharding import TensorSpec
from reshard.topology import Topology


@dataclass(frozen=True, eq=False)
class RotationLoads:
    """Loads of hosts. All arrays are float64, one entry per host; hosts without ranks have rates of 1.

    Attributes:
        out, into: bytes that the host sends to other hosts, and receives from them.
        held: bytes that it must send if each region leaves its holders once.
        messages, held_messages: messages that it sends to other hosts, and those of ``held``.
        inside: messages that its busiest rank passes on inside it.
        inside_bytes: bytes of these.
        inside_total: bytes that all its ranks pass on inside it.
        egress, ingress: bytes per second of the NICs that its ranks use.
        overhead_seconds: time that a message keeps its sender's NICs busy, as a share of all NICs of the host.
        overhead_bytes: the bytes that the slowest NIC of any host could send during one latency.
        passes: bytes per second of the NICs of a host if each sends to one that receives.
        entries: messages that a rank receives from other hosts.
    """

    out: np.ndarray
    into: np.ndarray
    held: np.ndarray
    messages: np.ndarray
    held_messages: np.ndarray
    inside: np.ndarray
    inside_bytes: np.ndarray
    inside_total: np.ndarray
    egress: np.ndarray
    ingress: np.ndarray
    overhead_seconds: np.ndarray
    overhead_bytes: float
    passes: np.ndarray
    entries: float

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec], topology: Topology, exchanges: Sequence[EvenExchange]) -> RotationLoads:
        """The loads of a plan of tensors, each with its exchange."""
        count = topology.num_hosts
        out, into, held, messages, held_messages = (np.zeros(count) for _ in range(5))
        inside, inside_bytes, inside_total = (np.zeros(count) for _ in range(3))
        egress, ingress, overhead_seconds = np.ones(count), np.ones(count), np.zeros(count)
        used = used_nics(tensors, topology)
        for host, nics in used.items():
            egress[host], ingress[host] = HostRates.of(nics)
            slowest = min(nic.egress_bytes_per_second for nic in nics)
            overhead_seconds[host] = topology.latency_seconds * slowest / egress[host]
        links = [link for nics in used.values() for link in nics]
        receiving = int(np.flatnonzero(exchanges[0].dst_number >= 0)[0])
        limit = min(link.ingress_bytes_per_second for link in used[receiving])
        passes = np.ones(count)
        for host, nics in used.items():
            passes[host] = sum(min(link.egress_bytes_per_second, limit) for link in nics)
        overhead_bytes = topology.latency_seconds * min(link.egress_bytes_per_second for link in links)
        entries = 0.0
        for spec, exchange in zip(tensors, exchanges, strict=True):
            nbytes, (_, copies, ranks) = math.prod(spec.shape) * spec.itemsize, exchange.groups.shape
            num_src, num_dst = exchange.num_hosts
            senders, receivers = exchange.src_number >= 0, exchange.dst_number >= 0
            out[senders] += nbytes * copies / num_src
            held[senders] += nbytes / num_src
            messages[senders] += exchange.num_regions * copies / num_src
            held_messages[senders] += exchange.num_regions / num_src
            entries += math.ceil(exchange.num_overlaps[1] / ranks)
            into[receivers] += nbytes * copies / num_dst
            passed = exchange.num_overlaps[1] * (ranks - 1) / ranks
            inside[receivers] += passed
            inside_bytes[receivers] += nbytes / exchange.num_regions * passed
            inside_total[receivers] += nbytes * copies / num_dst * (ranks - 1)
        return cls(
            out,
            into,
            held,
            messages,
            held_messages,
            inside,
            inside_bytes,
            inside_total,
            egress,
            ingress,
            overhead_seconds,
            overhead_bytes,
            passes,
            entries,
        )

    def seconds_in(self) -> np.ndarray:
        """``(hosts,)`` time of the bytes that each host receives."""
        return self.into / self.ingress

    def seconds_held(self) -> np.ndarray:
        """``(hosts,)`` time of the bytes that each host must send."""
        return self.held / self.egress

    def seconds_one_by_one(self) -> float:
        """Time of the messages that the busiest host sends if each of its ports sends one at a time.

        A message passes both its ports at the rate of the slower one.
        """
        return float((self.out / self.passes + self.messages * self.overhead_seconds).max())

    def unmerged_seconds(self) -> float:
        """The least time of all messages between hosts, if each carries one region, and receivers may pass them on."""
        alone = self.seconds_held() + self.held_messages * self.overhead_seconds
        together = (self.out + self.messages * self.overhead_bytes).sum()
        return float(max(alone.max(), together / self.egress[(self.out > 0) | (self.into > 0)].sum()))
