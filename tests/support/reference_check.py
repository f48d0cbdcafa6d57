"""A reference implementation of ``check_plan`` that replays a plan message by message; slow for many messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.errors import PlanError
from reshard.plan import Message, Plan, check_ranks, expand_messages, message_nbytes, num_recv_slots
from reshard.sharding.layout import format_box


class _Held:
    """The boxes of one tensor on one rank, in a growing table, each with the id of the message that delivered it."""

    def __init__(self, ndim: int) -> None:
        self._start = np.zeros((4, ndim), dtype=np.int64)
        self._stop = np.zeros((4, ndim), dtype=np.int64)
        self._ids = np.zeros(4, dtype=np.int64)
        self._count = 0

    @classmethod
    def of(cls, start: np.ndarray, stop: np.ndarray) -> _Held:
        """A table of the boxes of a shard."""
        held = cls(start.shape[1])
        held._start, held._stop, held._count = start, stop, len(start)
        held._ids = np.full(len(start), _SOURCE, dtype=np.int64)
        return held

    @property
    def numel(self) -> int:
        """Elements of all boxes."""
        sizes = self._stop[: self._count] - self._start[: self._count]
        return int(sizes.prod(axis=1, dtype=np.int64).sum())

    def add(self, start: Sequence[int], stop: Sequence[int], message: int) -> None:
        if self._count == len(self._ids):
            self._start = np.concatenate([self._start, np.zeros_like(self._start)])
            self._stop = np.concatenate([self._stop, np.zeros_like(self._stop)])
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._start[self._count], self._stop[self._count], self._ids[self._count] = start, stop, message
        self._count += 1

    def remove(self, message: int) -> None:
        """Remove the boxes that a message delivered."""
        kept = self._ids[: self._count] != message
        for name in ("_start", "_stop", "_ids"):
            table = getattr(self, name)
            rows = table[: self._count][kept]
            table[: len(rows)] = rows
        self._count = int(kept.sum())

    def overlap(self, start: Sequence[int], stop: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """For each box that overlaps the given one: number of shared elements, and message id."""
        starts, stops = self._start[: self._count], self._stop[: self._count]
        size = np.minimum(stops, np.array(stop, dtype=np.int64)) - np.maximum(starts, np.array(start, dtype=np.int64))
        shared = np.maximum(size, 0).prod(axis=1, dtype=np.int64)
        hit = shared > 0
        return shared[hit], self._ids[: self._count][hit]


_SOURCE = -1


def check_plan(plan: Plan) -> None:
    """Replay a plan in its order and check that it is valid.

    Every rank must receive each needed element exactly once. The sender of a message must have all of it by then: from
    its source shard, or through messages in ``after``. Regions must be inside their tensors. Bytes that a rank stages
    for others must not exceed ``staging_bytes``; they count from their arrival to the last message that relays them.
    A rank may receive staged regions again for later messages.

    Raises:
        PlanError: the plan breaks one of these rules.
    """
    check_ranks(plan)
    holds: dict[tuple[int, int], _Held] = {}
    needs: dict[tuple[int, int], _Held] = {}
    received: dict[tuple[int, int], _Held] = {}
    for tensor, spec in enumerate(plan.tensors):
        for rank in spec.src.ranks:
            holds[rank, tensor] = _Held.of(*spec.src_tiles.pieces_of(rank)[:2])
        for rank in spec.dst.ranks:
            needs[rank, tensor] = _Held.of(*spec.dst_tiles.pieces_of(rank)[:2])
    num_received: dict[tuple[int, int], int] = {}
    staged: dict[int, tuple[int, int]] = {}  # message id -> (receiver, bytes not needed there)
    last_use: dict[int, int] = {}
    messages = list(expand_messages(plan))
    before: dict[int, Message] = {}
    for message in messages:
        for i, (tensor, start, stop) in enumerate(message.boxes):
            spec = plan.tensors[tensor]
            where = f"message {message.id + i}: {format_box(list(zip(start, stop, strict=True)))}"
            numel = 1
            for lo, hi, size in zip(start, stop, spec.shape, strict=True):
                if not 0 <= lo < hi <= size:
                    raise PlanError(f"{where} is empty or outside shape {list(spec.shape)}")
                numel *= hi - lo
            known = None if message.source is None else message.source + i
            if message.gathered:
                known = message.gathered[i]
            _check_sender(message, i, where, numel, holds, received, last_use, known, before)
            key = (message.receiver, tensor)
            wanted = 0
            if key in needs:
                pieces = needs[key].overlap(start, stop)[0]
                wanted = int(pieces.sum())
                if len(pieces) > 1 or 0 < wanted < numel:
                    raise PlanError(
                        f"{where} is not inside one tile that rank {message.receiver} needs: it overlaps "
                        f"{len(pieces)} pieces in {wanted} of its {numel} elements"
                    )
            earlier = received.setdefault(key, _Held(spec.ndim))
            shared, ids = earlier.overlap(start, stop)
            again = int(shared.sum())
            if again and not wanted and again == numel and len(ids) == 1 and int(ids[0]) in staged:
                earlier.remove(int(ids[0]))  # staged again: the new copy replaces the old one
            elif again:
                raise PlanError(f"{where} delivers {again} elements to rank {message.receiver} a second time")
            if not wanted and message.sender == message.receiver:
                raise PlanError(f"{where} is a copy on rank {message.receiver}, which does not need it")
            earlier.add(start, stop, message.id + i)
            num_received[key] = num_received.get(key, 0) + wanted
            if wanted < numel:
                staged[message.id + i] = (message.receiver, (numel - wanted) * spec.itemsize)
        before[message.id] = message
    for (rank, tensor), region in needs.items():
        spec = plan.tensors[tensor]
        count = num_received.get((rank, tensor), 0)
        if count != region.numel:
            name = f" of {spec.name}" if spec.name is not None else ""
            raise PlanError(f"rank {rank} needs {region.numel} elements{name}, but receives {count}")
    _check_staging(plan, messages, staged, last_use)


def _check_sender(
    message: Message,
    i: int,
    where: str,
    numel: int,
    holds: dict[tuple[int, int], _Held],
    received: dict[tuple[int, int], _Held],
    last_use: dict[int, int],
    brought_by: int | None,
    before: dict[int, Message],
) -> None:
    tensor, start, stop = message.boxes[i]
    key = (message.sender, tensor)
    if brought_by is None and key in holds:
        pieces = holds[key].overlap(start, stop)[0]
        if int(pieces.sum()) == numel:
            if len(pieces) > 1:
                raise PlanError(f"{where} is not inside one tile that rank {message.sender} holds")
            return
    shared, ids = received[key].overlap(start, stop) if key in received else (np.zeros(0), np.zeros(0, dtype=np.int64))
    if int(shared.sum()) != numel:
        raise PlanError(
            f"{where}: rank {message.sender} sends {numel} elements, but has only {int(shared.sum())} at that point"
        )
    known = {brought_by}
    missing = sorted(set(ids.tolist()) - known)
    if missing:
        raise PlanError(
            f"{where}: rank {message.sender} receives it with message {missing[0]}, which is not in `after`"
        )
    if len(ids) > 1:
        raise PlanError(f"{where}: rank {message.sender} receives it in {len(ids)} messages, but relays only one")
    source = None if message.source is None else before.get(message.source)
    if message.gathered and brought_by is not None:
        gathered = before[max(ident for ident in before if ident <= brought_by)]
        assert gathered.boxes[brought_by - gathered.id] == message.boxes[i]
        if gathered.sender == gathered.receiver:
            raise PlanError(f"{where}: message {gathered.id} is a copy, which cannot be relayed")
    if source is not None and source.sender == source.receiver:
        raise PlanError(f"{where}: message {source.id} is a copy on rank {message.sender}, which cannot be relayed")
    if source is not None and source.boxes != message.boxes:
        raise PlanError(f"{where}: rank {message.sender} relays other boxes than it receives in message {source.id}")
    for ident in ids.tolist():
        last_use[ident] = message.id + i


def _check_staging(
    plan: Plan, messages: list[Message], staged: dict[int, tuple[int, int]], last_use: dict[int, int]
) -> None:
    """Replay the staging buffers: each received message needs one, and a relay keeps it until its last use."""
    largest: dict[int, int] = {}
    for message in messages:
        if message.sender != message.receiver:
            largest[message.receiver] = max(largest.get(message.receiver, 0), message_nbytes(plan, message))
    held_bytes: dict[int, int] = {}
    held_messages: dict[int, int] = {}
    release: dict[int, list[tuple[int, int]]] = {}
    for message in messages:
        rank = message.receiver
        if message.sender != rank:
            slots = num_recv_slots(plan.staging_bytes, largest[rank])
            if held_messages.get(rank, 0) >= slots:
                raise PlanError(
                    f"message {message.id}: rank {rank} receives it while it stages {held_messages[rank]} messages "
                    f"for others, but it can stage at most {slots} of {largest[rank]} bytes"
                )
        relayed = [message.id + i for i in range(len(message.boxes)) if message.id + i in staged]
        for ident in relayed:
            if ident not in last_use:
                raise PlanError(
                    f"message {ident} delivers {staged[ident][1]} bytes that rank {rank} neither needs nor relays"
                )
            held_bytes[rank] = held_bytes.get(rank, 0) + staged[ident][1]
            if held_bytes[rank] > plan.staging_bytes:
                raise PlanError(
                    f"message {ident}: rank {rank} would stage {held_bytes[rank]} bytes, "
                    f"but staging_bytes is {plan.staging_bytes}"
                )
        if relayed:
            held_messages[rank] = held_messages.get(rank, 0) + 1
            last = max(last_use[ident] for ident in relayed)
            release.setdefault(last, []).append((rank, sum(staged[ident][1] for ident in relayed)))
        for i in range(len(message.boxes)):
            for holder, nbytes in release.pop(message.id + i, ()):
                held_bytes[holder] -= nbytes
                held_messages[holder] -= 1
