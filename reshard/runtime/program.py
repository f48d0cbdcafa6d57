"""One rank's program: what it copies, receives and sends, and where each box lies in its local arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from reshard.errors import PlanError
from reshard.plan import (
    Message,
    Plan,
    box_nbytes,
    check_ranks,
    expand_messages,
    find_waits,
    is_sound,
    name_box,
    recvs_ahead,
)
from reshard.sharding import TensorSpec, Tiles, format_box

Slices = tuple[slice, ...]
#: A box of at least this many bytes travels in a separate buffer. If it is contiguous, it then needs no packing. Below
#: it, packing at both ends takes less time than another buffer.
LARGE_BOX_BYTES = 2**18


@dataclass(frozen=True)
class LocalBox:
    """A box of tensor number ``tensor``, as slices of the rank's source and destination arrays.

    A side is None if the rank's array there does not contain the box.
    """

    tensor: int
    src: Slices | None
    dst: Slices | None


@dataclass(frozen=True)
class LocalCopy:
    """A box that a rank copies from its own source array to its own destination array."""

    id: int
    box: LocalBox


@dataclass(frozen=True)
class BoxRange:
    """Consecutive boxes of a message that travel in one buffer: a large box, or small boxes together.

    Attributes:
        boxes: the range of boxes.
        bytes: their range of bytes in the message.
    """

    boxes: slice
    bytes: slice


@dataclass(frozen=True)
class Gathered:
    """Where a box of a gathered message comes from.

    Attributes:
        recv: index of the receive that brings it.
        bytes: its range of bytes in that message.
        is_staged: whether the rank only stages it. Otherwise it is in the rank's destination array.
    """

    recv: int
    bytes: slice
    is_staged: bool


#: A finished message: ``(message id, True)`` at its sender, ``(message id, False)`` at its receiver.
Event = tuple[int, bool]


@dataclass(frozen=True)
class Recv:
    """One received message.

    Attributes:
        parts: its buffers, the same at both ends.
        num_forwards: sends that forward it from its staging slot.
        ahead: it is posted only while fewer receives than this are under way.
        waits: events that must happen before it is posted.
    """

    id: int
    sender: int
    boxes: tuple[LocalBox, ...]
    parts: tuple[BoxRange, ...]
    num_forwards: int
    ahead: int
    waits: tuple[Event, ...] = ()

    @property
    def is_relay(self) -> bool:
        """True if the rank only forwards the message and needs no element of it."""
        return self.boxes[0].dst is None

    @property
    def nbytes(self) -> int:
        """Bytes of all boxes."""
        return self.parts[-1].bytes.stop


@dataclass(frozen=True)
class Send:
    """One sent message.

    Attributes:
        parts: its buffers, the same at both ends.
        forwards: index of the receive that brings the data; None if the rank holds it in its source array, or gathers
            it.
        window: it is posted only while fewer sends of its queue than this are under way.
        waits: events that must happen before it is posted.
        gathers: of a gathered message, where each box comes from; None for a box in the rank's source array.
    """

    id: int
    receiver: int
    boxes: tuple[LocalBox, ...]
    parts: tuple[BoxRange, ...]
    forwards: int | None
    window: int
    waits: tuple[Event, ...] = ()
    gathers: tuple[Gathered | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all boxes."""
        return self.parts[-1].bytes.stop

    @property
    def sources(self) -> tuple[int, ...]:
        """Indices of the receives that bring data, in the order of the boxes; empty if the rank holds all data."""
        if self.forwards is not None:
            return (self.forwards,)
        return tuple(source.recv for source in self.gathers if source is not None)

    @cached_property
    def last_source(self) -> int:
        """Index of the last receive that brings some of the data; -1 if the rank holds all of it."""
        return max(self.sources, default=-1)


@dataclass(frozen=True)
class RankProgram:
    """All operations of one rank, each list in the plan's total order.

    Attributes:
        sends_across, sends_inside: sends to other hosts and sends inside the host; two queues with separate windows.
        src_shapes, dst_shapes: shape of each tensor's local array; None where the rank has none. Arrays of a block
            codec's elements are uint8 and have one dim more than their tensor: the bytes of an element.
        awaited: events of other ranks that this rank waits for, each with the rank that sends the notification.
        notify: maps each event of this rank to the ranks to notify. Notifications carry no id, so both ends use event
            order.
    """

    rank: int
    copies: tuple[LocalCopy, ...]
    recvs: tuple[Recv, ...]
    sends_across: tuple[Send, ...]
    sends_inside: tuple[Send, ...]
    src_shapes: tuple[tuple[int, ...] | None, ...] = field(default=())
    dst_shapes: tuple[tuple[int, ...] | None, ...] = field(default=())
    awaited: tuple[tuple[Event, int], ...] = field(default=())
    notify: Mapping[Event, tuple[int, ...]] = field(default_factory=dict)


def build_program(plan: Plan, rank: int) -> RankProgram:
    """The program of ``rank``, built from its own messages only.

    Raises:
        PlanError: the rank cannot carry out a message, or does not receive all that it needs. TopologyError: a rank of
            the plan is on no host.
    """
    if not is_sound(plan):
        check_ranks(plan)
    builder = _Builder(plan, rank)
    for message in builder.messages:
        if message.sender == message.receiver:
            builder.add_copies(message)
        elif message.receiver == rank:
            builder.add_recv(message)
        else:
            builder.add_send(message)
    return builder.finish()


class _Builder:
    """Collects the operations of a rank, message by message in the plan's order."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self.messages = list(expand_messages(plan, rank))
        self._src, self._dst = (_Locator(plan, rank, self.messages, side) for side in ("src", "dst"))
        self._copies: list[LocalCopy] = []
        self._recvs: list[Recv] = []
        self._queues: tuple[list[Send], list[Send]] = ([], [])
        self._received: dict[int, tuple[int, Message]] = {}  # message id -> index of the receive, and the message
        self._num_forwards: dict[int, int] = {}
        sent = [message for message in self.messages if message.sender == rank]
        brings = {ident for message in sent for ident in message.gathered if ident is not None}
        self._brought: dict[int, tuple[int, int]] = {}  # id of a gathered box -> its message, and its place there
        for message in self.messages if brings else ():
            if message.receiver == rank != message.sender:
                ids = range(message.id, message.id + len(message.boxes))
                self._brought |= {ident: (message.id, i) for i, ident in enumerate(ids) if ident in brings}
        for message in sent:
            sources = {self._brought[ident][0] for ident in message.gathered if ident in self._brought}
            read = {ident for ident in sources if self._dst.find(ident) is None}  # others are in the destination array
            for source in read if message.source is None else {message.source}:
                self._num_forwards[source] = self._num_forwards.get(source, 0) + 1
        self._waits, self._awaited, self._notify = _find_events(plan, rank)

    def add_copies(self, message: Message) -> None:
        """Add a copy for each box of a message from the rank to itself."""
        for i, (tensor, start, stop) in enumerate(message.boxes):
            box = LocalBox(tensor, self._src.find(message.id + i), self._dst.find(message.id + i))
            if box.src is None or box.dst is None:
                raise PlanError(
                    f"{name_box(message.id, message.id + i, len(message.boxes))}: rank {self._rank} cannot copy "
                    f"{format_box([*zip(start, stop, strict=True)])}: its source or destination lacks it"
                )
            self._copies.append(LocalCopy(message.id + i, box))

    def add_recv(self, message: Message) -> None:
        """Add the receive of a message."""
        boxes = tuple(
            LocalBox(tensor, None, self._dst.find(message.id + i)) for i, (tensor, _, _) in enumerate(message.boxes)
        )
        if len({box.dst is None for box in boxes}) > 1:
            raise PlanError(f"message {message.id}: rank {self._rank} needs some of its boxes only")
        self._received[message.id] = len(self._recvs), message
        self._recvs.append(
            Recv(
                message.id,
                message.sender,
                boxes,
                _find_parts(self._plan, message),
                self._num_forwards.get(message.id, 0),
                recvs_ahead(message.window),
                self._waits.get(message.transfer, ()),
            )
        )

    def add_send(self, message: Message) -> None:
        """Add the send of a message, whose data the rank holds or has received."""
        forwards = None if message.source is None else self._find_forwarded(message, message.source)
        gathers = self._find_gathered(message)
        is_held = [forwards is None and item is None for item in gathers or [None] * len(message.boxes)]
        boxes = tuple(
            LocalBox(tensor, self._src.find(message.id + i) if is_held[i] else None, self._dst.find(message.id + i))
            for i, (tensor, _, _) in enumerate(message.boxes)
        )
        if any(box.src is None for box, held in zip(boxes, is_held, strict=True) if held):
            raise PlanError(f"message {message.id}: rank {self._rank} sends elements that it does not hold")
        hosts = self._plan.topology.host_of_rank
        parts, events = _find_parts(self._plan, message), self._waits.get(message.transfer, ())
        send = Send(message.id, message.receiver, boxes, parts, forwards, message.window, events, gathers)
        self._queues[hosts[self._rank] == hosts[message.receiver]].append(send)

    def _find_forwarded(self, message: Message, source: int) -> int:
        """The index of the receive that brings the data of ``message``."""
        prefix = f"message {message.id}: rank {self._rank} passes on"
        if source not in self._received:
            raise PlanError(f"{prefix} message {source}, which it has not received")
        forwards, original = self._received[source]
        if original.boxes != message.boxes:
            raise PlanError(f"{prefix} other boxes than message {source} brings")
        return forwards

    def _find_gathered(self, message: Message) -> tuple[Gathered | None, ...]:
        """Where each box of a gathered message comes from; empty for other messages."""
        gathers: list[Gathered | None] = []
        for ident in message.gathered:
            if ident is None:
                gathers.append(None)
                continue
            source, nth = self._brought.get(ident, (None, 0))
            if source not in self._received:
                raise PlanError(
                    f"message {message.id}: rank {self._rank} passes on message {ident}, which it has not received"
                )
            recv, original = self._received[source]
            ends = list(itertools.accumulate((box_nbytes(self._plan, box) for box in original.boxes), initial=0))
            is_staged = self._recvs[recv].is_relay
            gathers.append(Gathered(recv, slice(ends[nth], ends[nth + 1]), is_staged))
        return tuple(gathers)

    def finish(self) -> RankProgram:
        """The program of all added operations."""
        plan, rank = self._plan, self._rank
        _check_complete(plan, rank, self._copies, self._recvs)

        def shape_of(spec: TensorSpec, side: str) -> tuple[int, ...] | None:
            shards = spec.src_tiles if side == "src" else spec.dst_tiles
            return (*shards.local_shape(rank), *_inner_sizes(spec)) if rank in shards.layout.ranks else None

        return RankProgram(
            rank=rank,
            copies=tuple(self._copies),
            recvs=tuple(_count_staged_forwards(self._recvs, self._queues)),
            sends_across=tuple(self._queues[False]),
            sends_inside=tuple(self._queues[True]),
            src_shapes=tuple(shape_of(spec, "src") for spec in plan.tensors),
            dst_shapes=tuple(shape_of(spec, "dst") for spec in plan.tensors),
            awaited=self._awaited,
            notify=self._notify,
        )


def _find_parts(plan: Plan, message: Message) -> tuple[BoxRange, ...]:
    """The buffers in which the boxes of a message travel."""
    sizes = [box_nbytes(plan, box) for box in message.boxes]
    ends = list(itertools.accumulate(sizes, initial=0))
    is_large = [size >= LARGE_BOX_BYTES for size in sizes]
    first = [0] + [i for i in range(1, len(sizes)) if is_large[i] or is_large[i - 1]]
    last = [*first[1:], len(sizes)]
    return tuple(BoxRange(slice(a, b), slice(ends[a], ends[b])) for a, b in zip(first, last, strict=True))


def _inner_sizes(spec: TensorSpec) -> tuple[int, ...]:
    """Sizes of the dims that an array has beyond those of its tensor: an element of a block codec is a row of bytes."""
    return () if spec.codec is None else (spec.itemsize,)


def _find_events(
    plan: Plan, rank: int
) -> tuple[dict[int, tuple[Event, ...]], tuple[tuple[Event, int], ...], dict[Event, tuple[int, ...]]]:
    """The events of a rank's program.

    Returns:
        ``(waits, awaited, notify)``: the events that each transfer of the rank waits for, then
        :attr:`RankProgram.awaited` and :attr:`RankProgram.notify`.
    """
    waits_of_rank = find_waits(plan, rank)
    first = plan.transfers.first_message if plan.is_listed else None

    def id_of(transfer: int) -> int:
        return transfer if first is None else int(first[transfer])

    waits: dict[int, tuple[Event, ...]] = {}
    awaited: dict[Event, int] = {}
    mine = np.flatnonzero(waits_of_rank.waiter == rank)
    for later, earlier, actor, is_sent in zip(
        *(
            column[mine].tolist()
            for column in (waits_of_rank.later, waits_of_rank.earlier, waits_of_rank.actor, waits_of_rank.is_sent)
        ),
        strict=True,
    ):
        event = (id_of(earlier), is_sent)
        waits[later] = (*waits.get(later, ()), event)
        if actor != rank:
            awaited[event] = actor
    notify: dict[Event, tuple[int, ...]] = {}
    others = np.flatnonzero((waits_of_rank.actor == rank) & (waits_of_rank.waiter != rank))
    for earlier, waiter, is_sent in zip(
        *(column[others].tolist() for column in (waits_of_rank.earlier, waits_of_rank.waiter, waits_of_rank.is_sent)),
        strict=True,
    ):
        event = (id_of(earlier), is_sent)
        if waiter not in notify.get(event, ()):
            notify[event] = (*notify.get(event, ()), waiter)
    return waits, tuple(sorted(awaited.items())), dict(sorted(notify.items()))


def _check_complete(plan: Plan, rank: int, copies: Sequence[LocalCopy], recvs: Sequence[Recv]) -> None:
    """Raise PlanError unless the rank receives as many elements as it needs, and forwards every relayed message.

    Cheap: it counts the elements of the rank's own messages. :func:`reshard.check_plan` checks every
    element.
    """
    received = [0] * len(plan.tensors)
    for box in [copy.box for copy in copies] + [box for recv in recvs for box in recv.boxes]:
        if box.dst is not None:
            ndim = plan.tensors[box.tensor].ndim
            received[box.tensor] += math.prod(cut.stop - cut.start for cut in box.dst[:ndim])
    for tensor, spec in enumerate(plan.tensors):
        needed = math.prod(spec.dst_tiles.local_shape(rank)) if rank in spec.dst.ranks else 0
        if received[tensor] != needed:
            raise PlanError(
                f"rank {rank} needs {needed} elements of tensor {tensor}, but receives or copies {received[tensor]}"
            )
    for recv in recvs:
        if recv.is_relay and not recv.num_forwards:
            raise PlanError(f"message {recv.id}: rank {rank} neither needs nor forwards it")


def _count_staged_forwards(recvs: Sequence[Recv], queues: tuple[list[Send], list[Send]]) -> list[Recv]:
    """The receives, with ``num_forwards`` set to 0 where a forward comes after the next receive.

    A staging slot kept for such a forward would be released later in the plan's order than the next receive needs it;
    the forward reads the destination shard instead. A relay has no destination shard, so it keeps its slot;
    :func:`reshard.check_plan` checks that the slot is released in time.
    """
    last_forward: dict[int, int] = {}
    for queue in queues:
        for send in queue:
            if send.forwards is not None:
                last_forward[send.forwards] = max(last_forward.get(send.forwards, 0), send.id)
    counted = []
    for index, recv in enumerate(recvs):
        following = recvs[index + 1].id if index + 1 < len(recvs) else None
        stays_staged = following is None or last_forward.get(index, 0) < following
        counted.append(recv if stays_staged or recv.is_relay else replace(recv, num_forwards=0))
    return counted


class _Locator:
    """Slices of a rank's message boxes in its local arrays of one side, computed together per tensor."""

    def __init__(self, plan: Plan, rank: int, messages: Sequence[Message], side: str) -> None:
        self._slices: dict[int, Slices] = {}
        rows: dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
        for message in messages:
            for i, (tensor, start, stop) in enumerate(message.boxes):
                rows.setdefault(tensor, []).append((message.id + i, start, stop))
        # tensors of equal shape and layout have the same tiles
        together: dict[tuple[int, tuple[int, ...]], list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
        shards: dict[int, Tiles] = {}
        for tensor, boxes in rows.items():
            spec = plan.tensors[tensor]
            if rank in (spec.src if side == "src" else spec.dst).ranks:
                tiles = spec.src_tiles if side == "src" else spec.dst_tiles
                shards[id(tiles)] = tiles
                together.setdefault((id(tiles), _inner_sizes(spec)), []).extend(boxes)
        for (number, sizes), boxes in together.items():
            self._locate(shards[number], rank, boxes, tuple(slice(0, size) for size in sizes))

    def _locate(
        self,
        shards: Tiles,
        rank: int,
        boxes: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]],
        inner: Slices,
    ) -> None:
        ndim = len(shards.shape)
        start = np.array([box[1] for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
        stop = np.array([box[2] for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
        for box, local_box in zip(boxes, shards.find(rank, start, stop), strict=True):
            if local_box is not None:
                self._slices[box[0]] = (*local_box, *inner)

    def find(self, message_id: int) -> Slices | None:
        return self._slices.get(message_id)
