"""The reference implementation of ``native/multicast/rank_assignment.h``: sends between NICs become messages between ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from reshard.planner.multicast.chunk_workload import ChunkWorkload, Nics, rows_of
from reshard.planner.multicast.host_classes import LONGEST_CHAIN, MAX_CHILDREN
from tests.reference.chunk_scheduler import ChunkSends

#: Limit on pieces that a rank stages for other ranks. A rank that dropped a piece too early receives it again.
MAX_STAGED = 2


@dataclass
class Messages:
    """Messages between ranks, each with one piece and its planned start and end.

    ``source`` is the message that brought the piece to the sender, or -1 if the sender is a holder. ``after`` are the
    messages that must end before this one starts: ``source``, and others that keep the order at each port. ``staged``
    contains the messages whose receiver only forwards the piece.
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
        """Add a message and return its index; delay it until the messages it depends on have ended."""
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
    """Chooses the sending and the receiving rank of each piece of each chunk send.

    The sender is a rank at the sending NIC that has the piece; the receiver is a rank at the receiving NIC that needs
    it. If a NIC has no such rank, another rank at the NIC stages the piece. Other ranks of the receiving host get the
    piece from the receiver. The pieces of a chunk are sent one after another.
    """

    def __init__(self, nics: Nics, workload: ChunkWorkload, chunk_sends: ChunkSends) -> None:
        self.nics, self.workload, self.chunk_sends = nics, workload, chunk_sends
        self.host_of = [nics.host[nic] if nic >= 0 else -1 for nic in nics.of_rank]
        self.holders = [self.by_host(ranks) for ranks in rows_of(workload.class_holders)]
        self.receivers = [self.by_host(ranks) for ranks in rows_of(workload.class_receivers)]
        self.piece_class, self.piece_bytes = workload.piece_class.tolist(), workload.piece_bytes.tolist()
        self.sent = [0] * len(nics.of_rank)  # bytes sent by each rank
        self.received = [0] * len(nics.of_rank)  # bytes received by each rank from other hosts
        self.last_sender: dict[int, int] = {}  # by NIC
        self.last_receiver: dict[int, int] = {}  # by NIC
        self.where: dict[
            tuple[int, int], dict[int, int]
        ] = {}  # (piece, host) -> {rank: message that brought it, or -1}
        self.staged: dict[int, list[tuple[int, int]]] = {}  # by rank, (piece, host) that it stages, oldest first
        self.dropped: dict[tuple[int, int, int], int] = {}  # (piece, host, rank) -> message that brought it
        self.last_use: dict[int, int] = {}  # staged message -> last message that forwards it
        self.messages = Messages()

    def by_host(self, ranks: list[int]) -> dict[int, list[int]]:
        """Ranks grouped by host."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.host_of[rank], []).append(rank)
        return found

    def run(self) -> Messages:
        """All messages: first those on hosts of holders, then one chunk send after another."""
        for piece, k in enumerate(self.piece_class):
            for host, ranks in self.receivers[k].items():
                if host in self.holders[k]:
                    holder = self.least(self.holders[k][host], self.sent)
                    brought = self.where[piece, host] = dict.fromkeys(self.holders[k][host], -1)
                    self.fan_out(piece, holder, ranks, brought, 0.0, 0.0)
        chunk_sends, piece_offsets = self.chunk_sends, self.workload.piece_offsets.tolist()
        last = [-1] * len(chunk_sends.chunk)  # last message of each send
        for chunk_send, chunk in enumerate(chunk_sends.chunk):
            pieces = range(piece_offsets[chunk], piece_offsets[chunk + 1])
            total, sent = sum(self.piece_bytes[piece] for piece in pieces), 0
            start, duration = chunk_sends.start[chunk_send], chunk_sends.end[chunk_send] - chunk_sends.start[chunk_send]
            after = [last[earlier] for earlier in chunk_sends.after[chunk_send]]
            begun = start
            for piece in pieces:
                sent += self.piece_bytes[piece]
                end = start + duration * (sent / total)
                last[chunk_send] = self.pass_on(piece, chunk_send, after, begun, end)
                after, begun = [last[chunk_send]], end
        return self.messages

    def least(self, ranks: list[int], load: list[int]) -> int:
        """The first rank with the least load."""
        return min(ranks, key=lambda rank: load[rank])

    def keep_or_least(self, ranks: list[int], load: list[int], last: int | None, nbytes: int) -> int:
        """The last rank, unless its load is ``workload.max_lead`` pieces above the least load; then the least loaded rank.

        Ranks that take turns wait for each other at each turn, so few turns are best.
        """
        least = self.least(ranks, load)
        return last if last in ranks and load[last] < load[least] + self.workload.max_lead * nbytes else least

    def send(
        self, piece: int, sender: int, receiver: int, source: int, after: list[int], start: float, end: float
    ) -> int:
        """Add a message and return its index."""
        self.sent[sender] += self.piece_bytes[piece]
        message = self.messages.add(piece, sender, receiver, source, after, start, end)
        if source in self.messages.staged:
            self.last_use[source] = message
        return message

    def pass_on(self, piece: int, chunk_send: int, after: list[int], start: float, end: float) -> int:
        """Send a piece to another host and all its receivers there; return the message between hosts."""
        nic = self.chunk_sends.receiver[chunk_send]
        host = self.nics.host[nic]
        sender, source = self.find_sender(piece, self.chunk_sends.sender[chunk_send], start)
        destinations = self.receivers[self.piece_class[piece]][host]
        here = [rank for rank in destinations if self.nics.of_rank[rank] == nic]
        ranks, nbytes = here or self.nics.ranks[nic], self.piece_bytes[piece]
        receiver = self.keep_or_least(ranks, self.received, self.last_receiver.get(nic), nbytes)
        self.last_receiver[nic] = receiver
        message = self.send(piece, sender, receiver, source, after, start, end)
        self.received[receiver] += nbytes
        brought = self.where[piece, host] = {receiver: message}
        duration = self.workload.inside_each + nbytes * self.workload.inside_per_byte
        is_relay = receiver not in destinations and len(destinations) > 0
        if is_relay:
            self.messages.staged.add(message)
        self.fan_out(piece, receiver, destinations, brought, end, duration)
        if is_relay:
            self.stage(piece, host, receiver)
        return message

    def stage(self, piece: int, host: int, rank: int) -> None:
        """Record that a rank stages a piece for other ranks; drop its oldest staged piece if there are too many."""
        kept = self.staged.setdefault(rank, [])
        kept.append((piece, host))
        if len(kept) > MAX_STAGED:
            piece, host = kept.pop(0)
            self.dropped[piece, host, rank] = self.where[piece, host].pop(rank)

    def fan_out(
        self, piece: int, root: int, ranks: list[int], brought: dict[int, int], when: float, duration: float
    ) -> None:
        """Forward a piece inside a host along a chain, or a binary tree for many ranks, in cyclic order from the root."""
        later, before = [rank for rank in ranks if rank > root], [rank for rank in ranks if rank < root]
        nodes = [root, *later, *before]
        children = 1 if len(nodes) <= LONGEST_CHAIN else MAX_CHILDREN
        free_at = [when]  # earliest next send of each node
        is_relay = brought[root] >= 0 and root not in ranks  # it must free its buffer before the next arrival
        for i, rank in enumerate(nodes[1:]):
            parent = i // children
            start = free_at[parent]
            free_at[parent] = end = start if is_relay and not parent else start + duration
            free_at.append(end)
            brought[rank] = self.send(piece, nodes[parent], rank, brought[nodes[parent]], [], start, end)

    def find_sender(self, piece: int, nic: int, when: float) -> tuple[int, int]:
        """A rank at a NIC that has a piece, and the message that brought it; stages the piece there if necessary."""
        host = self.nics.host[nic]
        brought = self.where.get((piece, host))
        if brought is None:
            brought = dict.fromkeys(self.holders[self.piece_class[piece]][host], -1)
            self.where[piece, host] = brought
        ranks = [rank for rank in brought if brought[rank] < 0]  # a holder need not wait
        if not ranks:  # the first entry is the rank that received it from another host
            ranks = list(brought)[: 1 if self.workload.max_lead > 1 else None]
        for choice in (ranks, list(brought)):
            here = [rank for rank in choice if self.nics.of_rank[rank] == nic]
            if here:
                rank = self.keep_or_least(here, self.sent, self.last_sender.get(nic), self.piece_bytes[piece])
                self.last_sender[nic] = rank
                return rank, brought[rank]
        source_rank = self.least(ranks, self.sent)
        rank = self.least(self.nics.ranks[nic], self.received)
        earlier = self.last_use.get(
            self.dropped.get((piece, host, rank), -1)
        )  # wait for the last use of the dropped copy
        brought[rank] = message = self.send(
            piece, source_rank, rank, brought[source_rank], [] if earlier is None else [earlier], when, when
        )
        self.messages.staged.add(message)
        self.stage(piece, host, rank)
        return rank, message
