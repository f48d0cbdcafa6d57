"""Who sends which chunk to whom, and when: chunks are dealt out to ports as ports become free.

The clock counts what one chunk takes at rate 1. Whenever ports are free, senders and receivers are matched so that
those with most left to do are busy, and each pair takes the rarest chunk that the one has and the other lacks. With
equal rates all transfers end together and this fills slot after slot; with others it goes from one end to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from reshard.matching import find_pairs
from reshard.sharing import share_ports

#: A transfer starts only if it gets this part of what its ports could give it.
_LEAST_PART = 0.25
_TOGETHER = 1e-9


@dataclass(frozen=True)
class Ports:
    """Where chunks leave and enter: one port per NIC. Rates are relative.

    Attributes:
        host: the host of each port. out, into: its rates. of_rank: the port of each rank, -1 for those
            that take no part.
        pod: the pod of each host, empty where there are none. up, down: the rates of each pod's uplink.
    """

    host: tuple[int, ...]
    out: tuple[float, ...]
    into: tuple[float, ...]
    of_rank: tuple[int, ...]
    pod: tuple[int, ...] = ()
    up: tuple[float, ...] = ()
    down: tuple[float, ...] = ()


@dataclass
class Schedule:
    """Messages, as they were started. ``end`` says when each is over.

    ``after`` holds the numbers of messages that must have ended: ``source`` brings the chunk to the sender (-1: it
    holds it), the others keep the order at ports.
    """

    chunk: list[int] = field(default_factory=list)
    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    end: list[float] = field(default_factory=list)

    def add(self, chunk: int, sender: int, receiver: int, source: int, after: list[int], end: float) -> int:
        """Note a message; returns its number."""
        self.chunk.append(chunk)
        self.sender.append(sender)
        self.receiver.append(receiver)
        self.source.append(source)
        self.after.append(after)
        self.end.append(end)
        return len(self.chunk) - 1


class _Resource:
    """Something with a rate that flows share, and the messages whose ends made room for what starts next."""

    __slots__ = ("claimed", "free", "number", "rate", "unclaimed")

    def __init__(self, number: int, rate: float) -> None:
        self.number = number
        self.rate = self.free = rate
        self.unclaimed: list[int] = []
        self.claimed: list[int] = []

    def take(self, rate: float) -> list[int]:
        self.free -= rate
        if self.unclaimed:
            self.claimed, self.unclaimed = self.unclaimed, []
        return self.claimed

    def give(self, rate: float, message: int) -> None:
        self.free += rate
        self.unclaimed.append(message)


@dataclass(slots=True)
class _Flow:
    """A transfer under way: its ports, what was set aside for it, what is left of its chunk, and what it gets."""

    s: int
    r: int
    chunk: int
    rate: float
    message: int
    rank: int
    left: float = 1.0
    speed: float = 0.0


class Dealer:
    """Makes one schedule.

    Args:
        ports: the network. classes: per class its holders and its receivers, as ranks. class_of: of each chunk.
    """

    def __init__(
        self, ports: Ports, classes: Sequence[tuple[Sequence[int], Sequence[int]]], class_of: Sequence[int]
    ) -> None:
        self.ports, self.class_of = ports, class_of
        self.host_of = [ports.host[port] if port >= 0 else -1 for port in ports.of_rank]
        num_hosts = max(ports.host) + 1
        self.ranks_of_port: list[list[int]] = [[] for _ in ports.host]
        for rank, port in enumerate(ports.of_rank):
            if port >= 0:
                self.ranks_of_port[port].append(rank)
        self.used = [port for port, ranks in enumerate(self.ranks_of_port) if ranks]
        self.capacity = [*ports.out, *ports.into, *ports.up, *ports.down]
        resources = iter([_Resource(number, rate) for number, rate in enumerate(self.capacity)])
        self.out, self.into, self.up, self.down = (
            list(itertools.islice(resources, len(rates))) for rates in (ports.out, ports.into, ports.up, ports.down)
        )
        self.price = [0.0] * len(self.capacity)  # for the next search
        self.is_even = len(set(self.capacity)) == 1
        self.schedule = Schedule()
        self.sent = [0] * len(ports.of_rank)  # chunks that each rank was given to send, and to receive
        self.landed = [0] * len(ports.of_rank)
        # of each class: holders by host, receivers by host
        self.holders = [self.by_host(holders) for holders, _ in classes]
        self.receivers = [self.by_host(receivers) for _, receivers in classes]
        # sets of chunks are bits of integers
        self.have = [0] * num_hosts
        self.miss = [0] * num_hosts
        self.in_pod = [0] * len(ports.up)  # arrived or on the way
        self.level = [0] * (num_hosts + 1)  # chunks by how many hosts have them
        self.copies = [0] * len(class_of)
        self.fresh = 0  # chunks that no host but their holders has
        self.missing = [0] * num_hosts  # how many of each
        self.where: dict[tuple[int, int], dict[int, int]] = {}  # (chunk, host) -> {rank: message that brought it}
        self.flows: list[_Flow] = []
        self.now = 0.0
        self.prepare()

    def by_host(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """Ranks by their host."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.host_of[rank], []).append(rank)
        return found

    def prepare(self) -> None:
        """Who has and lacks what at first."""
        pod = self.ports.pod
        for chunk, k in enumerate(self.class_of):
            needing = [host for host in self.receivers[k] if host not in self.holders[k]]
            if not needing:
                continue
            bit = 1 << chunk
            for host in needing:
                self.miss[host] |= bit
                self.missing[host] += 1
            for host in self.holders[k]:
                self.have[host] |= bit
                if pod:
                    self.in_pod[pod[host]] |= bit
            self.copies[chunk] = len(self.holders[k])
            self.level[self.copies[chunk]] |= bit
            self.fresh |= bit
        for chunk, k in enumerate(self.class_of):  # what holders have beside them needs no port
            for host, ranks in self.receivers[k].items():
                if host in self.holders[k]:
                    holder = self.least(self.holders[k][host], self.sent)
                    for rank in ranks:
                        self.inside(chunk, holder, rank, -1)

    def least(self, ranks: Sequence[int], load: list[int]) -> int:
        """The first of those with the least load."""
        return min(ranks, key=lambda rank: load[rank])

    def inside(self, chunk: int, sender: int, receiver: int, source: int) -> int:
        """Note a message that needs no port; returns its number."""
        self.sent[sender] += 1
        return self.schedule.add(chunk, sender, receiver, source, [] if source < 0 else [source], self.now)

    def run(self) -> Schedule:
        """Deal out everything.

        Raises:
            RuntimeError: a chunk cannot reach a host that needs it.
        """
        while True:
            while self.match():
                pass
            if not self.flows:
                break
            self.advance()
        if any(self.missing):
            raise RuntimeError("a chunk cannot reach a host that needs it")
        return self.schedule

    # Matching

    def match(self) -> bool:
        """Start transfers between ports that are free now; returns whether one started."""
        host, out, into = self.ports.host, self.out, self.into
        least = _LEAST_PART / 4
        senders = [p for p in self.used if out[p].free > least * out[p].rate and self.have[host[p]]]
        receivers = [p for p in self.used if into[p].free > least * into[p].rate and self.miss[host[p]]]
        if not senders or not receivers:
            return False
        # who has most left to do, in time
        to_get = {p: self.missing[host[p]] / into[p].rate for p in receivers}
        fresh: dict[int, int] = {}
        for p in senders:
            if host[p] not in fresh:
                fresh[host[p]] = (self.have[host[p]] & self.fresh).bit_count()
        to_give = {p: fresh[host[p]] / out[p].rate for p in senders}
        receivers.sort(key=lambda p: (-to_get[p], p))
        senders.sort(key=lambda p: (-to_give[p], p))
        return self.pair(senders, receivers, to_get, to_give)

    def pair(
        self, senders: list[int], receivers: list[int], to_get: dict[int, float], to_give: dict[int, float]
    ) -> bool:
        """Start transfers between free ports, both lists with those first that have most left to do."""
        partners = {r: [s for s in senders if self.can_start(s, r)] for r in receivers}
        sender_of = find_pairs(senders, receivers, partners, to_give)
        started = False
        for r in receivers:
            if r in sender_of:
                started |= self.start(sender_of[r], r)
        return started

    def can_start(self, s: int, r: int) -> bool:
        """Whether one port's host has what the other's lacks, and both have room."""
        return self.rate(s, r) > 0 and self.candidates(s, r) > 0

    def candidates(self, s: int, r: int) -> int:
        """The chunks that one port's host can send to another's."""
        a, b = self.ports.host[s], self.ports.host[r]
        found = self.have[a] & self.miss[b]
        pod = self.ports.pod
        if pod and pod[a] != pod[b]:  # each pod is entered once
            found &= ~self.in_pod[pod[b]]
        return found

    def path(self, s: int, r: int) -> list[_Resource]:
        """What a transfer passes."""
        pod = self.ports.pod
        a, b = self.ports.host[s], self.ports.host[r]
        if pod and pod[a] != pod[b]:
            return [self.out[s], self.up[pod[a]], self.down[pod[b]], self.into[r]]
        return [self.out[s], self.into[r]]

    def rate(self, s: int, r: int) -> float:
        """What a transfer would get now; 0 where that is too little to start."""
        path = self.path(s, r)
        rate = min(resource.free for resource in path)
        return rate if rate >= _LEAST_PART * min(resource.rate for resource in path) else 0.0

    def start(self, s: int, r: int) -> bool:
        """Start a transfer of the rarest chunk; returns whether there was one."""
        found, rate = self.candidates(s, r), self.rate(s, r)
        if not found or rate <= 0:
            return False
        for level in self.level:
            if found & level:
                found &= level
                break
        chunk = (found & -found).bit_length() - 1
        a, b = self.ports.host[s], self.ports.host[r]
        bit = 1 << chunk
        self.miss[b] &= ~bit
        self.level[self.copies[chunk]] &= ~bit
        self.copies[chunk] += 1
        self.level[self.copies[chunk]] |= bit
        self.fresh &= ~bit
        if self.ports.pod:
            self.in_pod[self.ports.pod[b]] |= bit
        sender, source = self.find_sender(chunk, a, s)
        receiver = self.find_landing(chunk, b, r)
        order: dict[int, None] = {} if source < 0 else {source: None}
        for resource in self.path(s, r):
            order.update(dict.fromkeys(resource.take(rate)))
        message = self.schedule.add(chunk, sender, receiver, source, list(order), self.now)
        self.sent[sender] += 1
        self.landed[receiver] += 1
        self.flows.append(_Flow(s, r, chunk, rate, message, receiver))
        return True

    def find_sender(self, chunk: int, host: int, port: int) -> tuple[int, int]:
        """A rank at a port that has a chunk, and the message that brought it; staged there if need be."""
        of_rank = self.ports.of_rank
        brought = self.where.get((chunk, host))
        if brought is None:
            brought = dict.fromkeys(self.holders[self.class_of[chunk]].get(host, ()), -1)
            self.where[chunk, host] = brought
        here = [rank for rank in brought if of_rank[rank] == port]
        if here:
            rank = self.least(here, self.sent)
            return rank, brought[rank]
        near = self.least(list(brought), self.sent)
        rank = self.least(self.ranks_of_port[port], self.landed)
        brought[rank] = self.inside(chunk, near, rank, brought[near])
        return rank, brought[rank]

    def find_landing(self, chunk: int, host: int, port: int) -> int:
        """The rank that takes a chunk at a port: one that needs it, if there is one."""
        needers = self.receivers[self.class_of[chunk]][host]
        here = [rank for rank in needers if self.ports.of_rank[rank] == port]
        return self.least(here or self.ranks_of_port[port], self.landed)

    # Time

    def advance(self) -> None:
        """To the next end of a transfer."""
        self.set_speeds()
        step = min(flow.left / flow.speed for flow in self.flows)
        limit = step * (1 + _TOGETHER)
        self.now += step
        rest = []
        for flow in self.flows:
            if flow.left / flow.speed > limit:
                flow.left -= flow.speed * step
                rest.append(flow)
                continue
            self.schedule.end[flow.message] = self.now
            for resource in self.path(flow.s, flow.r):
                resource.give(flow.rate, flow.message)
            host = self.ports.host[flow.r]
            self.have[host] |= 1 << flow.chunk
            self.missing[host] -= 1
            brought = self.where.setdefault((flow.chunk, host), {})
            brought[flow.rank] = flow.message
            for needer in self.receivers[self.class_of[flow.chunk]][host]:
                if needer != flow.rank:
                    brought[needer] = self.inside(flow.chunk, flow.rank, needer, flow.message)
        self.flows = rest

    def set_speeds(self) -> None:
        """What each transfer gets; more than was set aside for it where others leave some."""
        if self.is_even:  # then each has its ports to itself
            for flow in self.flows:
                flow.speed = flow.rate
            return
        paths = [[resource.number for resource in self.path(flow.s, flow.r)] for flow in self.flows]
        for flow, speed in zip(self.flows, share_ports(paths, self.capacity, self.price), strict=True):
            flow.speed = speed
