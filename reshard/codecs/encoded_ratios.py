"""Predict the ratio of encoded to plain bytes of each lossless format, from a sample of a tensor's changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: ``{bytes of a word: share}``. If more than this share of the words changed, ``bitmap`` is smaller than ``delta``, or,
#: for words of 1 byte, faster.
DENSE_SHARES = {1: 1 / 16, 2: 1 / 8, 4: 1 / 8}
#: Encoded bytes per plain byte above which a bitmap is predicted to travel raw.
MAX_BITMAP_RATIO = 0.75
#: Encoded bytes per plain byte of bf16 weights without a base.
BF16_RATIO = 0.71
#: Entropy of normally distributed integers less the log2 of their mean magnitude.
BITS_BEYOND_DISTANCE = 2.37
#: Bits that zstd takes for a change beyond the entropy if few words changed. The number is fitted to updates of a GPT.
BITS_PER_RARE_CHANGE = 10
#: Bytes of zstd over those of the entropy, fitted to the same updates.
ZSTD_EXCESS = 1.12


@dataclass(frozen=True)
class Sample:
    """Statistics of the changes of a tensor, estimated from a sample of its words.

    Attributes:
        changed: share of the words that changed.
        fits: share of the changed words whose difference fits a signed byte.
        distance: mean magnitude of the lowest byte of the differences, as a signed integer.
    """

    changed: float
    fits: float
    distance: float = 64.0

    @property
    def wide(self) -> float:
        """The share of all words that changed by more than fits a signed byte."""
        return self.changed * (1 - self.fits)


def raw_ratio(width: int, sample: Sample) -> float:
    """Bytes of ``raw`` per plain byte."""
    return 1.0


def exponents_ratio(width: int, sample: Sample) -> float:
    """Bytes of ``bf16-lossless`` per plain byte."""
    return BF16_RATIO


def delta_ratio(width: int, sample: Sample) -> float:
    """Bytes of ``delta`` per plain byte. Its encoder writes a bitmap if many words changed."""
    changed = sample.changed
    if changed > DENSE_SHARES[width]:
        return bitmap_ratio(width, sample)
    long_gap = (1 - changed) ** 255  # the chance that 255 words after a changed one did not change
    skips = changed * long_gap / (1 - long_gap) if changed else 0.0
    return (2 * changed + skips) / width + sample.wide


def bitmap_ratio(width: int, sample: Sample) -> float:
    """Bytes of ``bitmap`` per plain byte."""
    ratio = (1 / 8 + sample.changed) / width + sample.wide
    return ratio if ratio <= MAX_BITMAP_RATIO else 1.0


def planes_ratio(width: int, sample: Sample) -> float:
    """Bytes of ``xor-zstd`` per plain byte."""
    changed = sample.changed
    shares = [share for share in (changed, 1 - changed) if share]
    bits = -sum(share * math.log2(share) for share in shares)  # which words changed
    # by how much, if the differences are normally distributed
    bits += changed * min(math.log2(max(sample.distance, 1.0)) + BITS_BEYOND_DISTANCE, 8.0)
    ratio = (bits + BITS_PER_RARE_CHANGE * changed * (1 - changed) ** 8) / (8 * width)
    return ZSTD_EXCESS * ratio + sample.wide * (width - 1) / width
