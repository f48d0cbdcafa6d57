"""The lossless formats of a piece of a tensor: one record for each format, and one function that reads all formats.

The first byte of an encoded piece names its format. If encoding would make the piece larger, the encoder writes the
plain bytes after the header of ``raw``. Some formats are also lossless codecs: callers pass their names as
``compression=``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard import _native
from reshard.codecs.bitmap import BITMAP, decode_bitmap, encode_bitmap
from reshard.codecs.delta import DIFFERENCES, HEADER_BYTES, PLAIN, decode_delta, encode_delta, read_plain, write_plain
from reshard.codecs.encoded_ratios import (
    DENSE_SHARES,
    Sample,
    bitmap_ratio,
    delta_ratio,
    exponents_ratio,
    planes_ratio,
    raw_ratio,
)
from reshard.codecs.exponents import DTYPE, EXPONENTS, decode_exponents, encode_exponents
from reshard.codecs.xor_planes import XOR_PLANES, decode_planes, encode_planes, zstd_version
from reshard.errors import ArgumentError

#: One 64-byte block in this many is sampled, to decide whether a piece is dense.
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
        encode: function that writes words, given a base, to a buffer with :data:`HEADER_BYTES` more bytes. It returns
            the number of bytes written. Arguments are flat uint8, and the last one is the number of bytes of a word.
        decode: function that turns the base into the words that were encoded, in place. It returns False if the bytes
            do not encode so many words. Arguments are the bytes after the header, the base, and the bytes of a word.
        header: the first byte of pieces that ``decode`` reads, before the bytes that it gets. ``encode`` may write
            another format where that is smaller.
        predict_ratio: function that predicts the encoded bytes per plain byte, from the bytes of a word and a sample.
        is_codec: whether callers may pass the name as ``compression=``.
        has_base: whether the receiver needs the base.
        dtype: the only dtype of the format; "" for any.
        is_timed_by_words: whether the time depends on the number of words, not on that of bytes. Rates are measured on
            words of 2 bytes.
        dense_format: name of the format that ``encode`` writes where many words changed; "" for none.
        version: function that returns the version of the library on which the bytes depend. It returns "" if they
            depend on none, and None if the library is missing.
    """

    encode: Callable[[np.ndarray, np.ndarray, np.ndarray, int], int]
    decode: Callable[[np.ndarray, np.ndarray, int], bool]
    header: int
    predict_ratio: Callable[[int, Sample], float]
    is_codec: bool = False
    has_base: bool = True
    dtype: str = ""
    is_timed_by_words: bool = False
    dense_format: str = ""
    version: Callable[[], str | None] = lambda: ""


FORMATS = {
    "raw": Format(
        lambda words, base, out, width: write_plain(words, out),
        lambda data, words, width: read_plain(data, words),
        PLAIN,
        raw_ratio,
        has_base=False,
    ),
    "bf16-lossless": Format(
        lambda words, base, out, width: encode_exponents(words, out),
        lambda data, words, width: decode_exponents(data, words),
        EXPONENTS,
        exponents_ratio,
        is_codec=True,
        has_base=False,
        dtype=DTYPE,
    ),
    "delta": Format(
        encode_changes,
        decode_delta,
        DIFFERENCES,
        delta_ratio,
        is_codec=True,
        is_timed_by_words=True,
        dense_format="bitmap",
    ),
    "bitmap": Format(encode_bitmap, decode_bitmap, BITMAP, bitmap_ratio, is_timed_by_words=True),
    "xor-zstd": Format(
        encode_planes,
        decode_planes,
        XOR_PLANES,
        planes_ratio,
        version=lambda: zstd_version() or None,
    ),
}
#: Names of the formats that callers may pass as ``compression=``.
LOSSLESS_CODECS = tuple(name for name, known in FORMATS.items() if known.is_codec)
_NAME_OF_HEADER = {known.header: name for name, known in FORMATS.items()}


def find_lossless_codec(compression: Any) -> Format | None:
    """The format that a caller names as ``compression=``, or None if the value names no lossless codec."""
    is_name = isinstance(compression, str) and compression in LOSSLESS_CODECS
    return FORMATS[compression] if is_name else None


def known_formats() -> dict[str, str]:
    """The formats of this rank, each with the version of the library on which its bytes depend.

    Ranks may use a format that they all list with the same version: then all read it, and write the same bytes.
    """
    versions = {name: known.version() for name, known in FORMATS.items()}
    return {name: version for name, version in versions.items() if version is not None}


def format_of(header: int) -> str:
    """The name of the format that begins with a header, or "raw" if there is none."""
    return _NAME_OF_HEADER.get(header, "raw")


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
        raise ArgumentError(
            f"{len(data)} bytes do not encode an array of {len(words)} bytes: "
            + (f"no lossless format begins with byte {header}" if len(data) else "the header is missing")
        )
    if not FORMATS[name].decode(data[HEADER_BYTES:], words, width):
        raise ArgumentError(f"{len(data)} bytes are no {name} encoding of an array of {len(words)} bytes")
