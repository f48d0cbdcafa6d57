"""Programs of a few small messages, each a contiguous range of an array. The caller's thread posts all of them.

Such a program needs no staging, waits for no event of this or another rank, and forwards nothing. So all of its
operations can start at once, and only their ends need a thread. Posting does not block. Operations between two ranks
are posted in plan order, as in :mod:`reshard.runtime.cpu.program_executor`. So one end of a message may be posted here
and the other end there.

Gloo shows the arrival of a message only by a wait, which no signal interrupts. So
:meth:`PostedProgram.post` can mark the end of each receive buffer. Bytes arrive in order: once the mark is gone, a wait
returns at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.plan import Plan
from reshard.runtime.array_bytes import flat_bytes
from reshard.runtime.byte_runs import box_span
from reshard.runtime.cpu.staging import view_as_bits
from reshard.runtime.cpu.transfer_progress import Tally
from reshard.runtime.program import RankProgram, Recv, Send
from reshard.runtime.transport import Transport, Work, wait_for

#: Largest number of bytes that a rank sends and receives in such a program. With a larger message, the copy to the
#: socket would cost the calling thread more time than a second thread costs.
MAX_POSTED_BYTES = 2**18
#: Largest number of messages of such a program in one direction.
MAX_POSTED_MESSAGES = 8


@dataclass(frozen=True, slots=True)
class _Operation:
    """One message: bytes ``span[0]`` to ``span[1]`` of array number ``tensor``, or all of it if ``span`` is None."""

    tensor: int
    span: tuple[int, int] | None
    nbytes: int
    peer: int
    what: str
    is_recv: bool


#: The last bytes of a marked receive buffer until the message arrives. A message that ends with the same
#: bytes counts as not arrived.
_MARK = 0x9E3779B97F4A7C15
_Word = ctypes.c_uint64


@dataclass(frozen=True, slots=True)
class Posted:
    """The operations that were posted.

    Attributes:
        works: each operation, with the object that waits for it.
        ends: the last eight bytes of each receive buffer, if all buffers were marked. They do not keep the buffers
            alive.
    """

    works: tuple[tuple[_Operation, Work], ...]
    ends: tuple[_Word, ...] = ()

    def has_arrived(self) -> bool:
        """Whether a wait for these receives returns at once; False if that is unknown."""
        for end in self.ends:
            if end.value == _MARK:
                return False
        return bool(self.ends)


class PostedProgram:
    """A rank's part of a plan that is posted at once. :func:`make_posted_program` makes it.

    Args:
        recvs, sends: the operations, in plan order.
    """

    def __init__(self, rank: int, recvs: Sequence[_Operation], sends: Sequence[_Operation]) -> None:
        self._rank, self._recvs, self._sends = rank, tuple(recvs), tuple(sends)

    @property
    def only_sends(self) -> bool:
        """Whether the rank receives nothing."""
        return not self._recvs

    def fits(self, src: Sequence[Any], dst: Sequence[Any]) -> bool:
        """Whether the bytes of each message are contiguous in these arrays."""
        for operations, arrays in ((self._recvs, dst), (self._sends, src)):
            for item in operations:
                if not _is_plain(arrays[item.tensor]):
                    return False
        return True

    def post(
        self,
        transport: Transport,
        src: Sequence[torch.Tensor],
        dst: Sequence[torch.Tensor],
        tag: int,
        *,
        marks_ends: bool = False,
    ) -> Posted:
        """Post all operations, receives first.

        Args:
            marks_ends: mark the receive buffers, if all of them have room, and nothing is sent.
        """
        ends: tuple[_Word, ...] = ()
        if marks_ends and not self._sends and all(item.nbytes >= ctypes.sizeof(_Word) for item in self._recvs):
            ends = tuple(_mark_end(dst[item.tensor], item) for item in self._recvs)
        works = [(item, transport.recv(_part(dst, item), item.peer, tag)) for item in self._recvs]
        works += [(item, transport.send(_part(src, item), item.peer, tag)) for item in self._sends]
        return Posted(tuple(works), ends)

    def wait(self, posted: Posted, deadline: float, check: Callable[[], None], tally: Tally) -> None:
        """Wait for all operations.

        :func:`reshard.runtime.cpu.program_executor.run_program` describes the arguments and errors.
        """
        tally.copied = True
        for item, work in posted.works:
            wait_for(work, deadline, check, self._rank, item.peer, item.what)
            if item.is_recv:
                tally.received += 1
                tally.received_bytes += item.nbytes


def _is_plain(array: Any) -> bool:
    return isinstance(array, torch.Tensor) and array.is_contiguous()


def _mark_end(array: torch.Tensor, item: _Operation) -> _Word:
    stop = item.nbytes if item.span is None else item.span[1]
    end = _Word.from_address(array.data_ptr() + stop - ctypes.sizeof(_Word))
    end.value = _MARK
    return end


def _part(arrays: Sequence[torch.Tensor], item: _Operation) -> torch.Tensor:
    array = arrays[item.tensor]
    return array if item.span is None else flat_bytes(view_as_bits(array))[item.span[0] : item.span[1]]


def make_posted_program(plan: Plan, program: RankProgram) -> PostedProgram | None:
    """The program as one that is posted at once; None if it cannot be."""
    sends = sorted((*program.sends_across, *program.sends_inside), key=lambda op: op.id)
    every: list[Recv | Send] = [*program.recvs, *sends]
    if program.copies or program.awaited or program.notify or any(spec.codec is not None for spec in plan.tensors):
        return None
    if max(len(program.recvs), len(sends)) > MAX_POSTED_MESSAGES:
        return None
    if sum(op.nbytes for op in every) > MAX_POSTED_BYTES:
        return None
    candidates = [_find_operation(plan, program, op) for op in every]
    operations = [item for item in candidates if item is not None]
    if len(operations) < len(candidates):
        return None
    recvs = [item for item in operations if item.is_recv]
    return PostedProgram(program.rank, recvs, [item for item in operations if not item.is_recv])


def _find_operation(plan: Plan, program: RankProgram, op: Recv | Send) -> _Operation | None:
    """The operation of a message; None if its bytes are not one run, or it waits for another one."""
    is_recv = isinstance(op, Recv)
    if op.waits or len(op.boxes) > 1 or (isinstance(op, Send) and (op.forwards is not None or op.gathers)):
        return None
    if isinstance(op, Recv) and (op.is_relay or op.num_forwards):
        return None
    box = op.boxes[0]
    shape = (program.dst_shapes if is_recv else program.src_shapes)[box.tensor]
    slices = box.dst if is_recv else box.src
    assert shape is not None and slices is not None
    itemsize = plan.tensors[box.tensor].itemsize
    span = box_span(shape, itemsize, slices)
    if span is None:
        return None
    total = itemsize
    for size in shape:
        total *= size
    peer = op.sender if isinstance(op, Recv) else op.receiver
    what = f"message {op.id} {'from' if is_recv else 'to'} rank {peer}"
    return _Operation(box.tensor, None if span == (0, total) else span, op.nbytes, peer, what, is_recv)
