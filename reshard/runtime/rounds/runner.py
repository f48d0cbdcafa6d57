"""Runs one rank's rounds: packs the sends of a round, posts the round as one group, unpacks its receives.

The host never waits for the device. On CUDA, packing, exchange and unpacking of several rounds use three streams, and
the buffer has two halves, so that a round is packed while the previous one is under way. All tables are made and copied
to the device before the first round is posted. A copy from host to device that is queued behind a receive could block
the host, and the host would then not post the send for which the receive waits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import PlanError
from reshard.runtime.byte_runs import box_span
from reshard.runtime.program import RankProgram, Recv, Send, Slices
from reshard.runtime.rounds.device_interfaces import (
    ONE_STREAM,
    PACK,
    UNPACK,
    Array,
    Copier,
    Memory,
    Posted,
    RoundExchange,
    RoundStreams,
)
from reshard.runtime.rounds.large_groups import LargeRounds
from reshard.runtime.rounds.round_assignment import Round, rounds_of
from reshard.runtime.rounds.steps import EXTRA, ArrayKind, CompiledRound, MessageBytes, Packed, aligned
from reshard.runtime.strided_regions import MAX_UNIT, box_regions, make_tables

#: Lists of steps without tables that are kept, for arrays of different kinds.
MAX_KINDS = 32


class _Slots:
    """Parts of the buffers for the messages of a round.

    Args:
        start: where the round may begin in the first buffer.
    """

    def __init__(self, start: int) -> None:
        self._next, self.extra_bytes = start, 0

    def take(self, nbytes: int, in_extra: bool, is_direct: bool) -> tuple[int | None, int, int]:
        """``(None or EXTRA, start, stop)`` of a part. A message without a buffer needs none in the second buffer."""
        if in_extra:
            start = self.extra_bytes
            self.extra_bytes += 0 if is_direct else aligned(nbytes)
            return EXTRA, start, start + nbytes
        start, self._next = self._next, self._next + aligned(nbytes)
        return None, start, start + nbytes


class RoundRunner:
    """Runs a program in rounds, with one buffer that is allocated on first use and kept.

    The buffer has two halves that rounds use in turn (one if two do not fit), and space for relayed messages. A
    ``copier`` packs and unpacks a round in a few launches. Some boxes are copied one by one: boxes of arrays that are
    not contiguous or are cast, and boxes whose tables do not fit into ``staging_bytes``. Arrays with another alignment
    than before need further tables.

    Args:
        round_of: the round of each message, from :func:`~reshard.runtime.rounds.round_assignment.find_rounds`; or large
            rounds. Their messages that need no buffer get one beyond ``staging_bytes`` for arrays that are not
            contiguous or cast, of at most twice :data:`~reshard.runtime.rounds.large_groups.UNBUFFERED_ROUND_BYTES`,
            while a transfer runs.
        itemsizes: bytes per element of each tensor.
        staging_bytes: limit for buffer and tables together; None for no limit.

    Raises:
        PlanError: one half and the relayed messages exceed ``staging_bytes``.
    """

    def __init__(
        self,
        program: RankProgram,
        round_of: Mapping[int, int] | LargeRounds,
        memory: Memory,
        itemsizes: Sequence[int],
        copier: Copier | None = None,
        staging_bytes: int | None = None,
    ) -> None:
        self.program, self.memory = program, memory
        self._copier: Copier | None = None
        self.rounds = rounds_of(program, round_of)
        self._bypass = round_of.unbuffered if isinstance(round_of, LargeRounds) else frozenset()  # need no buffer
        self._relays = {index for index, recv in enumerate(program.recvs) if recv.is_relay}
        self._index = {recv.id: index for index, recv in enumerate(program.recvs)}
        self._half_bytes = max(map(self._scratch_bytes, self.rounds), default=0)
        self._relay_offsets, self._relay_bytes = self._allocate_relays()
        self._steps: dict[tuple[ArrayKind | None, ...], tuple[CompiledRound, ...]] = {}
        self._storage: Array | None = None
        self.table_bytes = 0
        self.num_halves = 1
        self._is_captured = False
        kinds, limit = self._usual_kinds(itemsizes), math.inf if staging_bytes is None else staging_bytes
        self._room_for_tables = math.inf
        for halves, kernel in ((2 if len(self.rounds) > 1 else 1, copier), (1, copier), (1, None)):
            self.num_halves, self._copier, self.table_bytes = halves, kernel, 0
            self._steps.clear()
            if self.nbytes <= limit:
                self._find_steps(kinds)
                if self.nbytes + self.table_bytes <= limit:
                    self._room_for_tables = limit - self.nbytes
                    return
        raise PlanError(
            f"rank {program.rank} needs {self.nbytes} bytes of buffers to pack and forward messages in rounds, but "
            f"staging_bytes is {staging_bytes}: raise it, or choose a strategy without relays"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, whether allocated or not."""
        return self.num_halves * self._half_bytes + self._relay_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now, including tables on the device, without the second buffer of a run."""
        return 0 if self._storage is None else self.nbytes + self.table_bytes

    def release(self) -> None:
        """Free the buffer, unless a graph uses it; the next run allocates a new one."""
        if not self._is_captured:
            self._storage = None

    def keep(self) -> None:
        """Never free the buffer: a captured graph uses its address, and can be replayed at any time."""
        self._is_captured = True

    def buffer(self) -> Array:
        """The buffer as a flat uint8 array, allocated on first use."""
        if self._storage is None:
            self._storage = self.memory.empty(self.nbytes)
        return self._storage

    def warm_up(self) -> None:
        """Allocate the buffer and load the kernels, which could block if a receive were under way."""
        buffer = self.buffer()
        if self._copier is not None and self.nbytes:
            self._copier.warm_up(buffer)

    def _usual_kinds(self, itemsizes: Sequence[int]) -> tuple[ArrayKind | None, ...]:
        """The kinds of the program's arrays if all are contiguous and aligned."""
        return tuple(
            None if shape is None else ArrayKind(shape, itemsize, MAX_UNIT)
            for shapes in (self.program.src_shapes, self.program.dst_shapes)
            for shape, itemsize in zip(shapes, itemsizes, strict=True)
        )

    def run(
        self,
        src: Sequence[Array | None],
        dst: Sequence[Array | None],
        exchange: RoundExchange,
        streams: RoundStreams = ONE_STREAM,
    ) -> None:
        """Enqueue all rounds of this rank.

        Args:
            src, dst: one local array per tensor, as :func:`~reshard.runtime.cpu.staging.view_as_bits` gives it.
            exchange: posts one round.
            streams: where to pack and unpack.
        """
        arrays, buffer = [*src, *dst], self.buffer()
        steps = self._find_steps(tuple(map(self._kind_of, arrays)))
        addresses = None
        if any(step.has_tables for step in steps):
            assert self._copier is not None
            addresses = self._copier.find_addresses(tuple(map(self._address_of, arrays)))
        flats = [self._flat_of(array) for array in arrays]
        if (len(steps) < 2 or all(step.copies_nothing for step in steps)) and not self.program.copies:
            streams = ONE_STREAM  # nothing can overlap, so events would only cost time
        extra = (
            self.memory.empty(max(step.extra_bytes for step in steps)) if any(s.extra_bytes for s in steps) else None
        )
        begun = streams.mark()
        exchanged: list[Any] = []
        unpacked: list[Any] = []
        with streams.on(UNPACK):
            streams.wait(begun)
            for copy in self.program.copies:
                box = copy.box
                self.memory.copy(self._view(dst, box.tensor, box.dst), self._view(src, box.tensor, box.src))
        for number, step in enumerate(steps):
            # the previous step with this half of the buffer, or with the second buffer
            previous = number - (1 if step.extra_bytes else self.num_halves)
            after = max(previous, step.after_unpack)
            with streams.on(PACK):
                streams.wait(begun if number == 0 else None)
                received = max(previous, step.after_exchange)
                streams.wait(exchanged[received] if received >= 0 else None)
                streams.wait(unpacked[after] if after >= 0 else None)
                self._copy(step.pack_tables, step.pack_views, src, dst, addresses, True, extra)
                packed = streams.mark()
            streams.wait(packed)
            streams.wait(unpacked[after] if after >= 0 else None)
            recvs, sends, broadcasts = (
                [self._bytes_of(part, flats, buffer, extra) for part in parts]
                for parts in (step.recvs, step.sends, step.broadcasts)
            )
            exchange(recvs, sends, broadcasts)
            exchanged.append(streams.mark())
            with streams.on(UNPACK):
                streams.wait(exchanged[-1])
                self._copy(step.unpack_tables, step.unpack_views, src, dst, addresses, False, extra)
                unpacked.append(streams.mark())
        with streams.on(UNPACK):
            end = streams.mark()
        streams.wait(end)

    # Lookups of a run

    def _kind_of(self, array: Array | None) -> ArrayKind | None:
        if array is None:
            return None
        memory = self.memory
        alignment = math.gcd(memory.address(array), MAX_UNIT) if memory.is_contiguous(array) else 0
        return ArrayKind(tuple(array.shape), memory.itemsize(array), alignment)

    def _address_of(self, array: Array | None) -> int:
        return 0 if array is None or not self.memory.is_contiguous(array) else self.memory.address(array)

    def _flat_of(self, array: Array | None) -> Array | None:
        return None if array is None or not self.memory.is_contiguous(array) else self.memory.flat(array)

    def _bytes_of(
        self, part: MessageBytes, flats: Sequence[Array | None], buffer: Array, extra: Array | None
    ) -> Posted:
        whole = buffer if part.array is None else extra if part.array == EXTRA else flats[part.array]
        assert whole is not None
        return whole[part.start : part.stop], part.rank

    def _view(self, arrays: Sequence[Array | None], tensor: int, at: Slices | None) -> Array:
        assert arrays[tensor] is not None and at is not None
        return self.memory.view(arrays[tensor], at)

    def _copy(
        self,
        tables: Sequence[Any],
        views: Sequence[Packed],
        src: Sequence[Array | None],
        dst: Sequence[Array | None],
        addresses: Any,
        to_buffer: bool,
        extra: Array | None,
    ) -> None:
        buffer = self.buffer()
        for table in tables:
            assert self._copier is not None
            self._copier.copy(table, addresses, buffer, to_buffer)
        for view in views:
            if isinstance(view.op, Send) and view.op.gathers:
                boxes = self._gathered(view.op, src, dst)
            else:
                arrays, side = (src, "src") if view.in_source else (dst, "dst")
                boxes = [self._view(arrays, box.tensor, getattr(box, side)) for box in view.op.boxes]
            slot = (extra if view.in_extra else buffer)[view.start : view.start + view.op.nbytes]  # type: ignore[index]
            self.memory.pack(boxes, slot) if to_buffer else self.memory.unpack(slot, boxes)

    def _gathered(self, op: Send, src: Sequence[Array | None], dst: Sequence[Array | None]) -> list[Array]:
        """The boxes of a gathered message: views of arrays, or bytes of relayed messages in the buffer."""
        boxes = []
        for box, source in zip(op.boxes, op.gathers, strict=True):
            if source is None:
                boxes.append(self._view(src, box.tensor, box.src))
            elif not source.is_staged:
                boxes.append(self._view(dst, box.tensor, box.dst))
            else:
                first = self._relay(source.recv, op.receiver).start
                boxes.append(self.buffer()[first + source.bytes.start : first + source.bytes.stop])
        return boxes

    # Steps

    def _allocate_relays(self) -> tuple[dict[int, int], int]:
        """First-fit offsets of relayed messages, each kept from its round to the last that forwards it.

        Returns:
            ``({index of a receive: offset}, bytes in all)``.
        """
        last_round: dict[int, int] = {}
        for number, item in enumerate(self.rounds):
            for send in item.sends:
                last_round |= dict.fromkeys(send.sources, number)
        offsets: dict[int, int] = {}
        live: list[tuple[int, int, int]] = []  # (start, stop, last round)
        total = 0
        for number, item in enumerate(self.rounds):
            live = sorted(part for part in live if part[2] >= number)
            for recv in item.recvs:
                index = self._index[recv.id]
                if index not in self._relays:
                    continue
                size, at = aligned(recv.nbytes), 0
                for start, stop, _ in live:
                    if at + size <= start:
                        break
                    at = max(at, stop)
                live = sorted([*live, (at, at + size, last_round.get(index, number))])
                offsets[index], total = at, max(total, at + size)
        return offsets, total

    def _find_steps(self, kinds: tuple[ArrayKind | None, ...]) -> tuple[CompiledRound, ...]:
        if kinds not in self._steps:
            self._steps[kinds] = self._make_steps(kinds)
            # tables are kept, since kernels under way or captured may read them
            droppable = [item for item, steps in self._steps.items() if not any(step.has_tables for step in steps)]
            for item in droppable[:-MAX_KINDS]:
                del self._steps[item]
        return self._steps[kinds]

    def _make_steps(self, kinds: Sequence[ArrayKind | None]) -> tuple[CompiledRound, ...]:
        steps: list[CompiledRound] = []
        unpacked_in: dict[int, int] = {}  # index of a receive -> the step that unpacks it
        received_in: dict[int, int] = {}  # index of a receive -> its step
        for number, item in enumerate(self.rounds):
            slots = _Slots(number % self.num_halves * self._half_bytes)
            recvs: list[MessageBytes] = []
            sends: list[MessageBytes] = []
            to_pack: list[Packed] = []
            to_unpack: list[Packed] = []
            after_unpack = after_exchange = -1
            for recv in item.recvs:
                index = self._index[recv.id]
                part = self._place_of(recv, kinds)
                slot = slots.take(recv.nbytes, recv.id in self._bypass, part is not None)
                if part is None:
                    part = MessageBytes(*slot, recv.sender)
                    to_unpack.append(Packed(recv, part.start, False, part.array == EXTRA))
                    unpacked_in[index] = number
                received_in[index] = number
                recvs.append(part)
            for send in item.sends:
                part = self._place_of(send, kinds)
                for recv_index in send.sources:  # of data that the rank does not hold at first
                    after_unpack = max(after_unpack, unpacked_in.get(recv_index, -1))
                    if send.gathers:
                        after_exchange = max(after_exchange, received_in[recv_index])
                slot = slots.take(send.nbytes, send.id in self._bypass, part is not None)
                if part is None:
                    part = MessageBytes(*slot, send.receiver)
                    to_pack.append(Packed(send, part.start, send.forwards is None, part.array == EXTRA))
                sends.append(part)
            copies = to_pack, to_unpack
            for ops in item.joined:
                is_send = isinstance(ops[0], Send)
                peer = ops[0].receiver if isinstance(ops[0], Send) else ops[0].sender
                (sends if is_send else recvs).append(self._as_one(ops, peer, is_send, kinds, slots, copies))
            broadcasts = [
                self._as_one(one.parts, one.root, one.root == self.program.rank, kinds, slots, copies)
                for one in item.broadcasts
            ]
            sides = [self._split(packed, kinds) for packed in (to_pack, to_unpack)]
            steps.append(
                CompiledRound(
                    tuple(recvs),
                    tuple(sends),
                    tuple(broadcasts),
                    *sides[0],
                    *sides[1],
                    after_unpack,
                    after_exchange,
                    slots.extra_bytes,
                )
            )
        return tuple(steps)

    def _place_of(self, op: Recv | Send, kinds: Sequence[ArrayKind | None]) -> MessageBytes | None:
        """The bytes of a message in an array, or where it is relayed; None if it must be packed."""
        if isinstance(op, Recv):
            index, side, rank = self._index[op.id] if op.is_relay else None, "dst", op.sender
        elif op.gathers:
            return None
        else:
            index, side, rank = op.forwards, "src" if op.forwards is None else "dst", op.receiver
        if index in self._relays:
            return self._relay(index, rank)
        return self._unbuffered_bytes(op, kinds, side, rank)

    def _as_one(
        self, ops: Sequence[Recv | Send], rank: int, is_send: bool, kinds: Sequence[ArrayKind | None], slots: _Slots,
        copies: tuple[list[Packed], list[Packed]],
    ) -> MessageBytes:  # fmt: skip
        """The bytes of messages that are posted as one, in an array if they are adjacent there, else in a buffer.

        Args:
            rank: the rank at the other end, or the root.
            copies: messages to pack, and to unpack.
        """
        parts = [self._unbuffered_bytes(op, kinds, "src" if is_send else "dst", rank) for op in ops]
        known = [part for part in parts if part is not None]
        is_direct = len(known) == len(parts) and all(
            earlier.stop == later.start for earlier, later in itertools.pairwise(known)
        )
        array, start, stop = slots.take(sum(op.nbytes for op in ops), ops[0].id in self._bypass, is_direct)
        if is_direct:
            return MessageBytes(known[0].array, known[0].start, known[-1].stop, rank)
        at = start
        for op in ops:
            copies[0 if is_send else 1].append(Packed(op, at, is_send, array == EXTRA))
            at += op.nbytes
        return MessageBytes(array, start, stop, rank)

    def _scratch_bytes(self, one: Round) -> int:
        """The bytes of the buffer that a round uses at most."""
        # messages that are joined are in the second buffer
        ops = [*one.recvs, *one.sends, *(op for broadcast in one.broadcasts for op in broadcast.parts)]
        return sum(aligned(op.nbytes) for op in ops if op.id not in self._bypass)

    def _relay(self, index: int, rank: int) -> MessageBytes:
        start = self.num_halves * self._half_bytes + self._relay_offsets[index]
        return MessageBytes(None, start, start + self.program.recvs[index].nbytes, rank)

    def _unbuffered_bytes(
        self, op: Recv | Send, kinds: Sequence[ArrayKind | None], side: str, rank: int
    ) -> MessageBytes | None:
        """The bytes of a message inside an array; None if they are not contiguous there and must be packed."""
        if len(op.boxes) > 1:
            return None
        box = op.boxes[0]
        number = box.tensor + (0 if side == "src" else len(kinds) // 2)
        kind = kinds[number]
        assert kind is not None
        if not kind.alignment:
            return None
        span = box_span(kind.shape, kind.itemsize, getattr(box, side))
        return None if span is None else MessageBytes(number, *span, rank)

    def _split(
        self, packed: Sequence[Packed], kinds: Sequence[ArrayKind | None]
    ) -> tuple[tuple[Any, ...], tuple[Packed, ...]]:
        """``(tables on the device, messages to copy box by box)``."""
        regions: list[tuple[int, ...]] = []
        views: list[Packed] = []
        for item in packed:
            is_plain = self._copier is not None and not item.in_extra and not getattr(item.op, "gathers", ())
            item_regions = self._regions_of(item, kinds) if is_plain else None
            if item_regions is None:
                views.append(item)
            else:
                regions += item_regions
        if not regions:
            return (), tuple(views)
        assert self._copier is not None
        tables = make_tables(regions, [MAX_UNIT if kind is None else max(kind.alignment, 1) for kind in kinds])
        nbytes = sum(table.nbytes for table in tables)
        if self.table_bytes + nbytes > self._room_for_tables:
            return (), tuple(packed)
        self.table_bytes += nbytes
        return tuple(map(self._copier.upload, tables)), tuple(views)

    def _regions_of(self, one: Packed, kinds: Sequence[ArrayKind | None]) -> list[tuple[int, ...]] | None:
        """The boxes of a message as regions; None if an array is not contiguous."""
        regions: list[tuple[int, ...]] = []
        at, side = one.start, "src" if one.in_source else "dst"
        for box in one.op.boxes:
            number = box.tensor + (0 if one.in_source else len(kinds) // 2)
            kind, slices = kinds[number], getattr(box, side)
            assert kind is not None
            if not kind.alignment:
                return None
            regions += box_regions(number, kind.shape, kind.itemsize, slices, at)
            at += math.prod(cut.stop - cut.start for cut in slices) * kind.itemsize
        return regions
