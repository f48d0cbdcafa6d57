"""Divides a plan into rounds, for transports that match messages by order only, such as NCCL.

A round is a set of messages. Each rank posts its sends and receives of a round as one group (``ncclGroupStart`` to
``ncclGroupEnd``), in the plan's order, and its groups in round order.

Why it cannot deadlock. A message is in the same round at both ends, and a rank starts a round when it has finished all
earlier ones. Take the first round that some rank has not finished. Each rank of this round has finished all earlier
rounds in which it takes part. So it posts its messages of this round without waiting for anything else. Both ends of
every message are then posted, and the round finishes. A forwarded message arrives in an earlier round than it is sent.
Messages between two ranks match because both ranks post them in the same order: by round, then in the plan's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.plan import MessageTable, Plan, tabulate_messages
from reshard.runtime.program import RankProgram, Recv, Send
from reshard.runtime.rounds.large_groups import (
    UNBUFFERED_ROUND_BYTES,
    LargeRounds,
    find_broadcasts,
    find_unbuffered,
    join_messages,
)
from reshard.runtime.rounds.steps import aligned
from reshard.sharding import find_overlaps

#: Size limit of a round per rank and direction, in multiples of the largest message: between hosts, and inside a host,
#: where links are faster.
ACROSS, INSIDE = 1, 4
#: Least duration of a round at the rate of its links. A shorter round costs more in launches than it transfers.
ROUND_SECONDS = 2e-4


@dataclass(frozen=True)
class Broadcast:
    """Data of one rank for all others.

    Attributes:
        root: the rank that holds it.
        parts: one of this rank's sends of each part, or its receive of it; adjacent in memory.
    """

    root: int
    parts: tuple[Recv | Send, ...]


@dataclass(frozen=True)
class Round:
    """The messages that one rank posts as one group.

    Attributes:
        recvs, sends: messages, in the plan's order.
        broadcasts: broadcasts in the same order on all ranks.
        joined: messages that are sent or received as one, after those of ``recvs`` and ``sends``; in the same order at
            both ends.
    """

    recvs: tuple[Recv, ...]
    sends: tuple[Send, ...]
    broadcasts: tuple[Broadcast, ...] = ()
    joined: tuple[tuple[Recv | Send, ...], ...] = ()

    def pairs(self, rank: int) -> set[tuple[int, int]]:
        """``(sender, receiver)`` of each message of this rank, without broadcasts."""
        ops = [*self.recvs, *self.sends, *(ops[0] for ops in self.joined)]
        return {(op.sender, rank) if isinstance(op, Recv) else (rank, op.receiver) for op in ops}


def find_rounds(plan: Plan) -> dict[int, int]:
    """The round of each message, from 0, by message id. Local copies have none.

    A message goes into the first round that

    - comes after the round that brings its data,
    - comes no earlier than the rounds of the messages that the plan orders before it,
    - has room for it at both its ranks, and
    - if its receiver is a relay, leaves the relay room to store it.
    """
    return _Rounds(plan).assign(frozenset())


def find_large_rounds(plan: Plan) -> LargeRounds:
    """The rounds for a transport that broadcasts, and moves messages that need no buffer in large groups.

    A round holds such messages of at most :data:`~.large_groups.UNBUFFERED_ROUND_BYTES` in each direction of a rank, in
    addition to what :func:`find_rounds` allows.
    """
    rounds = _Rounds(plan)
    if not any(rounds.relays.is_relay) and not len(rounds.messages.gathered):
        room = rounds.room[False] + rounds.room[True]
        broadcasts = find_broadcasts(plan, rounds.messages, np.array(rounds.moves, dtype=bool), room)
        if broadcasts is not None:
            return broadcasts
    unbuffered = np.flatnonzero(find_unbuffered(plan, rounds.messages) & np.array(rounds.moves, dtype=bool))
    ids = rounds.messages.id[unbuffered].tolist()
    round_of = rounds.assign(frozenset(unbuffered.tolist()))
    at = np.array([round_of[ident] for ident in ids], dtype=np.int64)
    return LargeRounds(round_of, frozenset(ids), join_messages(plan, rounds.messages, unbuffered, at))


class _Rounds:
    """The sizes, hosts and relays of a plan, from which its rounds follow."""

    def __init__(self, plan: Plan) -> None:
        messages = tabulate_messages(plan)
        host = plan.topology.host_array
        inside = host[messages.sender] == host[messages.receiver]
        moves = messages.sender != messages.receiver
        largest = {kind: int(messages.nbytes[moves & (inside == kind)].max(initial=0)) for kind in (False, True)}
        topology = plan.topology
        nic = min(
            min(port.egress_bytes_per_second, port.ingress_bytes_per_second)
            for host in topology.hosts
            for port in host.nics
        )
        by_time = {
            False: int(nic * ROUND_SECONDS),
            True: int((topology.inside_bytes_per_second or nic) * ROUND_SECONDS),
        }
        room = {False: max(ACROSS * largest[False], min(by_time[False], plan.staging_bytes // 8))}
        # Sends and receives, across and inside hosts, get at most half of the staging bytes; relays get the rest.
        inside_room = max(INSIDE * largest[True], by_time[True])
        room[True] = max(largest[True], min(inside_room, plan.staging_bytes // 4 - room[False]))
        self.messages, self.room = messages, room
        self._inside, self.moves = inside.tolist(), moves.tolist()
        self.relays = _Relays(messages, _find_relays(plan, messages), plan.staging_bytes // 2)

    def assign(self, unbuffered: frozenset[int]) -> dict[int, int]:
        """The round of each message; ``unbuffered`` has the rows that need no buffer."""
        return _assign_rounds(self.messages, self._inside, self.moves, self.room, self.relays, unbuffered)


def _find_relays(plan: Plan, messages: MessageTable) -> np.ndarray:
    """``(messages,)`` bool: whether the receiver forwards the message and needs no element of it."""
    relays = np.zeros(len(messages), dtype=bool)
    relays[messages.brings[1]] = True
    transfers = plan.transfers
    box = transfers.first_box[messages.transfer]
    tensor = transfers.box_tensor[box]
    for number, spec in enumerate(plan.tensors):
        ndim = spec.ndim
        for rank in np.unique(messages.receiver[relays & (tensor == number)]).tolist():
            if rank not in spec.dst.ranks:
                continue
            indices = np.flatnonzero(relays & (tensor == number) & (messages.receiver == rank))
            start, stop = transfers.box_start[box[indices], :ndim], transfers.box_stop[box[indices], :ndim]
            pieces = spec.dst_tiles.pieces_of(rank)[:2]
            relays[indices[np.unique(find_overlaps(start, stop, *pieces)[0])]] = False
    return relays


class _Relays:
    """Memory of ranks for relayed messages, each kept from the round that brings it to the last that forwards it.

    Args:
        room: bytes of each rank.
    """

    def __init__(self, messages: MessageTable, is_relay: np.ndarray, room: int) -> None:
        self.is_relay, self._room = is_relay.tolist(), room
        self._last_use: dict[int, int] = {}  # row -> the last row that forwards it
        for index, source in zip(*(rows.tolist() for rows in messages.brings), strict=True):
            if self.is_relay[source]:
                self._last_use[source] = max(index, self._last_use.get(source, 0))
        self._kept: dict[int, list[list[int]]] = {}  # rank -> [row, bytes, last round so far]

    def first_round(self, index: int, rank: int, nbytes: int) -> int:
        """The first round in which a rank has room for a message."""
        kept = self._kept.get(rank, [])
        in_use = [item for item in kept if self._last_use[item[0]] >= index]
        used = sorted((item for item in kept if self._last_use[item[0]] < index), key=lambda one: -one[2])
        free = self._room - nbytes - sum(item[1] for item in in_use)
        for i, (_, size, last) in enumerate(used):
            free -= size
            if free < 0:  # messages with an earlier last round never matter again
                self._kept[rank] = in_use + used[: i + 1]
                return last + 1
        return 0

    def keep(self, index: int, rank: int, nbytes: int, at: int) -> None:
        """Record that a rank receives a message in round ``at``."""
        self._kept.setdefault(rank, []).append([index, nbytes, at])

    def use(self, source: int, rank: int, at: int) -> None:
        """Record that a rank forwards a message in round ``at``."""
        for item in self._kept.get(rank, ()):
            if item[0] == source:
                item[2] = max(item[2], at)


def _assign_rounds(
    messages: MessageTable, inside: list[bool], moves: list[bool], room: Mapping[bool, int], relays: _Relays,
    unbuffered: frozenset[int],
) -> dict[int, int]:  # fmt: skip
    round_of: dict[int, int] = {}
    rounds = [-1] * len(messages)
    used: dict[tuple[int, bool | None, bool], list[int]] = {}  # (rank, inside or None, is_send) -> bytes of each round
    first_free: dict[tuple[int, bool | None, bool], int] = {}  # the first round that is not full
    columns = (messages.id, messages.sender, messages.receiver, messages.nbytes)
    after_offsets, after = messages.after_offsets.tolist(), messages.after.tolist()
    sources: dict[int, list[int]] = {}
    for later, source in zip(*(rows.tolist() for rows in messages.brings), strict=True):
        sources.setdefault(later, []).append(source)
    for index, (ident, sender, receiver, nbytes) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        if not moves[index]:
            continue
        earliest = max((rounds[source] + 1 for source in sources.get(index, ())), default=0)
        for before in after[after_offsets[index] : after_offsets[index + 1]]:
            earliest = max(earliest, rounds[before])
        if relays.is_relay[index]:
            earliest = max(earliest, relays.first_round(index, receiver, nbytes))
        kind: bool | None = inside[index]
        limit = room[inside[index]]
        if index in unbuffered:
            nbytes = aligned(nbytes)
            kind, limit = None, max(UNBUFFERED_ROUND_BYTES, nbytes)
        ends = [(sender, kind, True), (receiver, kind, False)]
        at = max(earliest, *(first_free.get(end, 0) for end in ends))
        while any(_bytes_used(used, end, at) + nbytes > limit for end in ends):
            at += 1
        rounds[index] = round_of[ident] = at
        if relays.is_relay[index]:
            relays.keep(index, receiver, nbytes, at)
        for source in sources.get(index, ()):
            if relays.is_relay[source]:
                relays.use(source, sender, at)
        for end in ends:
            loads = used.setdefault(end, [])
            loads += [0] * (at + 1 - len(loads))
            loads[at] += nbytes
            free = first_free.get(end, 0)
            while free < len(loads) and loads[free] >= limit:
                free += 1
            first_free[end] = free
    return round_of


def _bytes_used(
    used: Mapping[tuple[int, bool | None, bool], list[int]], end: tuple[int, bool | None, bool], at: int
) -> int:
    loads = used.get(end, ())
    return loads[at] if at < len(loads) else 0


def rounds_of(program: RankProgram, rounds: Mapping[int, int] | LargeRounds) -> tuple[Round, ...]:
    """The rounds of one rank, in order. Rounds in which it has no message are omitted."""
    large = rounds if isinstance(rounds, LargeRounds) else LargeRounds(rounds, frozenset())
    sends = sorted((*program.sends_across, *program.sends_inside), key=lambda send: send.id)
    if large.broadcast_of:
        return _rounds_of_broadcasts(program, sends, large)
    recvs_in: dict[int, list[Recv]] = {}
    sends_in: dict[int, list[Send]] = {}
    joined_in: dict[int, dict[int, list[Recv | Send]]] = {}
    for recv in program.recvs:
        if recv.id in large.joined:
            joined_in.setdefault(large.round_of[recv.id], {}).setdefault(large.joined[recv.id], []).append(recv)
        else:
            recvs_in.setdefault(large.round_of[recv.id], []).append(recv)
    for send in sends:
        if send.id in large.joined:
            joined_in.setdefault(large.round_of[send.id], {}).setdefault(large.joined[send.id], []).append(send)
        else:
            sends_in.setdefault(large.round_of[send.id], []).append(send)
    return tuple(
        Round(
            tuple(recvs_in.get(index, ())),
            tuple(sends_in.get(index, ())),
            joined=tuple(tuple(ops) for _, ops in sorted(joined_in.get(index, {}).items())),
        )
        for index in sorted({*recvs_in, *sends_in, *joined_in})
    )


def _rounds_of_broadcasts(program: RankProgram, sends: Sequence[Send], large: LargeRounds) -> tuple[Round, ...]:
    parts: dict[int, dict[tuple[int, int], Recv | Send]] = {}  # round -> (number, part) of a broadcast -> operation
    ops_of_rank: list[Recv | Send] = [*program.recvs, *(send for send in sends if send.forwards is None)]
    for op in ops_of_rank:
        parts.setdefault(large.round_of[op.id], {}).setdefault(large.broadcast_of[op.id], op)
    rounds = []
    for index in sorted(parts):
        ops: dict[int, list[Recv | Send]] = {}
        for number, part in sorted(parts[index]):
            ops.setdefault(number, []).append(parts[index][number, part])
        rounds.append(Round((), (), tuple(Broadcast(large.roots[number], tuple(ops[number])) for number in ops)))
    return tuple(rounds)
