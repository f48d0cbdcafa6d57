"""Host classes: classes of regions grouped by holder and destination hosts, and their numbers of chunks.

Example: hosts 0 and 1 have ranks 0-7 and 8-15. Rank 0 sends region A to rank 8, and rank 1 sends region B to rank 9. A
and B are two classes, because their ranks differ. They are one host class, because both go from host 0 to host 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.planner.multicast.classes import Classes, group_rows, sum_by
from reshard.planner.strategies.chunk_limits import MIN_MULTICAST_CHUNK_BYTES
from reshard.ragged import NO_RANK, distinct_values, ranges
from reshard.topology import Topology

#: Number of slots of a plan if messages have no latency. A slot is the time of one chunk on the busiest port. With this
#: many slots, filling the pipeline takes little of the time.
MAX_SLOTS = 256
#: Limit on chunks x receiving hosts. More hosts get fewer chunks, but at least ``_MIN_SLOTS``.
_MAX_ARRIVALS = 2**14
_MIN_SLOTS = 64
#: Like ``MAX_SLOTS``, per NIC of a host with several NICs.
_SLOTS_OF_NIC = 128
#: Smallest size of a chunk, as a fraction of the largest chunk. Slow ports get smaller chunks.
_MIN_RELATIVE_SPEED = 1 / 8
#: Up to this many ranks of a host forward a piece along a chain; more ranks form a tree. ``rank_assignment.h`` in
#: ``native/multicast/`` has the same two numbers.
LONGEST_CHAIN = 8
#: Ranks to which a rank of that tree sends.
MAX_CHILDREN = 2
#: If one rank serves a NIC alone, forwarding may use this share of the rank's bandwidth inside its host.
_MAX_INSIDE_SHARE = 0.5
#: Limit on (number of slots, load of a link) pairs that are estimated at once. So many pairs fit the cache of a core.
_MAX_LOADS_AT_ONCE = 10_000
_NO_HOST = np.iinfo(np.int64).max

#: Rows of different lengths as ``(at, values)``: row k is ``values[at[k]:at[k + 1]]``.
RaggedRows = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class HostClasses:
    """Classes grouped by holder and destination hosts. Between hosts, a host class is one stream of bytes.

    Attributes:
        classes: the classes, ordered by host class.
        host_class: ``(classes,)`` host class of each class, ascending.
        nbytes: ``(host_classes,)``.
        holders: hosts that hold the data of each host class, as :data:`RaggedRows`.
        destinations: other hosts that receive it. A host class without destinations moves only inside hosts.
    """

    classes: Classes
    host_class: np.ndarray
    nbytes: np.ndarray
    holders: RaggedRows
    destinations: RaggedRows

    @classmethod
    def of(cls, classes: Classes, topology: Topology) -> HostClasses:
        """Group classes by hosts; host classes are ordered by first class."""
        holders = _hosts(classes.holders, topology)
        receivers = _hosts(classes.receivers, topology)
        for column in range(holders.shape[1]):
            receivers[receivers == holders[:, column : column + 1]] = _NO_HOST
        receivers.sort(axis=1)
        first, host_class = group_rows(np.concatenate([holders, receivers], axis=1))
        is_ordered = bool((host_class[1:] >= host_class[:-1]).all())
        order = np.argsort(host_class, kind="stable")
        return cls(
            classes=classes if is_ordered else classes.take(order),
            host_class=host_class if is_ordered else host_class[order],
            nbytes=sum_by(host_class, classes.nbytes, len(first)),
            holders=_members(holders[first], _NO_HOST),
            destinations=_members(receivers[first], _NO_HOST),
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def moves(self) -> np.ndarray:
        """``(host_classes,)`` bool, whether there is a destination host."""
        return np.diff(self.destinations[0]) > 0

    @property
    def first_class(self) -> np.ndarray:
        """``(host_classes,)`` index of the first class of each host class."""
        return np.searchsorted(self.host_class, np.arange(len(self)))


def _hosts(ranks: np.ndarray, topology: Topology) -> np.ndarray:
    """The hosts of each row of ranks, ascending, without duplicates, padded with ``_NO_HOST``."""
    hosts = np.where(ranks == NO_RANK, _NO_HOST, topology.host_array[ranks])
    hosts.sort(axis=1)
    hosts[:, 1:][hosts[:, 1:] == hosts[:, :-1]] = _NO_HOST
    hosts.sort(axis=1)
    return hosts


def members_of(ranks: np.ndarray) -> RaggedRows:
    """Rows of ranks padded with -1, as :data:`RaggedRows`."""
    return _members(ranks, NO_RANK)


def _members(table: np.ndarray, padding: int) -> RaggedRows:
    real = table != padding
    return np.concatenate([[0], np.cumsum(real.sum(axis=1))]), table[real]


@dataclass(frozen=True, eq=False)
class _LinkLoads:
    """The traffic that every plan sends through links: all bytes of ``host_class[i]`` pass ``link[i]``.

    There are three kinds of links here: one direction of all NICs of a host together, one direction of the uplink of a
    pod, and the egress of all sending hosts together.

    Attributes:
        link, host_class: ``(loads,)``.
        rate: ``(links,)`` bytes per second.
        ports: ``(links,)`` number of ports that share the traffic of the link.
    """

    link: np.ndarray
    host_class: np.ndarray
    rate: np.ndarray
    ports: np.ndarray

    def seconds(self, nbytes: np.ndarray) -> float:
        """Time of the busiest link; ``nbytes`` is ``(host_classes,)``."""
        return float((self._total(nbytes) / self.rate).max(initial=0.0))

    def seconds_of_chunks(self, counts: np.ndarray, nbytes: np.ndarray, latency_seconds: float) -> np.ndarray:
        """``(rows,)`` time of the busiest link, where ports pass whole chunks.

        Args:
            counts, nbytes: ``(rows, host_classes)`` number of chunks, and bytes of a chunk.
            latency_seconds: time that a port spends per chunk in addition to the time of its bytes.
        """
        count = _sum_rows(self.link, counts[:, self.host_class], len(self.rate))
        counted = np.ceil(count / self.ports) * self.ports  # every port counts the chunks of the busiest one
        total = _sum_rows(self.link, (counts * nbytes)[:, self.host_class], len(self.rate))
        total *= counted / np.maximum(count, 1)
        return (total / self.rate + counted / self.ports * latency_seconds).max(axis=1, initial=0.0)

    def _total(self, amount: np.ndarray) -> np.ndarray:
        return np.bincount(self.link, weights=amount[self.host_class], minlength=len(self.rate))


def _sum_rows(key: np.ndarray, amount: np.ndarray, size: int) -> np.ndarray:
    """``(rows, size)`` sums of each row of ``amount`` ``(rows, entries)``, grouped by ``key`` ``(entries,)``."""
    rows = len(amount)
    keys = (key + np.arange(rows)[:, None] * size).ravel()
    return np.bincount(keys, weights=amount.ravel(), minlength=rows * size).reshape(rows, size)


@dataclass(frozen=True, eq=False)
class _FanOut:
    """Traffic inside hosts: each chunk of ``host_class[i]`` that enters ``host[i]`` is forwarded inside it.

    Attributes:
        host, host_class, num_forwards: ``(entries,)`` the host, the host class, and the mean number of forwards of a
            chunk.
        num_ranks: ``(hosts,)`` number of receiving ranks, which share the forwards.
        bytes_per_second, latency_seconds: rate and latency of a message inside a host.
    """

    host: np.ndarray
    host_class: np.ndarray
    num_forwards: np.ndarray
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
        ranks = distinct_values(host_classes.classes.receivers[real])
        return cls(
            host=host_classes.destinations[1],
            host_class=host_class,
            num_forwards=np.maximum(receivers / np.maximum(hosts, 1) - 1, 0)[host_class],
            num_ranks=np.bincount(topology.host_array[ranks], minlength=topology.num_hosts),
            bytes_per_second=topology.inside_bytes_per_second or math.inf,
            latency_seconds=topology.inside_latency_seconds,
        )

    def seconds(self, counts: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """``(rows,)`` time of the busiest host, plus the time to forward the chunk that arrives last.

        Args:
            counts, nbytes: ``(rows, host_classes)`` number of chunks, and bytes of a chunk.
        """
        per_chunk = self.latency_seconds + nbytes[:, self.host_class] / self.bytes_per_second
        total = _sum_rows(self.host, counts[:, self.host_class] * self.num_forwards * per_chunk, len(self.num_ranks))
        in_tree = MAX_CHILDREN * np.log2(self.num_forwards + 1) / math.log2(MAX_CHILDREN)
        steps = np.where(self.num_forwards < LONGEST_CHAIN, self.num_forwards, in_tree)
        last = (steps * per_chunk).max(axis=1, initial=0.0)
        return (total / np.maximum(self.num_ranks, 1)).max(axis=1, initial=0.0) + last


def is_fast_inside(topology: Topology, host_classes: HostClasses) -> bool:
    """Whether links inside hosts are fast enough for one rank to forward everything that enters at its NIC."""
    if topology.inside_bytes_per_second is None:
        return True
    fastest = max(nic.ingress_bytes_per_second for host in topology.hosts for nic in host.nics)
    num_forwards = float(_FanOut.of(host_classes, topology).num_forwards.max(initial=0.0))
    branches = min(num_forwards, 1.0 if num_forwards < LONGEST_CHAIN else MAX_CHILDREN)
    return branches * fastest <= _MAX_INSIDE_SHARE * topology.inside_bytes_per_second


def _find_loads(host_classes: HostClasses, topology: Topology, senders: list[int]) -> _LinkLoads:
    """Loads into each host and pod, out of each host and pod that is a sole holder, and out of all senders together."""
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
            _pod_table(members, pod_of, pods) for members in (host_classes.holders, host_classes.destinations)
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
    link = np.concatenate([side[0] + first[i] for i, side in enumerate(sides)])
    host_class = np.concatenate([side[1] for side in sides])
    return _LinkLoads(link, host_class, np.concatenate(rates), np.concatenate(ports))


_NodeLoads = tuple[np.ndarray, np.ndarray]


def _arrivals_and_departures(
    holders: RaggedRows, destinations: RaggedRows, moves: np.ndarray
) -> tuple[_NodeLoads, _NodeLoads]:
    """``(node, host_class)`` pairs of hosts or pods: destinations, and sole holders of a class that moves."""
    arriving = destinations[1], np.repeat(np.arange(len(moves)), np.diff(destinations[0]))
    alone = np.flatnonzero(moves & (np.diff(holders[0]) == 1))
    return arriving, (holders[1][holders[0][:-1][alone]], alone)


def _pod_table(members: RaggedRows, pod_of: np.ndarray, count: int) -> np.ndarray:
    """``(host_classes, pods)`` True where a member host is in the pod."""
    table = np.zeros((len(members[0]) - 1, count), dtype=bool)
    table[np.repeat(np.arange(len(table)), np.diff(members[0])), pod_of[members[1]]] = True
    return table


def _senders(host_classes: HostClasses) -> list[int]:
    """The hosts that hold a class with a destination host, ascending."""
    first, counts = host_classes.holders[0][:-1], np.diff(host_classes.holders[0])
    moves = host_classes.moves
    return np.unique(host_classes.holders[1][ranges(first[moves], counts[moves])]).tolist()


def busiest_port_seconds(topology: Topology, host_classes: HostClasses) -> float:
    """Lower bound in seconds on any plan: the time of the busiest link."""
    senders = _senders(host_classes)
    return (
        _find_loads(host_classes, topology, senders).seconds(host_classes.nbytes.astype(np.float64)) if senders else 0.0
    )


#: Chunks that end where classes end may need more messages. They are then used only if they save at least this share of
#: the estimated time, because the estimate leaves out the CPU time of messages.
MIN_GAIN = 0.05


def count_chunks(
    topology: Topology, host_classes: HostClasses, largest: np.ndarray, largest_piece: int
) -> tuple[np.ndarray, np.ndarray]:
    """The number of chunks of each host class that minimizes the estimated time: busiest link plus pipeline fill.

    - Small chunks fill the pipeline fast. Large chunks pay few latencies.
    - A port passes whole chunks, so rounding costs time.
    - Slow ports get smaller chunks, so that all chunks take the same time.
    - If all classes have equal sizes, chunks can end where classes end. Such chunks are used if they take no longer. If
      they need more messages, they must save at least :data:`MIN_GAIN` of the time.

    Args:
        topology: the network.
        host_classes: the traffic.
        largest: ``(host_classes,)`` largest chunk in bytes, if classes are cut.
        largest_piece: largest class in bytes that may travel as one message.

    Returns:
        ``(host_classes,)`` numbers of chunks, and chunk sizes relative to chunks between the fastest ports.
    """
    if not len(host_classes):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    min_counts = -(-host_classes.nbytes // largest)
    moves = host_classes.moves
    if not moves.any():
        return min_counts, np.ones(len(host_classes))
    times = _ChunkTimes.of(topology, host_classes)
    cap = float(largest[moves].max())
    senders, receivers = _senders(host_classes), np.unique(host_classes.destinations[1])
    max_chunks = _max_slots(len(receivers), max(len(topology.host(h).nics) for h in senders))
    first, last = max_chunks, max_chunks * 3 // 2
    if not topology.latency_seconds and not topology.inside_latency_seconds:  # the cost of a message is unknown
        last = max(min(last, int(times.slot_bytes) // MIN_MULTICAST_CHUNK_BYTES), 1)
        first = min(first, last)
    else:
        near = times.cheapest(sorted({round(1.25**i) for i in range(40) if 1.25**i < max_chunks}), cap, min_counts)
        first, last = max(round(near / 1.25), 1), min(round(near * 1.25), last)
    n = times.cheapest(range(first, last + 1, max(1, (last - first) // 32)), cap, min_counts)
    counts = np.ceil(times.nbytes * n / (times.slot_bytes * times.relative_size) - 1e-9).astype(np.int64)
    counts = np.maximum(np.where(moves, counts, 1), min_counts)
    num_classes = _equal_classes(host_classes)
    if num_classes > 1 and len(set(counts[moves].tolist())) == 1:
        count, nbytes = int(counts[moves][0]), float(times.nbytes[moves][0])
        aligned = _aligned_counts(count, num_classes, nbytes, float(largest[moves].min()), largest_piece)
        counts = np.where(moves, times.find_faster(count, aligned, num_classes), counts)
    return counts, times.relative_size


@dataclass(frozen=True, eq=False)
class _ChunkTimes:
    """Estimates of the time of a plan: the busiest link, plus the hops of the first chunk to the last host.

    Attributes:
        topology: the network.
        moves: ``(host_classes,)`` whether a host class moves between hosts.
        nbytes: ``(host_classes,)`` bytes of a host class.
        relative_size: ``(host_classes,)`` chunk sizes relative to chunks between the fastest ports.
        loads: load of each link by host class.
        fan_out: load inside hosts.
        fastest: rate of the fastest port, in bytes per second.
        slot_bytes: bytes that the fastest port passes in the time of the busiest link.
        fill: number of hops in which the first chunk reaches the last host.
    """

    topology: Topology
    moves: np.ndarray
    nbytes: np.ndarray
    relative_size: np.ndarray
    loads: _LinkLoads
    fan_out: _FanOut
    fastest: float
    slot_bytes: float
    fill: int

    @classmethod
    def of(cls, topology: Topology, host_classes: HostClasses) -> _ChunkTimes:
        senders, nbytes = _senders(host_classes), host_classes.nbytes.astype(np.float64)
        loads = _find_loads(host_classes, topology, senders)
        fastest = max(
            *(nic.egress_bytes_per_second for h in senders for nic in topology.host(h).nics),
            *(
                nic.ingress_bytes_per_second
                for h in np.unique(host_classes.destinations[1]).tolist()
                for nic in topology.host(h).nics
            ),
        )
        speed, moves = _speeds(host_classes, topology), host_classes.moves
        max_copies = int(np.diff(host_classes.destinations[0]).max())
        return cls(
            topology,
            moves,
            nbytes,
            np.where(moves, speed / speed.max(), 1.0),
            loads,
            _FanOut.of(host_classes, topology),
            fastest,
            loads.seconds(nbytes) * fastest,
            max(math.ceil(math.log2(max_copies / len(senders) + 1)) - 1, 1),
        )

    def cheapest(self, numbers: Sequence[int], cap: float, min_counts: np.ndarray) -> int:
        """The fastest number of slots; the smallest if several are equally fast.

        Args:
            numbers: the numbers to compare.
            cap: largest chunk in bytes.
            min_counts: ``(host_classes,)`` lowest numbers of chunks.
        """
        costs: list[float] = []
        at_once = max(_MAX_LOADS_AT_ONCE // (len(self.loads.link) + 1), 1)
        for first in range(0, len(numbers), at_once):
            slots = np.array(numbers[first : first + at_once])[:, None]
            size = np.minimum(self.slot_bytes / slots * self.relative_size, cap)
            counts = np.where(self.moves, np.maximum(np.ceil(self.nbytes / size - 1e-9), min_counts), 0.0)
            per_hop = size.max(axis=1) / self.fastest + self.topology.latency_seconds
            across = self.loads.seconds_of_chunks(counts, size, self.topology.latency_seconds)
            costs += (np.maximum(across, self.fan_out.seconds(counts, size)) + self.fill * per_hop).tolist()
        return min(zip(costs, numbers, strict=True))[1]

    def find_faster(self, count: int, aligned: Sequence[int], num_classes: int) -> int:
        """The fastest number of chunks of each host class: ``count``, or one whose chunks end where classes end.

        Args:
            count: a number of chunks.
            aligned: numbers of chunks that end where classes end.
            num_classes: number of equally large classes in each host class.
        """
        seconds = {number: self._seconds(number, num_classes) for number in (count, *aligned)}
        max_messages = _num_pieces(count, num_classes)
        with_more = seconds[count] * (1.0 - MIN_GAIN)
        faster = [
            number
            for number in aligned
            if seconds[number] <= (seconds[count] if _num_pieces(number, num_classes) <= max_messages else with_more)
        ]
        return min(faster, key=lambda number: (seconds[number], number), default=count)

    def _seconds(self, number: int, num_classes: int) -> float:
        """The time with this number of chunks of each host class. Each piece of a class in a chunk is a message."""
        size, pieces = self.nbytes / number, _num_pieces(number, num_classes)
        messages = np.where(self.moves, pieces, 0.0)[None]
        across = self.loads.seconds_of_chunks(np.where(self.moves, number, 0.0)[None], size[None], 0.0)
        latencies = self.loads.seconds_of_chunks(messages, np.zeros_like(messages), self.topology.latency_seconds)
        inside = self.fan_out.seconds(messages, (self.nbytes / pieces)[None])
        per_hop = float(size[self.moves].max()) / self.fastest + self.topology.latency_seconds
        return float(np.maximum(across + latencies, inside)[0]) + self.fill * per_hop


def _num_pieces(num_chunks: int, num_classes: int) -> int:
    """The number of pieces that chunks and classes of equal sizes cut each other into."""
    return num_chunks + num_classes - math.gcd(num_chunks, num_classes)


def _aligned_counts(count: int, num_classes: int, nbytes: float, largest: float, largest_piece: int) -> list[int]:
    """Numbers of chunks from half to twice ``count`` with which chunks end where equally large classes end.

    Args:
        count: the number of chunks.
        num_classes, nbytes: classes and bytes of a host class.
        largest, largest_piece: see :func:`count_chunks`.
    """
    several_classes = [number for number in range(1, num_classes + 1) if num_classes % number == 0]
    parts_of_classes = range(2 * num_classes, 2 * count + 1, num_classes)
    numbers = several_classes if nbytes / num_classes <= largest_piece else []
    numbers += [number for number in parts_of_classes if nbytes / number <= largest]
    return [number for number in numbers if count <= 2 * number <= 4 * count]


def _equal_classes(host_classes: HostClasses) -> int:
    """The number of classes in each host class that moves, if all these classes are equally large; else 0."""
    is_moving = host_classes.moves[host_classes.host_class]
    number = np.bincount(host_classes.host_class[is_moving], minlength=len(host_classes))[host_classes.moves]
    sizes = host_classes.classes.nbytes[is_moving]
    return int(number[0]) if (number == number[0]).all() and (sizes == sizes[0]).all() else 0


def _speeds(host_classes: HostClasses, topology: Topology) -> np.ndarray:
    """``(host_classes,)`` the lower of two rates: ingress of the slowest destination, egress of the fastest holder."""
    hosts = [topology.host(h) for h in range(topology.num_hosts)]
    out = np.array([max(nic.egress_bytes_per_second for nic in host.nics) for host in hosts])
    into = np.array([max(nic.ingress_bytes_per_second for nic in host.nics) for host in hosts])
    speed = np.maximum.reduceat(out[host_classes.holders[1]], host_classes.holders[0][:-1])
    slowest = np.minimum.reduceat(
        into[host_classes.destinations[1]], host_classes.destinations[0][:-1][host_classes.moves]
    )
    speed[host_classes.moves] = np.minimum(speed[host_classes.moves], slowest)
    return np.maximum(speed, _MIN_RELATIVE_SPEED * speed.max())


def _max_slots(num_receivers: int, num_nics: int) -> int:
    """Chunks through the busiest port if messages have no latency."""
    slots = min(MAX_SLOTS, max(_MIN_SLOTS, _MAX_ARRIVALS // num_receivers))
    return min(slots, _SLOTS_OF_NIC) if num_nics > 1 else slots
