"""Runs one rank's rounds: packs what it sends, posts each round as one group, unpacks what came.

Nothing here waits for a device. Packing, exchanging and unpacking are three lanes, streams on a GPU. The buffer has two
halves, so that a round is packed while the one before is under way. All tables are made, and all that goes from host
to device goes there, before the first round is posted: a copy that is queued behind a receive could keep the host
from posting what that receive waits for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.errors import PlanError
from reshard.runtime.byte_runs import box_span
from reshard.runtime.program import Program, Recv, Send, Slices
from reshard.runtime.rounds.memory import PACK, UNPACK, Array, Copier, Exchange, Lanes, Memory, OneLane, Posted
from reshard.runtime.rounds.schedule import Round, rounds_of
from reshard.runtime.strided_regions import MAX_UNIT, box_regions, make_tables

ALIGN = 256


class ArrayKind(NamedTuple):
    """What the tables of a run depend on, of one array: shape, bytes of an element, alignment of its address.

    The alignment is 0 if it is not contiguous, or is cast as it is packed.
    """

    shape: tuple[int, ...]
    itemsize: int
    alignment: int


class Part(NamedTuple):
    """Bytes of one message: of the array with a number, or of the buffer where that is None."""

    array: int | None
    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class Packed:
    """A message that is packed view by view, and where in the buffer."""

    op: Recv | Send
    start: int
    in_source: bool


@dataclass(frozen=True)
class Step:
    """One round. ``after_unpack`` is the last step whose unpacking the sends of this one need, -1 for none."""

    recvs: tuple[Part, ...]
    sends: tuple[Part, ...]
    leaving: tuple[Any, ...]
    leaving_views: tuple[Packed, ...]
    landing: tuple[Any, ...]
    landing_views: tuple[Packed, ...]
    after_unpack: int


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class RoundRunner:
    """A program in rounds, with one buffer for all of them, made on first use and kept.

    The buffer has two halves that rounds use in turns, or one if two do not fit, and places for what a relay passes on
    in a later round. With a ``copier`` what a round packs is packed in a few launches, and so unpacked; what it cannot
    pack (arrays that are not contiguous, or are cast) goes view by view, and so does all if the tables do not fit.

    Args:
        itemsizes: bytes of an element of each tensor.
        staging_bytes: what buffer and tables may take; None for no limit.

    Raises:
        PlanError: they would take more, even with one half.
    """

    def __init__(
        self,
        program: Program,
        round_of: Mapping[int, int],
        memory: Memory,
        itemsizes: Sequence[int],
        copier: Copier | None = None,
        staging_bytes: int | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self.program, self.memory = program, memory
        self._copier: Copier | None = None
        self._lanes = OneLane() if lanes is None else lanes
        self.rounds = rounds_of(program, round_of)
        self._relays = {index for index, recv in enumerate(program.recvs) if recv.is_relay}
        self._index = {recv.id: index for index, recv in enumerate(program.recvs)}
        self._half_bytes = max((_scratch_bytes(one) for one in self.rounds), default=0)
        self._relay_places, self._relay_bytes = self._place_relays()
        self._steps: dict[tuple[ArrayKind | None, ...], tuple[Step, ...]] = {}
        self._storage: Array | None = None
        self.table_bytes = 0
        self.num_halves = 1
        kinds, most = self._usual_kinds(itemsizes), math.inf if staging_bytes is None else staging_bytes
        for halves, kernel in ((2 if len(self.rounds) > 1 else 1, copier), (1, copier), (1, None)):
            self.num_halves, self._copier, self.table_bytes = halves, kernel, 0
            self._steps.clear()
            if self.nbytes <= most:
                self._find_steps(kinds)
                if self.nbytes + self.table_bytes <= most:
                    return
        raise PlanError(
            f"rank {program.rank} needs {self.nbytes} bytes of buffers for what it packs and passes on in rounds, but "
            f"staging_bytes is {staging_bytes}: allow more, or choose a strategy without relays"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        return self.num_halves * self._half_bytes + self._relay_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now, tables on the device included."""
        return 0 if self._storage is None else self.nbytes + self.table_bytes

    def release(self) -> None:
        """Give the buffer back; the next run makes a new one."""
        self._storage = None

    def warm_up(self) -> None:
        """Make the buffer and load the kernels, where no receive is under way that they could wait for."""
        buffer = self._buffer()
        if self._copier is not None and self.nbytes:
            self._copier.warm_up(buffer)

    def _usual_kinds(self, itemsizes: Sequence[int]) -> tuple[ArrayKind | None, ...]:
        """Those of arrays that are contiguous and aligned."""
        return tuple(
            None if shape is None else ArrayKind(shape, itemsize, MAX_UNIT)
            for shapes in (self.program.src_shapes, self.program.dst_shapes)
            for shape, itemsize in zip(shapes, itemsizes, strict=True)
        )

    def run(self, src: Sequence[Array | None], dst: Sequence[Array | None], exchange: Exchange) -> None:
        """Do this rank's part.

        Args:
            src, dst: per tensor the local arrays as carriers, on the device; see
                :func:`~reshard.runtime.cpu.staging.carrier`.
            exchange: how bytes travel.
        """
        arrays, lanes, buffer = [*src, *dst], self._lanes, self._buffer()
        steps = self._find_steps(tuple(map(self._kind_of, arrays)))
        addresses = None
        if any(step.leaving or step.landing for step in steps):
            assert self._copier is not None
            addresses = self._copier.find_addresses(tuple(map(self._address_of, arrays)))
        flats = [self._flat_of(array) for array in arrays]
        begun = lanes.mark()
        exchanged: list[Any] = []
        unpacked: list[Any] = []
        with lanes.on(UNPACK):
            lanes.wait(begun)
            for copy in self.program.copies:
                place = copy.place
                self.memory.copy(self._view(dst, place.tensor, place.dst), self._view(src, place.tensor, place.src))
        for number, step in enumerate(steps):
            reused = number - self.num_halves  # the step that used this half before
            with lanes.on(PACK):
                lanes.wait(begun if number == 0 else None)
                lanes.wait(exchanged[reused] if reused >= 0 else None)
                lanes.wait(unpacked[max(reused, step.after_unpack)] if max(reused, step.after_unpack) >= 0 else None)
                self._copy(step.leaving, step.leaving_views, src, dst, addresses, True)
                packed = lanes.mark()
            lanes.wait(packed)
            lanes.wait(unpacked[max(reused, step.after_unpack)] if max(reused, step.after_unpack) >= 0 else None)
            exchange(*([self._bytes_of(part, flats, buffer) for part in parts] for parts in (step.recvs, step.sends)))
            exchanged.append(lanes.mark())
            with lanes.on(UNPACK):
                lanes.wait(exchanged[-1])
                self._copy(step.landing, step.landing_views, src, dst, addresses, False)
                unpacked.append(lanes.mark())
        with lanes.on(UNPACK):
            end = lanes.mark()
        lanes.wait(end)

    # What a run looks up

    def _buffer(self) -> Array:
        if self._storage is None:
            self._storage = self.memory.empty(self.nbytes)
        return self._storage

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

    def _bytes_of(self, part: Part, flats: Sequence[Array | None], buffer: Array) -> Posted:
        whole = buffer if part.array is None else flats[part.array]
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
    ) -> None:
        buffer = self._buffer()
        for placed in tables:
            assert self._copier is not None
            self._copier.copy(placed, addresses, buffer, to_buffer)
        for one in views:
            arrays, side = (src, "src") if one.in_source else (dst, "dst")
            boxes = [self._view(arrays, place.tensor, getattr(place, side)) for place in one.op.places]
            slot = buffer[one.start : one.start + one.op.nbytes]
            self.memory.pack(boxes, slot) if to_buffer else self.memory.unpack(slot, boxes)

    # Steps

    def _place_relays(self) -> tuple[dict[int, int], int]:
        """Where each relayed message is kept from its round to the last that passes it on, first fit."""
        until: dict[int, int] = {}
        for number, one in enumerate(self.rounds):
            for send in one.sends:
                if send.forwards in self._relays:
                    until[send.forwards] = number  # type: ignore[index]
        placed: dict[int, int] = {}
        live: list[tuple[int, int, int]] = []  # (first byte, end, last round)
        total = 0
        for number, one in enumerate(self.rounds):
            live = sorted(part for part in live if part[2] >= number)
            for recv in one.recvs:
                index = self._index[recv.id]
                if index not in self._relays:
                    continue
                size, at = _aligned(recv.nbytes), 0
                for first, end, _ in live:
                    if at + size <= first:
                        break
                    at = max(at, end)
                live = sorted([*live, (at, at + size, until.get(index, number))])
                placed[index], total = at, max(total, at + size)
        return placed, total

    def _find_steps(self, kinds: tuple[ArrayKind | None, ...]) -> tuple[Step, ...]:
        if kinds not in self._steps:
            self._steps[kinds] = self._make_steps(kinds)
        return self._steps[kinds]

    def _make_steps(self, kinds: Sequence[ArrayKind | None]) -> tuple[Step, ...]:
        steps: list[Step] = []
        landed_in: dict[int, int] = {}  # receive -> the step that unpacks it
        for number, one in enumerate(self.rounds):
            at = number % self.num_halves * self._half_bytes
            recvs: list[Part] = []
            sends: list[Part] = []
            leaving: list[Packed] = []
            landing: list[Packed] = []
            after_unpack = -1
            for recv in one.recvs:
                index = self._index[recv.id]
                part = (
                    self._relay(index, recv.sender) if recv.is_relay else self._direct(recv, kinds, "dst", recv.sender)
                )
                if part is None:
                    part = Part(None, at, at + recv.nbytes, recv.sender)
                    landing.append(Packed(recv, at, False))
                    landed_in[index] = number
                recvs.append(part)
                at += _aligned(recv.nbytes)
            for send in one.sends:
                if send.forwards in self._relays:
                    part = self._relay(send.forwards, send.receiver)  # type: ignore[arg-type]
                else:
                    part = self._direct(send, kinds, "src" if send.forwards is None else "dst", send.receiver)
                    after_unpack = max(after_unpack, landed_in.get(-1 if send.forwards is None else send.forwards, -1))
                if part is None:
                    part = Part(None, at, at + send.nbytes, send.receiver)
                    leaving.append(Packed(send, at, send.forwards is None))
                sends.append(part)
                at += _aligned(send.nbytes)
            sides = [self._split(packed, kinds) for packed in (leaving, landing)]
            steps.append(Step(tuple(recvs), tuple(sends), *sides[0], *sides[1], after_unpack))
        return tuple(steps)

    def _relay(self, index: int, rank: int) -> Part:
        start = self.num_halves * self._half_bytes + self._relay_places[index]
        return Part(None, start, start + self.program.recvs[index].nbytes, rank)

    def _direct(self, op: Recv | Send, kinds: Sequence[ArrayKind | None], side: str, rank: int) -> Part | None:
        """The bytes of a message where they lie in a contiguous array, None if it must be packed."""
        if len(op.places) > 1:
            return None
        place = op.places[0]
        number = place.tensor + (0 if side == "src" else len(kinds) // 2)
        kind = kinds[number]
        assert kind is not None
        if not kind.alignment:
            return None
        span = box_span(kind.shape, kind.itemsize, getattr(place, side))
        return None if span is None else Part(number, *span, rank)

    def _split(
        self, packed: Sequence[Packed], kinds: Sequence[ArrayKind | None]
    ) -> tuple[tuple[Any, ...], tuple[Packed, ...]]:
        """Messages as tables, and those that must go view by view."""
        regions: list[tuple[int, ...]] = []
        views: list[Packed] = []
        for one in packed:
            found = None if self._copier is None else self._regions_of(one, kinds)
            if found is None:
                views.append(one)
            else:
                regions += found
        if not regions:
            return (), tuple(views)
        assert self._copier is not None
        tables = make_tables(regions, [MAX_UNIT if kind is None else max(kind.alignment, 1) for kind in kinds])
        self.table_bytes += sum(table.nbytes for table in tables)
        return tuple(map(self._copier.place, tables)), tuple(views)

    def _regions_of(self, one: Packed, kinds: Sequence[ArrayKind | None]) -> list[tuple[int, ...]] | None:
        """The boxes of a message as regions, None if one is of an array that is not contiguous."""
        regions: list[tuple[int, ...]] = []
        at, side = one.start, "src" if one.in_source else "dst"
        for place in one.op.places:
            number = place.tensor + (0 if one.in_source else len(kinds) // 2)
            kind, box = kinds[number], getattr(place, side)
            assert kind is not None
            if not kind.alignment:
                return None
            regions += box_regions(number, kind.shape, kind.itemsize, box, at)
            at += math.prod(cut.stop - cut.start for cut in box) * kind.itemsize
        return regions


def _scratch_bytes(one: Round) -> int:
    return sum(_aligned(op.nbytes) for ops in (one.recvs, one.sends) for op in ops)
