"""The lossless codec ``bf16-lossless``: 3 bits per exponent, as the distance to the largest one of 128 values.

``native/codecs/exponents.h`` describes the code. Weights, gradients and optimizer states become about 1.4 times
smaller: sign and mantissa, 8 of 16 bits, are noise and stay as they are. An encoded array begins with a byte that tells
whether a code or the plain bytes follow, as in :mod:`reshard.codecs.delta`.
"""

from __future__ import annotations

import numpy as np

from reshard import _native
from reshard.codecs.delta import HEADER_BYTES, read_plain, write_plain
from reshard.errors import ArgumentError

#: The first byte of a code.
EXPONENTS = 2
#: The dtype that the codec codes.
DTYPE = "bfloat16"


def encode_exponents(words: np.ndarray, out: np.ndarray) -> int:
    """Encode bf16 values, or copy the plain bytes if they are fewer.

    Args:
        words: flat uint8.
        out: flat uint8, with :data:`HEADER_BYTES` more.

    Returns:
        The number of bytes written.
    """
    size = _native.encode_exponents(words, out[HEADER_BYTES : HEADER_BYTES + len(words)])
    if size >= 0:
        out[0] = EXPONENTS
        return size + HEADER_BYTES
    return write_plain(words, out)


def decode_exponents(data: np.ndarray, words: np.ndarray) -> None:
    """The inverse of :func:`encode_exponents`.

    Raises:
        ArgumentError: ``data`` does not encode an array of this size. Some words may have changed.
    """
    if len(data) >= HEADER_BYTES and data[0] == EXPONENTS and _native.decode_exponents(data[HEADER_BYTES:], words):
        return
    if read_plain(data, words):
        return
    raise ArgumentError(f"{len(data)} bytes are not the code of an array of {len(words)} bytes of bf16")
