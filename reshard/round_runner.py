"""Runs one rank's rounds: packs what it sends, posts each round as one group, unpacks what came.

Nothing here waits for a device: on a GPU all of it is put on one stream, in order, so that buffers of one round can be
used again in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from reshard.program import Program, Recv, Send
from reshard.rounds import Round, rounds_of
from reshard.runs import box_span
from reshard.staging import flat_bytes, pack, unpack, view_of

#: A buffer and the rank at the other end.
Posted = tuple[torch.Tensor, int]
#: Posts receives and sends as one group. What is put on the stream behind it finds them done.
Exchange = Callable[[Sequence[Posted], Sequence[Posted]], None]
ALIGN = 256


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class RoundRunner:
    """A program in rounds, with one buffer for all of them, made on first use and kept.

    The buffer has a part that every round uses anew, and places for what a relay passes on in a later round.
    """

    def __init__(self, program: Program, round_of: Mapping[int, int], device: torch.device) -> None:
        self.program, self.device = program, device
        self.rounds = rounds_of(program, round_of)
        self._relays = {index for index, recv in enumerate(program.recvs) if recv.is_relay}
        self._index = {recv.id: index for index, recv in enumerate(program.recvs)}
        self._scratch_bytes = max((_scratch_bytes(one) for one in self.rounds), default=0)
        self._place_of_relay, relay_bytes = self._place_relays()
        self._nbytes = self._scratch_bytes + relay_bytes
        self._storage: torch.Tensor | None = None

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now."""
        return 0 if self._storage is None else self._storage.numel()

    @property
    def needed_bytes(self) -> int:
        """Bytes held from the first run on."""
        return self._nbytes

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

    def run(self, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None], exchange: Exchange) -> None:
        """Do this rank's part.

        Args:
            src, dst: per tensor the local arrays as carriers (see :func:`~reshard.staging.carrier`), on the device.
            exchange: how bytes travel.
        """
        if self._storage is None:
            self._storage = torch.empty(self._nbytes, dtype=torch.uint8, device=self.device)
        for copy in self.program.copies:
            view_of(dst, copy.place.tensor, copy.place.dst).copy_(view_of(src, copy.place.tensor, copy.place.src))
        for one in self.rounds:
            at = 0
            recvs: list[Posted] = []
            landing: list[tuple[Recv, torch.Tensor]] = []
            for recv in one.recvs:
                if recv.is_relay:
                    buffer = self._slot(self._place_of_relay[self._index[recv.id]], recv.nbytes)
                else:
                    found = _direct(recv, dst, "dst")
                    buffer = self._slot(at, recv.nbytes) if found is None else found
                    if found is None:
                        landing.append((recv, buffer))
                at += _aligned(recv.nbytes)
                recvs.append((buffer, recv.sender))
            sends: list[Posted] = []
            for send in one.sends:
                sends.append((self._outgoing(send, src, dst, at), send.receiver))
                at += _aligned(send.nbytes)
            exchange(recvs, sends)
            for recv, buffer in landing:
                unpack(buffer, [view_of(dst, place.tensor, place.dst) for place in recv.places])

    def _outgoing(
        self, send: Send, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None], at: int
    ) -> torch.Tensor:
        if send.forwards in self._relays:
            return self._slot(self._place_of_relay[send.forwards], send.nbytes)  # type: ignore[index]
        arrays, side = (src, "src") if send.forwards is None else (dst, "dst")
        found = _direct(send, arrays, side)
        if found is not None:
            return found
        buffer = self._slot(at, send.nbytes)
        pack([view_of(arrays, place.tensor, getattr(place, side)) for place in send.places], buffer)
        return buffer

    def _slot(self, at: int, nbytes: int) -> torch.Tensor:
        assert self._storage is not None
        return self._storage[at : at + nbytes]


def _scratch_bytes(one: Round) -> int:
    return sum(_aligned(op.nbytes) for ops in (one.recvs, one.sends) for op in ops)


def _direct(op: Recv | Send, arrays: Sequence[torch.Tensor | None], side: str) -> torch.Tensor | None:
    """The bytes of a message where they lie in a contiguous array, None if it must be packed."""
    if len(op.places) > 1:
        return None
    place = op.places[0]
    array = arrays[place.tensor]
    assert array is not None
    if not array.is_contiguous():
        return None
    span = box_span(array.shape, array.element_size(), getattr(place, side))
    return None if span is None else flat_bytes(array)[span[0] : span[1]]
