"""What every codec offers, and codecs by name."""

from __future__ import annotations

from typing import Any, Protocol

from reshard.codecs.block import BLOCK_CODECS, find_block_codec
from reshard.errors import ArgumentError

#: Lossless codecs whose output has no fixed size.
STREAM_CODECS = ("bf16-lossless", "delta")


class Codec(Protocol):
    """Turns arrays into bytes and back.

    Attributes:
        name: the inverse of :func:`parse_codec`; equal names mean equal bytes on the wire.
        is_lossless: whether decoded arrays equal their source bit for bit.
        element: ``(values, bytes)`` of an element of fixed size, or None if the size depends on the values.
    """

    @property
    def name(self) -> str:
        """See above."""

    @property
    def is_lossless(self) -> bool:
        """See above."""

    @property
    def element(self) -> tuple[int, int] | None:
        """See above."""

    def encode(self, source: Any, out: Any) -> int:
        """Encode an array into flat uint8 and return the number of bytes written."""

    def decode(self, data: Any, target: Any, *, accumulate: bool = False) -> None:
        """Decode into ``target``, or add to it."""


def parse_codec(name: Any) -> Any:
    """The block codec of a name.

    Raises:
        ArgumentError: there is no block codec of this name.
    """
    if isinstance(name, str) and (found := find_block_codec(name)) is not None:
        return found
    if is_streamed(name):
        raise ArgumentError(
            f"{name} makes streams whose sizes depend on the values, which only reshard and reshard_async send; here a "
            f"codec with blocks of fixed size is needed: {', '.join(BLOCK_CODECS)}"
        )
    raise ArgumentError(f"there is no codec {name!r}; codecs are {', '.join(BLOCK_CODECS + STREAM_CODECS)}")


def is_streamed(name: Any) -> bool:
    """Whether a codec has this name that makes streams whose sizes depend on the values."""
    return isinstance(name, str) and name in STREAM_CODECS
