"""The lossless codec ``bf16-lossless``: 3 bits per exponent, as the distance to the largest one of 128 values.

``native/codecs/exponents.h`` describes the encoding. Weights, gradients and optimizer states become about 1.4 times
smaller: sign and mantissa, 8 of 16 bits, are noise and stay as they are. An encoded array begins with a byte that tells
whether encoded or plain bytes follow, as in :mod:`reshard.codecs.delta`.
"""

from __future__ import annotations

import numpy as np

from reshard import _native
from reshard.codecs.delta import HEADER_BYTES, write_plain

#: The first byte of an encoded array.
EXPONENTS = 2
#: The dtype that the codec encodes.
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


def decode_exponents(data: np.ndarray, words: np.ndarray) -> bool:
    """The inverse of :func:`encode_exponents`, without its header.

    Returns:
        Whether ``data`` encodes an array of this size. If not, some words may have changed.
    """
    return bool(_native.decode_exponents(data, words))
