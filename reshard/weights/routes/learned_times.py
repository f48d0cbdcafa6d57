"""Lessons of earlier versions for the times of later ones: how long coding takes, and whether it pays.

The first rank of a trainer keeps it, and tells the other ranks what to do. So all ranks choose alike, although each
measures other times.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from reshard.codecs.lossless_choice import CodingFactors

#: A factor is the median of the last so many versions that used the format.
MAX_RATIOS = 3
#: Bounds of a factor.
MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
#: A version without a format brings its factor nearer to 1: to this power. After 35 versions, half is left of its
#: logarithm.
FORGETTING = 0.98
#: Formats are chosen anew if a factor has changed by more than this.
MOVED = 1.25
#: Encoded versions must take less than this part of the time of raw ones.
MAX_PART = 0.98
#: Versions of each kind of which the median counts, and the least number that is compared.
MAX_VERSIONS, MIN_VERSIONS = 5, 2
#: Largest number of raw versions after encoded ones have taken longer. The number doubles each time.
MAX_PAUSE = 32
#: Versions after which a raw one is sent to measure its time again, if encoding saves less than half of that time.
RAW_EVERY = 64


class LearnedTimes:
    """Compares the measured times of versions with predicted ones, and those of encoded versions with raw ones.

    Attributes:
        factors: how many times longer than predicted encoding, and decoding, take, by format.
    """

    def __init__(self) -> None:
        self._ratios: dict[str, tuple[deque[float], deque[float]]] = {}
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=MAX_VERSIONS) for kind in (False, True)}
        self._pause = self._left = self._since_raw = 0

    @property
    def factors(self) -> dict[str, tuple[float, float]]:
        """See the class."""
        return {name: (_factor(sides[0]), _factor(sides[1])) for name, sides in self._ratios.items()}

    def add_coding(
        self, encoding: Mapping[str, tuple[float, float]], decoding: Mapping[str, tuple[float, float]]
    ) -> None:
        """Learn from an encoded version.

        Args:
            encoding: ``{format: (predicted, measured) seconds}`` of all ranks that encode.
            decoding: the same of the slowest rank that decodes.
        """
        for side, times in enumerate((encoding, decoding)):
            for name, (predicted, measured) in times.items():
                if predicted > 0 and measured > 0:
                    sides = self._ratios.setdefault(name, (deque(maxlen=MAX_RATIOS), deque(maxlen=MAX_RATIOS)))
                    sides[side].append(min(MAX_FACTOR, max(MIN_FACTOR, measured / predicted)))
        for name in self._ratios.keys() - encoding.keys() - decoding.keys():
            for ratios in self._ratios[name]:
                ratios.extend([ratio**FORGETTING for ratio in ratios])

    def add_version(self, is_encoded: bool, seconds: float, raw_bound: float) -> None:
        """Learn from a version that all engines have confirmed.

        Args:
            is_encoded: whether a format other than raw was used.
            seconds: from the order to send until the last engine confirmed.
            raw_bound: lower bound of the time of a raw version.
        """
        self._seconds[is_encoded].append(seconds)
        self._since_raw = self._since_raw + 1 if is_encoded else 0
        raw, encoded = self._seconds[False], self._seconds[True]
        if not is_encoded or len(encoded) < MIN_VERSIONS:
            return
        middle = statistics.median(encoded)
        if not raw:
            self._left = int(middle > MAX_PART * raw_bound)
        elif middle > MAX_PART * statistics.median(raw):
            self._pause = self._left = min(MAX_PAUSE, max(1, 2 * self._pause))
            encoded.clear()
        else:
            self._pause = 0
            self._left = int(self._since_raw >= RAW_EVERY and middle > statistics.median(raw) / 2)

    def may_encode(self) -> bool:
        """Whether the next version may be encoded. Call it once for each version."""
        if self._left:
            self._left -= 1
            return False
        return True


def have_moved(old: CodingFactors, new: CodingFactors) -> bool:
    """Whether factors have changed so much that another format may be faster."""
    for name in {*old, *new}:
        for before, after in zip(old.get(name, (1.0, 1.0)), new.get(name, (1.0, 1.0)), strict=True):
            if max(before / after, after / before) > MOVED:
                return True
    return False


def _factor(ratios: deque[float]) -> float:
    return statistics.median(ratios) if ratios else 1.0
