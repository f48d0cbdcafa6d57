"""Who sends which chunk to whom, and when: chunks are scheduled to ports as ports become free.

The clock counts what one chunk takes at rate 1. Whenever ports are free, senders and receivers are matched so that
those with most left to do are busy, and each pair takes the rarest chunk that the one has and the other lacks. With
equal rates all transfers end together and this fills slot after slot; with others it goes from one end to the next.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from reshard.planner.multicast.workload import UNITS, Ports, Workload
from tests.reference.bipartite_matching import find_pairs
from tests.reference.chunk_state import ChunkState
from tests.reference.proportional_fairness import share_ports

#: A transfer starts only if it gets this part of what its ports could give it.
_LEAST_PART = 0.25
_TOGETHER = 1e-9
_NO_RATE = 1e-9


@dataclass
class ChunkSends:
    """Chunks as they pass from port to port, in the order in which they start.

    ``source`` is the chunk_send that brings the chunk to the sending host (-1: it holds it), ``after`` are those that must
    have ended before this one starts, to keep the order at ports.
    """

    chunk: list[int] = field(default_factory=list)
    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)

    def add(self, chunk: int, sender: int, receiver: int, source: int, after: list[int], start: float) -> int:
        """Note a deal, whose end is not known yet; returns its number."""
        self.chunk.append(chunk)
        self.sender.append(sender)
        self.receiver.append(receiver)
        self.source.append(source)
        self.after.append(after)
        self.start.append(start)
        self.end.append(start)
        return len(self.chunk) - 1


class _Resource:
    """Something with a rate that flows share, and the deals whose ends made room for what starts next."""

    __slots__ = ("free", "number", "rate", "room")

    def __init__(self, number: int, rate: float) -> None:
        self.number = number
        self.rate = self.free = rate
        self.room = [(-1, -1, rate)]  # deals that have ended, their senders, and what each set free

    def take(self, rate: float, sender: int) -> list[int]:
        """Set some rate aside, that of the same sender first; returns the deals that had it before."""
        self.free -= rate
        before = []
        self.room.sort(key=lambda entry: entry[1] != sender)
        while rate > _NO_RATE and self.room:
            chunk_send, its, freed = self.room.pop(0)
            if chunk_send >= 0:
                before.append(chunk_send)
            if freed > rate + _NO_RATE:
                self.room.insert(0, (chunk_send, its, freed - rate))
            rate -= freed
        return before

    def give(self, rate: float, chunk_send: int, sender: int) -> None:
        self.free += rate
        self.room.append((chunk_send, sender, rate))


@dataclass(slots=True)
class _Flow:
    """A transfer under way: its ports, what was set aside for it, what is left of its chunk, and what it gets."""

    s: int
    r: int
    chunk: int
    rate: float
    chunk_send: int
    left: float
    speed: float = 0.0


class ChunkScheduler:
    """ChunkSends out chunks once.

    Args:
        ports: the network. workload: what is to be sent over it.
    """

    def __init__(self, ports: Ports, workload: Workload) -> None:
        self.ports = ports
        self.chunk_state = ChunkState(ports, workload)
        self.used = [port for port, ranks in enumerate(ports.ranks) if ranks]
        self.host_out, self.host_into = ([0.0] * (max(ports.host) + 1) for _ in range(2))  # all their ports together
        for port in self.used:
            self.host_out[ports.host[port]] += ports.out[port]
            self.host_into[ports.host[port]] += ports.into[port]
        self.capacity = [*ports.out, *ports.into, *ports.up, *ports.down]
        resources = iter([_Resource(number, rate) for number, rate in enumerate(self.capacity)])
        self.out, self.into, self.up, self.down = (
            list(itertools.islice(resources, len(rates))) for rates in (ports.out, ports.into, ports.up, ports.down)
        )
        self.price = [0.0] * len(self.capacity)  # for the next search
        self.chunk_sends = ChunkSends()
        self.partner: dict[int, int] = {}  # who served each receiver last
        self.keeps_partners = workload.keeps_partners
        self.served: dict[int, int] = {}  # whom each sender serves, where partners are kept
        self.flows: list[_Flow] = []
        self.now = 0.0
        self.may_be_late = False

    def run(self) -> ChunkSends:
        """ChunkSend out everything.

        Raises:
            RuntimeError: a chunk cannot reach a host that needs it.
        """
        while True:
            while self.match():
                self.may_be_late = False
            if self.flows:
                self.advance()
            elif self.may_be_late or not any(self.chunk_state.to_get):
                break
            else:  # the faster port that has the last chunk may not send it
                self.may_be_late = True
        if any(self.chunk_state.to_get):
            raise RuntimeError("a chunk cannot reach a host that needs it")
        return self.chunk_sends

    # Matching

    def match(self) -> bool:
        """Start transfers between ports that are free now; returns whether one started."""
        host, out, into, chunk_state = self.ports.host, self.out, self.into, self.chunk_state
        least = _LEAST_PART / 4
        senders = [p for p in self.used if out[p].free > least * out[p].rate and chunk_state.have[host[p]]]
        receivers = [p for p in self.used if into[p].free > least * into[p].rate and chunk_state.miss[host[p]]]
        if not senders or not receivers:
            return False
        # who has most left to do, in time
        to_get = {p: chunk_state.to_get[host[p]] / UNITS / self.host_into[host[p]] for p in receivers}
        to_give = {p: chunk_state.to_give[host[p]] / UNITS / self.host_out[host[p]] for p in senders}
        receivers.sort(key=lambda p: (-to_get[p], -into[p].rate, p))
        senders.sort(key=lambda p: (-to_give[p], -out[p].rate, p))
        return self.pair(senders, receivers, to_get, to_give)

    def pair(
        self, senders: list[int], receivers: list[int], to_get: dict[int, float], to_give: dict[int, float]
    ) -> bool:
        """Start transfers between free ports, both lists with those first that have most left to do."""
        if self.keeps_partners:
            return self.pair_again(senders, receivers, to_get)
        partners = {}
        for r in receivers:
            partners[r] = row = [s for s in senders if self.can_start(s, r)]
            last = self.partner.get(r, -1)
            if last in row and not to_give[last]:  # turns cost time, and it has nothing that others lack
                row.remove(last)
                row.insert(0, last)
        sender_of = find_pairs(senders, receivers, partners, to_give)
        started = False
        for r in receivers:
            if r in sender_of and self.start(sender_of[r], r):
                self.partner[r] = sender_of[r]
                started = True
        return started

    def pair_again(self, senders: list[int], receivers: list[int], to_get: dict[int, float]) -> bool:
        """Start transfers of senders that serve whom they served before.

        Where there are none, one other is started: the fastest sender's, to whom has most left to get, and of those to
        whom has most room. So each receiver gets senders of as much rate as it can take, and no more.
        """
        again = [s for s in senders if self.served.get(s, -1) in receivers]
        if sum(self.can_start(s, self.served[s]) and self.start(s, self.served[s]) for s in again):
            return True
        receivers = sorted(receivers, key=lambda r: (-to_get[r], -self.into[r].free))
        senders = sorted(senders, key=lambda s: -self.out[s].rate)
        for r, s in itertools.product(receivers, senders):
            if self.can_start(s, r) and self.start(s, r):
                self.served[s] = r
                return True
        return False

    def can_start(self, s: int, r: int) -> bool:
        """Whether one port's host has what the other's lacks, and both have room."""
        return self.rate(s, r) > 0 and self.chunk_state.candidates(s, r) > 0 and not self.would_be_late(s, r)

    def would_be_late(self, s: int, r: int) -> bool:
        """Whether a transfer would outlast all that its receiver has left to get, and a faster port could take it."""
        host = self.ports.host
        rate, left = self.rate(s, r), self.chunk_state.to_get[host[r]] / UNITS / self.host_into[host[r]]
        if self.ports.are_alike or self.may_be_late or rate * left >= 1:
            return False
        chunk = self.chunk_state.choose(s, r)
        if self.chunk_state.size[chunk] / UNITS <= rate * left:
            return False
        if any(host[p] == host[r] and self.into[p].rate > self.into[r].rate for p in self.used):
            return True
        have = self.chunk_state.have
        return any(self.out[p].rate > self.out[s].rate and have[host[p]] >> chunk & 1 for p in self.used)

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

    def start(self, s: int, r: int, may_enter_again: bool = False) -> bool:
        """Start a transfer; returns whether there was a chunk for it."""
        chunk, rate = self.chunk_state.choose(s, r, may_enter_again), self.rate(s, r)
        if chunk < 0 or rate <= 0:
            return False
        source = self.chunk_state.source.get((chunk, self.ports.host[s]), -1)
        self.chunk_state.start(chunk, self.ports.host[r])
        order: dict[int, None] = {}
        for resource in self.path(s, r):
            order.update(dict.fromkeys(resource.take(rate, s)))
        chunk_send = self.chunk_sends.add(chunk, s, r, source, list(order), self.now)
        self.flows.append(_Flow(s, r, chunk, rate, chunk_send, self.chunk_state.size[chunk] / UNITS))
        return True

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
            self.chunk_sends.end[flow.chunk_send] = self.now
            for resource in self.path(flow.s, flow.r):
                resource.give(flow.rate, flow.chunk_send, flow.s)
            self.chunk_state.land(flow.chunk, flow.r, flow.chunk_send)
        self.flows = rest

    def set_speeds(self) -> None:
        """What each transfer gets; more than was set aside for it where others leave some."""
        if self.ports.are_alike:  # then each has its ports to itself
            for flow in self.flows:
                flow.speed = flow.rate
            return
        paths = [[resource.number for resource in self.path(flow.s, flow.r)] for flow in self.flows]
        for flow, speed in zip(self.flows, share_ports(paths, self.capacity, self.price), strict=True):
            flow.speed = speed
