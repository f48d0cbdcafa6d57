"""The contents of a drawing of a plan: its hosts, or groups of hosts, and the bytes between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from reshard.formatting import count_of, format_ranks

if TYPE_CHECKING:
    from reshard.plan.value.plan import Plan

#: Limit on the boxes in a column of a drawing, or around its ring. If there are more hosts, a box is a group of hosts.
MAX_BOXES = 16


@dataclass(frozen=True)
class HostBox:
    """A host, or a group of hosts: those of a pod, or consecutive ones.

    Attributes:
        label: such as ``host 3``, ``hosts 8-15`` or ``pod 2``.
        hosts: numbers of the hosts.
        pod: their pod, None if there are no pods or several.
        cells: one entry per device of the host, or per host of the group: "src" if it holds a part of the source
            layouts, "dst" if it needs a part of the destination layouts, or "both".
    """

    label: str
    hosts: tuple[int, ...]
    pod: int | None
    cells: tuple[str, ...]

    @property
    def is_host(self) -> bool:
        """Whether cells are devices."""
        return len(self.hosts) == 1


@dataclass(frozen=True)
class Traffic:
    """Bytes between boxes, one entry per pair of boxes with traffic between hosts.

    Attributes:
        sender, receiver: ``(arrows,)`` indices of boxes, equal for traffic between hosts of one group.
        nbytes: ``(arrows,)``.
        is_marked: ``(arrows,)`` whether some of the bytes pass a marked port.
        inside: ``(boxes,)`` bytes between devices of one host.
    """

    sender: np.ndarray
    receiver: np.ndarray
    nbytes: np.ndarray
    is_marked: np.ndarray
    inside: np.ndarray


@dataclass(frozen=True)
class HostBoxes:
    """The boxes of a plan.

    Attributes:
        src: boxes with source ranks.
        dst: other boxes, empty if some host has source and destination ranks.
    """

    plan: Plan
    src: tuple[HostBox, ...]
    dst: tuple[HostBox, ...]

    @classmethod
    def of(cls, plan: Plan) -> HostBoxes:
        """The boxes of a plan: a box per host, unless there are more than :data:`MAX_BOXES` hosts on a side."""
        host = plan.topology.host_array
        src_ranks, dst_ranks = (
            np.array(sorted({rank for layout in layouts.values() for rank in layout.ranks}), dtype=np.int64)
            for layouts in (
                {id(spec.src): spec.src for spec in plan.tensors},
                {id(spec.dst): spec.dst for spec in plan.tensors},
            )
        )
        role = dict.fromkeys(src_ranks.tolist(), "src")
        role |= {rank: "both" if rank in role else "dst" for rank in dst_ranks.tolist()}
        src_hosts, dst_hosts = set(host[src_ranks].tolist()), set(host[dst_ranks].tolist())
        by_host: dict[int, list[str]] = {}
        for rank in sorted(role):
            by_host.setdefault(int(host[rank]), []).append(role[rank])
        if src_hosts & dst_hosts:
            return cls(plan, tuple(_make_boxes(plan, sorted(src_hosts | dst_hosts), by_host)), ())
        return cls(
            plan,
            tuple(_make_boxes(plan, sorted(src_hosts), by_host)),
            tuple(_make_boxes(plan, sorted(dst_hosts), by_host)),
        )

    @cached_property
    def all(self) -> tuple[HostBox, ...]:
        """The boxes in the order of their indices."""
        return self.src + self.dst

    @cached_property
    def of_rank(self) -> np.ndarray:
        """``(ranks,)`` index of the box of each rank, -1 for ranks on hosts that the plan does not use."""
        of_host = np.full(self.plan.topology.num_hosts, -1, dtype=np.int64)
        for number, box in enumerate(self.all):
            of_host[list(box.hosts)] = number
        return of_host[self.plan.topology.host_array]

    def find_traffic(self, marked: Sequence[str] = ()) -> Traffic:
        """The bytes between boxes. ``marked`` names ports as :class:`~reshard.plan.Load` does, without NICs."""
        plan, transfers = self.plan, self.plan.transfers
        host, nbytes = plan.topology.host_array, plan.message_bytes[transfers.transfer_of_edge]
        a, b = host[transfers.sender], host[transfers.receiver]
        x, y = self.of_rank[transfers.sender], self.of_rank[transfers.receiver]
        inside = np.zeros(len(self.all), dtype=np.int64)
        is_inside = (a == b) & (transfers.sender != transfers.receiver)
        np.add.at(inside, x[is_inside], nbytes[is_inside])
        across = np.flatnonzero(a != b)
        keys, row = np.unique(x[across] * len(self.all) + y[across], return_inverse=True)
        total = np.zeros(len(keys), dtype=np.int64)
        np.add.at(total, row.ravel(), nbytes[across])
        passes = np.zeros(len(keys), dtype=bool)
        passes[np.unique(row.ravel()[self._passes(marked, a[across], b[across])])] = True
        return Traffic(keys // len(self.all), keys % len(self.all), total, passes, inside)

    def _passes(self, marked: Sequence[str], a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """``(edges,)`` whether an edge from host ``a`` to host ``b`` passes a marked port."""
        topology, is_marked = self.plan.topology, np.zeros(len(a), dtype=bool)
        pod = np.array([topology.host(h).pod if topology.pods else -1 for h in range(topology.num_hosts)])
        for name in marked:
            kind, number, direction = name.partition(",")[0].split()
            out = direction in ("out", "up")
            if direction == "inside":
                continue
            if kind == "host":
                is_marked |= (a if out else b) == int(number)
            else:
                is_marked |= ((pod[a] if out else pod[b]) == int(number)) & (pod[a] != pod[b])
        return is_marked

    def is_marked(self, number: int, marked: Sequence[str]) -> bool:
        """Whether a box holds a host whose port is marked, or is the group of a pod whose uplink is."""
        box = self.all[number]
        names = {f"host {host}" for host in box.hosts} | ({f"pod {box.pod}"} if box.label.startswith("pod") else set())
        return any(name.partition(",")[0].rpartition(" ")[0] in names for name in marked)


def _make_boxes(plan: Plan, hosts: list[int], by_host: dict[int, list[str]]) -> list[HostBox]:
    topology = plan.topology
    pod_of = {host: topology.host(host).pod if topology.pods else None for host in hosts}
    if len(hosts) <= MAX_BOXES:
        hosts = sorted(hosts, key=lambda host: (pod_of[host] or 0, host))
        return [HostBox(f"host {host}", (host,), pod_of[host], tuple(by_host[host])) for host in hosts]
    pods: dict[int | None, list[int]] = {}
    for host in hosts:
        pods.setdefault(pod_of[host], []).append(host)
    if 1 < len(pods) <= MAX_BOXES:
        groups = [(f"pod {pod}", pods[pod]) for pod in sorted(pods, key=lambda pod: pod or 0)]
    else:
        size = -(-len(hosts) // MAX_BOXES)
        groups = [("", hosts[first : first + size]) for first in range(0, len(hosts), size)]
    return [
        HostBox(
            name or _name_hosts(group),
            tuple(group),
            _common_pod(pod_of[host] for host in group),
            _roles(group, by_host),
        )
        for name, group in groups
    ]


def _name_hosts(hosts: Sequence[int]) -> str:
    text = format_ranks(hosts)
    return (
        f"host{'s' * (len(hosts) > 1)} {text}" if len(text) < 10 else f"{count_of(len(hosts), 'host')} from {hosts[0]}"
    )


def _common_pod(pods: Iterable[int | None]) -> int | None:
    """The pod of all hosts of a group; None if there are several, or none."""
    distinct = set(pods)
    return distinct.pop() if len(distinct) == 1 else None


def _roles(hosts: Sequence[int], by_host: dict[int, list[str]]) -> tuple[str, ...]:
    """The role of each host: "both" if its devices have several."""
    return tuple(roles.pop() if len(roles := set(by_host[host])) == 1 else "both" for host in hosts)
