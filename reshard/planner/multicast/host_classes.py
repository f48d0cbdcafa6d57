"""Classes of regions by the hosts that hold and lack them, and into how many chunks those are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from reshard.planner.multicast.classes import Classes, group_rows, sum_by
from reshard.ragged import NO_RANK, ranges
from reshard.topology.model import Topology

#: Chunks that the busiest port passes where messages cost nothing: so few are lost while the first reach the last host.
SLOTS = 256
#: Between many hosts there are fewer, so that a plan has no more than about so many chunks times hosts.
_MOST_ARRIVALS = 2**14
_FEWEST_SLOTS = 64
#: Of a host with several NICs, at each of them.
_SLOTS_OF_NIC = 128
#: Chunks to the slowest ports are at least this part of the largest.
_LEAST_SPEED = 1 / 8
#: Where nothing is known of what a message costs.
_LEAST_CHUNK_BYTES = 2**14
#: Ranks of a host that pass a piece on from one to the next; more of them form a tree of two branches each.
LONGEST_CHAIN = 8
#: What one rank may have to pass on, over what it can.
_MOST_INSIDE = 0.5
_NO_HOST = np.iinfo(np.int64).max

Members = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class HostClasses:
    """Classes with the same hosts on both sides: to hosts they are one stream of bytes.

    Attributes:
        classes: ordered by host class. host class: ``(classes,)`` ascending. nbytes: ``(host_classes,)``.
        holders, destinations: hosts as ``(at, hosts)``: host_class k has ``hosts[at[k]:at[k + 1]]``; destinations do
        not hold. A host class
            without destinations stays inside its hosts.
    """

    classes: Classes
    host_class: np.ndarray
    nbytes: np.ndarray
    holders: Members
    destinations: Members

    @classmethod
    def of(cls, classes: Classes, topology: Topology) -> HostClasses:
        """Put classes into host classes, in the order of the host classes' first classes."""
        holders = _hosts(classes.holders, topology)
        receivers = _hosts(classes.receivers, topology)
        for column in range(holders.shape[1]):
            receivers[receivers == holders[:, column : column + 1]] = _NO_HOST
        receivers.sort(axis=1)
        first, host_class = group_rows(np.concatenate([holders, receivers], axis=1))
        order = np.argsort(host_class, kind="stable")
        return cls(
            classes=classes.take(order),
            host_class=host_class[order],
            nbytes=sum_by(host_class, classes.nbytes, len(first)),
            holders=_members(holders[first], _NO_HOST),
            destinations=_members(receivers[first], _NO_HOST),
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def moves(self) -> np.ndarray:
        """``(host_classes,)`` whether another host needs it."""
        return np.diff(self.destinations[0]) > 0

    @property
    def first_class(self) -> np.ndarray:
        """``(host_classes,)`` the first class of each."""
        return np.searchsorted(self.host_class, np.arange(len(self)))


def _hosts(ranks: np.ndarray, topology: Topology) -> np.ndarray:
    """The hosts of each row of ranks, ascending and each once."""
    hosts = np.where(ranks == NO_RANK, _NO_HOST, topology.host_by_rank[ranks])
    hosts.sort(axis=1)
    hosts[:, 1:][hosts[:, 1:] == hosts[:, :-1]] = _NO_HOST
    hosts.sort(axis=1)
    return hosts


def members_of(ranks: np.ndarray) -> Members:
    """Rows of ranks that are padded with -1, as ``(at, ranks)``."""
    return _members(ranks, NO_RANK)


def _members(table: np.ndarray, nobody: int) -> Members:
    real = table != nobody
    return np.concatenate([[0], np.cumsum(real.sum(axis=1))]), table[real]


@dataclass(frozen=True, eq=False)
class _Loads:
    """What every plan must pass through hosts and uplinks: bytes of ``host_class[i]`` at place ``place[i]``.

    ``rate`` is of each place, ``ports`` among how many NICs it is divided.
    """

    place: np.ndarray
    host_class: np.ndarray
    rate: np.ndarray
    ports: np.ndarray

    def seconds(self, nbytes: np.ndarray) -> float:
        """Of the busiest place."""
        return float((self._total(nbytes) / self.rate).max(initial=0.0))

    def seconds_of_chunks(self, counts: np.ndarray, nbytes: np.ndarray, latency_seconds: float) -> float:
        """Of the busiest place, where host classes have so many chunks of so many bytes and ports get whole ones."""
        each = np.ceil(self._total(counts) / self.ports) * self.ports  # chunks of one port, as if each passed as many
        total = self._total(counts * nbytes) * (each / np.maximum(self._total(counts), 1))
        return float((total / self.rate + each / self.ports * latency_seconds).max(initial=0.0))

    def _total(self, amount: np.ndarray) -> np.ndarray:
        return np.bincount(self.place, weights=amount[self.host_class], minlength=len(self.rate))


@dataclass(frozen=True, eq=False)
class _FanOut:
    """Traffic inside hosts: chunks of ``host_class[i]`` arrive at ``host[i]`` and are forwarded ``times[i]`` times."""

    host: np.ndarray
    host_class: np.ndarray
    times: np.ndarray
    num_ranks: np.ndarray
    bytes_per_second: float
    latency_seconds: float

    @classmethod
    def of(cls, host_classes: HostClasses, topology: Topology) -> _FanOut:
        real = host_classes.classes.receivers != NO_RANK
        hosts = np.diff(host_classes.destinations[0])
        share = host_classes.classes.nbytes / host_classes.nbytes[host_classes.host_class]
        receivers = np.bincount(host_classes.host_class, weights=real.sum(axis=1) * share, minlength=len(host_classes))
        host_class = np.repeat(np.arange(len(host_classes)), hosts)
        ranks = np.unique(host_classes.classes.receivers[real])
        return cls(
            host=host_classes.destinations[1],
            host_class=host_class,
            times=np.maximum(receivers / np.maximum(hosts, 1) - 1, 0)[host_class],
            num_ranks=np.bincount(topology.host_by_rank[ranks], minlength=topology.num_hosts),
            bytes_per_second=topology.inside_bytes_per_second or math.inf,
            latency_seconds=topology.inside_latency_seconds,
        )

    def seconds(self, counts: np.ndarray, nbytes: np.ndarray) -> float:
        """Of the busiest host, whose ranks share the work."""
        of_one = self.latency_seconds + nbytes[self.host_class] / self.bytes_per_second
        total = np.bincount(
            self.host, weights=counts[self.host_class] * self.times * of_one, minlength=len(self.num_ranks)
        )
        steps = np.where(self.times < LONGEST_CHAIN, self.times, 2 * np.log2(self.times + 1))
        last = float((steps * of_one).max(initial=0.0))  # what lands last has yet to go on
        return float((total / np.maximum(self.num_ranks, 1)).max(initial=0.0)) + last


def is_fast_inside(topology: Topology, host_classes: HostClasses) -> bool:
    """Whether one rank can pass on all that enters at its NIC."""
    if topology.inside_bytes_per_second is None:
        return True
    fastest = max(nic.ingress_bytes_per_second for host in topology.hosts for nic in host.nics)
    times = float(_FanOut.of(host_classes, topology).times.max(initial=0.0))
    branches = min(times, 1.0 if times < LONGEST_CHAIN else 2.0)
    return branches * fastest <= _MOST_INSIDE * topology.inside_bytes_per_second


def _find_loads(host_classes: HostClasses, topology: Topology, senders: list[int]) -> _Loads:
    """Arrivals, departures where one place alone holds a host class, and what all senders must send; pods too."""
    hosts, pods = [topology.host(h) for h in range(topology.num_hosts)], len(topology.pods)
    rates_in = [host.ingress_bytes_per_second for host in hosts]
    rates_out = [host.egress_bytes_per_second for host in hosts]
    nics = [len(host.nics) for host in hosts]
    moves = host_classes.moves
    arriving, leaving = _arrivals_and_departures(host_classes.holders, host_classes.destinations, moves)
    moving = np.flatnonzero(moves)
    sides = [arriving, leaving, (np.zeros_like(moving), moving)]
    rates = [rates_in, rates_out, [sum(rates_out[h] for h in senders)]]
    ports = [nics, nics, [sum(nics[h] for h in senders)]]
    if pods:
        pod_of = np.array([host.pod or 0 for host in hosts])
        holding, needing = (
            _places(members, pod_of, pods) for members in (host_classes.holders, host_classes.destinations)
        )
        needing = needing & ~holding
        inside = [_members(np.where(table, np.arange(pods), NO_RANK), NO_RANK) for table in (holding, needing)]
        sides += _arrivals_and_departures(inside[0], inside[1], needing.any(axis=1))
        rates += [
            [pod.ingress_bytes_per_second for pod in topology.pods],
            [pod.egress_bytes_per_second for pod in topology.pods],
        ]
        ports += [[1] * pods, [1] * pods]
    first = np.cumsum([0] + [len(rate) for rate in rates])
    place = np.concatenate([side[0] + first[i] for i, side in enumerate(sides)])
    host_class = np.concatenate([side[1] for side in sides])
    return _Loads(place, host_class, np.concatenate(rates), np.concatenate(ports))


_Side = tuple[np.ndarray, np.ndarray]


def _arrivals_and_departures(holders: Members, destinations: Members, moves: np.ndarray) -> tuple[_Side, _Side]:
    """``(place, host_class)`` of what enters each place, and of what only one place can send."""
    arriving = destinations[1], np.repeat(np.arange(len(moves)), np.diff(destinations[0]))
    alone = np.flatnonzero(moves & (np.diff(holders[0]) == 1))
    return arriving, (holders[1][holders[0][:-1][alone]], alone)


def _places(members: Members, place_of: np.ndarray, count: int) -> np.ndarray:
    """``(host_classes, places)`` True where a member is."""
    found = np.zeros((len(members[0]) - 1, count), dtype=bool)
    found[np.repeat(np.arange(len(found)), np.diff(members[0])), place_of[members[1]]] = True
    return found


def _senders(host_classes: HostClasses) -> list[int]:
    """The hosts that hold what others need."""
    first, counts = host_classes.holders[0][:-1], np.diff(host_classes.holders[0])
    moves = host_classes.moves
    return np.unique(host_classes.holders[1][ranges(first[moves], counts[moves])]).tolist()


def least_seconds(topology: Topology, host_classes: HostClasses) -> float:
    """Below which no plan can be, found fast: the busiest arrival, departure of one holder, or share of all senders."""
    senders = _senders(host_classes)
    return (
        _find_loads(host_classes, topology, senders).seconds(host_classes.nbytes.astype(np.float64)) if senders else 0.0
    )


def count_chunks(topology: Topology, host_classes: HostClasses, largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunks of each host class: as many as make the least of what the busiest port passes and of the fill.

    Small chunks fill the pipeline fast; large ones cost few latencies; where ports get whole chunks some is lost in
    rounding. Chunks to slow ports are smaller, so that all take as long.

    Args:
        largest: ``(host_classes,)`` bytes that no chunk may exceed.

    Returns:
        ``(host_classes,)`` how many chunks, and how large they are relative to those between the fastest ports.
    """
    if not len(host_classes):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    nbytes = host_classes.nbytes.astype(np.float64)
    fewest = -(-host_classes.nbytes // largest)
    num_destinations, moves = np.diff(host_classes.destinations[0]), host_classes.moves
    if not moves.any():
        return fewest, np.ones(len(host_classes))
    senders = _senders(host_classes)
    loads = _find_loads(host_classes, topology, senders)
    least = loads.seconds(nbytes)
    copies = int(num_destinations.max())
    fill = max(math.ceil(math.log2(copies / len(senders) + 1)) - 1, 1)
    receivers = np.unique(host_classes.destinations[1]).tolist()
    fastest = max(
        *(nic.egress_bytes_per_second for h in senders for nic in topology.host(h).nics),
        *(nic.ingress_bytes_per_second for h in receivers for nic in topology.host(h).nics),
    )
    speed = _speeds(host_classes, topology)
    part = np.where(moves, speed / speed.max(), 1.0)
    cap = float(largest[moves].max())
    fan_out = _FanOut.of(host_classes, topology)

    def cost(n: int) -> tuple[float, int]:
        size = np.minimum(least * fastest / n * part, cap)
        counts = np.where(moves, np.maximum(np.ceil(nbytes / size - 1e-9), fewest), 0.0)
        of_one = float(size.max()) / fastest + topology.latency_seconds
        across = loads.seconds_of_chunks(counts, size, topology.latency_seconds)
        return max(across, fan_out.seconds(counts, size)) + fill * of_one, n

    most = _most_slots(len(receivers), max(len(topology.host(h).nics) for h in senders))
    first, last = most, most * 3 // 2
    if not topology.latency_seconds and not topology.inside_latency_seconds:  # nothing says what a message costs
        last = max(min(last, int(least * fastest) // _LEAST_CHUNK_BYTES), 1)
        first = min(first, last)
    else:
        _, near = min(cost(n) for n in sorted({round(1.25**i) for i in range(40) if 1.25**i < most}))
        first, last = max(round(near / 1.25), 1), min(round(near * 1.25), last)
    _, n = min(cost(n) for n in range(first, last + 1, max(1, (last - first) // 32)))
    counts = np.ceil(nbytes * n / (least * fastest * part) - 1e-9).astype(np.int64)
    return np.maximum(np.where(moves, counts, 1), fewest), part


def _speeds(host_classes: HostClasses, topology: Topology) -> np.ndarray:
    """``(host_classes,)`` the rate into the slowest destination, or out of the fastest holder if that is less."""
    hosts = [topology.host(h) for h in range(topology.num_hosts)]
    out = np.array([max(nic.egress_bytes_per_second for nic in host.nics) for host in hosts])
    into = np.array([max(nic.ingress_bytes_per_second for nic in host.nics) for host in hosts])
    speed = np.maximum.reduceat(out[host_classes.holders[1]], host_classes.holders[0][:-1])
    slowest = np.minimum.reduceat(
        into[host_classes.destinations[1]], host_classes.destinations[0][:-1][host_classes.moves]
    )
    speed[host_classes.moves] = np.minimum(speed[host_classes.moves], slowest)
    return np.maximum(speed, _LEAST_SPEED * speed.max())


def _most_slots(num_receivers: int, num_nics: int) -> int:
    """Into how many chunks to cut what the busiest port passes where messages cost nothing."""
    slots = min(SLOTS, max(_FEWEST_SLOTS, _MOST_ARRIVALS // num_receivers))
    return min(slots, _SLOTS_OF_NIC) if num_nics > 1 else slots
