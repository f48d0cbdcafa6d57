"""Parts of a problem between pods that share no port. Each is scheduled alone, on a share of the uplinks.

Between pods, the scheduler compares all pairs of senders and receivers at each step, so its time grows much faster than
the number of ranks. Regular layouts consist of equal parts, for example one for each rank of expert parallelism, and
equal parts have one schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from reshard.planner.multicast.classes import Classes
from reshard.planner.multicast.host_classes import HostClasses, busiest_port_seconds
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.ragged import NO_RANK, distinct_values
from reshard.topology import Host, Link, Topology

#: Parts are used if the busiest port or uplink then takes at most this many times as long as in the whole problem. An
#: uplink passes whole sends, so its share is rounded down to a multiple of the rate of a port.
_MAX_LOSS = 1.01
#: Up to this number of pairs of a sending and a receiving port, ``multicast`` schedules a problem as a whole. This
#: takes at most a second.
MAX_TOGETHER = 10_000


@dataclass(frozen=True, eq=False)
class ProblemPart:
    """A part of a problem.

    Attributes:
        problem: its tasks, with ranks, hosts and pods numbered from 0.
        host_classes: the host classes of the problem.
        ranks: the rank of each number.
    """

    problem: PlanProblem
    host_classes: HostClasses
    ranks: np.ndarray


def split_by_ports(problem: PlanProblem, max_together: int = MAX_TOGETHER) -> list[ProblemPart]:
    """The parts of a large problem between pods; empty if it has one part, or if parts would make the plan slower.

    A port belongs to one part. Parts in one pod have equal loads of its uplink, so each gets an equal share. Several
    parts are joined if the shares of fewer, larger parts are rounded with less loss.

    Args:
        problem: the problem.
        max_together: number of pairs of a sending and a receiving port up to which a problem is not large.
    """
    topology = problem.topology
    rates = {rate for host in topology.hosts for nic in host.nics for rate in _rates(nic)}
    if not topology.pods or len(rates) > 1:
        return []
    classes = Classes.of(problem)
    part_of, num_pairs = _number_parts(classes, topology)
    count = int(part_of.max(initial=-1)) + 1
    if num_pairs <= max_together:
        return []
    single = _UplinkLoads.of(classes, topology, part_of, count)
    limit = busiest_port_seconds(topology, HostClasses.of(classes, topology)) * _MAX_LOSS
    for size in (size for size in range(1, count // 2 + 1) if count % size == 0):
        loads = single.join(size)
        if loads.seconds(topology, *rates) <= limit:
            parts = list(_cut(problem, classes, part_of // size, loads.shares(topology)))
            times = (busiest_port_seconds(part.problem.topology, part.host_classes) for part in parts)
            return parts if max(times) <= limit else []
    return []


def _rates(link: Link) -> tuple[float, float]:
    return link.egress_bytes_per_second, link.ingress_bytes_per_second


def _number_parts(classes: Classes, topology: Topology) -> tuple[np.ndarray, int]:
    """``(classes,)`` the part of each class, and the number of pairs of a holder's port and a receiver's.

    Parts are numbered in the order of their first ports.
    """
    num_nics = max(len(host.nics) for host in topology.hosts)
    nic = topology.host_array * num_nics + topology.nic_array
    senders, receivers = (nic[table[table != NO_RANK]] for table in (classes.holders, classes.receivers))
    num_pairs = len(distinct_values(senders)) * len(distinct_values(receivers))
    ranks = np.concatenate([classes.holders, classes.receivers], axis=1)
    is_real = ranks != NO_RANK
    at = np.concatenate([[0], np.cumsum(is_real.sum(axis=1))])[:-1]
    nic = nic[ranks[is_real]]
    row = np.repeat(np.arange(len(ranks)), is_real.sum(axis=1))
    label = np.arange(nic.max(initial=-1) + 1)
    while len(nic):  # each port takes the smallest label of its classes
        smallest = np.minimum.reduceat(label[nic], at)
        before = label.copy()
        np.minimum.at(label, nic, smallest[row])
        label = label[label]
        if (label == before).all():
            return np.unique(smallest, return_inverse=True)[1], num_pairs
    return np.zeros(0, dtype=np.int64), 0


@dataclass(frozen=True, eq=False)
class _UplinkLoads:
    """The bytes of parts on the uplinks of pods; all arrays ``(parts, pods)``.

    Attributes:
        leaving, entering: bytes.
        is_there: bool, whether the part has ranks in the pod.
    """

    leaving: np.ndarray
    entering: np.ndarray
    is_there: np.ndarray

    @classmethod
    def of(cls, classes: Classes, topology: Topology, part_of: np.ndarray, count: int) -> _UplinkLoads:
        pods = len(topology.pods)
        pod_of_rank = np.array([topology.host(h).pod for h in range(topology.num_hosts)])[topology.host_array]

        def tabulate(ranks: np.ndarray) -> np.ndarray:
            """``(classes, pods)`` bool, whether one of the ranks of a class is in the pod."""
            table = np.zeros((len(classes), pods + 1), dtype=bool)
            table[np.arange(len(classes))[:, None], np.where(ranks == NO_RANK, pods, pod_of_rank[ranks])] = True
            return table[:, :pods]

        def add(rows: np.ndarray) -> np.ndarray:
            total = np.zeros((count, pods))
            np.add.at(total, part_of, rows)
            return total

        holding, receiving = tabulate(classes.holders), tabulate(classes.receivers)
        needing = receiving & ~holding
        share = classes.nbytes * needing.any(axis=1) / holding.sum(axis=1)
        return cls(
            leaving=add(holding * share[:, None]),
            entering=add(needing * classes.nbytes[:, None]),
            is_there=add(holding | receiving) > 0,
        )

    def join(self, size: int) -> _UplinkLoads:
        """The loads of ``size`` consecutive parts together."""
        first = np.arange(0, len(self.is_there), size)
        return _UplinkLoads(
            np.add.reduceat(self.leaving, first),
            np.add.reduceat(self.entering, first),
            np.logical_or.reduceat(self.is_there, first),
        )

    def seconds(self, topology: Topology, port_rate: float) -> float:
        """Time of the busiest uplink, with shares of whole sends; infinite if parts have unequal loads of an uplink."""
        sharing = np.maximum(self.is_there.sum(axis=0), 1)
        slowest = 0.0
        for loads, rates in zip((self.leaving, self.entering), _uplink_rates(topology), strict=True):
            low, high = (
                find(np.where(self.is_there, loads, empty), axis=0)
                for find, empty in ((np.min, np.inf), (np.max, -np.inf))
            )
            if (low < high * (1 - 1e-9)).any():
                return np.inf
            share = rates / sharing
            usable = np.where(share >= port_rate, np.floor(share / port_rate * (1 + 1e-9)) * port_rate, share)
            slowest = max(slowest, float((np.maximum(high, 0.0) / usable).max(initial=0.0)))
        return slowest

    def shares(self, topology: Topology) -> Iterator[tuple[Link, ...]]:
        """The uplinks of each part, in the pods where it has ranks."""
        sharing = np.maximum(self.is_there.sum(axis=0), 1)
        out, into = (rates / sharing for rates in _uplink_rates(topology))
        for is_there in self.is_there:
            yield tuple(Link(float(out[pod]), float(into[pod])) for pod in np.flatnonzero(is_there))


def _uplink_rates(topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    rates = np.array([_rates(pod) for pod in topology.pods])
    return rates[:, 0], rates[:, 1]


def _cut(
    problem: PlanProblem, classes: Classes, part_of: np.ndarray, uplinks: Iterable[tuple[Link, ...]]
) -> Iterator[ProblemPart]:
    """The parts, each with the given uplinks of its pods."""
    task_part = np.repeat(part_of, np.diff(classes.task_offsets))
    for number, pods in enumerate(uplinks):
        tasks = np.sort(classes.task[task_part == number])
        holders, destinations = problem.holders[tasks], problem.destinations[tasks]
        ranks = np.concatenate([holders.ravel(), destinations.ravel()])
        ranks = distinct_values(ranks[ranks != NO_RANK])

        def renumber(table: np.ndarray, ranks: np.ndarray = ranks) -> np.ndarray:
            return np.where(table == NO_RANK, NO_RANK, np.searchsorted(ranks, table))

        part = replace(
            problem,
            topology=_topology_of(problem.topology, ranks, pods),
            tensor=problem.tensor[tasks],
            nbytes=problem.nbytes[tasks],
            is_strided=problem.is_strided[tasks],
            start=problem.start[tasks],
            stop=problem.stop[tasks],
            holders=renumber(holders),
            destinations=renumber(destinations),
        )
        yield ProblemPart(part, HostClasses.of(Classes.of(part), part.topology), ranks)


def _topology_of(topology: Topology, ranks: np.ndarray, uplinks: tuple[Link, ...]) -> Topology:
    """The part of a topology with these ranks, their NICs, hosts and pods, numbered from 0, and the given uplinks."""
    hosts, host_of = np.unique(topology.host_array[ranks], return_inverse=True)
    pods = sorted({topology.host(h).pod or 0 for h in hosts.tolist()})
    described, nic_of = [], np.zeros(len(ranks), dtype=np.int64)
    for number, old in enumerate(hosts.tolist()):
        here = np.flatnonzero(host_of == number)
        nics, nic_of[here] = np.unique(topology.nic_array[ranks[here]], return_inverse=True)
        host = topology.host(old)
        described.append(Host(tuple(host.nics[nic] for nic in nics), pod=pods.index(host.pod or 0)))
    return replace(
        topology,
        host_of_rank=tuple(host_of.tolist()),
        hosts=tuple(described),
        nic_of_rank=tuple(nic_of.tolist()),
        pods=uplinks,
    )
