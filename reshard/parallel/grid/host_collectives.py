"""Collectives of ranks that share a host, through memory that they share.

Every rank writes its messages into its own memory, which the others map. They copy or add from there, so no message
passes a socket. Ranks that cannot map the memory of all others, such as ranks in different containers, use Gloo.

The memory is an unnamed file, which ends with the processes that have it open, even if they are killed. The file begins
with three fields: a counter of messages, on which other ranks wait; a flag that no message will follow; and a ring of
entries, each with the kind of a message and the place of its buffer. A buffer begins with the interval that each rank
reads.

Writing never waits for other ranks: it takes a buffer that all ranks have read, or else the memory grows. Ranks may
therefore start collectives in one order and wait for them in another. The memory holds as many buffers as were in use
at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from reshard import _native
from reshard.errors import DisagreementError, ReshardError, ResourceError
from reshard.formatting import describe_ranks
from reshard.runtime.memory_file import create_memory_file, open_memory_file
from reshard.runtime.torch_compat import timeout_of

from .failures import Failures
from .pending import Parts, PendingResult, ordered_sum

#: Largest number of messages that a rank writes before all others have read the first of them.
RING = 1024
#: Seconds between two checks whether a rank that others wait for has ended.
HOST_CHECK_INTERVAL_SECONDS = 0.5
#: Kinds of messages, by the collective to which a message belongs.
KINDS = ALL_GATHER, REDUCE_SCATTER, EXCHANGE = "all_gather", "reduce_scatter", "exchange"

_ENTRY_BYTES = 64
_CONTROL_BYTES = -(-_ENTRY_BYTES * (RING + 1) // mmap.PAGESIZE) * mmap.PAGESIZE
#: Index, in 32-bit words, of the flag that this rank will write no more messages. Before it is the counter.
_FAILED = 1
#: Index, in 32-bit words of an entry, of the number of ranks that have yet to read the message. Before it are three
#: 64-bit fields: index of the kind, offset and capacity of the buffer.
_READERS = 6


class NotStartedError(RuntimeError):
    """A rank did not start a collective within the time-out.

    Attributes:
        rank: the global rank.
    """

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(f"{describe_ranks([rank])} did not start it within {seconds:g} s")
        self.rank = rank


class LocalRanks(Protocol):
    """The part of an axis that the shared memory reads. Its ranks are on one host: see :class:`Axis`."""

    group: Any
    ranks: tuple[int, ...]
    index: int
    failures: Failures

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> PendingResult:
        """See :meth:`Axis.all_gather`."""


class HostCollectives:
    """Messages among the ranks of an axis, all on one host. Ranks are positions on the axis.

    Args:
        axis: the ranks.
        processes: their process ids.
        descriptors: file descriptors of their memory, in this process. They end with this object.
        control: the beginning of the memory of each, mapped.
    """

    def __init__(
        self, axis: LocalRanks, processes: Sequence[int], descriptors: Sequence[int], control: Sequence[Any]
    ) -> None:
        self._ranks, self._index, self._failures = axis.ranks, axis.index, axis.failures
        self._failures.watch(self)
        self._processes, self._descriptors = tuple(processes), tuple(descriptors)
        self._others = [(self._index + step) % axis.size for step in range(1, axis.size)]
        self._order = sorted(range(axis.size), key=lambda position: self._ranks[position])
        self._seconds = timeout_of(axis.group)
        weakref.finalize(self, _close, self._descriptors).atexit = False
        self._maps: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._words, self._fields = ([item.view(dtype) for item in control] for dtype in ("u4", "i8"))
        self._number, self._end = 0, _CONTROL_BYTES
        #: Messages that not all ranks have read, and offsets of free buffers by their capacity.
        self._written: dict[int, tuple[int, int]] = {}
        self._free: dict[int, list[int]] = {}
        self._reserved: dict[int, int] = {}  # bytes of memory that the file has at an offset
        #: Collectives whose messages this rank has not read.
        self._unread: dict[int, weakref.ref[PostedCollective]] = {}

    @classmethod
    def attach(cls, axis: LocalRanks) -> HostCollectives | None:
        """Share memory among the ranks of an axis. None, on all of them, if one cannot map the memory of another."""
        token, own = secrets.randbits(62), -1
        with contextlib.suppress(OSError):  # the others learn that this rank has none
            own = create_memory_file(token, _CONTROL_BYTES, grows=True)
        try:
            table = axis.all_gather(torch.tensor([[os.getpid(), own, token]], device="cpu"), [1] * axis.size).wait()
            opened: list[int] = []
            control: list[Any] = []
            with contextlib.suppress(OSError):  # another pid namespace, a process that hides, or a limit of memory
                for facts in table.tolist():
                    opened.append(open_memory_file(*facts, writes=True))
                    control.append(_native.map_shared(opened[-1], 0, _CONTROL_BYTES))
            can_map = torch.tensor([len(control) == axis.size], device="cpu")
            if bool(axis.all_gather(can_map, [1] * axis.size).wait().all()):
                return cls(axis, table[:, 0].tolist(), opened, control)
            _close(opened)
            return None
        finally:
            _close([own] if own >= 0 else [])

    def move(
        self, kind: str, parts: Sequence[Parts], targets: Sequence[Parts], result: torch.Tensor
    ) -> PostedCollective:
        """Copy the data of each rank ``i`` for this rank to the tensors ``targets[i]``, which are rows of ``result``.

        Args:
            kind: ``ALL_GATHER`` or ``EXCHANGE``.
            parts: parts for each rank, or one part for all of them.
        """
        _copy(parts[self._index if len(parts) > 1 else 0], targets[self._index])

        def finish(views: list[Any]) -> torch.Tensor:
            for rank in self._others:
                _copy([views[rank]], targets[rank])
            return result

        return self._start(kind, parts, [sum(item.nbytes for item in to) for to in targets], result.dtype, finish)

    def reduce_scatter(self, parts: Sequence[Parts]) -> PostedCollective:
        """Sum ``parts[i]`` over ranks, in the order of their global ranks, for each rank ``i``."""
        own = _join(parts[self._index])

        def finish(views: list[Any]) -> torch.Tensor:
            views[self._index] = own
            return ordered_sum([views[position].view(own.shape) for position in self._order])

        return self._start(REDUCE_SCATTER, parts, [own.nbytes] * len(parts), own.dtype, finish)

    def _start(
        self, kind: str, parts: Sequence[Parts], nbytes: Sequence[int], dtype: torch.dtype, make: Callable[..., Any]
    ) -> PostedCollective:
        """Write a message: ``parts[i]`` for rank ``i``, or the only part for all. The rest are fields of the result."""
        number = self._number + 1
        first, intervals = -(-16 * len(self._ranks) // 64) * 64, []
        for rank, part in enumerate(parts):
            length = 0 if len(parts) > 1 and rank == self._index else sum(item.nbytes for item in part)
            intervals.append((first, first + length))
            first += length
        offset, capacity = self._take_buffer(number, first)
        table, buffer = self._map(self._index, offset, capacity)
        table[:] = intervals
        for (begin, end), part in zip(intervals, parts, strict=True):
            if begin < end:
                _copy(part, [buffer[begin:end].view(dtype)])
        entry = _entry(number)
        self._fields[self._index][entry : entry + 3] = KINDS.index(kind), offset, capacity
        _native.add_to_counter(self._words[self._index], 2 * entry + _READERS, len(self._others))
        self._written[number] = offset, capacity
        _native.publish_number(self._words[self._index], 0, number % 2**32)
        self._number = number
        message = PostedCollective(self, number, kind, nbytes, dtype, make)
        self._unread[number] = weakref.ref(message)
        return message

    def _take_buffer(self, number: int, nbytes: int) -> tuple[int, int]:
        """Offset and capacity of a buffer for a message."""
        for unread, message in list(self._unread.items()):
            # nobody can wait for this one any more, such as after an error in a forward
            if message() is None and all(self._has_started(rank, unread, 0.0) for rank in self._others):
                self.mark_read(unread)
        for written, (offset, capacity) in list(self._written.items()):
            if not _native.add_to_counter(self._words[self._index], 2 * _entry(written) + _READERS, 0):
                del self._written[written]
                self._free.setdefault(capacity, []).append(offset)
        if number - RING in self._written:
            raise self._fail(
                ResourceError(
                    f"{describe_ranks([self._ranks[self._index]])} started {RING} collectives before "
                    f"{describe_ranks(self._ranks)} all waited for the first; wait for them earlier"
                )
            )
        capacity = max(mmap.PAGESIZE, 1 << (nbytes - 1).bit_length())
        descriptor = self._descriptors[self._index]
        try:
            if self._free.get(capacity):
                offset = self._free[capacity].pop()
            else:
                offset, self._end = self._end, self._end + capacity
                os.ftruncate(descriptor, self._end)
            if nbytes > self._reserved.get(offset, 0):  # without memory, a write would end the process by SIGBUS
                os.posix_fallocate(descriptor, offset, nbytes)
                self._reserved[offset] = nbytes
        except OSError as error:
            raise self._no_memory(self._index, capacity, error) from error
        return offset, capacity

    def mark_failed(self) -> None:
        """Tell the ranks that wait for this rank that it will write no further messages."""
        _native.publish_number(self._words[self._index], _FAILED, 1)

    def _has_started(self, rank: int, number: int, seconds: float) -> bool:
        """Whether a rank writes a message within some seconds."""
        return _native.wait_for_number(self._words[rank], 0, number % 2**32, seconds)

    def wait_for(self, number: int) -> None:
        """Wait until all ranks have written a message.

        Raises:
            RuntimeError: before it did, a rank ended or a collective failed on it; or it did not write the message
                within the time-out of the process group.
        """
        deadline = time.monotonic() + self._seconds
        for rank in self._others:
            while not self._has_started(rank, number, min(HOST_CHECK_INTERVAL_SECONDS, deadline - time.monotonic())):
                name, has_ended = describe_ranks([self._ranks[rank]]), _has_ended(self._processes[rank])
                has_failed = bool(_native.add_to_counter(self._words[rank], _FAILED, 0))
                if (has_ended or has_failed) and not self._has_started(rank, number, 0.0):
                    what = f"the process of {name} has ended"
                    raise RuntimeError(what if has_ended else f"a collective of the grid failed on {name}")
                if time.monotonic() >= deadline:
                    raise NotStartedError(self._ranks[rank], self._seconds)

    def read(self, message: PostedCollective) -> list[Any]:
        """The data of each rank for this rank, as flat tensors in the memory of that rank; None for this rank itself.

        Raises:
            DisagreementError: a rank called another collective, or has another number of bytes for this one.
        """
        views: list[Any] = [None] * len(self._ranks)
        entry = _entry(message.number)
        for rank in self._others:
            kind, offset, capacity = self._fields[rank][entry : entry + 3].tolist()
            table, buffer = self._map(rank, offset, capacity)
            begin, end = table[self._index].tolist()
            if (KINDS[kind], end - begin) != (message.kind, message.nbytes[rank]):
                own, other = (describe_ranks([self._ranks[item]]) for item in (self._index, rank))
                error = DisagreementError(
                    f"{other} called {KINDS[kind]} with {end - begin} bytes for {own}, which called {message.kind} "
                    f"and expects {message.nbytes[rank]} bytes; ranks must call the same collectives of a grid, in the "
                    "same order and with the same sizes"
                )
                raise self._fail(error)
            views[rank] = buffer[begin:end].view(message.dtype)
        return views

    def mark_read(self, number: int) -> None:
        """Let the other ranks reuse the buffers of a message."""
        del self._unread[number]
        for rank in self._others:
            _native.add_to_counter(self._words[rank], 2 * _entry(number) + _READERS, -1)

    def _map(self, rank: int, offset: int, nbytes: int) -> tuple[Any, torch.Tensor]:
        """A buffer: its table of intervals, ``[rank, begin or end]``, and its bytes. It never changes its capacity."""
        if (rank, offset) not in self._maps:
            try:
                array = _native.map_shared(self._descriptors[rank], offset, nbytes)
            except OSError as error:
                raise self._no_memory(rank, nbytes, error) from error
            with torch.inference_mode(False):  # tensors made in this mode cannot change outside of it
                table = array[: 16 * len(self._ranks)].view("i8").reshape(-1, 2)
                self._maps[rank, offset] = table, torch.from_numpy(array)
        return self._maps[rank, offset]

    def _no_memory(self, rank: int, nbytes: int, error: OSError) -> ReshardError:
        """The error for memory of a rank that this rank cannot make or map."""
        own, owner = (describe_ranks([self._ranks[item]]) for item in (self._index, rank))
        return self._fail(
            ResourceError(
                f"{own} cannot map {nbytes} bytes of the shared memory of {owner}: {error.strerror}; raise the limits "
                "of memory and file sizes of the process (ulimit -v, ulimit -f), or move less at a time with panel="
            )
        )

    def _fail(self, error: ReshardError) -> ReshardError:
        """Prevent later collectives of the grid, because they would meet other collectives of the other ranks."""
        self._failures.report(error)
        return self._failures.add(error)


@dataclass(eq=False)
class PostedCollective:
    """A collective of this rank that is under way.

    Attributes:
        kind: name of the collective.
        nbytes: bytes that each rank has for this rank.
        dtype: dtype of these bytes.
        make: makes the result of :meth:`HostCollectives.read`.
    """

    memory: HostCollectives
    number: int
    kind: str
    nbytes: Sequence[int]
    dtype: torch.dtype
    make: Callable[[list[Any]], torch.Tensor]
    result: torch.Tensor | None = None

    def wait(self) -> None:
        """Wait for the messages of the other ranks."""
        if self.result is None:
            self.memory.wait_for(self.number)

    def finish(self) -> torch.Tensor:
        """The result."""
        if self.result is None:
            self.result = self.make(self.memory.read(self))
            self.memory.mark_read(self.number)
        return self.result


def _entry(number: int) -> int:
    """Index of the entry of a message, in 64-bit words."""
    return _ENTRY_BYTES // 8 * (1 + number % RING)


def _copy(sources: Parts, targets: Parts) -> None:
    """Copy tensors that follow each other. There is one source or one target, which is contiguous."""
    if len(sources) == len(targets) == 1:
        targets[0].copy_(sources[0].detach().reshape(targets[0].shape))
        return
    flat = (targets if len(targets) == 1 else sources)[0].detach().reshape(-1)
    many = sources if len(targets) == 1 else targets
    for part, values in zip(many, flat.split([item.numel() for item in many]), strict=True):
        if len(targets) == 1:
            values.view(part.shape).copy_(part.detach())
        else:
            part.copy_(values.view(part.shape))


def _join(parts: Parts) -> torch.Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).detach()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _has_ended(process: int) -> bool:
    """Whether a process has ended, also if its parent has not noticed."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in ("Z", "X")
