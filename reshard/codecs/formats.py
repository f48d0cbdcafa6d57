"""The lossless formats of a piece of a tensor, and the one function that reads them all.

A piece begins with a byte that names its format. If a format would need more bytes than the plain ones, its encoder
writes those, after the header of ``raw``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reshard import _native
from reshard.codecs.bitmap import BITMAP, decode_bitmap, encode_bitmap
from reshard.codecs.delta import DIFFERENCES, HEADER_BYTES, PLAIN, decode_delta, encode_delta, read_plain, write_plain
from reshard.codecs.exponents import DTYPE, EXPONENTS, decode_exponents, encode_exponents
from reshard.codecs.xor_planes import XOR_PLANES, decode_planes, encode_planes, zstd_version
from reshard.errors import ArgumentError

#: ``{bytes of a word: share of changed words}`` from which ``bitmap`` is smaller than ``delta``, or faster (1 byte).
DENSE_SHARES = {1: 1 / 16, 2: 1 / 8, 4: 1 / 8}
#: Distance, in blocks of 64 bytes, of the blocks that tell whether a piece is dense.
SAMPLED_BLOCKS = 64


def encode_changes(words: np.ndarray, base: np.ndarray, out: np.ndarray, width: int) -> int:
    """Encode as :func:`encode_delta` does, or as :func:`encode_bitmap` if many words changed."""
    count, changed, _, _ = _native.sample_changes(width, words, base, SAMPLED_BLOCKS)
    encode = encode_bitmap if changed > DENSE_SHARES[width] * count else encode_delta
    return encode(words, base, out, width)


@dataclass(frozen=True)
class Format:
    """A lossless format.

    Attributes:
        encode: writes words, given a base, to a buffer with :data:`HEADER_BYTES` more bytes; returns the bytes written.
            Arguments are flat uint8, and the last one is the number of bytes of a word.
        decode: turns the base into the words that were encoded, in place; returns False if the bytes do not encode so
            many words. Arguments are the bytes after the header, the base, and the number of bytes of a word.
        header: the first byte of what ``decode`` reads. ``encode`` may write another format where that is smaller.
        has_base: whether the receiver needs the base.
        dtype: the only dtype of the format; "" for any.
    """

    encode: Callable[[np.ndarray, np.ndarray, np.ndarray, int], int]
    decode: Callable[[np.ndarray, np.ndarray, int], bool]
    header: int
    has_base: bool = True
    dtype: str = ""


FORMATS = {
    "raw": Format(
        lambda words, base, out, width: write_plain(words, out),
        lambda data, words, width: read_plain(data, words),
        PLAIN,
        has_base=False,
    ),
    "bf16-lossless": Format(
        lambda words, base, out, width: encode_exponents(words, out),
        lambda data, words, width: decode_exponents(data, words),
        EXPONENTS,
        has_base=False,
        dtype=DTYPE,
    ),
    "delta": Format(encode_changes, decode_delta, DIFFERENCES),
    "bitmap": Format(encode_bitmap, decode_bitmap, BITMAP),
    "xor-zstd": Format(encode_planes, decode_planes, XOR_PLANES),
}
_NAME_OF_HEADER = {known.header: name for name, known in FORMATS.items()}


def known_formats() -> dict[str, str]:
    """The formats of this rank, each with the version of the library on which its bytes depend.

    Ranks may use a format that they all list with the same version: then all read it, and write the same bytes.
    """
    return {name: "" for name in FORMATS if name != "xor-zstd"} | (
        {"xor-zstd": zstd_version()} if zstd_version() else {}
    )


def decode_piece(data: np.ndarray, words: np.ndarray, width: int) -> None:
    """Turn the base into the array that a format encoded, in place.

    Args:
        data: flat uint8, what an encoder wrote.
        words: flat uint8, the base if the format has one.
        width: bytes of a word.

    Raises:
        ArgumentError: ``data`` does not encode an array of this size. Some words may have changed.
    """
    header = int(data[0]) if len(data) else -1
    name = _NAME_OF_HEADER.get(header)
    if name is None:
        raise ArgumentError(f"{len(data)} bytes do not begin as a format of an array of {len(words)} bytes")
    if not FORMATS[name].decode(data[HEADER_BYTES:], words, width):
        raise ArgumentError(f"{len(data)} bytes are no {name} encoding of an array of {len(words)} bytes")
