"""From chunks between ports to messages between ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from reshard.planner.multicast.host_classes import LONGEST_CHAIN
from reshard.planner.multicast.workload import Ports, Workload, rows_of
from tests.reference.chunk_scheduler import ChunkSends

#: Pieces that a rank keeps for others though it needs none of them; it gets one again where it gave it up too early.
MOST_STAGED = 2


@dataclass
class Messages:
    """Pieces of chunks on their way between ranks, with the times at which each should start and end.

    ``after`` holds the numbers of messages that must have ended: ``source`` brings the piece to the sender (-1: it
    holds it), the others keep the order at ports. ``staged`` are those whose receiver only sends it on.
    """

    piece: list[int] = field(default_factory=list)
    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    staged: set[int] = field(default_factory=set)

    def add(
        self, piece: int, sender: int, receiver: int, source: int, after: list[int], start: float, end: float
    ) -> int:
        """Note a message, not before what it comes after has ended; returns its number."""
        before = after if source < 0 else [source, *(i for i in after if i != source)]
        ready = max((self.end[i] for i in before), default=start)
        if ready > start:
            start, end = ready, ready + (end - start)
        self.piece.append(piece)
        self.sender.append(sender)
        self.receiver.append(receiver)
        self.source.append(source)
        self.after.append(before)
        self.start.append(start)
        self.end.append(end)
        return len(self.piece) - 1


class RankAssignment:
    """Chooses ranks for deals: a rank that has the piece at the sending port, one that needs it at the other.

    Pieces of a chunk follow each other. Where a port has no such rank a neighbour stages the piece; what else needs it
    on its host gets it from the rank where it landed.
    """

    def __init__(self, ports: Ports, workload: Workload, chunk_sends: ChunkSends) -> None:
        self.ports, self.workload, self.chunk_sends = ports, workload, chunk_sends
        self.host_of = [ports.host[port] if port >= 0 else -1 for port in ports.of_rank]
        self.holders = [self.by_host(ranks) for ranks in rows_of(workload.class_holders)]
        self.receivers = [self.by_host(ranks) for ranks in rows_of(workload.class_receivers)]
        self.piece_class, self.piece_bytes = workload.piece_class.tolist(), workload.piece_bytes.tolist()
        self.sent = [0] * len(ports.of_rank)  # bytes that each rank was given to send, and to receive
        self.landed = [0] * len(ports.of_rank)
        self.last_sender: dict[int, int] = {}  # at each port
        self.last_receiver: dict[int, int] = {}
        self.where: dict[tuple[int, int], dict[int, int]] = {}  # (piece, host) -> {rank: message that brought it}
        self.staged: dict[int, list[tuple[int, int]]] = {}  # by rank, (piece, host) that others get from it
        self.given_up: dict[tuple[int, int, int], int] = {}  # by (piece, host, rank), what brought it
        self.last_use: dict[int, int] = {}  # of what messages staged
        self.messages = Messages()

    def by_host(self, ranks: list[int]) -> dict[int, list[int]]:
        """Ranks by their host."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.host_of[rank], []).append(rank)
        return found

    def run(self) -> Messages:
        """All messages: first those that need no port, then deal by deal."""
        for piece, k in enumerate(self.piece_class):
            for host, ranks in self.receivers[k].items():
                if host in self.holders[k]:
                    holder = self.least(self.holders[k][host], self.sent)
                    brought = self.where[piece, host] = dict.fromkeys(self.holders[k][host], -1)
                    self.fan_out(piece, holder, ranks, brought, 0.0, 0.0)
        chunk_sends, piece_at = self.chunk_sends, self.workload.piece_at.tolist()
        last = [-1] * len(chunk_sends.chunk)  # the last message of each deal
        for chunk_send, chunk in enumerate(chunk_sends.chunk):
            pieces = range(piece_at[chunk], piece_at[chunk + 1])
            total, passed = sum(self.piece_bytes[piece] for piece in pieces), 0
            start, took = chunk_sends.start[chunk_send], chunk_sends.end[chunk_send] - chunk_sends.start[chunk_send]
            after = [last[earlier] for earlier in chunk_sends.after[chunk_send]]
            begun = start
            for piece in pieces:
                passed += self.piece_bytes[piece]
                end = start + took * (passed / total)
                last[chunk_send] = self.pass_on(piece, chunk_send, after, begun, end)
                after, begun = [last[chunk_send]], end
        return self.messages

    def least(self, ranks: list[int], load: list[int]) -> int:
        """The first of those with the least load."""
        return min(ranks, key=lambda rank: load[rank])

    def keep_or_least(self, ranks: list[int], load: list[int], last: int | None, nbytes: int) -> int:
        """The rank that was used last, unless it is a run ahead of the least loaded one.

        Ranks that take turns wait for each other at each turn, so turns are long.
        """
        least = self.least(ranks, load)
        return last if last in ranks and load[last] < load[least] + self.workload.run * nbytes else least

    def send(
        self, piece: int, sender: int, receiver: int, source: int, after: list[int], start: float, end: float
    ) -> int:
        """Note a message; returns its number."""
        self.sent[sender] += self.piece_bytes[piece]
        message = self.messages.add(piece, sender, receiver, source, after, start, end)
        if source in self.messages.staged:
            self.last_use[source] = message
        return message

    def pass_on(self, piece: int, chunk_send: int, after: list[int], start: float, end: float) -> int:
        """A piece crosses from host to host and reaches all who need it there; returns the message between hosts."""
        port = self.chunk_sends.receiver[chunk_send]
        host = self.ports.host[port]
        sender, source = self.find_sender(piece, self.chunk_sends.sender[chunk_send], start)
        destinations = self.receivers[self.piece_class[piece]][host]
        here = [rank for rank in destinations if self.ports.of_rank[rank] == port]
        ranks, nbytes = here or self.ports.ranks[port], self.piece_bytes[piece]
        receiver = self.keep_or_least(ranks, self.landed, self.last_receiver.get(port), nbytes)
        self.last_receiver[port] = receiver
        message = self.send(piece, sender, receiver, source, after, start, end)
        self.landed[receiver] += nbytes
        brought = self.where[piece, host] = {receiver: message}
        took = self.workload.inside_each + nbytes * self.workload.inside_per_byte
        is_relay = receiver not in destinations and len(destinations) > 0
        if is_relay:
            self.messages.staged.add(message)
        self.fan_out(piece, receiver, destinations, brought, end, took)
        if is_relay:
            self.stage(piece, host, receiver)
        return message

    def stage(self, piece: int, host: int, rank: int) -> None:
        """Note that a rank keeps a piece for others; what it has kept longest makes room."""
        kept = self.staged.setdefault(rank, [])
        kept.append((piece, host))
        if len(kept) > MOST_STAGED:
            piece, host = kept.pop(0)
            self.given_up[piece, host, rank] = self.where[piece, host].pop(rank)

    def fan_out(
        self, piece: int, root: int, ranks: list[int], brought: dict[int, int], when: float, took: float
    ) -> None:
        """Pass a piece on inside a host, along a chain or, to many, a tree; those behind the root come first."""
        later, before = [rank for rank in ranks if rank > root], [rank for rank in ranks if rank < root]
        nodes = [root, *later, *before]
        children = 1 if len(nodes) <= LONGEST_CHAIN else 2
        free_at = [when]  # when each can send next
        is_relay = brought[root] >= 0 and root not in ranks  # it must give its buffer back before the next lands
        for i, rank in enumerate(nodes[1:]):
            parent = i // children
            start = free_at[parent]
            free_at[parent] = end = start if is_relay and not parent else start + took
            free_at.append(end)
            brought[rank] = self.send(piece, nodes[parent], rank, brought[nodes[parent]], [], start, end)

    def find_sender(self, piece: int, port: int, when: float) -> tuple[int, int]:
        """A rank at a port that has a piece, and the message that brought it; staged there if need be."""
        host = self.ports.host[port]
        brought = self.where.get((piece, host))
        if brought is None:
            brought = dict.fromkeys(self.holders[self.piece_class[piece]][host], -1)
            self.where[piece, host] = brought
        ranks = [rank for rank in brought if brought[rank] < 0]  # who holds it need not wait for it
        if not ranks:  # where it landed it is first
            ranks = list(brought)[: 1 if self.workload.run > 1 else None]
        for choice in (ranks, list(brought)):
            here = [rank for rank in choice if self.ports.of_rank[rank] == port]
            if here:
                rank = self.keep_or_least(here, self.sent, self.last_sender.get(port), self.piece_bytes[piece])
                self.last_sender[port] = rank
                return rank, brought[rank]
        near = self.least(ranks, self.sent)
        rank = self.least(self.ports.ranks[port], self.landed)
        earlier = self.last_use.get(self.given_up.get((piece, host, rank), -1))  # it must be through with that one
        brought[rank] = message = self.send(
            piece, near, rank, brought[near], [] if earlier is None else [earlier], when, when
        )
        self.messages.staged.add(message)
        self.stage(piece, host, rank)
        return rank, message
