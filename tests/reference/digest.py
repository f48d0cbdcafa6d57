"""The twin of ``native/digest.cpp``, an element at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_HALF = 2**32


def digest_elements_python(words: np.ndarray, index_strides: Sequence[int], first: int) -> int:
    """The digest of unsigned words, whose flat index in the tensor starts at ``first`` and moves by the strides."""
    low = high = 0
    for at in np.ndindex(words.shape):
        index = first + sum(position * stride for position, stride in zip(at, index_strides, strict=True))
        seeded = (int(words[at]) + index % _HALF * 0x9E3779B1 + index // _HALF * 0x85EBCA77) % _HALF
        mixed = (seeded ^ (seeded >> 16)) * 0x7FEB352D % _HALF
        mixed ^= mixed >> 15
        low += mixed * 0x846CA68B
        high += (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    return high % _HALF * _HALF + low % _HALF
