"""The interfaces of an array library and its device that :class:`~.executor.RoundRunner` needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from reshard.runtime.program import Slices
from reshard.runtime.strided_regions import RegionTable

#: A torch tensor or a CuPy array.
Array = Any
#: A flat uint8 buffer and the rank at the other end.
Posted = tuple[Array, int]
#: Posts receives and sends as one group. Work that is enqueued on the current stream afterwards runs after them.
Exchange = Callable[[Sequence[Posted], Sequence[Posted]], None]
#: Names of the streams.
EXCHANGE, PACK, UNPACK = "exchange", "pack", "unpack"


class Copier(Protocol):
    """Copies all regions of a table in one launch."""

    def upload(self, table: RegionTable) -> Any:
        """A table on the device."""

    def find_addresses(self, known: tuple[int, ...]) -> Any:
        """The addresses of arrays, on the device."""

    def warm_up(self, buffer: Array) -> None:
        """Compile and load the kernels, so that the first copy does not."""

    def copy(self, table: Any, addresses: Any, buffer: Array, to_buffer: bool) -> None:
        """Copy from contiguous arrays into a flat byte buffer, or back. ``table`` is what :meth:`upload` returned."""


class Memory(Protocol):
    """The arrays of one library on one device."""

    device: Any

    def empty(self, nbytes: int) -> Array:
        """A new flat uint8 array."""

    def view(self, array: Array, at: Slices) -> Array:
        """A view of a box."""

    def is_contiguous(self, array: Array) -> bool:
        """Whether the elements are contiguous in row-major order."""

    def itemsize(self, array: Array) -> int:
        """Bytes per element."""

    def address(self, array: Array) -> int:
        """Address of the first byte."""

    def flat(self, array: Array) -> Array:
        """A contiguous array as a flat uint8 array on the same memory."""

    def copy(self, target: Array, source: Array) -> None:
        """Copy between views of one shape and dtype."""

    def pack(self, views: Sequence[Array], buffer: Array) -> None:
        """Copy views into consecutive parts of a flat byte buffer."""

    def unpack(self, buffer: Array, views: Sequence[Array]) -> None:
        """Copy consecutive parts of a flat byte buffer into views."""


class RoundStreams(Protocol):
    """Streams for packing, exchange and unpacking. :data:`EXCHANGE` is the stream that is current at the start."""

    def on(self, stream: str) -> contextlib.AbstractContextManager[Any]:
        """Make a stream the current one inside a ``with`` block."""

    def mark(self) -> Any:
        """An event at the end of the work on the current stream."""

    def wait(self, mark: Any) -> None:
        """Let later work on the current stream wait for an event."""


class OneStream:
    """All work on one stream, in the order in which it is enqueued."""

    def on(self, stream: str) -> contextlib.AbstractContextManager[Any]:
        """See :class:`RoundStreams`."""
        return contextlib.nullcontext()

    def mark(self) -> None:
        """See :class:`RoundStreams`."""

    def wait(self, mark: Any) -> None:
        """See :class:`RoundStreams`."""
