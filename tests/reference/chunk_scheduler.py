"""Reference implementation of ``native/multicast/chunk_scheduler.h``: list scheduling of chunks on ports.

The scheduler advances a simulated clock. Whenever ports are free, it matches senders and receivers so that the ports
with the most work left are busy. Each pair transfers the rarest chunk that the sender's host has and the receiver's
host lacks. The clock then advances to the next end of a transfer. With equal rates, all transfers end together, so the
schedule is a sequence of time slots.

A time unit is the time that a chunk of full size takes at rate 1. Names are short because the formulas are long: ``s``
and ``r`` are the sending and the receiving NIC, ``out`` and ``into`` the two directions of NICs, ``up`` and ``down``
those of pod uplinks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from reshard.planner.multicast.chunk_workload import CHUNK_UNITS, ChunkWorkload, Nics
from tests.reference.bipartite_matching import find_pairs
from tests.reference.chunk_state import ChunkState
from tests.reference.proportional_fairness import share_ports

#: A transfer starts only if it can reserve this fraction of the rate of its slowest port or uplink.
_MIN_FREE_FRACTION = 0.25
#: Transfers whose remaining times differ by less than this fraction end at the same time.
_TIME_TOLERANCE = 1e-9
#: Rates below this count as zero.
_NO_RATE = 1e-9


@dataclass
class ChunkSends:
    """Sends of chunks between NICs, in the order of their starts.

    Attributes:
        chunk, sender, receiver: the chunk and the two NICs of each send.
        source: the send that brought the chunk to the sending host; -1 if that host holds the chunk from the start.
        after: the sends that must end before this one starts, because it reuses their rate.
        start, end: times of each send.
    """

    chunk: list[int] = field(default_factory=list)
    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)

    def add(self, chunk: int, sender: int, receiver: int, source: int, after: list[int], start: float) -> int:
        """Add a send, whose end is set later, and return its index."""
        self.chunk.append(chunk)
        self.sender.append(sender)
        self.receiver.append(receiver)
        self.source.append(source)
        self.after.append(after)
        self.start.append(start)
        self.end.append(start)
        return len(self.chunk) - 1


class _Port:
    """One direction of a NIC or uplink, which transfers share. It records which ended sends freed its rate."""

    __slots__ = ("free", "free_parts", "number", "rate")

    def __init__(self, number: int, rate: float) -> None:
        self.number = number
        self.rate = self.free = rate
        self.free_parts = [(-1, -1, rate)]  # (ended send or -1, its sender or -1, freed rate)

    def reserve(self, rate: float, sender: int) -> list[int]:
        """Reserve rate, preferably rate that this sender has freed; return the ended sends that used it before."""
        self.free -= rate
        before = []
        self.free_parts.sort(key=lambda entry: entry[1] != sender)
        while rate > _NO_RATE and self.free_parts:
            chunk_send, freed_by, amount = self.free_parts.pop(0)
            if chunk_send >= 0:
                before.append(chunk_send)
            if amount > rate + _NO_RATE:
                self.free_parts.insert(0, (chunk_send, freed_by, amount - rate))
            rate -= amount
        return before

    def release(self, rate: float, chunk_send: int, sender: int) -> None:
        """Free the rate of a send that has ended."""
        self.free += rate
        self.free_parts.append((chunk_send, sender, rate))


@dataclass(slots=True)
class _Flow:
    """A transfer in progress.

    Attributes:
        rate: the rate that it reserved.
        chunk_send: its index in :class:`ChunkSends`.
        left: the fraction of a full-size chunk that has not arrived.
        speed: the rate at which it runs now.
    """

    s: int
    r: int
    chunk: int
    rate: float
    chunk_send: int
    left: float
    speed: float = 0.0


class ChunkScheduler:
    """Computes one schedule.

    Args:
        nics: the network.
        workload: the chunks to schedule.
    """

    def __init__(self, nics: Nics, workload: ChunkWorkload) -> None:
        self.nics = nics
        self.chunk_state = ChunkState(nics, workload)
        self.used = [nic for nic, ranks in enumerate(nics.ranks) if ranks]
        # total rate of the ports of each host
        self.host_out, self.host_into = ([0.0] * (max(nics.host) + 1) for _ in range(2))
        for nic in self.used:
            self.host_out[nics.host[nic]] += nics.out[nic]
            self.host_into[nics.host[nic]] += nics.into[nic]
        self.capacity = [*nics.out, *nics.into, *nics.up, *nics.down]
        ports = iter([_Port(number, rate) for number, rate in enumerate(self.capacity)])
        self.out, self.into, self.up, self.down = (
            list(itertools.islice(ports, len(rates))) for rates in (nics.out, nics.into, nics.up, nics.down)
        )
        self.price = [0.0] * len(self.capacity)  # dual variables of fair sharing, kept as a warm start
        self.chunk_sends = ChunkSends()
        self.partner: dict[int, int] = {}  # last sender of each receiver
        self.keeps_partners = workload.keeps_partners
        self.served: dict[int, int] = {}  # receiver of each sender, if partners are kept
        self.flows: list[_Flow] = []
        self.now = 0.0
        self.may_be_late = False  # whether would_be_late() is ignored

    def run(self) -> ChunkSends:
        """Schedule all chunks.

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
            else:  # chunks wait for faster ports, which cannot send them now: allow slow ports too
                self.may_be_late = True
        if any(self.chunk_state.to_get):
            raise RuntimeError("a chunk cannot reach a host that needs it")
        return self.chunk_sends

    # Matching

    def match(self) -> bool:
        """Start transfers between free ports; return whether one started."""
        host, out, into, chunk_state = self.nics.host, self.out, self.into, self.chunk_state
        min_free = _MIN_FREE_FRACTION / 4  # ports with less free rate are not tried, to save time
        senders = [p for p in self.used if out[p].free > min_free * out[p].rate and chunk_state.have[host[p]]]
        receivers = [p for p in self.used if into[p].free > min_free * into[p].rate and chunk_state.miss[host[p]]]
        if not senders or not receivers:
            return False
        # time that the host of each port still needs to receive or to send
        to_get = {p: chunk_state.to_get[host[p]] / CHUNK_UNITS / self.host_into[host[p]] for p in receivers}
        to_give = {p: chunk_state.to_give[host[p]] / CHUNK_UNITS / self.host_out[host[p]] for p in senders}
        receivers.sort(key=lambda p: (-to_get[p], -into[p].rate, p))
        senders.sort(key=lambda p: (-to_give[p], -out[p].rate, p))
        return self.pair(senders, receivers, to_get, to_give)

    def pair(
        self, senders: list[int], receivers: list[int], to_get: dict[int, float], to_give: dict[int, float]
    ) -> bool:
        """Start transfers between free ports; both lists are sorted by work left, most first."""
        if self.keeps_partners:
            return self.pair_again(senders, receivers, to_get)
        partners = {}
        for r in receivers:
            partners[r] = row = [s for s in senders if self.can_start(s, r)]
            last = self.partner.get(r, -1)
            if last in row and not to_give[last]:  # keep a sender that has no unsent chunk
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
        """Start transfers between pairs that transferred before, or else one transfer of a new pair.

        A new pair is the receiver with the most left to get (ties: the most free rate), and the fastest sender. Each
        receiver thus gets senders until they use its whole rate.
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
        """Whether the sender's host has a chunk that the receiver's host lacks, and the path has enough free rate."""
        return self.rate(s, r) > 0 and self.chunk_state.candidates(s, r) > 0 and not self.would_be_late(s, r)

    def would_be_late(self, s: int, r: int) -> bool:
        """Whether a transfer takes longer than its receiver's remaining work, and a faster port could do it instead."""
        host = self.nics.host
        rate, left = self.rate(s, r), self.chunk_state.to_get[host[r]] / CHUNK_UNITS / self.host_into[host[r]]
        if self.nics.have_equal_rates or self.may_be_late or rate * left >= 1:
            return False
        chunk = self.chunk_state.choose(s, r)
        if self.chunk_state.size[chunk] / CHUNK_UNITS <= rate * left:
            return False
        if any(host[p] == host[r] and self.into[p].rate > self.into[r].rate for p in self.used):
            return True
        have = self.chunk_state.have
        return any(self.out[p].rate > self.out[s].rate and have[host[p]] >> chunk & 1 for p in self.used)

    def path(self, s: int, r: int) -> list[_Port]:
        """The ports and uplinks that a transfer uses."""
        pod = self.nics.pod
        a, b = self.nics.host[s], self.nics.host[r]
        if pod and pod[a] != pod[b]:
            return [self.out[s], self.up[pod[a]], self.down[pod[b]], self.into[r]]
        return [self.out[s], self.into[r]]

    def rate(self, s: int, r: int) -> float:
        """The rate that a transfer could reserve now, 0 if that is too little to start."""
        path = self.path(s, r)
        rate = min(port.free for port in path)
        return rate if rate >= _MIN_FREE_FRACTION * min(port.rate for port in path) else 0.0

    def start(self, s: int, r: int, may_enter_again: bool = False) -> bool:
        """Start a transfer, if a chunk and rate are available; return whether it started."""
        chunk, rate = self.chunk_state.choose(s, r, may_enter_again), self.rate(s, r)
        if chunk < 0 or rate <= 0:
            return False
        source = self.chunk_state.source.get((chunk, self.nics.host[s]), -1)
        self.chunk_state.start(chunk, self.nics.host[r])
        order: dict[int, None] = {}
        for port in self.path(s, r):
            order.update(dict.fromkeys(port.reserve(rate, s)))
        chunk_send = self.chunk_sends.add(chunk, s, r, source, list(order), self.now)
        self.flows.append(_Flow(s, r, chunk, rate, chunk_send, self.chunk_state.size[chunk] / CHUNK_UNITS))
        return True

    # Time

    def advance(self) -> None:
        """Advance the clock to the next end of a transfer."""
        self.set_speeds()
        step = min(flow.left / flow.speed for flow in self.flows)
        limit = step * (1 + _TIME_TOLERANCE)
        self.now += step
        rest = []
        for flow in self.flows:
            if flow.left / flow.speed > limit:
                flow.left -= flow.speed * step
                rest.append(flow)
                continue
            self.chunk_sends.end[flow.chunk_send] = self.now
            for port in self.path(flow.s, flow.r):
                port.release(flow.rate, flow.chunk_send, flow.s)
            self.chunk_state.land(flow.chunk, flow.r, flow.chunk_send)
        self.flows = rest

    def set_speeds(self) -> None:
        """Set the speed of each transfer. It can exceed the reserved rate, if the ports have unused rate."""
        if self.nics.have_equal_rates:  # each transfer has its ports to itself
            for flow in self.flows:
                flow.speed = flow.rate
            return
        paths = [[port.number for port in self.path(flow.s, flow.r)] for flow in self.flows]
        for flow, speed in zip(self.flows, share_ports(paths, self.capacity, self.price), strict=True):
            flow.speed = speed
