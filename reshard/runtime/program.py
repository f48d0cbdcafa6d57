"""One rank's part of a plan: what it copies, receives and sends, and where that lies in its local arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from reshard.errors import PlanError
from reshard.plan.check import check_ranks
from reshard.plan.messages import Message, expand_messages, message_nbytes
from reshard.plan.model import Plan, recvs_ahead
from reshard.plan.ordering import find_waits
from reshard.sharding.layout import format_box
from reshard.sharding.tiles import Shards

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Place:
    """Where one box lies: which tensor, and the slices of the rank's local array; None where it has none."""

    tensor: int
    src: Slices | None
    dst: Slices | None


@dataclass(frozen=True)
class Copy:
    """A box that stays on its rank."""

    id: int
    place: Place


#: That a message is over, as its sender (True) or its receiver (False) sees it.
Event = tuple[int, bool]


@dataclass(frozen=True)
class Recv:
    """One message in. ``num_forwards`` sends pass it on from where it was staged; a relay keeps none of it.

    It may be posted when all of ``waits`` have come and fewer than ``ahead`` receives are under way.
    """

    id: int
    sender: int
    places: tuple[Place, ...]
    nbytes: int
    num_forwards: int
    ahead: int
    waits: tuple[Event, ...] = ()

    @property
    def is_relay(self) -> bool:
        """True if the rank needs none of it."""
        return self.places[0].dst is None


@dataclass(frozen=True)
class Send:
    """One message out. ``forwards`` is the index of the receive that brings the data, None for a holder.

    It may be posted when all of ``waits`` have come and fewer than ``window`` sends of its queue are under way.
    """

    id: int
    receiver: int
    places: tuple[Place, ...]
    nbytes: int
    forwards: int | None
    window: int
    waits: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Program:
    """All that one rank does, each list in the plan's total order.

    Sends that cross hosts and sends that stay inside are two queues, as their windows are. ``awaited`` are events of
    other ranks that this one waits for, each with the rank that tells of it; ``told`` says whom to tell of own events,
    in the same order, that of events, for what tells of them is alike.
    """

    rank: int
    copies: tuple[Copy, ...]
    recvs: tuple[Recv, ...]
    sends_across: tuple[Send, ...]
    sends_inside: tuple[Send, ...]
    src_shapes: tuple[tuple[int, ...] | None, ...] = field(default=())
    dst_shapes: tuple[tuple[int, ...] | None, ...] = field(default=())
    awaited: tuple[tuple[Event, int], ...] = field(default=())
    told: Mapping[Event, tuple[int, ...]] = field(default_factory=dict)


def build_program(plan: Plan, rank: int) -> Program:
    """The part of ``rank``, from its own messages alone.

    Raises:
        PlanError: a message that the rank cannot serve; :func:`~reshard.plan.check.check_plan` says why. TopologyError:
            a rank of the plan is on no host.
    """
    check_ranks(plan)
    messages = list(expand_messages(plan, rank))
    src, dst = _Locator(plan, rank, messages, "src"), _Locator(plan, rank, messages, "dst")
    copies: list[Copy] = []
    recvs: list[Recv] = []
    queues: tuple[list[Send], list[Send]] = ([], [])
    received: dict[int, tuple[int, Message]] = {}  # message id -> index of the receive, and the message
    num_forwards: dict[int, int] = {}
    for message in messages:
        if message.sender == rank and message.source is not None:
            num_forwards[message.source] = num_forwards.get(message.source, 0) + 1
    hosts = plan.topology.host_of_rank
    waits, awaited, told = _waits_of(plan, rank)
    for message in messages:
        nbytes = message_nbytes(plan, message)
        if message.sender == message.receiver:
            for i, (tensor, start, stop) in enumerate(message.boxes):
                place = Place(tensor, src.find(message.id + i), dst.find(message.id + i))
                if place.src is None or place.dst is None:
                    raise PlanError(
                        f"message {message.id + i}: rank {rank} cannot copy "
                        f"{format_box([*zip(start, stop, strict=True)])}"
                    )
                copies.append(Copy(message.id + i, place))
        elif message.receiver == rank:
            places = tuple(Place(box[0], None, dst.find(message.id + i)) for i, box in enumerate(message.boxes))
            if len({place.dst is None for place in places}) > 1:
                raise PlanError(f"message {message.id}: rank {rank} needs some of its boxes only")
            received[message.id] = len(recvs), message
            recvs.append(
                Recv(
                    message.id,
                    message.sender,
                    places,
                    nbytes,
                    num_forwards.get(message.id, 0),
                    recvs_ahead(message.window),
                    waits.get(message.transfer, ()),
                )
            )
        else:
            forwards = None
            if message.source is not None:
                passes_on = f"message {message.id}: rank {rank} passes on"
                if message.source not in received:
                    raise PlanError(f"{passes_on} message {message.source}, which it has not received")
                forwards, brought = received[message.source]
                if brought.boxes != message.boxes:
                    raise PlanError(f"{passes_on} other boxes than message {message.source} brings")
            places = tuple(
                Place(box[0], src.find(message.id + i) if forwards is None else None, dst.find(message.id + i))
                for i, box in enumerate(message.boxes)
            )
            if forwards is None and any(place.src is None for place in places):
                raise PlanError(f"message {message.id}: rank {rank} sends what it does not hold")
            queue = queues[hosts[rank] == hosts[message.receiver]]
            before = waits.get(message.transfer, ())
            queue.append(Send(message.id, message.receiver, places, nbytes, forwards, message.window, before))
    _check_complete(plan, rank, copies, recvs)
    return Program(
        rank=rank,
        copies=tuple(copies),
        recvs=tuple(_keep_staged(recvs, queues)),
        sends_across=tuple(queues[False]),
        sends_inside=tuple(queues[True]),
        src_shapes=tuple(s.src_shards.local_shape(rank) if rank in s.src.ranks else None for s in plan.tensors),
        dst_shapes=tuple(s.dst_shards.local_shape(rank) if rank in s.dst.ranks else None for s in plan.tensors),
        awaited=awaited,
        told=told,
    )


def _waits_of(
    plan: Plan, rank: int
) -> tuple[dict[int, tuple[Event, ...]], tuple[tuple[Event, int], ...], dict[Event, tuple[int, ...]]]:
    """Of each transfer of a rank the events that it waits for; those of other ranks; and whom to tell of its own."""
    found, ids = find_waits(plan), plan.transfers.first_message
    waits: dict[int, tuple[Event, ...]] = {}
    awaited: dict[Event, int] = {}
    mine = np.flatnonzero(found.waiter == rank)
    for later, earlier, actor, is_sent in zip(
        *(column[mine].tolist() for column in (found.later, found.earlier, found.actor, found.is_sent)), strict=True
    ):
        event = (int(ids[earlier]), is_sent)
        waits[later] = (*waits.get(later, ()), event)
        if actor != rank:
            awaited[event] = actor
    told: dict[Event, tuple[int, ...]] = {}
    others = np.flatnonzero((found.actor == rank) & (found.waiter != rank))
    for earlier, waiter, is_sent in zip(
        *(column[others].tolist() for column in (found.earlier, found.waiter, found.is_sent)), strict=True
    ):
        event = (int(ids[earlier]), is_sent)
        if waiter not in told.get(event, ()):
            told[event] = (*told.get(event, ()), waiter)
    return waits, tuple(sorted(awaited.items())), dict(sorted(told.items()))


def _check_complete(plan: Plan, rank: int, copies: Sequence[Copy], recvs: Sequence[Recv]) -> None:
    """Raise PlanError unless what lands on the rank is as much as it needs, and relays pass everything on.

    Cheap, and from the rank's own messages alone; :func:`~reshard.plan.check.check_plan` looks at every element.
    """
    landed = [0] * len(plan.tensors)
    for place in [copy.place for copy in copies] + [place for recv in recvs for place in recv.places]:
        if place.dst is not None:
            landed[place.tensor] += math.prod(cut.stop - cut.start for cut in place.dst)
    for tensor, spec in enumerate(plan.tensors):
        needed = math.prod(spec.dst_shards.local_shape(rank)) if rank in spec.dst.ranks else 0
        if landed[tensor] != needed:
            raise PlanError(f"rank {rank} needs {needed} elements of tensor {tensor}, but {landed[tensor]} land there")
    for recv in recvs:
        if recv.is_relay and not recv.num_forwards:
            raise PlanError(f"message {recv.id}: rank {rank} neither needs it nor passes it on")


def _keep_staged(recvs: Sequence[Recv], queues: tuple[list[Send], list[Send]]) -> list[Recv]:
    """Receives, with forwards from staging only where those come before the next receive.

    A buffer that was kept for a later forward would be given back later in the order than it is needed; such a
    forward reads the destination shard instead. A relay has none, and :func:`~reshard.plan.check.check_plan` sees to it
    that its buffer is free in time.
    """
    last_forward: dict[int, int] = {}
    for queue in queues:
        for send in queue:
            if send.forwards is not None:
                last_forward[send.forwards] = max(last_forward.get(send.forwards, 0), send.id)
    kept = []
    for index, recv in enumerate(recvs):
        until = recvs[index + 1].id if index + 1 < len(recvs) else None
        soon = until is None or last_forward.get(index, 0) < until
        kept.append(recv if soon or recv.is_relay else replace(recv, num_forwards=0))
    return kept


class _Locator:
    """Finds the boxes of a rank's messages in its local arrays, all at once."""

    def __init__(self, plan: Plan, rank: int, messages: Sequence[Message], side: str) -> None:
        self._slices: dict[int, Slices] = {}
        rows: dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
        for message in messages:
            for i, (tensor, start, stop) in enumerate(message.boxes):
                rows.setdefault(tensor, []).append((message.id + i, start, stop))
        for tensor, boxes in rows.items():
            spec = plan.tensors[tensor]
            layout = spec.src if side == "src" else spec.dst
            if rank in layout.ranks:
                self._locate(spec.src_shards if side == "src" else spec.dst_shards, rank, boxes)

    def _locate(self, shards: Shards, rank: int, boxes: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> None:
        ndim = len(shards.shape)
        start = np.array([box[1] for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
        stop = np.array([box[2] for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
        for box, found in zip(boxes, shards.find(rank, start, stop), strict=True):
            if found is not None:
                self._slices[box[0]] = found

    def find(self, ident: int) -> Slices | None:
        return self._slices.get(ident)
