"""The reference implementation of ``native/digest.cpp``: the digest of a region of a tensor, element by element."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = 2**32 - 1


def digest_region(words: np.ndarray, strides: Sequence[int], first: int) -> int:
    """The digest of unsigned integers, whose flat index starts at ``first`` and moves by a stride along each dim."""
    low = high = 0
    for at, word in np.ndenumerate(words):
        index = first + sum(step * stride for step, stride in zip(at, strides, strict=True))
        seeded = (int(word) + index % 2**32 * 0x9E3779B1 + (index >> 32) * 0x85EBCA77) & _MASK
        mixed = ((seeded ^ seeded >> 16) * 0x7FEB352D) & _MASK
        mixed ^= mixed >> 15
        low += mixed * 0x846CA68B
        high += (mixed ^ mixed >> 13) * 0xC2B2AE35
    return (high & _MASK) << 32 | low & _MASK
