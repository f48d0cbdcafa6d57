"""The lossless format ``xor-zstd``: words XOR their base, regrouped by byte position, compressed by zstd.

The first bytes of all words come first, then the second ones, and so on. In bf16, nearly all high bytes of the XOR are
0. Compression is that of Python 3.14's ``compression.zstd`` at level 1, or of its backport ``backports.zstd``. Without
either, the format does not exist on this rank.
"""

from __future__ import annotations

import numpy as np

from reshard.codecs.delta import HEADER_BYTES, write_plain

try:
    from compression import zstd
except ImportError:
    try:
        from backports import zstd
    except ImportError:
        zstd = None

#: The first byte of an encoded array.
XOR_PLANES = 4
LEVEL = 1


def zstd_version() -> str:
    """The version of zstd, on which the bytes that it writes depend; "" if Python cannot import it."""
    return "" if zstd is None else str(zstd.zstd_version)


def encode_planes(words: np.ndarray, base: np.ndarray, out: np.ndarray, width: int) -> int:
    """Encode the XOR with the base, or copy the plain bytes if they are fewer.

    Args:
        words, base: flat uint8 of equal size.
        out: flat uint8, with :data:`HEADER_BYTES` more.
        width: bytes of a word.

    Returns:
        The number of bytes written.
    """
    difference = np.bitwise_xor(words, base).view(f"u{width}")
    planes = np.empty((width, len(difference)), dtype=np.uint8)
    for place in range(width):
        np.right_shift(difference, 8 * place, out=planes[place], casting="unsafe")
    data = zstd.compress(planes.data, LEVEL)
    if len(data) >= len(words):
        return write_plain(words, out)
    out[0] = XOR_PLANES
    out[HEADER_BYTES : HEADER_BYTES + len(data)] = np.frombuffer(data, dtype=np.uint8)
    return len(data) + HEADER_BYTES


def decode_planes(data: np.ndarray, words: np.ndarray, width: int) -> bool:
    """Turn the base into the array that was encoded, in place; see :func:`~reshard.codecs.delta.decode_delta`."""
    if zstd is None:
        return False
    decompressor = zstd.ZstdDecompressor()
    try:
        planes = decompressor.decompress(data.data, len(words) + 1)
    except zstd.ZstdError:
        return False
    if not decompressor.eof or decompressor.unused_data or len(planes) != len(words):
        return False
    difference = np.zeros(len(words) // width, dtype=f"u{width}")
    for place, plane in enumerate(np.frombuffer(planes, dtype=np.uint8).reshape(width, -1)):
        difference |= plane.astype(difference.dtype) << (8 * place)
    words ^= difference.view(np.uint8)
    return True
