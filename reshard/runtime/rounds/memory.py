"""What runs rounds needs of an array library and its device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from reshard.runtime.program import Slices
from reshard.runtime.strided_regions import RegionTable

#: Of the library whose arrays travel: a torch tensor, or a CuPy array.
Array = Any
#: A buffer and the rank at the other end.
Posted = tuple[Array, int]
#: Posts receives and sends as one group. What is put on the stream behind it finds them done.
Exchange = Callable[[Sequence[Posted], Sequence[Posted]], None]
EXCHANGE, PACK, UNPACK = "exchange", "pack", "unpack"


class Copier(Protocol):
    """Copies the regions of tables, each in one launch."""

    def place(self, table: RegionTable) -> Any:
        """A table where it can be followed."""

    def find_addresses(self, known: tuple[int, ...]) -> Any:
        """Addresses of arrays where they can be followed."""

    def warm_up(self, buffer: Array) -> None:
        """Do once what the first copy would do besides."""

    def copy(self, placed: Any, addresses: Any, buffer: Array, to_buffer: bool) -> None:
        """Between contiguous arrays and a flat byte buffer."""


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


class Lanes(Protocol):
    """Where the three kinds of work of a run are put; :data:`EXCHANGE` is where the caller is."""

    def on(self, lane: str) -> contextlib.AbstractContextManager[Any]:
        """What is put while inside goes to a lane."""

    def mark(self) -> Any:
        """The end of what is put on the current lane so far."""

    def wait(self, mark: Any) -> None:
        """Let the current lane wait for a mark."""


class OneLane:
    """Everything in order, as it is put."""

    def on(self, lane: str) -> contextlib.AbstractContextManager[Any]:
        """See :class:`Lanes`."""
        return contextlib.nullcontext()

    def mark(self) -> None:
        """See :class:`Lanes`."""

    def wait(self, mark: Any) -> None:
        """See :class:`Lanes`."""
