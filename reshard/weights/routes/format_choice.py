"""The choice of the lossless format of each region of a version: the format with the shortest predicted time."""

from __future__ import annotations

import functools
import hashlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reshard.codecs.delta import word_width
from reshard.codecs.encoded_ratios import Sample
from reshard.codecs.formats import FORMATS, known_formats
from reshard.codecs.lossless_choice import (
    MIN_GAIN,
    CodingFactors,
    CodingSeconds,
    SetupSeconds,
    TransferRates,
    add_link,
    choose_format,
    predict_coding,
    predict_seconds,
)
from reshard.codecs.rates import measure_format_rates, slowest_rates
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.formatting import brief
from reshard.weights.routes.encoded_regions import decode_region, encode_region, largest_size, sample_region

#: Values of ``compression=`` of a Publisher, and whether the format of a region may refer to the version before.
COMPRESSIONS = {"delta": True, "lossless": False}
#: The rate of the link is the median of at most this many transfers.
MAX_LINK_RATES = 5
#: A region that takes less time than this on the link travels as SMALL_FORMAT if there is a base: a comparison of
#: formats would take too long for it.
MIN_REGION_SECONDS = 5e-5
#: A format that takes hardly longer than raw for a small region, and hardly more bytes, whatever has changed.
SMALL_FORMAT = "delta"
#: Largest number of versions that are sent raw without a new comparison. Each comparison that ends in raw doubles the
#: number.
MAX_PAUSE = 32
#: The rate of the link is measured only on transfers of at least this part of the plain bytes. Others are too short.
MIN_PART = 1 / 16
#: Words of a small region, and how often each format codes it; the median counts.
SETUP_WORDS, SETUP_RUNS = 64, 15


def check_compression(compression: Any) -> str | None:
    """The compression of a Publisher.

    Raises:
        ArgumentError: the value is not one of :data:`COMPRESSIONS`.
    """
    if compression is not None and not (isinstance(compression, str) and compression in COMPRESSIONS):
        raise ArgumentError(f"compression is {brief(compression)}; it must be None, 'delta' or 'lossless'")
    return None if compression is None else str(compression)


def keeps_base(compression: str | None) -> bool:
    """Whether the trainer keeps the previous version. Formats may then encode the differences to that version."""
    return compression is not None and COMPRESSIONS[compression]


def report_formats() -> dict[str, Any]:
    """The report of a rank to the others: its formats, its times of encoding and decoding, and its cores."""
    return {
        "known": known_formats(),
        "rates": measure_format_rates(),
        "setups": measure_setups(),
        "cores": find_cores(),
    }


def find_cores() -> tuple[str, int]:
    """A name that only processes on the same cores have, and the number of these cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux, or a system that hides the file
        machine = f"{os.uname().nodename} {os.getpid()}"
    return hashlib.sha256(f"{machine} {cores}".encode()).hexdigest()[:16], len(cores)


def find_share(reports: Mapping[int, Any], ranks: Iterable[int]) -> float:
    """The smallest part of a core that one of some ranks has while all of them code at the same time.

    Args:
        reports: result of :func:`report_formats` of each rank.
        ranks: ranks that code at the same time.
    """
    names = Counter(reports[rank]["cores"][0] for rank in ranks)
    num_cores = dict(report["cores"] for report in reports.values())
    return min((min(1.0, num_cores[name] / num_ranks) for name, num_ranks in names.items()), default=1.0)


@functools.cache
def measure_setups() -> SetupSeconds:
    """The result of :func:`time_setups`, measured once per process."""
    return time_setups()


def time_setups() -> SetupSeconds:
    """The times of encoding and of decoding a small region in all formats, on a core that does nothing else."""
    new = torch.arange(SETUP_WORDS, dtype=torch.int16, device="cpu").view(1, -1).view(torch.bfloat16)
    base, out = torch.zeros_like(new), np.empty(largest_size(new), dtype=np.uint8)
    setups = {}
    for name in known_formats():
        seconds = []
        for _ in range(SETUP_RUNS):
            target, begun = base.clone(), time.thread_time()
            encode_region(new, base, name, out)
            encoded = time.thread_time()
            decode_region(out, target)
            seconds.append((encoded - begun, time.thread_time() - encoded))
        setups[name] = tuple(statistics.median(side) for side in zip(*seconds, strict=True))
    return setups


@dataclass(frozen=True)
class RegionChoice:
    """The format of a region.

    Attributes:
        name: name of the format.
        saved: seconds that it is predicted to save.
        coding: predicted times of one rank; None for a region that travels raw.
        sample: sample of the region's changes; None if none was taken.
    """

    name: str
    saved: float = 0.0
    coding: CodingSeconds | None = None
    sample: Sample | None = None


class FormatChoice:
    """The choice of formats on one rank of a trainer. All ranks choose alike, because they know the same rates.

    Args:
        allowed: names of the formats among which to choose, with ``"raw"``.

    Attributes:
        factors: how many times longer than at the rates of the ranks coding took in earlier versions. The first rank of
            the trainer tells the others.
    """

    def __init__(self, allowed: tuple[str, ...] = tuple(FORMATS)) -> None:
        self._allowed = allowed
        self._formats: tuple[str, ...] = ()
        self._rates: Mapping[str, Any] = {}
        self._setups: SetupSeconds = {}
        self.factors: CodingFactors = {}
        self._encoders = self._decoders = 1.0
        self._pause = self._left = 0  # versions without a comparison: in the last pause, and left in this one
        self._link_rates: list[float] = []
        self._first_rate: float | None = None  # of a transfer that also connected the ranks

    def agree(self, reports: Mapping[int, Any], encoders: float = 1.0, decoders: float = 1.0) -> None:
        """Use the formats that all ranks of a route know, and the rates of the slowest one.

        Args:
            reports: result of :func:`report_formats` of each rank.
            encoders: how many times faster than one rank on its own core all ranks together encode.
            decoders: how many times faster than one rank on its own core all ranks together decode.
        """
        self._encoders, self._decoders = encoders, decoders
        known = [report["known"] for report in reports.values()]
        self._formats = tuple(
            name
            for name in FORMATS
            if name in self._allowed
            and name in known[0]
            and all(formats.get(name) == known[0][name] for formats in known)
        )
        self._rates = slowest_rates([report["rates"] for report in reports.values()])
        setups = [report["setups"] for report in reports.values()]
        self._setups = {
            name: tuple(max(seconds[name][side] for seconds in setups) for side in range(2)) for name in self._formats
        }
        # a rank that missed a version knows another rate, and holders of a region must choose alike
        link_rates = [report["link_rate"] for report in reports.values() if report.get("link_rate") is not None]
        self._link_rates, self._first_rate = [], link_rates[0] if link_rates else None

    def add_transfer(self, nbytes: int, seconds: float, plain: int, is_first: bool) -> None:
        """Take the rate of the link from a transfer.

        Args:
            nbytes: bytes that travelled.
            seconds: the longest time of any rank.
            plain: bytes of the model.
            is_first: whether the transfer was the first one of its connections.
        """
        if seconds <= 0 or nbytes < MIN_PART * plain:
            return
        if is_first:
            self._first_rate = nbytes / seconds
        else:
            self._link_rates = [*self._link_rates, nbytes / seconds][-MAX_LINK_RATES:]

    @property
    def link_rate(self) -> float | None:
        """Bytes per second of all regions together; None before the first transfer."""
        return statistics.median(self._link_rates) if self._link_rates else self._first_rate

    def note(self, pays: bool) -> None:
        """Note whether a comparison of formats has chosen another format than raw."""
        if self.link_rate is not None:  # else nothing was compared
            self._pause = 0 if pays else min(MAX_PAUSE, max(1, 2 * self._pause))
            self._left = self._pause

    def may_pay(self) -> bool:
        """Whether to compare formats for the next version.

        False if raw is fastest even for regions without changes. Also False for some versions after a comparison that
        ended in raw, because a comparison takes time.
        """
        if self._left:
            self._left -= 1
            return False
        if self.link_rate is None or not self._rates:
            return True
        rates = self._transfer_rates(self.link_rate)
        unchanged = Sample(0.0, 1.0)
        encoded = [predict_seconds(name, 2**20, 2, unchanged, rates) for name in self._formats if name != "raw"]
        return min(encoded, default=float("inf")) < MIN_GAIN * 2**21 / self.link_rate

    def choose(
        self, region: torch.Tensor, base: torch.Tensor | None, last: str | None = None, sample: Sample | None = None
    ) -> RegionChoice:
        """The format of a region.

        Args:
            region: a tensor on the CPU.
            base: the same region of the version before, on the CPU; None if the receivers hold no such version.
            last: format of the last choice, which stays unless another one is clearly faster; None if there is none.
            sample: sample of an earlier version to choose by; None to take a new one.
        """
        dtype, width, nbytes = dtype_name(region.dtype), word_width(region.itemsize), region.numel() * region.itemsize
        allowed = [
            name
            for name in self._formats
            if FORMATS[name].dtype in ("", dtype) and not (base is None and FORMATS[name].has_base)
        ]
        if self.link_rate is None:
            return RegionChoice("raw")
        raw = nbytes / self.link_rate
        if raw < MIN_REGION_SECONDS:
            name = SMALL_FORMAT if SMALL_FORMAT in allowed else "raw"
            setups, factors = self._setups.get(name, (0.0, 0.0)), self.factors.get(name, (1.0, 1.0))
            small = CodingSeconds(name, setups[0] * factors[0], setups[1] * factors[1])
            saved = (MIN_GAIN - 1) * raw - small.encode / self._encoders - small.decode / self._decoders
            return RegionChoice(name, saved, small)
        rates = self._transfer_rates(self.link_rate)
        sample, numel = sample or sample_region(region, base), nbytes // width
        name = choose_format(numel, width, sample, rates, allowed, last)
        coding = predict_coding(name, numel, width, sample, rates)
        return RegionChoice(name, MIN_GAIN * raw - add_link(coding, numel, width, sample, rates), coding, sample)

    def _transfer_rates(self, link_rate: float) -> TransferRates:
        return TransferRates(link_rate, self._rates, self._encoders, self._decoders, self._setups, self.factors)
