"""Runs one rank's rounds: packs what it sends, posts each round as one group, unpacks what came.

Nothing here waits for a device: on a GPU all of it is put on one stream, in order, so that buffers of one round can be
used again in the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from reshard.errors import PlanError
from reshard.program import Program, Recv, Send, Slices
from reshard.regions import RegionTable, box_regions, make_table
from reshard.rounds import Round, rounds_of
from reshard.runs import box_span

#: Of the library whose arrays travel: a torch tensor, or a CuPy array.
Array = Any
#: A buffer and the rank at the other end.
Posted = tuple[Array, int]
#: Posts receives and sends as one group. What is put on the stream behind it finds them done.
Exchange = Callable[[Sequence[Posted], Sequence[Posted]], None]
ALIGN = 256


class Copier(Protocol):
    """Copies the regions of one table, all in one launch."""

    def copy(self, arrays: Sequence[Array | None], buffer: Array, to_buffer: bool) -> None:
        """Between contiguous arrays and a flat byte buffer."""


MakeCopier = Callable[[RegionTable, Any], Copier]


class Memory(Protocol):
    """Arrays of one library on one device."""

    device: Any

    def empty(self, nbytes: int) -> Array:
        """A flat array of bytes."""

    def view(self, array: Array, at: Slices) -> Array:
        """A box of an array."""

    def is_contiguous(self, array: Array) -> bool:
        """Whether its elements lie in a row, in order."""

    def itemsize(self, array: Array) -> int:
        """Bytes of an element."""

    def address(self, array: Array) -> int:
        """Of its first byte."""

    def flat(self, array: Array) -> Array:
        """A contiguous array as flat bytes, on the same memory."""

    def copy(self, target: Array, source: Array) -> None:
        """Between views of one shape and dtype."""

    def pack(self, views: Sequence[Array], buffer: Array) -> None:
        """Copy views one after the other into flat bytes."""

    def unpack(self, buffer: Array, views: Sequence[Array]) -> None:
        """The inverse."""


#: A message that does not lie in one run in an array, where it is packed, and whether it is in a source array.
Packed = tuple[Recv | Send, int, bool]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class RoundRunner:
    """A program in rounds, with one buffer for all of them, made on first use and kept.

    The buffer has a part that every round uses anew, and places for what a relay passes on in a later round. With
    ``make_copier`` all that a round packs is packed in one launch, and unpacked in another; else box by box.
    """

    def __init__(
        self,
        program: Program,
        round_of: Mapping[int, int],
        memory: Memory,
        make_copier: MakeCopier | None = None,
    ) -> None:
        self.program, self.memory = program, memory
        self._make_copier = make_copier
        self._copiers: dict[tuple[int, bool, int], Copier] = {}
        self.rounds = rounds_of(program, round_of)
        self._relays = {index for index, recv in enumerate(program.recvs) if recv.is_relay}
        self._index = {recv.id: index for index, recv in enumerate(program.recvs)}
        self._scratch_bytes = max((_scratch_bytes(one) for one in self.rounds), default=0)
        self._place_of_relay, relay_bytes = self._place_relays()
        #: Of its buffer.
        self.nbytes = self._scratch_bytes + relay_bytes
        self._storage: Array | None = None

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now."""
        return 0 if self._storage is None else self.nbytes

    def release(self) -> None:
        """Give the buffer back; the next run makes a new one."""
        self._storage = None

    def check_fits(self, staging_bytes: int) -> None:
        """Raise PlanError if the buffer is larger than a plan allows."""
        if self.nbytes > staging_bytes:
            raise PlanError(
                f"rank {self.program.rank} needs {self.nbytes} bytes of buffers for what it packs and passes on in "
                f"rounds, but staging_bytes is {staging_bytes}: allow more, or choose a strategy without relays"
            )

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
                placed[index], total = self._scratch_bytes + at, max(total, at + size)
        return placed, total

    def run(self, src: Sequence[Array | None], dst: Sequence[Array | None], exchange: Exchange) -> None:
        """Do this rank's part.

        Args:
            src, dst: per tensor the local arrays as carriers (see :func:`~reshard.staging.carrier`), on the device.
            exchange: how bytes travel.
        """
        if self._storage is None:
            self._storage = self.memory.empty(self.nbytes)
        for copy in self.program.copies:
            place = copy.place
            self.memory.copy(self._view(dst, place.tensor, place.dst), self._view(src, place.tensor, place.src))
        for number, one in enumerate(self.rounds):
            at = 0
            recvs: list[Posted] = []
            landing: list[Packed] = []
            for recv in one.recvs:
                found = self._direct(recv, dst, "dst") if not recv.is_relay else self._relayed(self._index[recv.id])
                if found is None:
                    landing.append((recv, at, False))
                    found = self._slot(at, recv.nbytes)
                recvs.append((found, recv.sender))
                at += _aligned(recv.nbytes)
            sends: list[Posted] = []
            leaving: list[Packed] = []
            for send in one.sends:
                found = self._outgoing(send, src, dst)
                if found is None:
                    leaving.append((send, at, send.forwards is None))
                    found = self._slot(at, send.nbytes)
                sends.append((found, send.receiver))
                at += _aligned(send.nbytes)
            self._copy(number, leaving, src, dst, True)
            exchange(recvs, sends)
            self._copy(number, landing, src, dst, False)

    def _outgoing(self, send: Send, src: Sequence[Array | None], dst: Sequence[Array | None]) -> Array | None:
        """The bytes of a message where they lie; None if it must be packed."""
        if send.forwards is None:
            return self._direct(send, src, "src")
        return self._relayed(send.forwards) if send.forwards in self._relays else self._direct(send, dst, "dst")

    def _copy(
        self,
        number: int,
        packed: Sequence[Packed],
        src: Sequence[Array | None],
        dst: Sequence[Array | None],
        to_buffer: bool,
    ) -> None:
        """Pack, or unpack, what a round does not take from where it lies."""
        if not packed:
            return
        used = [(src if is_source else dst)[place.tensor] for op, _, is_source in packed for place in op.places]
        if self._make_copier is None or not all(map(self._is_contiguous, used)):
            for op, at, is_source in packed:
                arrays, side = (src, "src") if is_source else (dst, "dst")
                views = [self._view(arrays, place.tensor, getattr(place, side)) for place in op.places]
                slot = self._slot(at, op.nbytes)
                self.memory.pack(views, slot) if to_buffer else self.memory.unpack(slot, views)
            return
        unit = math.gcd(8, *map(self.memory.address, used))
        key = number, to_buffer, unit
        if key not in self._copiers:
            table = make_table(self._regions_of(packed, src, dst), unit)
            self._copiers[key] = self._make_copier(table, self.memory.device)
        assert self._storage is not None
        self._copiers[key].copy([*src, *dst], self._storage, to_buffer)

    def _relayed(self, index: int) -> Array:
        return self._slot(self._place_of_relay[index], self.program.recvs[index].nbytes)

    def _slot(self, at: int, nbytes: int) -> Array:
        assert self._storage is not None
        return self._storage[at : at + nbytes]

    def _is_contiguous(self, array: Array | None) -> bool:
        return array is not None and self.memory.is_contiguous(array)

    def _view(self, arrays: Sequence[Array | None], tensor: int, at: Slices | None) -> Array:
        assert arrays[tensor] is not None and at is not None
        return self.memory.view(arrays[tensor], at)

    def _direct(self, op: Recv | Send, arrays: Sequence[Array | None], side: str) -> Array | None:
        """The bytes of a message where they lie in a contiguous array, None if it must be packed."""
        if len(op.places) > 1:
            return None
        array = arrays[op.places[0].tensor]
        assert array is not None
        if not self.memory.is_contiguous(array):
            return None
        span = box_span(array.shape, self.memory.itemsize(array), getattr(op.places[0], side))
        return None if span is None else self.memory.flat(array)[span[0] : span[1]]

    def _regions_of(
        self, packed: Sequence[Packed], src: Sequence[Array | None], dst: Sequence[Array | None]
    ) -> list[tuple[int, ...]]:
        """All boxes of messages as regions; arrays are numbered sources first."""
        regions = []
        for op, at, is_source in packed:
            for place in op.places:
                array, box = (src[place.tensor], place.src) if is_source else (dst[place.tensor], place.dst)
                assert array is not None and box is not None
                number = place.tensor + (0 if is_source else len(src))
                itemsize = self.memory.itemsize(array)
                regions += box_regions(number, array.shape, itemsize, box, at)
                at += math.prod(cut.stop - cut.start for cut in box) * itemsize
        return regions


def _scratch_bytes(one: Round) -> int:
    return sum(_aligned(op.nbytes) for ops in (one.recvs, one.sends) for op in ops)
