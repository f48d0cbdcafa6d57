"""Lower bounds that count the latency of messages between hosts; ``docs/latency-bounds.md`` proves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.cost.lower_bound import (
    Bound,
    Classes,
    Demand,
    find_bound,
    find_demand,
    min_egress_seconds,
    min_largest_share,
)
from reshard.plan import HostRates, Plan, RotationLoads, RotationPlan, used_nics
from reshard.topology import Link, Topology

#: Weights of senders against receivers that are tried; each gives a valid bound.
_MAX_WEIGHTS = 256


@dataclass(frozen=True)
class LatencyBounds:
    """Two times that count bytes and latencies between hosts.

    Attributes:
        any_plan_seconds: no plan takes less, whatever it relays, gathers or merges.
        unmerged_seconds: bound on plans without relays whose messages carry bytes of one unit task each.
            Exchanges of equal parts reach it.
    """

    any_plan_seconds: float
    unmerged_seconds: float


def find_latency_bounds(plan: Plan, bound: Bound | None = None) -> LatencyBounds | None:
    """The two bounds of a plan's tensors on its topology, in the model of :func:`reshard.simulate`.

    Args:
        plan: the plan.
        bound: its bound by bytes, if known.

    Returns:
        None if messages between hosts have no latency, or if links pass bursts, which no rate limits.
    """
    topology = plan.topology
    if not topology.latency_seconds or topology.burst_bytes:
        return None
    if isinstance(plan, RotationPlan):
        return _bounds_of_rotation(plan)
    demand = find_demand(plan.tensors, topology.host_of_rank.__getitem__)
    if not demand:
        return LatencyBounds(0.0, 0.0)
    problem = _Problem.of(plan, demand)
    any_plan = max(
        problem.seconds_of_bytes(),
        problem.seconds_of_rounds(),
        problem.seconds_of_broadcasts(),
        problem.seconds_of_exchanges(),
    )
    unmerged = max(any_plan, problem.seconds_of_unit_tasks(), (bound or find_bound(plan)).seconds)
    return LatencyBounds(*(topology.start_seconds + seconds for seconds in (any_plan, unmerged)))


def _bounds_of_rotation(plan: RotationPlan) -> LatencyBounds:
    """Like :func:`find_latency_bounds`, without a list of regions: by bytes, exchanges and unit tasks."""
    loads, topology = plan.loads, plan.topology
    bounds = [topology.latency_seconds + find_bound(plan).seconds]
    if len(plan.tensors) == 1:
        exchange = _Exchange.of_rotation(plan, loads)
        bounds += map(exchange.seconds, exchange.weights())
    unmerged = max(*bounds, loads.unmerged_seconds())
    return LatencyBounds(topology.start_seconds + max(bounds), topology.start_seconds + unmerged)


@dataclass(frozen=True, eq=False)
class _Problem:
    """The bytes that hosts need of others, and the rates of the hosts that take part.

    Attributes:
        demand: bytes and unit tasks by holders and destinations.
        pods: the same of pods; None without pods.
        rates: the total rates of each host, by the NICs that its ranks use.
        num_nics: the number of these NICs.
        overhead_bytes: bytes that the slowest of these NICs could send during one latency.
        latency: latency between hosts, in seconds.
        uplinks: the uplinks of pods.
    """

    demand: Demand
    pods: Demand | None
    rates: Mapping[int, HostRates]
    num_nics: Mapping[int, int]
    overhead_bytes: Mapping[int, float]
    latency: float
    uplinks: Sequence[Link]

    @classmethod
    def of(cls, plan: Plan, demand: Demand) -> _Problem:
        topology = plan.topology
        nics = used_nics(plan.tensors, topology)
        return cls(
            demand,
            find_demand(plan.tensors, _pod_of(topology)) if topology.pods else None,
            {host: HostRates.of(host_nics) for host, host_nics in nics.items()},
            {host: len(host_nics) for host, host_nics in nics.items()},
            {
                host: topology.latency_seconds * min(nic.egress_bytes_per_second for nic in host_nics)
                for host, host_nics in nics.items()
            },
            topology.latency_seconds,
            topology.pods,
        )

    @cached_property
    def most_nics(self) -> int:
        """The largest number of NICs of a host."""
        return max(self.num_nics.values())

    def seconds_of_bytes(self) -> float:
        """The bound of bytes: each port passes its bytes after the latency of its first message."""
        seconds = _arrival_or_share(_bytes_of(self.demand), self.rates)
        if self.pods is not None:
            seconds = max(seconds, _arrival_or_share(_bytes_of(self.pods), dict(enumerate(self.uplinks))))
        total = sum(nbytes * len(destinations) for (_, destinations), (nbytes, _) in self.demand.items())
        receivers = len({host for _, destinations in self.demand for host in destinations})
        work = total + receivers * min(self.overhead_bytes.values())
        return max(self.latency + seconds, work / sum(rates.egress_bytes_per_second for rates in self.rates.values()))

    def seconds_of_rounds(self) -> float:
        """The bound of rounds: in one latency, each NIC of a host with some of the bytes informs one more host."""
        informed: dict[tuple[int, ...], set[int]] = {}
        for holders, destinations in self.demand:
            informed.setdefault(holders, set()).update(destinations)
        sources = {host for holders in informed for host in holders}
        everyone = set().union(*informed.values()) - sources
        starts = [(holders, len(hosts.difference(holders))) for holders, hosts in informed.items()]
        starts.append((tuple(sources), len(everyone)))
        return self.latency * max(self._num_rounds(holders, count) for holders, count in starts)

    def seconds_of_broadcasts(self) -> float:
        """The bound of broadcasts: after a sole holder with one NIC sent its last byte, that byte takes all rounds."""
        by_rounds: dict[int, Counter[int]] = {}
        for (holders, destinations), (nbytes, _) in self.demand.items():
            if len(holders) == 1 and self.num_nics[holders[0]] == 1:
                by_rounds.setdefault(holders[0], Counter())[self._num_rounds(holders, len(destinations))] += nbytes
        seconds = 0.0
        for host, nbytes_of in by_rounds.items():
            total = 0
            for rounds in sorted(nbytes_of, reverse=True):
                total += nbytes_of[rounds]
                seconds = max(seconds, total / self.rates[host].egress_bytes_per_second + rounds * self.latency)
        return seconds

    def seconds_of_exchanges(self) -> float:
        """The bound of exchanges: data from one host to another goes in a message between them, or via a third host."""
        exchange = _Exchange.of(self)
        return max(map(exchange.seconds, exchange.weights()))

    def seconds_of_unit_tasks(self) -> float:
        """The bound of bytes, to which each unit task that passes a port adds one latency there."""
        overhead = min(self.overhead_bytes.values())
        work = {key: nbytes + count * overhead for key, (nbytes, count) in self.demand.items()}
        egress = {host: rates.egress_bytes_per_second for host, rates in self.rates.items()}
        total = sum(size * len(destinations) for (_, destinations), size in work.items())
        held = {
            key: nbytes + count * min(self.overhead_bytes[host] for host in key[0])
            for key, (nbytes, count) in self.demand.items()
        }
        bounds = [_share(held, egress), total / sum(egress.values())]
        sources = {host for holders, _ in work for host in holders}
        if not sources.isdisjoint({host for _, destinations in work for host in destinations}):
            bounds.append(min_egress_seconds(work, egress))
        return max(bounds)

    def _num_rounds(self, holders: Sequence[int], num_destinations: int) -> int:
        """The least number of latencies in which the holders can inform so many other hosts."""
        branches = self.most_nics
        informed, ports, rounds = 0, sum(self.num_nics[host] for host in holders), 0
        while informed < num_destinations:
            informed += ports  # the NICs of the holders send to new hosts, and so do those of all hosts they informed
            ports += ports * branches
            rounds += 1
        return rounds


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Loads of senders and receivers, each as a mean over their ports, and the parts that one host sends to one other.

    Attributes:
        out, into: mean seconds of bytes of the sending and of the receiving hosts.
        num_senders, num_receivers: how many they are.
        part: ``(kinds,)`` bytes of a part.
        overhead_seconds: ``(kinds,)`` time that a message occupies its sender's port before its bytes.
        count: ``(kinds,)`` number of parts.
        relay_out, relay_into: ``(hosts,)`` seconds for each byte that a host relays, at the ports that count.
        latency: latency between hosts, in seconds.
    """

    out: float
    into: float
    num_senders: int
    num_receivers: int
    part: np.ndarray
    overhead_seconds: np.ndarray
    count: np.ndarray
    relay_out: np.ndarray
    relay_into: np.ndarray
    latency: float

    @classmethod
    def of(cls, problem: _Problem) -> _Exchange:
        rates, demand = problem.rates, problem.demand
        senders = {host for holders, _ in demand for host in holders}
        receivers = {host for _, destinations in demand for host in destinations}
        out = sum(
            nbytes / max(rates[host].egress_bytes_per_second for host in holders)
            for (holders, _), (nbytes, _) in demand.items()
        )
        into = sum(
            nbytes / rates[host].ingress_bytes_per_second
            for (_, destinations), (nbytes, _) in demand.items()
            for host in destinations
        )
        parts = Counter(
            (nbytes, problem.overhead_bytes[holders[0]] / rates[holders[0]].egress_bytes_per_second)
            for (holders, destinations), (nbytes, _) in demand.items()
            if len(holders) == 1 and len(destinations) == 1
        )
        return cls(
            out / len(senders),
            into / len(receivers),
            len(senders),
            len(receivers),
            np.array([part for part, _ in parts], dtype=np.float64),
            np.array([overhead for _, overhead in parts], dtype=np.float64),
            np.array(list(parts.values()), dtype=np.float64),
            np.array([(host in senders) / rates[host].egress_bytes_per_second for host in rates]),
            np.array([(host in receivers) / rates[host].ingress_bytes_per_second for host in rates]),
            problem.latency,
        )

    @classmethod
    def of_rotation(cls, plan: RotationPlan, loads: RotationLoads) -> _Exchange:
        """The loads of the only tensor of a plan in closed form, whose hosts all send alike."""
        exchange, host = plan.exchanges[0], plan.topology.host_array
        senders, receivers = (np.flatnonzero(number >= 0) for number in (exchange.src_number, exchange.dst_number))
        rank = int(exchange.holders[0, 0])
        first = host[rank]
        parts = np.zeros(0)
        if exchange.groups.shape[1] == 1 and len(np.unique(host[exchange.holders[0]])) == 1:
            receiver = plan.host_messages(rank).receiver
            number = np.unique(host[receiver], return_counts=True)[1]
            parts = number * (loads.out[first] / len(receiver))
        egress = np.where(loads.out > 0, 1 / loads.egress, 0.0)[np.concatenate([senders, receivers])]
        ingress = np.where(loads.into > 0, 1 / loads.ingress, 0.0)[np.concatenate([senders, receivers])]
        return cls(
            float(loads.seconds_held()[senders].mean()),
            float(loads.seconds_in()[receivers].mean()),
            len(senders),
            len(receivers),
            parts,
            np.full(len(parts), loads.overhead_seconds[first]),
            np.full(len(parts), float(len(senders))),
            egress,
            ingress,
            plan.topology.latency_seconds,
        )

    def weights(self) -> list[float]:
        """Weights of senders from 0 to 1.

        These are evenly spaced weights, and weights at which a part costs as much directly as via a third host.
        """
        shares = set(np.linspace(0.0, 1.0, 17).tolist())
        slowest = float(self.relay_into.max())
        heaviest = (array[:_MAX_WEIGHTS].tolist() for array in (self.part, self.overhead_seconds))
        for part, overhead in zip(*heaviest, strict=True):
            relayed = part * slowest / self.num_receivers
            shares.add(relayed / (relayed + overhead / self.num_senders))
        return sorted(shares)

    def seconds(self, weight: float) -> float:
        """The bound by the mean load of senders, times ``weight``, plus that of receivers, times the rest."""
        of_sender, of_receiver = weight / self.num_senders, (1.0 - weight) / self.num_receivers
        relayed = float((of_sender * self.relay_out + of_receiver * self.relay_into).min())
        extra = np.minimum(of_sender * self.overhead_seconds, self.part * relayed) @ self.count
        return weight * self.out + (1.0 - weight) * (self.into + self.latency) + float(extra)


def _arrival_or_share(classes: Classes, rates: Mapping[int, Link | HostRates]) -> float:
    """Seconds of the longest arrival, or of the busiest holders if longer. Relays change neither."""
    arrives: Counter[int] = Counter()
    for (_, destinations), nbytes in classes.items():
        for place in destinations:
            arrives[place] += nbytes
    longest = max((total / rates[place].ingress_bytes_per_second for place, total in arrives.items()), default=0.0)
    return max(longest, _share(classes, {place: link.egress_bytes_per_second for place, link in rates.items()}))


def _share(classes: Mapping[tuple[tuple[int, ...], tuple[int, ...]], float], egress: Mapping[int, float]) -> float:
    """Seconds in which all classes can leave their holders once."""
    held: dict[tuple[int, ...], float] = {}
    for (holders, _), nbytes in classes.items():
        held[holders] = held.get(holders, 0) + nbytes
    return min_largest_share(held, egress)


def _bytes_of(demand: Demand) -> Classes:
    return {key: nbytes for key, (nbytes, _) in demand.items()}


def _pod_of(topology: Topology) -> Callable[[int], int]:
    return lambda rank: topology.host(topology.host_of_rank[rank]).pod or 0
