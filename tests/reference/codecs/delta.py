"""Reference implementation of native/codecs/delta.h, word by word."""

from __future__ import annotations

import numpy as np


def _position(word: int, bits: int) -> int:
    magnitude = word & ((1 << (bits - 1)) - 1)
    return -magnitude if word >> (bits - 1) else magnitude


def encode(words: np.ndarray, base: np.ndarray) -> bytes:
    """The stream that turns ``base`` into ``words``, unsigned integers of equal size."""
    bits, out, following = 8 * words.itemsize, bytearray(), 0
    for index in np.flatnonzero(words != base).tolist():
        skips, gap = divmod(index - following, 255)
        out += b"\xff" * skips + bytes([gap])
        steps = _position(int(words[index]), bits) - _position(int(base[index]), bits)
        code = 2 * steps - 2 if steps > 0 else -2 * steps - 1
        is_zero = _position(int(words[index]), bits) == 0  # -0 has the position of 0
        is_whole = steps == 0 or code >= 255 or (is_zero and words[index] != 0)
        out += b"\xff" + words[index].tobytes() if is_whole else bytes([code])
        following = index + 1
    return bytes(out)
