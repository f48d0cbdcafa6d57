"""NCCL communicators: grouped point-to-point messages (one group per round), and collectives."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.runtime.cuda.nccl import Communicator, NcclMessage, Poll
from reshard.runtime.cuda.nccl_library import DATA_TYPES, REDUCTIONS, NcclError, find_library
from reshard.runtime.cuda.stream import STREAMS, allow_queries_during_capture, current_stream_handle
from reshard.runtime.rounds.device_interfaces import Posted
from reshard.runtime.rounds.round_assignment import Round

#: Device types whose messages NCCL transfers.
NCCL_DEVICES = {"cuda"}
#: Interval at which a host polls the device.
DEVICE_POLL_INTERVAL_SECONDS = 0.0005
_ID_KEY = "id"


def make_communicator(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout_seconds: float, poll: Poll
) -> Communicator:
    """Create a communicator of ``size`` ranks. Rank 0 creates its unique id and publishes it in the store.

    Args:
        store: a store that polls when it waits, so that a wait does not block other users of its connection.
        poll: function that is called repeatedly while NCCL connects the ranks. It raises an error to end the wait,
            for example because a rank failed.

    Raises:
        RuntimeError, TimeoutError: not all ranks joined in time, NCCL failed, or ``NCCL_COMM_BLOCKING`` is 1.
    """
    if os.environ.get("NCCL_COMM_BLOCKING") == "1":
        raise RuntimeError("NCCL_COMM_BLOCKING=1 makes calls of NCCL block without a limit: unset it on all ranks")
    library = find_library()
    if rank == 0:
        store.set(_ID_KEY, library.make_unique_id())
    store.wait([_ID_KEY], timedelta(seconds=timeout_seconds))
    unique_id = bytes(store.get(_ID_KEY))
    if device.type != "cuda":
        return Communicator(library, unique_id, rank, size, timeout_seconds=timeout_seconds, poll=poll)
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        return Communicator(
            library, unique_id, rank, size, timeout_seconds=timeout_seconds, poll=poll,
            in_thread=functools.partial(_in_thread, index),
        )  # fmt: skip


@contextlib.contextmanager
def _in_thread(index: int) -> Iterator[None]:
    """Prepare a thread that aborts or destroys a communicator of a device.

    NCCL frees memory, which would invalidate a capture, and restores the thread's device, which would make a context on
    the first device if the thread had chosen none.
    """
    allow_queries_during_capture()
    with torch.cuda.device(index):
        yield


class _OnCommunicator:
    """An object that ends with the communicator that it uses."""

    _communicator: Communicator

    def begin_abort(self) -> None:
        """Cancel all operations as :meth:`abort` does, but do not wait until the device has cancelled them."""
        self._communicator.begin_abort()

    def abort(self) -> None:
        """Cancel all operations in progress. Those on the other ranks end soon after."""
        self._communicator.abort()

    def begin_close(self) -> None:
        """Destroy the communicator as :meth:`close` does, but do not wait for operations in progress."""
        self._communicator.begin_close()

    def close(self) -> None:
        """Destroy the communicator."""
        self._communicator.close()


class NcclExchange(_OnCommunicator):
    """Posts the messages and broadcasts of a round as one NCCL group on the current stream.

    Args:
        communicator: the communicator of the ranks of a plan.
        position: ``{global rank: rank in the communicator}``.
        device: device of the buffers.
    """

    def __init__(self, communicator: Communicator, position: Mapping[int, int], device: torch.device) -> None:
        self._communicator, self._position, self._device = communicator, position, device
        self._connected: set[tuple[int, int]] = set()  # (sender, receiver)
        self._has_broadcast = False
        self.streams = STREAMS[device.type](device)

    def __call__(self, recvs: Sequence[Posted], sends: Sequence[Posted], broadcasts: Sequence[Posted] = ()) -> None:
        """Enqueue one round; later work on the current stream runs after it."""
        lists = (self._messages(posted) for posted in (recvs, sends, broadcasts))
        self._communicator.exchange(next(lists), next(lists), current_stream_handle(self._device), next(lists))

    def _messages(self, posted: Sequence[Posted]) -> list[NcclMessage]:
        return [
            (buffer.data_ptr(), buffer.numel() * buffer.element_size(), self._position[rank]) for buffer, rank in posted
        ]

    def connect(self, rank: int, rounds: Sequence[Round], timeout_seconds: float, poll: Poll) -> None:
        """Connect this rank to its peers, and wait until the device has done so.

        Each pair of ranks exchanges one byte, in the order of ``rounds``. If they broadcast, rank 0 broadcasts one byte
        first. NCCL connects two ranks when both post a group with messages between them. If they first did so during a
        training step, they could post different groups and deadlock. Therefore all ranks of a plan call this method
        right after they agree on the plan.

        Raises:
            RuntimeError, TimeoutError: not all ranks connected in time, or NCCL failed. Or what ``poll`` raises.
        """
        marks = []
        if any(messages.broadcasts for messages in rounds) and not self._has_broadcast:
            self._has_broadcast = True
            scratch = torch.zeros(1, dtype=torch.uint8, device=self._device)
            root = min(self._position)
            marks.append(self.streams.enqueue(functools.partial(self, [], [], [(scratch, root)]), [scratch]))
        for messages in rounds:
            pairs = messages.pairs(rank) - self._connected
            senders = {sender for sender, receiver in pairs if receiver == rank}
            receivers = {receiver for sender, receiver in pairs if sender == rank}
            if not senders and not receivers:
                continue
            scratch = torch.zeros(2, dtype=torch.uint8, device=self._device)
            recvs = [(scratch[:1], peer) for peer in sorted(senders)]
            sends = [(scratch[1:], peer) for peer in sorted(receivers)]
            marks.append(self.streams.enqueue(functools.partial(self, recvs, sends), [scratch]))
            self._connected |= {(peer, rank) for peer in senders} | {(rank, peer) for peer in receivers}
        last_look = time.monotonic()
        deadline = last_look + timeout_seconds
        for mark in marks:
            while mark is not None and not mark.query():
                now = time.monotonic()
                if now > deadline:
                    raise TimeoutError(f"ranks did not connect over NCCL within {timeout_seconds:g} s")
                if now - last_look > 0.2:
                    last_look = now
                    poll()
                    self.check()
                time.sleep(DEVICE_POLL_INTERVAL_SECONDS)

    def check(self) -> None:
        """Raise NcclError if the communicator failed."""
        error = self.find_error()
        if error is not None:
            raise NcclError(error)

    def find_error(self) -> str | None:
        """The reason why the communicator failed; None if it works."""
        return self._communicator.find_error()


class NcclCollectives(_OnCommunicator):
    """All-reduce and broadcast, with the interface that a ``torch.distributed`` backend has for them."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self._device = communicator, device

    def allreduce(self, arrays: Sequence[torch.Tensor], options: Any) -> CollectiveWork:
        """All-reduce one tensor in place.

        Raises:
            ArgumentError: the array is sparse, not contiguous, or of a dtype that NCCL cannot reduce, or the reduction
                is not in :data:`~reshard.runtime.cuda.nccl_library.REDUCTIONS`.
        """
        (array,) = arrays
        if array.layout is not torch.strided:
            raise ArgumentError(f"all-reduce over NCCL needs a dense tensor, not one with layout {array.layout}")
        if not array.is_contiguous():
            raise ArgumentError(
                f"all-reduce over NCCL needs a contiguous tensor; this one of shape {list(array.shape)} has strides "
                f"{list(array.stride())}"
            )
        if dtype_name(array.dtype) not in DATA_TYPES:
            raise ArgumentError(f"NCCL cannot reduce {array.dtype}; it reduces {', '.join(sorted(DATA_TYPES))}")
        # Torch returns another object than it was given. It is equal, but has no name and another hash.
        reduction = next((name for op, name in _REDUCTIONS if options.reduceOp == op), None)
        if reduction is None:
            raise ArgumentError(
                f"all-reduce over NCCL computes only {', '.join(REDUCTIONS)}, not {options.reduceOp.op}"
            )
        return self._enqueue(
            lambda stream: self._communicator.all_reduce(
                array.data_ptr(), array.numel(), dtype_name(array.dtype), reduction, stream
            )
        )

    def broadcast(self, arrays: Sequence[torch.Tensor], options: Any) -> CollectiveWork:
        """Broadcast one tensor from ``options.rootRank`` to all ranks, in place."""
        (array,) = arrays
        nbytes = array.numel() * array.element_size()
        return self._enqueue(
            lambda stream: self._communicator.broadcast(array.data_ptr(), nbytes, options.rootRank, stream)
        )

    def _enqueue(self, work: Callable[[int], None]) -> CollectiveWork:
        work(current_stream_handle(self._device))
        event: Any = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return CollectiveWork(self._communicator, event)


_REDUCTIONS = [(getattr(dist.ReduceOp, name.upper()), name) for name in REDUCTIONS]


class CollectiveWork:
    """A collective that was enqueued on a stream."""

    def __init__(self, communicator: Communicator, event: Any) -> None:
        self._communicator, self._event = communicator, event

    def is_completed(self) -> bool:
        """Whether the device has finished it; raises RuntimeError if the communicator failed."""
        error = self._communicator.find_error()
        if error is not None:
            raise RuntimeError(error)
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Return at once: later work on the same stream runs after the collective."""
