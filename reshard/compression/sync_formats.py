"""In which format each tensor of a version travels: one for all, or the one that is predicted to be fastest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.api.lossless.regions import Bucket
from reshard.codecs.choice import SMALL_BYTES, Rates, choose_format, take_sample
from reshard.codecs.formats import FORMATS, known_formats
from reshard.codecs.rates import measure_format_rates, slowest_rates
from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import brief, describe_ranks

#: Value of ``compression=`` that chooses a format for each tensor and version.
AUTO = "auto"
#: The rate of the link is the median of so many transfers.
MAX_LINK_RATES = 5
#: Transfers of less than this part of the plain bytes take too short to tell the rate of the link.
MIN_PART = 1 / 16


class SyncFormats:
    """The choice of formats of one rank. It is the same on all ranks, as they exchange what it depends on.

    Args:
        compression: :data:`AUTO`, or the name of the format of all tensors. buckets: see :func:`find_buckets`.
        planned_seconds: predicted time of the plain bytes; None if no topology is known.
    """

    def __init__(self, compression: str, buckets: Mapping[str, Bucket], planned_seconds: float | None) -> None:
        self._compression, self._formats = compression, dict.fromkeys(FORMATS, "")
        self._plain = sum(bucket.nbytes for bucket in buckets.values())
        self._is_timed = compression == AUTO and any(bucket.nbytes >= SMALL_BYTES for bucket in buckets.values())
        self._sides = [
            max((_bytes_of(rank, side, buckets) for rank in {*_ranks(side, buckets)}), default=0)
            for side in ("holders", "receivers")
        ]
        self._planned = self._plain / planned_seconds if planned_seconds else None
        self._rates: Mapping[str, Any] = {}
        self._link_rates: list[float] = []
        self._first_rate: float | None = None  # of a transfer that also connected the ranks

    def report(self) -> dict[str, Any]:
        """What this rank tells the others."""
        return {
            "compression": self._compression,
            "known": known_formats(),
            "rates": measure_format_rates() if self._is_timed else {},
            "links": [self._first_rate, *self._link_rates],
        }

    def agree(self, reports: Mapping[int, Any]) -> None:
        """Use the formats that all ranks know, and the rates of the slowest rank.

        Args:
            reports: the report of each rank.

        Raises:
            DisagreementError: ranks pass other values of ``compression``. ArgumentError: a rank lacks the format.
        """
        first = min(reports)
        for rank, report in sorted(reports.items()):
            if report["compression"] != reports[first]["compression"]:
                raise DisagreementError(
                    f"rank {first} passes compression {reports[first]['compression']!r}, "
                    f"rank {rank} {report['compression']!r}"
                )
        known = [report["known"] for _, report in sorted(reports.items())]
        self._formats = {
            name: version for name, version in known[0].items() if all(item.get(name) == version for item in known)
        }
        if self._compression in FORMATS and self._compression not in self._formats:
            lacking = [rank for rank, report in sorted(reports.items()) if self._compression not in report["known"]]
            why = (
                f"{describe_ranks(lacking)} cannot import backports.zstd, or compression.zstd of Python 3.14"
                if lacking
                else "ranks have other versions of zstd"
            )
            raise ArgumentError(f"compression {self._compression!r} needs the same zstd on all ranks: {why}")
        self._rates = slowest_rates([report["rates"] for report in reports.values() if report["rates"]])
        links = max(
            (report["links"] for _, report in sorted(reports.items())), key=lambda each: (len(each), each[0] or 0.0)
        )
        self._first_rate, self._link_rates = links[0], list(links[1:])

    def add_transfer(self, nbytes: int, seconds: float, is_first: bool) -> None:
        """Take the rate of the link from the time of a transfer, the longest of any rank.

        Args:
            is_first: whether the transfer was the first one of its connections.
        """
        if not seconds or nbytes < MIN_PART * self._plain:
            return
        if is_first:
            self._first_rate = nbytes / seconds
        else:
            self._link_rates = [*self._link_rates, nbytes / seconds][-MAX_LINK_RATES:]

    @property
    def link_rate(self) -> float | None:
        """Bytes per second of all buckets together: measured, else predicted; None if neither is known."""
        return statistics.median(self._link_rates) if self._link_rates else self._first_rate or self._planned

    def __call__(self, words: np.ndarray, base: np.ndarray | None, dtype: str, width: int) -> str:
        """The format of a region of a tensor.

        Args:
            words, base: flat uint8 of this and of the last version; ``base`` may be None.
        """
        if self._compression in FORMATS:
            return "raw" if base is None and FORMATS[self._compression].has_base else self._compression
        allowed = [
            name
            for name in self._formats
            if FORMATS[name].dtype in ("", dtype) and not (base is None and FORMATS[name].has_base)
        ]
        link = self.link_rate
        if link is None or not self._rates or len(words) < SMALL_BYTES:
            return "raw" if base is None else "delta"
        encoders, decoders = (self._plain / max(most, 1) for most in self._sides)
        rates = Rates(link, self._rates, encoders, decoders)
        return choose_format(len(words) // width, width, take_sample(words, base, width), rates, allowed)


def check_compression(compression: Any, dtypes: Mapping[str, str]) -> None:
    """Raise ArgumentError unless ``compression`` is :data:`AUTO` or a format for the dtypes of all tensors."""
    if isinstance(compression, str) and compression == AUTO:
        return
    if not isinstance(compression, str) or compression not in FORMATS:
        raise ArgumentError(
            f"compression of a WeightSync is {brief(compression)}; it must be one of {AUTO!r}, "
            f"{', '.join(map(repr, FORMATS))}"
        )
    for name, dtype in dtypes.items():
        if FORMATS[compression].dtype not in ("", dtype):
            raise ArgumentError(f"tensor {name!r}: {compression} encodes {FORMATS[compression].dtype}, not {dtype}")


def _ranks(side: str, buckets: Mapping[str, Bucket]) -> set[int]:
    return {rank for bucket in buckets.values() for rank in getattr(bucket, side)}


def _bytes_of(rank: int, side: str, buckets: Mapping[str, Bucket]) -> int:
    return sum(bucket.nbytes for bucket in buckets.values() if rank in getattr(bucket, side))
