"""Runs one rank's program on a transport: posts in the plan's order, waits in the plan's order.

Why it cannot deadlock. All ranks share one total order of messages. Each queue of a rank (receives, sends
across hosts, sends inside) is posted in that order and takes its buffers from a pool of its own in that
order; a buffer is given back by events that stand earlier in the order than whatever waits for it. A rank
that must wait waits for the earliest of its posted operations. So the earliest unfinished message of all has
its data, a buffer at both ends, and both its operations posted.

Receives are posted before sends because Gloo otherwise may run the two directions one after the other.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch

from reshard.errors import TransferTimeoutError
from reshard.plan import num_recv_slots, recvs_ahead
from reshard.program import Program, Recv, Send
from reshard.runs import box_runs, copy_runs

#: Packed messages that one queue of sends may have under way, whatever windows the plan has.
MAX_WINDOW = 4
#: From this many boxes on, a message is packed as byte runs in one call rather than box by box.
MANY_BOXES = 4


class Work(Protocol):
    """An operation under way."""

    def wait(self, timeout: timedelta) -> Any:
        """Block until done; raise if it failed or ``timeout`` passed."""


class Transport(Protocol):
    """Moves flat byte buffers between ranks; messages of one pair and tag arrive in the order of sending."""

    def send(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start sending a buffer, which must not change until the work is done."""
        ...

    def recv(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start receiving exactly ``buffer.numel()`` bytes."""
        ...


class Staging:
    """The buffers of one program, made on first use and kept: half of them for receives, a quarter a send queue."""

    def __init__(self, program: Program, staging_bytes: int) -> None:
        self.recv = _Pool(program.recvs, num_recv_slots(staging_bytes, _largest(program.recvs)))
        self.across = _Pool(program.sends_across, _num_send_slots(program.sends_across, staging_bytes))
        self.inside = _Pool(program.sends_inside, _num_send_slots(program.sends_inside, staging_bytes))
        self._runs: dict[tuple[int, str], _Runs] = {}

    def runs_of(self, op: Recv | Send, arrays: Sequence[torch.Tensor | None], side: str) -> _Runs | None:
        """The boxes of a message as byte runs, worked out once; None if an array is not contiguous."""
        tensors = {place.tensor for place in op.places}
        if not all((array := arrays[tensor]) is not None and array.is_contiguous() for tensor in tensors):
            return None
        if (op.id, side) not in self._runs:
            self._runs[op.id, side] = _Runs(op, arrays, side)
        return self._runs[op.id, side]

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now."""
        return sum(pool.allocated_bytes for pool in (self.recv, self.across, self.inside))


def _largest(ops: Sequence[Recv] | Sequence[Send]) -> int:
    return max((op.nbytes for op in ops), default=0)


def _num_send_slots(sends: Sequence[Send], staging_bytes: int) -> int:
    return max(1, min(MAX_WINDOW, staging_bytes // 4 // max(_largest(sends), 1)))


class _Pool:
    def __init__(self, ops: Sequence[Recv] | Sequence[Send], num_slots: int) -> None:
        self._slot_bytes = -(-_largest(ops) // 16) * 16
        self._num_slots = min(num_slots, len(ops))
        self._storage: torch.Tensor | None = None
        self._free: list[torch.Tensor] = []

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._storage is None else self._storage.numel()

    def take(self) -> torch.Tensor | None:
        if self._storage is None:
            self._storage = torch.empty(self._num_slots * self._slot_bytes, dtype=torch.uint8)
            self._free = list(self._storage.split(self._slot_bytes)) if self._slot_bytes else []
        return self._free.pop() if self._free else None

    def give(self, slot: torch.Tensor) -> None:
        self._free.append(slot)


def flat_bytes(view: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat uint8 tensor on the same memory.

    A view of one element counts as contiguous whatever its strides, but keeps them; hence as_strided.
    """
    return view.as_strided((view.numel(),), (1,)).view(torch.uint8)


class _Runs:
    """Where the boxes of one message lie in contiguous arrays and in its buffer, as byte runs per tensor."""

    def __init__(self, op: Recv | Send, arrays: Sequence[torch.Tensor | None], side: str) -> None:
        self.rows: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
        filled = 0
        for tensor, places in itertools.groupby(op.places, key=lambda place: place.tensor):
            array = arrays[tensor]
            assert array is not None
            boxes = [getattr(place, side) for place in places]
            at, length = box_runs(array.shape, array.element_size(), boxes)
            ends = filled + np.cumsum(length)
            self.rows.append((tensor, at, ends - length, length))
            filled = int(ends[-1])

    def pack(self, arrays: Sequence[torch.Tensor | None], buffer: torch.Tensor) -> None:
        """From the arrays into the buffer."""
        for tensor, at, in_buffer, length in self.rows:
            copy_runs(_flat(arrays[tensor]), buffer.numpy(), at, in_buffer, length)

    def unpack(self, buffer: torch.Tensor, arrays: Sequence[torch.Tensor | None]) -> None:
        """From the buffer into the arrays."""
        for tensor, at, in_buffer, length in self.rows:
            copy_runs(buffer.numpy(), _flat(arrays[tensor]), in_buffer, at, length)


def _flat(array: torch.Tensor | None) -> np.ndarray:
    assert array is not None
    return flat_bytes(array).numpy()


class _Run:
    def __init__(
        self,
        program: Program,
        transport: Transport,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        staging: Staging,
        tag: int,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        self.program, self.transport, self.tag = program, transport, tag
        self.src, self.dst, self.staging = src, dst, staging
        self.deadline, self.check = deadline, check
        self.slot_of: dict[int, torch.Tensor] = {}  # receive -> its staging slot
        self.uses: dict[int, int] = {}  # receive -> forwards that still read its slot
        self.recvs_done = 0
        self.posted_recvs: deque[tuple[int, Work]] = deque()
        self.queues = [_Queue(program.sends_across, staging.across), _Queue(program.sends_inside, staging.inside)]

    def run(self) -> None:
        next_recv = 0
        recvs, copies = self.program.recvs, self.program.copies
        while True:
            posting = True
            while posting:
                posting = False
                while next_recv < len(recvs) and self.post_recv(next_recv):
                    next_recv += 1
                for queue in self.queues:
                    while self.post_send(queue):
                        posting = True
            for copy in copies:
                _view(self.dst, copy.place.tensor, copy.place.dst).copy_(
                    _view(self.src, copy.place.tensor, copy.place.src)
                )
            copies = ()
            if not self.wait_earliest():
                break
        assert next_recv == len(recvs) and all(queue.at == len(queue.ops) for queue in self.queues)

    def post_recv(self, index: int) -> bool:
        op = self.program.recvs[index]
        if len(self.posted_recvs) >= recvs_ahead(op.window):
            return False
        buffer = None
        if len(op.places) == 1 and not op.is_relay:
            view = _view(self.dst, op.places[0].tensor, op.places[0].dst)
            if view.is_contiguous():
                buffer = flat_bytes(view)
        if buffer is None:
            slot = self.staging.recv.take()
            if slot is None:
                return False
            self.slot_of[index] = slot
            buffer = slot[: op.nbytes]
        self.posted_recvs.append((index, self.transport.recv(buffer, op.sender, self.tag)))
        return True

    def finish_recv(self) -> None:
        index, work = self.posted_recvs.popleft()
        op = self.program.recvs[index]
        self.wait(work, op.id, "from", op.sender)
        slot = self.slot_of.get(index)
        if slot is not None:
            if not op.is_relay:
                runs = self.staging.runs_of(op, self.dst, "dst") if len(op.places) >= MANY_BOXES else None
                if runs is not None:
                    runs.unpack(slot[: op.nbytes], self.dst)
                else:
                    unpack(slot[: op.nbytes], [_view(self.dst, p.tensor, p.dst) for p in op.places])
            self.uses[index] = op.num_forwards
            self.release_if_unused(index)
        self.recvs_done = index + 1

    def release_if_unused(self, index: int) -> None:
        if not self.uses[index]:
            self.staging.recv.give(self.slot_of.pop(index))

    def post_send(self, queue: _Queue) -> bool:
        if queue.at == len(queue.ops):
            return False
        op = queue.ops[queue.at]
        if len(queue.posted) >= op.window or (op.forwards is not None and self.recvs_done <= op.forwards):
            return False
        slot = None
        if op.forwards is not None and op.forwards in self.slot_of:
            buffer = self.slot_of[op.forwards][: op.nbytes]
        else:
            arrays, side = (self.dst, "dst") if op.forwards is not None else (self.src, "src")
            view = _view(arrays, op.places[0].tensor, getattr(op.places[0], side))
            if len(op.places) == 1 and view.is_contiguous():
                buffer = flat_bytes(view)
            else:
                slot = queue.pool.take()
                if slot is None:
                    return False
                buffer = slot[: op.nbytes]
                runs = self.staging.runs_of(op, arrays, side) if len(op.places) >= MANY_BOXES else None
                if runs is not None:
                    runs.pack(arrays, buffer)
                else:
                    pack([_view(arrays, place.tensor, getattr(place, side)) for place in op.places], buffer)
        queue.posted.append((op, self.transport.send(buffer, op.receiver, self.tag), slot))
        queue.at += 1
        return True

    def finish_send(self, queue: _Queue) -> None:
        op, work, slot = queue.posted.popleft()
        self.wait(work, op.id, "to", op.receiver)
        if slot is not None:
            queue.pool.give(slot)
        elif op.forwards is not None and op.forwards in self.slot_of:
            self.uses[op.forwards] -= 1
            self.release_if_unused(op.forwards)

    def wait_earliest(self) -> bool:
        """Wait for the earliest posted operation in the plan's order; False if there is none."""
        first: Callable[[], None] | None = None
        earliest = -1
        if self.posted_recvs:
            earliest, first = self.program.recvs[self.posted_recvs[0][0]].id, self.finish_recv
        for queue in self.queues:
            if queue.posted and (first is None or queue.posted[0][0].id < earliest):
                earliest, first = queue.posted[0][0].id, lambda queue=queue: self.finish_send(queue)  # type: ignore[misc]
        if first is None:
            return False
        first()
        return True

    def wait(self, work: Work, ident: int, way: str, rank: int) -> None:
        self.check()
        left = self.deadline - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(left, 0.001)))
        except Exception as error:
            self.check()
            if time.monotonic() >= self.deadline:
                raise TransferTimeoutError(
                    f"rank {self.program.rank}: message {ident} {way} rank {rank} did not finish in time"
                ) from error
            raise ConnectionError(f"message {ident} {way} rank {rank} failed: {error}") from error


class _Queue:
    def __init__(self, ops: tuple[Send, ...], pool: _Pool) -> None:
        self.ops, self.pool, self.at = ops, pool, 0
        self.posted: deque[tuple[Send, Work, torch.Tensor | None]] = deque()


def _view(arrays: Sequence[torch.Tensor | None], tensor: int, at: tuple[slice, ...] | None) -> torch.Tensor:
    array = arrays[tensor]
    assert array is not None and at is not None
    return array[at]


def pack(views: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy strided views one after the other into a flat byte buffer."""
    at = 0
    for view in views:
        nbytes = view.numel() * view.element_size()
        _typed(buffer, at, nbytes, view).copy_(view)
        at += nbytes


def unpack(buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """The inverse of :func:`pack`."""
    at = 0
    for view in views:
        nbytes = view.numel() * view.element_size()
        view.copy_(_typed(buffer, at, nbytes, view))
        at += nbytes


def _typed(buffer: torch.Tensor, at: int, nbytes: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[at : at + nbytes].view(like.dtype).view(like.shape)  # boxes of a message have one itemsize


def run_program(
    program: Program,
    transport: Transport,
    src: Sequence[torch.Tensor | None],
    dst: Sequence[torch.Tensor | None],
    staging: Staging,
    *,
    tag: int = 0,
    deadline: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Do one rank's part; returns when all its operations are done.

    Args:
        program: the part. transport: how bytes travel.
        src, dst: per tensor the local arrays, as carriers (see :func:`carrier`); None where the rank has none.
        staging: buffers of this program. tag: tells programs under way on one transport apart.
        deadline: ``time.monotonic()`` after which waiting fails. check: raises when the run must stop.

    Raises:
        TransferTimeoutError: the deadline passed. ConnectionError: the transport failed.
    """
    _Run(program, transport, src, dst, staging, tag, deadline, check).run()


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain dtype of the same size, so that any dtype can be copied as bytes."""
    return tensor.detach().view(_CARRIERS[tensor.element_size()])
