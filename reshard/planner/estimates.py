"""What plans take at least, found without simulating them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.plan.transfers import Transfers
from reshard.planner.multicast.classes import Classes
from reshard.planner.multicast.host_classes import HostClasses, least_seconds
from reshard.planner.strategies.problem import DIRECT_CHUNK_BYTES, TREE_CHUNK_BYTES, Problem
from reshard.ragged import NO_RANK
from reshard.topology.model import MAX_NICS, Topology


@dataclass(frozen=True, eq=False)
class Floors:
    """Times below which no plan of a kind can be by :func:`~reshard.cost.simulator.simulate`, before there is one."""

    problem: Problem

    @cached_property
    def host_classes(self) -> HostClasses:
        """The problem's classes by hosts."""
        return HostClasses.of(Classes.of(self.problem), self.problem.topology)

    @cached_property
    def of_all(self) -> float:
        """Of every strategy that is known here: bytes through ports, and messages that no strategy can do without."""
        return self._with_start(max(self._bytes, self._alone))

    @cached_property
    def of_trees(self) -> float:
        """Of strategies that send each class of regions by itself, once to each host that lacks it."""
        topology, host_classes = self.problem.topology, self.host_classes
        if not host_classes.moves.any():
            return self.of_all
        hosts = np.unique(np.concatenate([host_classes.holders[1], host_classes.destinations[1]])).tolist()
        rates = [nic.egress_bytes_per_second for h in hosts for nic in topology.host(h).nics]
        arrivals = np.diff(host_classes.destinations[0])[host_classes.host_class]
        work = float((arrivals * (host_classes.classes.nbytes + topology.latency_seconds * min(rates))).sum())
        return max(self.of_all, self._with_start(work / sum(rates)))

    @cached_property
    def of_broadcasts(self) -> float:
        """As :attr:`of_trees`, of those along a chain of hosts: a holder sends to the first, each other comes from one.

        What goes further than one hop has chunks of at most 1 MiB.
        """
        topology, host_classes = self.problem.topology, self.host_classes
        if not host_classes.moves.any():
            return self.of_all
        classes, hosts = host_classes.classes, np.diff(host_classes.destinations[0])[host_classes.host_class]
        is_chain = (classes.receivers != NO_RANK).sum(axis=1) > 1
        chunks = -(-classes.nbytes // np.where(is_chain, TREE_CHUNK_BYTES, DIRECT_CHUNK_BYTES))
        goes = hosts > 0
        seconds = [float(hosts.max()) * topology.latency_seconds]
        for members, times in (
            (host_classes.holders[1], goes),
            (host_classes.destinations[1], np.maximum(hosts - 1, 0)),
        ):
            rates = [nic.egress_bytes_per_second for h in np.unique(members).tolist() for nic in topology.host(h).nics]
            work = times * (classes.nbytes + chunks * topology.latency_seconds * min(rates))
            seconds.append(float(work.sum()) / sum(rates))
        return max(self.of_trees, self._with_start(max(seconds)))

    def of_gathers(self, num_receivers: np.ndarray) -> float:
        """Of strategies in which each receiver of a region passes parts on to or for all others, by regions."""
        problem, topology = self.problem, self.problem.topology
        passes = np.where(self._has_near_holder, 0, np.maximum(num_receivers - 1, 0))
        task, replica = np.nonzero(problem.receivers != NO_RANK)
        count = np.bincount(problem.receivers[task, replica], weights=passes[task])
        of_one = min(topology.latency_seconds, topology.inside_latency_seconds)
        return max(self.of_all, self._with_start(float(count.max(initial=0.0)) * of_one))

    @cached_property
    def _has_near_holder(self) -> np.ndarray:
        """``(tasks,)`` whether a holder shares a host with a receiver."""
        problem, host = self.problem, self.problem.topology.host_by_rank
        found = np.zeros(len(problem), dtype=bool)
        receivers = np.where(problem.receivers == NO_RANK, -1, host[problem.receivers])
        for column in problem.holders.T:
            found |= ((receivers == host[column][:, None]) & (column != NO_RANK)[:, None]).any(axis=1)
        return found

    def _with_start(self, seconds: float) -> float:
        topology = self.problem.topology
        return max(seconds - _saved(topology), 0.0) + topology.start_seconds

    @property
    def _bytes(self) -> float:
        """Nothing flows before one latency."""
        if not self.host_classes.moves.any():
            return 0.0
        return least_seconds(self.problem.topology, self.host_classes) + self.problem.topology.latency_seconds

    @property
    def _alone(self) -> float:
        """What one rank alone holds leaves its host, or where nothing does leaves that rank.

        Boxes travel together only from one rank to the same receivers, so there is a message at least for each rank
        that is the last of such receivers.
        """
        topology, classes = self.problem.topology, self.host_classes.classes
        alone = np.flatnonzero((classes.holders != NO_RANK).sum(axis=1) == 1)
        if not len(alone):
            return 0.0
        host = topology.host_by_rank
        holder, receivers = classes.holders[alone].max(axis=1), classes.receivers[alone]
        if self.host_classes.moves.any():
            receivers = np.where(host[receivers] != host[holder][:, None], receivers, NO_RANK)
            hosts = [topology.host(h) for h in range(topology.num_hosts)]
            place, latency = host, topology.latency_seconds
            rate = np.array([h.egress_bytes_per_second for h in hosts])
            of_one = np.array([min(nic.egress_bytes_per_second for nic in h.nics) for h in hosts]) / rate
        else:
            place, latency = np.arange(len(host)), topology.inside_latency_seconds
            rate = np.full(len(host), topology.inside_bytes_per_second or np.inf)
            of_one = np.ones(len(host))
        last = receivers.max(axis=1)
        goes = last != NO_RANK
        nbytes = np.bincount(place[holder[goes]], weights=classes.nbytes[alone][goes], minlength=len(rate))
        pairs = np.unique(holder[goes] * len(host) + last[goes])
        count = np.bincount(place[pairs // len(host)], minlength=len(rate))
        return float((nbytes / rate + count * latency * of_one).max())


def _saved(topology: Topology) -> float:
    """Seconds that bursts can save: what a port passes at once."""
    return topology.burst_bytes / min(_rates_of_ports(topology)) if topology.burst_bytes else 0.0


def least_seconds_of(problem: Problem, transfers: Transfers) -> float:
    """Below which :func:`~reshard.cost.simulator.simulate` of these transfers cannot be: the busiest port.

    A message holds its sender's port for its latency and then for its bytes. Nothing arrives before one latency.
    """
    topology = problem.topology
    host, nic = topology.host_by_rank, np.array(topology.nic_of_rank, dtype=np.int64)
    itemsize = np.array([spec.itemsize for spec in problem.tensors], dtype=np.int64)
    box_bytes = (transfers.box_stop - transfers.box_start).prod(axis=1, dtype=np.int64) * itemsize[transfers.box_tensor]
    ends = np.concatenate([[0], np.cumsum(box_bytes)])[transfers.box_at]
    of = transfers.transfer_of_edge
    nbytes = np.diff(ends)[transfers.region][of].astype(np.float64)
    count = transfers.num_chunks[of].astype(np.float64)  # boxes that travel together are one message
    a, b = host[transfers.sender], host[transfers.receiver]
    crosses = a != b
    inside = ~crosses & (transfers.sender != transfers.receiver)
    seconds = [0.0]
    if crosses.any():
        out, into, latency = _rates(topology)
        x, y, part = a[crosses] * MAX_NICS, b[crosses] * MAX_NICS, nbytes[crosses]
        x, y = x + nic[transfers.sender[crosses]], y + nic[transfers.receiver[crosses]]
        size = topology.num_hosts * MAX_NICS
        sent = np.bincount(x, weights=part, minlength=size) / out
        held = np.bincount(x, weights=count[crosses], minlength=size) * latency
        got = np.bincount(y, weights=part, minlength=size) / into
        seconds += [float((sent + held).max()), float(got.max()) + latency]
        if topology.pods:
            pod = np.array([topology.host(h).pod for h in range(topology.num_hosts)], dtype=np.int64)
            p, q = pod[a[crosses]], pod[b[crosses]]
            apart = p != q
            for place, rates in (
                (p, [port.egress_bytes_per_second for port in topology.pods]),
                (q, [port.ingress_bytes_per_second for port in topology.pods]),
            ):
                passed = np.bincount(place[apart], weights=part[apart], minlength=len(rates)) / np.array(rates)
                seconds.append(float(passed.max()) + latency * bool(apart.any()))
    if inside.any():
        rate, latency = topology.inside_bytes_per_second or np.inf, topology.inside_latency_seconds
        work = nbytes[inside] / rate
        left = np.bincount(transfers.sender[inside], weights=work + count[inside] * latency)
        came = np.bincount(transfers.receiver[inside], weights=work)
        seconds += [float(left.max()), float(came.max()) + latency]
    return max(max(seconds) - _saved(topology), 0.0) + topology.start_seconds


def _rates(topology: Topology) -> tuple[np.ndarray, np.ndarray, float]:
    """Of each NIC, numbered by host and place, out and in; and the latency between hosts."""
    out, into = (np.full(topology.num_hosts * MAX_NICS, np.inf) for _ in range(2))
    if len(topology.hosts) == 1:
        for number, nic in enumerate(topology.hosts[0].nics):
            out[number::MAX_NICS], into[number::MAX_NICS] = nic.egress_bytes_per_second, nic.ingress_bytes_per_second
    else:
        for h in range(topology.num_hosts):
            for number, nic in enumerate(topology.host(h).nics):
                at = h * MAX_NICS + number
                out[at], into[at] = nic.egress_bytes_per_second, nic.ingress_bytes_per_second
    return out, into, topology.latency_seconds


def _rates_of_ports(topology: Topology) -> list[float]:
    ports = [*(nic for host in topology.hosts for nic in host.nics), *topology.pods]
    return [rate for port in ports for rate in (port.egress_bytes_per_second, port.ingress_bytes_per_second)]
