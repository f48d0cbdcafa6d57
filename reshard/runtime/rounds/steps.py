"""What a rank does in one round with arrays of given kinds: the messages that it posts or packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.runtime.program import Recv, Send


class ArrayKind(NamedTuple):
    """The properties of an array that determine its tables.

    Attributes:
        itemsize: bytes per element. alignment: a power of two that divides the address; 0 if the array is not
            contiguous or is cast while it is packed.
    """

    shape: tuple[int, ...]
    itemsize: int
    alignment: int


class Part(NamedTuple):
    """The bytes of one message, in an array (by number) or in the buffer (None), and the rank at the other end."""

    array: int | None
    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class Packed:
    """A message that is packed or unpacked: its offset in the buffer, and whether its array is a source."""

    op: Recv | Send
    start: int
    in_source: bool


@dataclass(frozen=True)
class Step:
    """One round. Tables are copied in one launch each, views box by box.

    Attributes:
        recvs, sends: the messages to post. pack_tables, pack_views: copied into the buffer before the exchange.
        unpack_tables, unpack_views: copied out of the buffer after the exchange.
        after_unpack: the last step whose unpacked data the sends of this one read; -1 if none.
    """

    recvs: tuple[Part, ...]
    sends: tuple[Part, ...]
    pack_tables: tuple[Any, ...]
    pack_views: tuple[Packed, ...]
    unpack_tables: tuple[Any, ...]
    unpack_views: tuple[Packed, ...]
    after_unpack: int

    @property
    def has_tables(self) -> bool:
        """Whether a kernel copies some of its messages."""
        return bool(self.pack_tables or self.unpack_tables)
