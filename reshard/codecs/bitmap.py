"""The lossless format ``bitmap``: which words changed since a base, and one byte for each change.

``native/codecs/bitmap.h`` describes the format. The format is smaller than :mod:`reshard.codecs.delta` if many words
changed. An unchanged word takes one bit. A word that moved by less than 128 units in the last place takes nine.
"""

from __future__ import annotations

import numpy as np

from reshard import _native
from reshard.codecs.delta import HEADER_BYTES, write_plain

#: The first byte of an encoded array.
BITMAP = 3


def encode_bitmap(words: np.ndarray, base: np.ndarray, out: np.ndarray, width: int) -> int:
    """Encode what changed since the base, or copy the plain bytes if they are fewer.

    Args:
        words, base: flat uint8 of equal size.
        out: flat uint8, with :data:`HEADER_BYTES` more.
        width: bytes of a word.

    Returns:
        The number of bytes written.
    """
    size = _native.encode_bitmap(width, words, base, out[HEADER_BYTES : HEADER_BYTES + len(words)])
    if size >= 0:
        out[0] = BITMAP
        return size + HEADER_BYTES
    return write_plain(words, out)


def decode_bitmap(data: np.ndarray, words: np.ndarray, width: int) -> bool:
    """Turn the base into the array that was encoded, in place; see :func:`~reshard.codecs.delta.decode_delta`."""
    return bool(_native.apply_bitmap(width, data, words))
