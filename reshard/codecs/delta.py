"""The lossless codec ``delta``: the changes of an array since a base that the receiver holds.

One byte counts the unchanged words before each changed one, and one byte holds the difference in units in the last
place; ``native/codecs/delta.h`` describes the format. If 1 % of bf16 values change by a few units, the differences are
97 times smaller than the array. The first byte of an encoded array says whether differences or the plain bytes follow.
So an encoded array has at most :data:`HEADER_BYTES` bytes more than the plain one.
"""

from __future__ import annotations

import numpy as np

from reshard import _native

HEADER_BYTES = 1
#: The first byte of an array that travels as it is, and of differences.
PLAIN, DIFFERENCES = 0, 1


def word_width(itemsize: int) -> int:
    """Bytes of the words in which an array of this itemsize is compared."""
    return min(itemsize, 4)


def write_plain(words: np.ndarray, out: np.ndarray) -> int:
    """Copy the plain bytes after a header. Returns the number of bytes written."""
    out[0] = PLAIN
    out[HEADER_BYTES : HEADER_BYTES + len(words)] = words
    return len(words) + HEADER_BYTES


def read_plain(data: np.ndarray, words: np.ndarray) -> bool:
    """Copy what :func:`write_plain` wrote after the header. Returns False if it is of another size."""
    if len(data) != len(words):
        return False
    words[:] = data
    return True


def encode_delta(words: np.ndarray, base: np.ndarray | None, out: np.ndarray, width: int) -> int:
    """Encode the changes since the base. Without a base, or if the changes take more bytes, copy the plain bytes.

    Args:
        words, base: flat uint8 of equal size.
        out: flat uint8, with :data:`HEADER_BYTES` more.
        width: bytes of a word.

    Returns:
        The number of bytes written.
    """
    if base is not None:
        size = _native.encode_delta(width, words, base, out[HEADER_BYTES : HEADER_BYTES + len(words)])
        if size >= 0:
            out[0] = DIFFERENCES
            return size + HEADER_BYTES
    return write_plain(words, out)


def decode_delta(data: np.ndarray, words: np.ndarray, width: int) -> bool:
    """Turn the base into the array that was encoded, in place.

    Args:
        data: what :func:`encode_delta` wrote after the header :data:`DIFFERENCES`.
        words: flat uint8, the base.
        width: bytes of a word.

    Returns:
        Whether ``data`` encodes an array of this size. If not, some words may have changed.
    """
    return bool(_native.apply_delta(width, data, words))
