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
class Lanes:
    """Classes with the same hosts on both sides: to hosts they are one stream of bytes.

    Attributes:
        classes: ordered by lane. lane: ``(classes,)`` ascending. nbytes: ``(lanes,)``.
        holders, needers: hosts as ``(at, hosts)``: lane k has ``hosts[at[k]:at[k + 1]]``; needers do not hold. A lane
            without needers stays inside its hosts.
    """

    classes: Classes
    lane: np.ndarray
    nbytes: np.ndarray
    holders: Members
    needers: Members

    @classmethod
    def of(cls, classes: Classes, topology: Topology) -> Lanes:
        """Put classes into lanes, in the order of the lanes' first classes."""
        holders = _hosts(classes.holders, topology)
        receivers = _hosts(classes.receivers, topology)
        for column in range(holders.shape[1]):
            receivers[receivers == holders[:, column : column + 1]] = _NO_HOST
        receivers.sort(axis=1)
        first, lane = group_rows(np.concatenate([holders, receivers], axis=1))
        order = np.argsort(lane, kind="stable")
        return cls(
            classes=classes.take(order),
            lane=lane[order],
            nbytes=sum_by(lane, classes.nbytes, len(first)),
            holders=_members(holders[first], _NO_HOST),
            needers=_members(receivers[first], _NO_HOST),
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def moves(self) -> np.ndarray:
        """``(lanes,)`` whether another host needs it."""
        return np.diff(self.needers[0]) > 0

    @property
    def first_class(self) -> np.ndarray:
        """``(lanes,)`` the first class of each."""
        return np.searchsorted(self.lane, np.arange(len(self)))


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
    """What must pass hosts and uplinks whatever is planned: bytes of lane ``lane[i]`` at place ``place[i]``.

    ``rate`` is of each place, ``ports`` among how many NICs it is divided.
    """

    place: np.ndarray
    lane: np.ndarray
    rate: np.ndarray
    ports: np.ndarray

    def seconds(self, nbytes: np.ndarray) -> float:
        """Of the busiest place."""
        return float((self._total(nbytes) / self.rate).max(initial=0.0))

    def seconds_of_chunks(self, counts: np.ndarray, nbytes: np.ndarray, latency_seconds: float) -> float:
        """Of the busiest place, where lanes have so many chunks of so many bytes and ports get whole ones."""
        each = np.ceil(self._total(counts) / self.ports) * self.ports  # chunks of one port, as if each passed as many
        total = self._total(counts * nbytes) * (each / np.maximum(self._total(counts), 1))
        return float((total / self.rate + each / self.ports * latency_seconds).max(initial=0.0))

    def _total(self, amount: np.ndarray) -> np.ndarray:
        return np.bincount(self.place, weights=amount[self.lane], minlength=len(self.rate))


@dataclass(frozen=True, eq=False)
class _FanOut:
    """What passes inside hosts: chunks of lane ``lane[i]`` land on host ``host[i]`` and go on ``times[i]`` times."""

    host: np.ndarray
    lane: np.ndarray
    times: np.ndarray
    num_ranks: np.ndarray
    bytes_per_second: float
    latency_seconds: float

    @classmethod
    def of(cls, lanes: Lanes, topology: Topology) -> _FanOut:
        real = lanes.classes.receivers != NO_RANK
        hosts = np.diff(lanes.needers[0])
        share = lanes.classes.nbytes / lanes.nbytes[lanes.lane]
        receivers = np.bincount(lanes.lane, weights=real.sum(axis=1) * share, minlength=len(lanes))
        lane = np.repeat(np.arange(len(lanes)), hosts)
        ranks = np.unique(lanes.classes.receivers[real])
        return cls(
            host=lanes.needers[1],
            lane=lane,
            times=np.maximum(receivers / np.maximum(hosts, 1) - 1, 0)[lane],
            num_ranks=np.bincount(topology.host_by_rank[ranks], minlength=topology.num_hosts),
            bytes_per_second=topology.inside_bytes_per_second or math.inf,
            latency_seconds=topology.inside_latency_seconds,
        )

    def seconds(self, counts: np.ndarray, nbytes: np.ndarray) -> float:
        """Of the busiest host, whose ranks share the work."""
        of_one = self.latency_seconds + nbytes[self.lane] / self.bytes_per_second
        total = np.bincount(self.host, weights=counts[self.lane] * self.times * of_one, minlength=len(self.num_ranks))
        steps = np.where(self.times < LONGEST_CHAIN, self.times, 2 * np.log2(self.times + 1))
        last = float((steps * of_one).max(initial=0.0))  # what lands last has yet to go on
        return float((total / np.maximum(self.num_ranks, 1)).max(initial=0.0)) + last


def is_fast_inside(topology: Topology, lanes: Lanes) -> bool:
    """Whether one rank can pass on all that enters at its NIC."""
    if topology.inside_bytes_per_second is None:
        return True
    fastest = max(nic.ingress_bytes_per_second for host in topology.hosts for nic in host.nics)
    times = float(_FanOut.of(lanes, topology).times.max(initial=0.0))
    branches = min(times, 1.0 if times < LONGEST_CHAIN else 2.0)
    return branches * fastest <= _MOST_INSIDE * topology.inside_bytes_per_second


def _find_loads(lanes: Lanes, topology: Topology, senders: list[int]) -> _Loads:
    """Arrivals, departures where one place alone holds a lane, what all senders must send; pods' uplinks alike."""
    hosts, pods = [topology.host(h) for h in range(topology.num_hosts)], len(topology.pods)
    rates_in = [host.ingress_bytes_per_second for host in hosts]
    rates_out = [host.egress_bytes_per_second for host in hosts]
    nics = [len(host.nics) for host in hosts]
    moves = lanes.moves
    arriving, leaving = _arrivals_and_departures(lanes.holders, lanes.needers, moves)
    moving = np.flatnonzero(moves)
    sides = [arriving, leaving, (np.zeros_like(moving), moving)]
    rates = [rates_in, rates_out, [sum(rates_out[h] for h in senders)]]
    ports = [nics, nics, [sum(nics[h] for h in senders)]]
    if pods:
        pod_of = np.array([host.pod or 0 for host in hosts])
        holding, needing = (_places(members, pod_of, pods) for members in (lanes.holders, lanes.needers))
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
    lane = np.concatenate([side[1] for side in sides])
    return _Loads(place, lane, np.concatenate(rates), np.concatenate(ports))


_Side = tuple[np.ndarray, np.ndarray]


def _arrivals_and_departures(holders: Members, needers: Members, moves: np.ndarray) -> tuple[_Side, _Side]:
    """``(place, lane)`` of what enters each place, and of what only one place can send."""
    arriving = needers[1], np.repeat(np.arange(len(moves)), np.diff(needers[0]))
    alone = np.flatnonzero(moves & (np.diff(holders[0]) == 1))
    return arriving, (holders[1][holders[0][:-1][alone]], alone)


def _places(members: Members, place_of: np.ndarray, count: int) -> np.ndarray:
    """``(lanes, places)`` True where a member is."""
    found = np.zeros((len(members[0]) - 1, count), dtype=bool)
    found[np.repeat(np.arange(len(found)), np.diff(members[0])), place_of[members[1]]] = True
    return found


def _senders(lanes: Lanes) -> list[int]:
    """The hosts that hold what others need."""
    first, counts = lanes.holders[0][:-1], np.diff(lanes.holders[0])
    moves = lanes.moves
    return np.unique(lanes.holders[1][ranges(first[moves], counts[moves])]).tolist()


def least_seconds(topology: Topology, lanes: Lanes) -> float:
    """Below which no plan can be, found fast: the busiest arrival, departure of one holder, or share of all senders."""
    senders = _senders(lanes)
    return _find_loads(lanes, topology, senders).seconds(lanes.nbytes.astype(np.float64)) if senders else 0.0


def count_chunks(topology: Topology, lanes: Lanes, largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunks of each lane: as many as make the least of what the busiest port passes and of the fill.

    Small chunks fill the pipeline fast; large ones cost few latencies; where ports get whole chunks some is lost in
    rounding. Chunks to slow ports are smaller, so that all take as long.

    Args:
        largest: ``(lanes,)`` bytes that no chunk may exceed.

    Returns:
        ``(lanes,)`` how many chunks, and how large they are relative to those between the fastest ports.
    """
    if not len(lanes):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    nbytes = lanes.nbytes.astype(np.float64)
    fewest = -(-lanes.nbytes // largest)
    num_needers, moves = np.diff(lanes.needers[0]), lanes.moves
    if not moves.any():
        return fewest, np.ones(len(lanes))
    senders = _senders(lanes)
    loads = _find_loads(lanes, topology, senders)
    least = loads.seconds(nbytes)
    copies = int(num_needers.max())
    fill = max(math.ceil(math.log2(copies / len(senders) + 1)) - 1, 1)
    receivers = np.unique(lanes.needers[1]).tolist()
    fastest = max(
        *(nic.egress_bytes_per_second for h in senders for nic in topology.host(h).nics),
        *(nic.ingress_bytes_per_second for h in receivers for nic in topology.host(h).nics),
    )
    speed = _speeds(lanes, topology)
    part = np.where(moves, speed / speed.max(), 1.0)
    cap = float(largest[moves].max())
    fan_out = _FanOut.of(lanes, topology)

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


def _speeds(lanes: Lanes, topology: Topology) -> np.ndarray:
    """``(lanes,)`` what a port of the slowest needer takes in, or of the fastest holder lets out if that is less."""
    hosts = [topology.host(h) for h in range(topology.num_hosts)]
    out = np.array([max(nic.egress_bytes_per_second for nic in host.nics) for host in hosts])
    into = np.array([max(nic.ingress_bytes_per_second for nic in host.nics) for host in hosts])
    speed = np.maximum.reduceat(out[lanes.holders[1]], lanes.holders[0][:-1])
    slowest = np.minimum.reduceat(into[lanes.needers[1]], lanes.needers[0][:-1][lanes.moves])
    speed[lanes.moves] = np.minimum(speed[lanes.moves], slowest)
    return np.maximum(speed, _LEAST_SPEED * speed.max())


def _most_slots(num_receivers: int, num_nics: int) -> int:
    """Into how many chunks to cut what the busiest port passes where messages cost nothing."""
    slots = min(SLOTS, max(_FEWEST_SLOTS, _MOST_ARRIVALS // num_receivers))
    return min(slots, _SLOTS_OF_NIC) if num_nics > 1 else slots
