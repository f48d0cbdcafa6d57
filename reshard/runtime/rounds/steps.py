"""The steps of a rank in one round, for arrays of given kinds: the messages that it posts or packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.runtime.program import Recv, Send

#: Alignment of messages in a buffer, in bytes.
ALIGN = 256


def aligned(nbytes: int) -> int:
    """The bytes that a message takes in a buffer."""
    return -(-nbytes // ALIGN) * ALIGN


class ArrayKind(NamedTuple):
    """The properties of an array that determine its tables.

    Attributes:
        itemsize: bytes per element.
        alignment: a power of two that divides the address; 0 if the array is not contiguous or is cast while it is
            packed.
    """

    shape: tuple[int, ...]
    itemsize: int
    alignment: int


#: Number of the second buffer, in place of that of an array.
EXTRA = -1


class MessageBytes(NamedTuple):
    """The bytes of one message, in an array (by number) or in a buffer (None or EXTRA), and the rank at the other end.

    For a broadcast, the rank is its root.
    """

    array: int | None
    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class Packed:
    """A message that is packed or unpacked: its offset in the buffer, and whether its array is a source.

    Attributes:
        in_extra: whether the buffer is the second one.
    """

    op: Recv | Send
    start: int
    in_source: bool
    in_extra: bool = False


@dataclass(frozen=True)
class CompiledRound:
    """One round. Tables are copied in one launch each, views box by box.

    Attributes:
        recvs, sends: the messages to post.
        broadcasts: posted in the same group.
        pack_tables, pack_views: copied into the buffer before the exchange.
        unpack_tables, unpack_views: copied out of the buffer after the exchange.
        after_unpack: the last step whose unpacked data the sends of this one read; -1 if none.
        after_exchange: the last step that receives data which this one gathers; -1 if none.
        extra_bytes: bytes of the second buffer that it uses.
    """

    recvs: tuple[MessageBytes, ...]
    sends: tuple[MessageBytes, ...]
    broadcasts: tuple[MessageBytes, ...]
    pack_tables: tuple[Any, ...]
    pack_views: tuple[Packed, ...]
    unpack_tables: tuple[Any, ...]
    unpack_views: tuple[Packed, ...]
    after_unpack: int
    after_exchange: int
    extra_bytes: int

    @property
    def copies_nothing(self) -> bool:
        """Whether all its messages are sent from the arrays, and received into them."""
        return not (self.pack_tables or self.pack_views or self.unpack_tables or self.unpack_views)

    @property
    def has_tables(self) -> bool:
        """Whether a kernel copies some of its messages."""
        return bool(self.pack_tables or self.unpack_tables)
