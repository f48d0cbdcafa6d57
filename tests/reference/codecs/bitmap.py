"""Reference implementation of native/codecs/bitmap.h, with NumPy on blocks of 64 words."""

from __future__ import annotations

import numpy as np

WORDS = 64


def encode(words: np.ndarray, base: np.ndarray) -> bytes | None:
    """The code that turns ``base`` into ``words``, unsigned integers of equal size; None if it pays little."""
    out, span = bytearray(), 1 << (8 * words.itemsize)
    for index in range(0, len(words), WORDS):
        if index % (64 * WORDS) == 0 and 4 * len(out) > 3 * index * words.itemsize:
            return None
        new, old = words[index : index + WORDS], base[index : index + WORDS]
        changed = np.flatnonzero(new != old)
        steps = (new[changed].astype(np.int64) - old[changed] + span // 2) % span - span // 2
        fits = (steps >= -128) & (steps < 128)
        bits = np.zeros(WORDS, dtype=np.uint8)
        bits[changed] = 1
        out += np.packbits(bits, bitorder="little").tobytes()
        out += np.where(fits, steps, 0).astype(np.int8).tobytes()
        out += new[changed[~fits]].tobytes()
    return bytes(out)


def decode(data: bytes, base: np.ndarray) -> np.ndarray:
    """The words that a code makes of ``base``."""
    words, at = base.copy(), 0
    for start in range(0, len(words), WORDS):
        bits = np.unpackbits(np.frombuffer(data, np.uint8, WORDS // 8, at), bitorder="little")
        changed = start + np.flatnonzero(bits)
        at += WORDS // 8
        steps = np.frombuffer(data, np.int8, len(changed), at)
        at += len(changed)
        words[changed] += steps.astype(words.dtype)
        wide = changed[steps == 0]
        words[wide] = np.frombuffer(data, words.dtype, len(wide), at)
        at += len(wide) * words.itemsize
    assert at == len(data)
    return words
