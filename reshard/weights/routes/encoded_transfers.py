"""Versions that travel over a route in lossless formats: as differences if the destinations hold an earlier version."""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xxhash

from reshard.api.lossless.buckets import Bucket, Region, find_buckets
from reshard.api.lossless.encoding import find_capacities
from reshard.api.mover import Mover
from reshard.api.transfers.handle import Handle, times_of
from reshard.codecs.formats import format_of
from reshard.codecs.lossless_choice import CodingFactors, CodingSeconds
from reshard.errors import ArgumentError, DisagreementError, RemoteError
from reshard.formatting import format_ranks
from reshard.planner import plan_tensors
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.weights.membership.team import run_collectively
from reshard.weights.routes.encoded_regions import decode_region, encode_region, find_header, largest_size
from reshard.weights.routes.format_choice import FormatChoice, RegionChoice, find_share, report_formats
from reshard.weights.routes.learned_times import have_moved
from reshard.weights.routes.route import NUM_SHARES, Route, RouteOptions

Arrays = Mapping[str, torch.Tensor]
#: Versions for which the formats of regions are kept.
MAX_KEPT = 16
#: Largest number of rounds of a version; more would take longer than they save.
MAX_ROUNDS = 4096


@dataclass
class SendingReport:
    """The way in which a version was sent.

    Attributes:
        seconds: how long its transfers took.
        nbytes: bytes that travelled, each counted once.
        formats: ``{format: plain bytes}`` of the buckets whose first holder is this rank.
        encoding: ``{format: (predicted, measured) seconds}`` of encoding on this rank.
        decoding: ``{format: predicted seconds}``: what the buckets whose first holder is this rank add to the decoding
            of the slowest rank.
    """

    seconds: float = 0.0
    nbytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    encoding: dict[str, tuple[float, float]] = field(default_factory=dict)
    decoding: dict[str, float] = field(default_factory=dict)

    def add(self, handle: Handle, nbytes: int) -> None:
        """Add a transfer that has ended."""
        begun, ended = times_of(handle)
        self.seconds += (ended or 0.0) - (begun or 0.0)
        self.nbytes += nbytes


@dataclass(frozen=True)
class BucketChoice:
    """The formats of a bucket.

    Attributes:
        names: the format of each region.
        gain: seconds that these formats are predicted to save. All regions are raw if this is not positive.
        plain: ``{format: plain bytes}``.
        counts: whether this rank is the first holder of the bucket, which reports the gain.
        coding: predicted times of one rank in which no earlier version is considered.
        regions: choice of each region by itself.
    """

    names: list[str]
    gain: float
    plain: dict[str, int]
    counts: bool
    coding: tuple[CodingSeconds, ...] = ()
    regions: tuple[RegionChoice, ...] = ()


class EncodedTransfers:
    """Moves versions over a route, in the thread of the route. All ranks of the route make one at the same time.

    Regions that the same ranks hold and the same ranks need form a bucket. If the buckets of a rank exceed its share of
    memory, they travel in several rounds. Each round moves an equal part of every bucket.

    Args:
        route: the route.
        options: options of this rank; all ranks use the smallest ``memory_bytes`` of any rank.
        choice: the choice of formats; None on a rank of a destination.

    Attributes:
        coding_seconds: ``{format: seconds}`` in which this rank has coded its part of the last version.

    Raises:
        ReshardError: a rank did not come; the same on all ranks.
    """

    def __init__(self, route: Route, options: RouteOptions, choice: FormatChoice | None) -> None:
        self.route, self.timeout_seconds, self._choice = route, options.timeout_seconds, choice
        self._staging_bytes = options.memory_bytes // NUM_SHARES
        self._rank, specs = route.rank, route.plan.tensors
        self._buckets = find_buckets(specs, self._rank)
        self._itemsize = {spec.name or "": spec.itemsize for spec in specs}

        def describe() -> dict[str, Any]:
            link_rate = None if choice is None else choice.link_rate
            return {**report_formats(), "memory_bytes": options.memory_bytes, "link_rate": link_rate}

        reports = self.exchange(describe, "compares formats")
        limit = min(report["memory_bytes"] for report in reports.values()) // NUM_SHARES
        held, needed = (_sum_by_rank(self._buckets, side) for side in ("holders", "receivers"))
        max_bytes = max((held.get(rank, 0) + needed.get(rank, 0) for rank in {*held, *needed}), default=0)
        self.num_rounds = max(1, -(-max_bytes // limit))
        if self.num_rounds > MAX_ROUNDS:
            raise ArgumentError(
                f"compression= would send this model in {self.num_rounds:,} rounds, because memory_bytes is "
                f"{limit * NUM_SHARES:,} on a rank; it must be at least {NUM_SHARES * -(-max_bytes // MAX_ROUNDS):,}"
            )
        self.plain_bytes = sum(bucket.nbytes for bucket in self._buckets.values())
        if choice is not None:
            self._shares = find_share(reports, held), find_share(reports, needed)
            self._decoders = self._shares[1] * self.plain_bytes / max(1, *needed.values(), 1)
            encoders = self._shares[0] * self.plain_bytes / max(1, *held.values(), 1)
            choice.agree(reports, encoders, self._decoders)
        self._rounds = [self._find_round(number) for number in range(self.num_rounds)]
        self._chosen: tuple[bool, dict[str, BucketChoice]] | None = None
        self._num_chosen = 0  # versions whose formats were chosen by the same samples
        self._factors: CodingFactors = {}  # when the kept formats were chosen
        self.coding_seconds: defaultdict[str, float] = defaultdict(float)
        self._mover: Mover | None = None
        self._capacity: dict[str, int] = {}
        self._sent: dict[str, np.ndarray] = {}
        self._received: dict[str, np.ndarray] = {}

    def start_sending(self, arrays: Arrays, base: Arrays | None, problem: str = "") -> SendingHandle:
        """Start to send a version.

        Args:
            arrays: the local shards of the source model by name, on the CPU.
            base: the local shards of the version that the destinations hold; None if they need not hold one.
            problem: why this rank cannot send, as an error for all ranks.
        """
        self.coding_seconds.clear()
        new = self.route.gather(arrays)
        old = None if base is None else self.route.gather(base)
        return SendingHandle(self, arrays, new, old, problem)

    def receive(self, arrays: Arrays, base: Arrays | None, problem: str = "") -> None:
        """Receive into the local shards of the destination model of this rank.

        Args:
            arrays: the local shards by name; they change only after all ranks are known to hold the base.
            base: the local shards of the version to which differences refer, in the same or in other memory.
            problem: why this rank cannot receive, as an error for all ranks.
        """
        self.coding_seconds.clear()
        buffers = None
        for number in range(self.num_rounds):
            reports = self.exchange(functools.partial(_raise_problem, problem))
            if number == 0:
                if not _pays(reports):
                    self.route.receive(arrays)
                    return
                buffers = self.route.find_buffers(arrays, base)
            assert buffers is not None
            self.move(reports)[0].wait(self.timeout_seconds)
            try:
                self._decode(number, buffers.arrays)
            except Exception as error:  # the next round reports it to the other ranks
                problem = f"{type(error).__name__}: {error}"
        _raise_problem(problem)
        assert buffers is not None
        buffers.finish()

    def exchange(self, function: Callable[[], Mapping[str, Any]], purpose: str = "offers a version") -> dict[int, Any]:
        """The results of a function on all ranks of the route. If it raises an error on one, all raise it."""
        return run_collectively(self.route.group, function, purpose, self.timeout_seconds)

    def _find_round(self, number: int) -> dict[str, _BucketPart]:
        """The part of each bucket that travels in a round."""
        parts = {}
        for name, bucket in self._buckets.items():
            lo, hi = (bucket.nbytes * nth // self.num_rounds for nth in (number, number + 1))
            cut = list(_cut_regions(bucket.regions, self._itemsize, lo, hi))
            regions = tuple(region for _, region in cut)
            parts[name] = _BucketPart(replace(bucket, regions=regions), [number for number, _ in cut])
        return parts

    def choose(self, new: Arrays, old: Arrays | None) -> dict[str, BucketChoice]:
        """The formats of the buckets that this rank holds. All ranks that hold a bucket choose the same.

        A choice is kept for some versions, because updates of one training run are alike. If they show that coding
        takes another time, the formats are chosen again from the same samples.
        """
        assert self._choice is not None
        factors = self._choice.factors
        last = self._chosen[1] if self._chosen and self._chosen[0] == (old is None) else {}
        is_due = not last or self._num_chosen == MAX_KEPT
        self._num_chosen = 1 if is_due else self._num_chosen + 1
        if not is_due and not have_moved(self._factors, factors):
            return last
        self._factors, choices = factors, {}
        for name, bucket in self._buckets.items():
            if self._rank not in bucket.holders:
                continue
            plain: dict[str, int] = {}
            views, names, gain = list(bucket.views(new, "src")), [], 0.0
            coding, regions = [], []
            bases = [None] * len(views) if old is None else bucket.views(old, "src")
            before = [(item.name, item.sample) for item in last[name].regions] if last else [(None, None)] * len(views)
            for view, base, (format_before, sample) in zip(views, bases, before, strict=True):
                chosen = self._choice.choose(view, base, format_before, None if is_due else sample)
                regions.append(chosen)
                names.append(chosen.name)
                gain += chosen.saved
                plain[chosen.name] = plain.get(chosen.name, 0) + view.numel() * view.itemsize
                if chosen.coding is not None:
                    coding.append(_without(factors, chosen.coding))
            if gain <= 0:
                names, plain, coding = ["raw"] * len(views), {"raw": bucket.nbytes}, []
            counts = bucket.holders[0] == self._rank
            choices[name] = BucketChoice(names, gain, plain, counts, tuple(coding), tuple(regions))
        is_known = self._choice.link_rate is not None
        self._chosen = (old is None, choices) if is_known else None
        return choices

    def encode(
        self, number: int, new: Arrays, old: Arrays | None, choices: Mapping[str, BucketChoice]
    ) -> dict[str, Any]:
        """Encode this rank's buckets of a round into buffers; returns their sizes and digests."""
        offers = {}
        for name, part, views in self._sources(number, new):
            if name not in choices:
                continue
            bases = [None] * len(views) if old is None else list(part.bucket.views(old, "src"))
            capacity = find_capacities({name: sum(map(largest_size, views))}, {})[name]
            if len(self._sent.get(name, ())) < capacity:
                self._sent[name] = np.empty(capacity, dtype=np.uint8)  # only pages that are used take memory
            out, size = self._sent[name], 0
            for region, view, base in zip(part.numbers, views, bases, strict=True):
                begun = time.perf_counter()
                encoded = encode_region(view, base, choices[name].names[region], out[size:])
                self._note_coding(out[size:], begun)
                size += encoded
            offers[name] = size, xxhash.xxh3_64(out[:size].data).intdigest()
        return offers

    def raw_sizes(self, number: int, new: Arrays) -> dict[str, Any]:
        """The result of :meth:`encode` if all regions are raw, but without digests."""
        return {name: (sum(map(largest_size, views)), None) for name, _, views in self._sources(number, new)}

    def _sources(self, number: int, new: Arrays) -> Iterator[tuple[str, _BucketPart, list[torch.Tensor]]]:
        """The parts that this rank sends in a round: the name and the views of each."""
        for name, part in self._rounds[number].items():
            if self._rank in part.bucket.holders:
                yield name, part, list(part.bucket.views(new, "src"))

    def _decode(self, number: int, arrays: Arrays) -> None:
        for name, part in self._rounds[number].items():
            if self._rank in part.bucket.receivers:
                data, begin = self._received[name], 0
                for view in part.bucket.views(arrays, "dst"):
                    begun, region = time.perf_counter(), data[begin:]
                    begin += decode_region(region, view)
                    self._note_coding(region, begun)

    def _note_coding(self, encoded: np.ndarray, begun: float) -> None:
        """Add the time since the coding of a region began."""
        self.coding_seconds[format_of(find_header(encoded))] += time.perf_counter() - begun

    def report_coding(self, choices: Mapping[str, BucketChoice], report: SendingReport) -> None:
        """Add the predicted and measured times of a version that has been encoded."""
        predicted: defaultdict[str, float] = defaultdict(float)
        for choice in choices.values():
            for coding in choice.coding:
                predicted[coding.written] += coding.encode / self._shares[0]
                if choice.counts:
                    seconds = report.decoding.get(coding.written, 0.0)
                    report.decoding[coding.written] = seconds + coding.decode / self._decoders
        report.encoding = {name: (seconds, self.coding_seconds[name]) for name, seconds in predicted.items()}

    def move(self, reports: Mapping[int, Any]) -> tuple[Handle, int]:
        """Start the transfer of the buckets of a round; returns its handle, and the bytes of all buckets."""
        sizes = {}
        for name, bucket in self._buckets.items():
            offers = [tuple(reports[rank]["buckets"][name]) for rank in bucket.holders]
            if any(offer != offers[0] for offer in offers):
                raise DisagreementError(
                    f"ranks {format_ranks(bucket.holders)} hold the same regions, but other weights in them"
                )
            sizes[name] = offers[0][0]
        mover = self._find_mover(sizes)
        sent: dict[str | None, Any] = dict.fromkeys(sizes)
        received: dict[str | None, Any] = dict.fromkeys(sizes)
        for name, bucket in self._buckets.items():
            if self._rank in bucket.holders:
                sent[name] = torch.from_numpy(self._sent[name][: self._capacity[name]])
            if self._rank in bucket.receivers:
                received[name] = torch.from_numpy(self._received[name])
        return mover.start(sent, out=received), sum(sizes.values())

    def _find_mover(self, sizes: Mapping[str, int]) -> Mover:
        """A Mover whose buffers hold buckets of these sizes; kept while they are not much larger than needed."""
        capacity = find_capacities(sizes, self._capacity)
        if self._mover is not None and capacity == self._capacity:
            return self._mover
        if self._mover is not None:
            self._mover.close()
        self._capacity = capacity
        specs = [
            TensorSpec(
                (self._capacity[name],), "uint8", Layout(Mesh(bucket.holders)), Layout(Mesh(bucket.receivers)), name
            )
            for name, bucket in self._buckets.items()
        ]
        plan = plan_tensors(specs, topology=self.route.topology, staging_bytes=self._staging_bytes)
        self._mover = Mover(plan, self.route.group, timeout_seconds=self.timeout_seconds)
        self._received = {
            name: np.empty(self._capacity[name], dtype=np.uint8)
            for name, bucket in self._buckets.items()
            if self._rank in bucket.receivers
        }
        return self._mover


class SendingHandle:
    """A version on its way: the first round has begun, and :meth:`wait` runs the others.

    Args:
        transfers: the transfers of the route.
        arrays: the local shards of the source model by name.
        new: the tensors of the route.
        old: the same tensors in the base; None without a base.
        problem: why this rank cannot send, as an error for all ranks.
    """

    def __init__(
        self, transfers: EncodedTransfers, arrays: Arrays, new: Arrays, old: Arrays | None, problem: str
    ) -> None:
        self._transfers, self._new, self._old = transfers, new, old
        self._choices: dict[str, BucketChoice] = {}
        self.report = SendingReport()

        def offer() -> dict[str, Any]:
            _raise_problem(problem)
            self._choices = transfers.choose(new, old)
            gain = sum(choice.gain for choice in self._choices.values() if choice.counts)
            encoded = {name: choice for name, choice in self._choices.items() if choice.gain > 0}
            return {"gain": gain, "buckets": transfers.raw_sizes(0, new) | transfers.encode(0, new, old, encoded)}

        reports = transfers.exchange(offer)
        self._is_encoded = _pays(reports)
        if not self._is_encoded:
            self._num_rounds = 1
            self._handle, self._nbytes = transfers.route.start_sending(arrays), transfers.plain_bytes
            raw = sum(sum(choice.plain.values()) for choice in self._choices.values() if choice.counts)
            self.report.formats = {"raw": raw}
            return
        self._num_rounds = transfers.num_rounds
        transfers.encode(0, new, old, {name: choice for name, choice in self._choices.items() if choice.gain <= 0})
        for choice in self._choices.values():
            for name, nbytes in choice.plain.items() if choice.counts else ():
                self.report.formats[name] = self.report.formats.get(name, 0) + nbytes
        self._handle, self._nbytes = transfers.move(reports)

    def wait(self, timeout_seconds: float) -> SendingReport:
        """Wait until all data has left."""
        self._handle.wait(timeout_seconds)
        self.report.add(self._handle, self._nbytes)
        for number in range(1, self._num_rounds):
            reports = self._transfers.exchange(functools.partial(self._offer, number))
            handle, nbytes = self._transfers.move(reports)
            handle.wait(timeout_seconds)
            self.report.add(handle, nbytes)
        if self._is_encoded:
            self._transfers.report_coding(self._choices, self.report)
        return self.report

    def _offer(self, number: int) -> dict[str, Any]:
        return {"buckets": self._transfers.encode(number, self._new, self._old, self._choices)}


class RawHandle:
    """A version on its way without encoding.

    Args:
        route: the route.
        arrays: the local shards of the source model by name.
    """

    def __init__(self, route: Route, arrays: Arrays) -> None:
        self._route, self._handle = route, route.start_sending(arrays)

    def wait(self, timeout_seconds: float) -> SendingReport:
        """Wait until all data has left."""
        self._handle.wait(timeout_seconds)
        nbytes = int(self._route.predict()["nbytes"])
        report = SendingReport(formats={"raw": nbytes if self._route.rank == 0 else 0})
        report.add(self._handle, nbytes)
        return report


@dataclass(frozen=True)
class _BucketPart:
    """A part of a bucket, and the number that each of its regions has in the whole bucket."""

    bucket: Bucket
    numbers: list[int]


def _without(factors: CodingFactors, coding: CodingSeconds) -> CodingSeconds:
    """Times without the factors of earlier versions."""
    encode, decode = factors.get(coding.written, (1.0, 1.0))
    return replace(coding, encode=coding.encode / encode, decode=coding.decode / decode)


def _pays(reports: Mapping[int, Any]) -> bool:
    """Whether the formats that all ranks offer are predicted to save time."""
    return sum(report.get("gain", 0.0) for report in reports.values()) > 0


def _raise_problem(problem: str) -> dict[str, Any]:
    if problem:
        raise RemoteError(problem)
    return {}


def _sum_by_rank(buckets: Mapping[str, Bucket], side: str) -> dict[int, int]:
    """Bytes of the buckets that each rank holds or needs."""
    sums: dict[int, int] = {}
    for bucket in buckets.values():
        for rank in getattr(bucket, side):
            sums[rank] = sums.get(rank, 0) + bucket.nbytes
    return sums


def _cut_regions(
    regions: Sequence[Region], itemsize: Mapping[str, int], lo: int, hi: int
) -> Iterator[tuple[int, Region]]:
    """The rows that begin at bytes ``lo`` to ``hi - 1`` of joined regions, each with the number of its region."""
    region_begin = 0
    for number, region in enumerate(regions):
        slices = region.dst if region.src is None else region.src  # () for a tensor without dims
        if slices is None:  # this rank neither holds nor needs the region
            continue
        shape = [piece.stop - piece.start for piece in slices]
        rows = shape[0] if shape else 1
        row_bytes = math.prod(shape) * itemsize[region.tensor] // rows
        first, last = (min(rows, max(0, -(-(edge - region_begin) // row_bytes))) for edge in (lo, hi))
        if first < last:
            sides = [
                side and (slice(side[0].start + first, side[0].start + last), *side[1:])
                for side in (region.src, region.dst)
            ]
            yield number, Region(region.tensor, *sides)
        region_begin += rows * row_bytes
