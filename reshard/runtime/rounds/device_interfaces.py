"""Interfaces through which :class:`~.runner.RoundRunner` uses an array library and its device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from reshard.runtime.program import Slices
from reshard.runtime.strided_regions import RegionTable

#: A torch tensor or a CuPy array.
Array = Any
#: A flat uint8 buffer and the rank at the other end.
Posted = tuple[Array, int]
#: Names of the streams.
EXCHANGE, PACK, UNPACK = "exchange", "pack", "unpack"


class RoundExchange(Protocol):
    """Posts one round as one group. Work that is enqueued on the current stream later runs after it."""

    def __call__(self, recvs: Sequence[Posted], sends: Sequence[Posted], broadcasts: Sequence[Posted], /) -> None:
        """Post receives, sends and broadcasts.

        Args:
            recvs: buffers to receive into, each with its sender.
            sends: buffers to send, each with its receiver.
            broadcasts: buffers to broadcast, each with its root. Empty unless the rounds are
                :class:`~.large_groups.LargeRounds`.
        """


class Copier(Protocol):
    """Copies all regions of a table in one launch."""

    def upload(self, table: RegionTable) -> Any:
        """Copy a table to the device; returns what :meth:`copy` takes."""

    def find_addresses(self, known: tuple[int, ...]) -> Any:
        """Array addresses as a device array, cached."""

    def warm_up(self, buffer: Array) -> None:
        """Compile and load the kernels, so that the first copy does not."""

    def copy(self, table: Any, addresses: Any, buffer: Array, to_buffer: bool) -> None:
        """Copy regions from contiguous arrays into a flat byte buffer, or from the buffer back into the arrays.

        Args:
            table: a result of :meth:`upload`.
            addresses: a result of :meth:`find_addresses`.
            buffer: the flat byte buffer.
            to_buffer: the direction.
        """


class Memory(Protocol):
    """Array operations of one library on one device."""

    device: Any

    def empty(self, nbytes: int) -> Array:
        """A new flat uint8 array."""

    def view(self, array: Array, at: Slices) -> Array:
        """A view of one box of an array."""

    def is_contiguous(self, array: Array) -> bool:
        """Whether the elements are contiguous in row-major order."""

    def itemsize(self, array: Array) -> int:
        """Bytes per element."""

    def address(self, array: Array) -> int:
        """Address of the first byte."""

    def flat(self, array: Array) -> Array:
        """A contiguous array as a flat uint8 array on the same memory."""

    def copy(self, target: Array, source: Array) -> None:
        """Copy ``source`` into ``target``. Both have the same shape and dtype."""

    def pack(self, views: Sequence[Array], buffer: Array) -> None:
        """Copy views into consecutive parts of a flat byte buffer."""

    def unpack(self, buffer: Array, views: Sequence[Array]) -> None:
        """Copy consecutive parts of a flat byte buffer into views."""


class RoundStreams(Protocol):
    """Streams for packing, exchange and unpacking. :data:`EXCHANGE` is the stream that is current at the start."""

    def on(self, stream: str) -> contextlib.AbstractContextManager[Any]:
        """Make a stream the current one inside a ``with`` block."""

    def mark(self) -> Any:
        """Record an event on the current stream, after the work enqueued so far."""

    def wait(self, mark: Any) -> None:
        """Make later work on the current stream wait for an event of :meth:`mark`."""


class OneStream:
    """All work on one stream, in the order in which it is enqueued."""

    def on(self, stream: str) -> contextlib.AbstractContextManager[Any]:
        """See :class:`RoundStreams`."""
        return contextlib.nullcontext()

    def mark(self) -> None:
        """See :class:`RoundStreams`."""

    def wait(self, mark: Any) -> None:
        """See :class:`RoundStreams`."""


#: Keeps no state, so all may share it.
ONE_STREAM = OneStream()
