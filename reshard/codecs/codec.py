"""Codecs by name, and what a caller's codec offers."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from reshard.codecs.block import BLOCK_CODECS, BlockCodec, find_block_codec
from reshard.codecs.custom import wrap_codec
from reshard.codecs.elements import ElementCodec
from reshard.codecs.formats import LOSSLESS_CODECS, find_lossless_codec
from reshard.errors import ArgumentError
from reshard.formatting import brief, did_you_mean


class Codec(Protocol):
    """A lossy or lossless codec that you implement: pass an instance as ``compression=``.

    Every rank must pass a codec of the same name and sizes. Values travel in elements of fixed size. A plan moves whole
    elements, and only the first sender encodes them and only the last receivers decode them. Methods may be called from
    several threads at once.

    Attributes:
        name: letters, digits and ``_``; equal names mean equal bytes on the wire.
        element: ``(values, bytes)`` of an element.
    """

    @property
    def name(self) -> str:
        """See above."""

    @property
    def element(self) -> tuple[int, int]:
        """See above."""

    def encode(self, values: np.ndarray, out: np.ndarray) -> object:
        """Encode n elements.

        Args:
            values: float32 of shape (n, values), a copy. The end of a row of the tensor is padded by zeros.
            out: uint8 of shape (n, bytes); every byte must be written.
        """

    def decode(self, data: np.ndarray, out: np.ndarray) -> object:
        """Decode n elements.

        Args:
            data: uint8 of shape (n, bytes), read-only because relays still forward it.
            out: float32 of shape (n, values), to be filled. It is rounded to the dtype of the result.
        """


class TransferPolicy(Protocol):
    """An object that names the codec of a transfer, such as :class:`reshard.compression.Policy`."""

    def transfer_codec(self) -> str:
        """The name of the codec.

        Raises:
            ArgumentError: it sets no codec for transfers, or sets codecs that a transfer would ignore.
        """


def find_codec(codec: Any) -> ElementCodec:
    """The codec of a name or of a policy, or a caller's :class:`Codec` as plans use it.

    Raises:
        ArgumentError: there is no codec of this name, it is not a Codec, or the policy does not fit a transfer.
    """
    if isinstance(codec, ElementCodec):
        return codec
    if hasattr(codec, "transfer_codec"):
        codec = codec.transfer_codec()
    return parse_codec(codec) if isinstance(codec, str) else wrap_codec(codec)


def parse_codec(name: Any) -> BlockCodec:
    """The block codec of a name.

    Raises:
        ArgumentError: there is no block codec of this name.
    """
    if isinstance(name, str) and (codec := find_block_codec(name)) is not None:
        return codec
    if has_variable_size(name):
        raise ArgumentError(
            f"{name} makes output whose size depends on the values, which only reshard, reshard_async, reshard_local, "
            "a Mover and reshard.ray.reshard send; here a codec with blocks of fixed size is needed: "
            f"{', '.join(BLOCK_CODECS)}"
        )
    raise ArgumentError(
        f"there is no codec {brief(name)}; codecs are {', '.join(BLOCK_CODECS)}, and for calls that move tensors also "
        f"{', '.join(LOSSLESS_CODECS)}{did_you_mean(name, BLOCK_CODECS + LOSSLESS_CODECS)}"
    )


def has_variable_size(name: Any) -> bool:
    """Whether this names a codec whose output size depends on the values: a lossless codec."""
    return find_lossless_codec(name) is not None


def has_base(name: Any) -> bool:
    """Whether this names a codec that encodes what changed since a version that the receivers hold, the base."""
    codec = find_lossless_codec(name)
    return codec is not None and codec.has_base


def codec_name(codec: Any) -> str:
    """The text by which ranks compare the codec of a call."""
    try:
        return codec if isinstance(codec, str) else str(None if codec is None else find_codec(codec).name)
    except ArgumentError:  # raised where the argument is checked
        return type(codec).__name__
