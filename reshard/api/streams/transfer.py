"""A call whose tensors travel as streams: the ranks agree on bases and sizes, move the streams, confirm, and decode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from reshard.api.streams.encoding import EncodedStream, capacity_of, decode_stream, digest_regions, encode_stream
from reshard.api.streams.regions import Stream, find_streams
from reshard.api.tensor_checks import mark_written
from reshard.api.transfers import ConfirmedHandle, Handle
from reshard.codecs.exponents import DTYPE
from reshard.coordination import Channel, Decision, Request, calling, describe_error, rebuild_error
from reshard.errors import ArgumentError, DisagreementError, ReshardError, VerificationError
from reshard.formatting import describe_ranks, format_ranks
from reshard.sharding import Layout, Mesh, TensorSpec

#: Extra time after the time limit of the transfer in which ranks wait for each other's outcome.
OUTCOME_SECONDS = 0.5

Arrays = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class StreamReport:
    """How a call sent its tensors; the same on all ranks.

    Attributes:
        base: digest of the version to which the differences refer; None if the tensors were sent in full. because: why
            ``"delta"`` sent them in full; "" otherwise.
        stream_bytes, plain_bytes: size of all streams, and of the regions that they encode, each counted once.
    """

    base: str | None
    because: str
    stream_bytes: int
    plain_bytes: int


class CallArrays(NamedTuple):
    """The arrays of one rank by name, None where the rank has none.

    Attributes:
        tensors: source shards. bases: those of the last version. outs: destination shards.
    """

    tensors: Arrays
    bases: Arrays
    outs: Arrays


class StreamTransfer:
    """One rank's part of a call whose tensors travel as streams.

    Args:
        codec: ``"delta"`` or ``"bf16-lossless"``. specs: the tensors as they are. arrays: those of this rank.
        purpose: of the call's rounds. verify: compare digests of the destination shards with those of the source, too.
    """

    def __init__(
        self,
        channel: Channel,
        codec: str,
        specs: Sequence[TensorSpec],
        arrays: CallArrays,
        timeout_seconds: float,
        purpose: str,
        *,
        verify: bool = False,
    ) -> None:
        self._channel, self._codec, self._rank = channel, codec, channel.group.rank
        self._specs = {spec.name or "": spec for spec in specs}
        self._tensors, self._bases, self._outs = arrays
        self._timeout_seconds, self._purpose, self._verify = timeout_seconds, purpose, verify
        channel.transfers += 1
        self._name = f"coded transfer {channel.transfers} of ranks {format_ranks(channel.members)}"
        self._streams = find_streams(specs, self._rank)
        self._encoded: dict[str, EncodedStream] = {}
        # of each stream: size, digest of the plain bytes if asked for, digest of the stream
        self._entries: dict[str, tuple[int, int | None, int]] = {}
        self._kept = "every out is unchanged"

    def offer(self) -> StreamReport:
        """Agree on the base, encode this rank's streams, and agree on their sizes.

        Raises:
            ArgumentError: the codec does not code the dtype of a tensor. DisagreementError: replicas of the source
                differ. ReshardError: a rank failed to encode. No data has moved.
        """
        for name, spec in self._specs.items():
            if self._codec == "bf16-lossless" and spec.dtype != DTYPE:
                what = f"tensor {name!r}" if name else "the tensor"
                raise ArgumentError(f"{what}: {self._codec} codes {DTYPE}, not {spec.dtype}")
        reports = self._encode(self._bases)
        base, because = self._find_base(reports) if self._codec == "delta" else (None, "")
        given = [digest for report in reports.values() for digest in report["sources"].values() if digest is not None]
        if base is None and given:
            warnings.warn(f"compression='delta' sends the tensors in full: {because}", stacklevel=5)
            reports = self._encode({})
        self._kept = f"every out is unchanged{f', at base {base}' if base else ''}"
        self._entries = self._agree_on_streams(reports)
        plain = sum(stream.nbytes for stream in self._streams.values())
        return StreamReport(base, because, sum(size for size, _, _ in self._entries.values()), plain)

    def specs(self) -> list[TensorSpec]:
        """The streams as tensors of a plan."""
        return [
            TensorSpec(
                (capacity_of(size),), "uint8", Layout(Mesh(stream.holders)), Layout(Mesh(stream.receivers)), name
            )
            for (name, stream), (size, _, _) in zip(self._streams.items(), self._entries.values(), strict=True)
        ]

    def arrays(self) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """The buffers to send, and new ones to receive into."""
        sent: list[torch.Tensor | None] = [
            torch.from_numpy(self._encoded[name].buffer) if name in self._encoded else None for name in self._streams
        ]
        received: list[torch.Tensor | None] = [
            torch.empty(capacity_of(self._entries[name][0]), dtype=torch.uint8)
            if self._rank in stream.receivers
            else None
            for name, stream in self._streams.items()
        ]
        return sent, received

    def complete(self, error: ReshardError | None, received: Sequence[torch.Tensor | None], targets: Arrays) -> None:
        """Write the destination shards once all ranks have received their streams.

        Args:
            error: what ended this rank's part of the transfer, or None. received: from :meth:`arrays`.

        Raises:
            ReshardError: a rank failed. The error says what the destination shards hold.
        """
        arrays = dict(zip(self._streams, received, strict=True))
        with calling(self._channel.group):
            failure = error or self._check_received(arrays)
            self._report({"failed": None if failure is None else describe_error(failure)}, "confirms the data of")
            self._kept = "its out is undefined"
            report: dict[str, Any] = {"failed": None}
            try:
                self._decode(arrays, targets)
            except Exception as failed:
                report["failed"] = describe_error(failed)
            self._report(report, "confirms the result of")

    def _encode(self, bases: Arrays) -> dict[int, Any]:
        """Encode this rank's streams, as differences if it has all bases; returns the reports of all ranks."""
        report: dict[str, Any] = {"failed": None, "streams": {}, "sources": {}, "outs": {}}
        try:
            for name, stream in self._streams.items():
                if self._rank in stream.holders:
                    base = _shards_of(stream, bases)
                    encoded = encode_stream(
                        stream, _shards_of(stream, self._tensors) or {}, base, self._codec, with_digest=self._verify
                    )
                    self._encoded[name] = encoded
                    own = xxhash.xxh3_64(encoded.data.data).intdigest()
                    report["streams"][name] = encoded.nbytes, encoded.digest, own
                    report["sources"][name] = None if base is None else digest_regions(stream, base, "src")
                if self._rank in stream.receivers and self._codec == "delta":
                    out = _shards_of(stream, self._outs)
                    report["outs"][name] = None if out is None else digest_regions(stream, out, "dst")
        except Exception as error:
            report["failed"] = describe_error(error)
        return self._report(report, "offers")

    def _find_base(self, reports: Mapping[int, Any]) -> tuple[str | None, str]:
        """The digest of the base that all ranks hold; or None, and why there is none."""
        lacks = {
            what: [rank for rank, report in sorted(reports.items()) if None in report[side].values()]
            for what, side in (("base", "sources"), ("out", "outs"))
        }
        for what, ranks in lacks.items():
            if ranks:
                return None, f"{describe_ranks(ranks)} pass{'es' * (len(ranks) == 1)} no {what}"
        digests = []
        for name, stream in self._streams.items():
            found = [(rank, reports[rank]["sources"][name]) for rank in stream.holders]
            found += [(rank, reports[rank]["outs"][name]) for rank in stream.receivers]
            first, digest = found[0]
            for rank, other in found:
                if other != digest:
                    names = ", ".join(sorted({repr(region.tensor) for region in stream.regions if region.tensor}))
                    what = f" of {names}" if names else ""
                    return None, f"rank {rank} holds another base{what} than rank {first}"
            digests.append(digest)
        return xxhash.xxh3_64(repr(digests).encode()).hexdigest(), ""

    def _agree_on_streams(self, reports: Mapping[int, Any]) -> dict[str, tuple[int, int | None, int]]:
        """What all holders of each stream report alike."""
        entries = {}
        for name, stream in self._streams.items():
            first = stream.holders[0]
            entries[name] = tuple(reports[first]["streams"][name])
            for rank in stream.holders:
                if tuple(reports[rank]["streams"][name]) != entries[name]:
                    raise DisagreementError(
                        f"ranks {first} and {rank} hold the same regions, but other values in them; {self._kept}"
                    )
        return entries  # type: ignore[return-value]

    def _report(self, report: dict[str, Any], purpose: str) -> dict[int, Any]:
        limit = self._timeout_seconds + OUTCOME_SECONDS
        what = f"{purpose} {self._name} {self._purpose}".strip()
        return exchange_reports(self._channel, report, what, limit, self._kept)

    def _check_received(self, received: Arrays) -> ReshardError | None:
        for name, stream in self._streams.items():
            size, _, digest = self._entries[name]
            array = received[name]
            if array is not None and xxhash.xxh3_64(array[:size].numpy().data).intdigest() != digest:
                return VerificationError(
                    f"the stream from ranks {format_ranks(stream.holders)} arrived at rank {self._rank} with other "
                    "bytes than were sent"
                )
        return None

    def _decode(self, received: Arrays, targets: Arrays) -> None:
        shards = {name: array for name, array in targets.items() if array is not None}
        mark_written(shards.values())
        for name, stream in self._streams.items():
            array = received[name]
            if array is None:
                continue
            digest = decode_stream(stream, array.numpy(), shards, with_digest=self._verify)
            if digest != self._entries[name][1]:
                raise VerificationError(
                    f"rank {self._rank} does not hold what ranks {format_ranks(stream.holders)} sent: out changed "
                    "during the transfer"
                )


class StreamedHandle(ConfirmedHandle):
    """A transfer of streams. Every rank must call :meth:`wait`, which confirms the data and decodes it.

    Attributes:
        report: how the tensors are sent.
    """

    def __init__(
        self,
        inner: Handle,
        report: StreamReport,
        complete: Callable[[ReshardError | None], None],
        finish: Callable[[], Any],
    ) -> None:
        super().__init__(inner, finish)
        self._complete = complete
        self._outcome: ReshardError | None = None
        self._is_complete = False
        self.report = report

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Wait as :meth:`Handle.wait` does. Then confirm with the other ranks that all data has arrived, and decode it.

        ``timeout_seconds`` limits only the wait for this rank's streams. The timeout of the call limits the rest.

        Raises:
            ReshardError: a rank failed; the same on every rank. Unless it failed to decode, every ``out`` is unchanged.
        """
        self._wait_for_part(timeout_seconds)
        with self._finishing:
            if not self._is_complete and self._interruption is None:
                try:
                    self._outcome, self._is_complete = self._confirm(self._complete), True
                except BaseException as error:
                    self._interruption = type(error).__name__
                    raise
        if self._outcome is not None:
            raise self._outcome
        return self._take_result()


def exchange_reports(
    channel: Channel, report: Mapping[str, Any], purpose: str, timeout_seconds: float, kept: str = ""
) -> dict[int, Any]:
    """The reports of all ranks.

    Args:
        report: with ``"failed"``: class and text of this rank's error, or None. kept: what holds in spite of an error.

    Raises:
        ReshardError: the error of the first rank that failed, the same on all ranks; or a rank did not report.
    """
    what = f"; {kept}" if kept else ""
    request = Request(channel.group.rank, payload=dict(report), purpose=purpose)
    try:
        _, decision = channel.agree(request, _gather, timeout_seconds)
    except ReshardError as error:
        raise rebuild_error(type(error).__name__, f"{error}{what}") from error
    for rank, found in sorted(decision.payloads.items()):
        if found["failed"] is not None:
            name, text = found["failed"]
            prefix = "" if text.startswith("rank ") else f"rank {rank}: "
            raise rebuild_error(name, f"{prefix}{text}{what}")
    return decision.payloads


def _gather(requests: list[Request]) -> Decision:
    payloads = {request.rank: request.payload for request in requests}
    return Decision(generation=max(request.generation for request in requests), payloads=payloads)


def _shards_of(stream: Stream, arrays: Arrays) -> dict[str, torch.Tensor] | None:
    """The shards that hold a stream's regions; None if one is missing."""
    found = {region.tensor: arrays.get(region.tensor) for region in stream.regions}
    shards = {name: array for name, array in found.items() if array is not None}
    return shards if len(shards) == len(found) else None
