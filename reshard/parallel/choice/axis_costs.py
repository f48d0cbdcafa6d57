"""Seconds that collectives along the axes of a grid take on a topology."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.topology import Link, Topology

from ..grid.cuts import size_of
from ..products.dataflow import Dataflows, LayerProducts, busiest_elements


@dataclass(frozen=True)
class AxisCost:
    """Seconds per byte, and latency, of one collective along an axis on which every rank holds one part.

    An all-gather and a reduce-scatter move the same bytes: each rank receives one part from every other rank of its
    axis. The parts pass NICs and uplinks of pods, or stay inside a host. Where all hosts have the same number of ranks
    of an axis, both collectives run in two levels (:class:`~reshard.parallel.grid.two_levels.TwoLevelAxis`).

    Attributes:
        nic_seconds: seconds of the busiest NIC, or uplink of a pod, for parts of one byte.
        inside_seconds: seconds of the traffic inside a host, of the busiest rank, for parts of one byte.
        latency_seconds: time that does not depend on bytes.
        parts: number of parts that a rank receives.
    """

    nic_seconds: float
    inside_seconds: float
    latency_seconds: float
    parts: int

    def seconds(self, part_bytes: float) -> float:
        """Seconds of one collective with parts of this size."""
        if not self.parts:
            return 0.0
        return self.latency_seconds + part_bytes * (self.nic_seconds + self.inside_seconds)


def find_axis_cost(topology: Topology, ranks: np.ndarray, axis: int) -> AxisCost:
    """The cost of collectives along one axis of a grid.

    Args:
        topology: hosts and links of the ranks.
        ranks: ``[depth, row, col]`` the rank at each position.
        axis: 0, 1 or 2.
    """
    groups = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis])
    size = groups.shape[1]
    if size == 1:
        return AxisCost(0.0, 0.0, 0.0, 0)
    received: dict[tuple[int, int], float] = {}
    pod_received = [0.0] * len(topology.pods)
    max_inside, has_levels, crosses = 0.0, False, False
    for group in groups.tolist():
        hosts = [topology.host_of_rank[rank] for rank in group]
        counts = Counter(hosts)
        has_levels = 1 < len(counts) < size and len(set(counts.values())) == 1
        crosses |= len(counts) > 1
        for rank, host in zip(group, hosts, strict=True):
            outside = len(counts) - 1 if has_levels else size - counts[host]
            inside = (counts[host] - 1) * (len(counts) if has_levels else 1)
            nic = (host, topology.nic_of_rank[rank])
            received[nic] = received.get(nic, 0.0) + outside
            max_inside = max(max_inside, inside)
            if topology.pods:
                pod = topology.host(host).pod
                others = {item: 1 if has_levels else count for item, count in counts.items()}
                pod_received[pod or 0] += sum(n for other, n in others.items() if topology.host(other).pod != pod)
    nic_seconds = 0.0
    for (host, number), parts in received.items():
        link = topology.host(host).nics[number]
        nic_seconds = max(nic_seconds, parts / _slower_rate(link))
    for parts, uplink in zip(pod_received, topology.pods, strict=True):  # every pod sends as many bytes as it receives
        nic_seconds = max(nic_seconds, parts / _slower_rate(uplink))
    inside_rate = topology.inside_bytes_per_second or math.inf
    latency = (topology.latency_seconds if crosses else 0.0) + (topology.inside_latency_seconds if max_inside else 0.0)
    return AxisCost(nic_seconds, max_inside / inside_rate, latency, size - 1)


def _slower_rate(link: Link) -> float:
    return min(link.egress_bytes_per_second, link.ingress_bytes_per_second)


class ProductSeconds(NamedTuple):
    """Communication of one product: on the busiest NIC, inside the host of the busiest rank, and latencies."""

    nic: float
    inside: float
    latency: float


def find_product_seconds(
    products: LayerProducts, flows: Dataflows, axis_costs: Mapping[str, AxisCost], itemsize: float
) -> list[ProductSeconds]:
    """Seconds of communication of the three products of a layer, without overlap.

    Args:
        products: the products.
        flows: their dataflows.
        axis_costs: costs by axis, with "row" and "col".
        itemsize: bytes of an element on the wire.
    """
    row, col = axis_costs["row"], axis_costs["col"]
    shape, tokens = products.shape, products.tokens
    m, q = max(tokens), max(shape.q)
    nic, inside = _seconds_per_byte(axis_costs)
    result = []
    for number, (kind, keeps_weight) in enumerate(zip(products.kinds, flows, strict=True)):
        has_x, has_z = products.gathers_first(flows) if number == len(flows) - 1 else (False, False)
        if keeps_weight:
            y_part = m * q * itemsize
            busiest_bytes = busiest_elements(kind, shape, tokens, keeps_weight=True) * itemsize
            rest = 0.0 if has_x else max(0.0, busiest_bytes - (shape.rows - 1) * y_part)
            y_part = 0.0 if has_z else y_part
            latency = row.latency_seconds + max(row.latency_seconds, col.latency_seconds)
            moved = row.nic_seconds * y_part + nic * rest, row.inside_seconds * y_part + inside * rest
        else:
            x_part = 0.0 if has_x else size_of(shape.p_cols[0]) * m * itemsize
            w_part = size_of(shape.p_rows[0]) * q * itemsize
            latency = shape.panels.num_panels * (row.latency_seconds + (0.0 if has_x else col.latency_seconds))
            moved = (
                col.nic_seconds * x_part + row.nic_seconds * w_part,
                col.inside_seconds * x_part + row.inside_seconds * w_part,
            )
        result.append(ProductSeconds(*moved, latency))
    return result


def find_exchange_seconds(nbytes: float, axis_costs: Mapping[str, AxisCost]) -> float:
    """Seconds of an exchange between all ranks of a layer, of which the busiest receives ``nbytes``."""
    if not nbytes:
        return 0.0
    latency = max(axis_costs[axis].latency_seconds for axis in ("row", "col"))
    return nbytes * sum(_seconds_per_byte(axis_costs)) + latency


def _seconds_per_byte(axis_costs: Mapping[str, AxisCost]) -> tuple[float, float]:
    """Seconds per received byte on NICs and inside hosts, each along the slower of the axes "row" and "col"."""
    parts = [axis_costs[axis] for axis in ("row", "col")]
    return (
        max(part.nic_seconds / max(1, part.parts) for part in parts),
        max(part.inside_seconds / max(1, part.parts) for part in parts),
    )
