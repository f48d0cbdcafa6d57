"""A call whose tensors travel as buckets: the ranks agree on bases and sizes, move the buckets, confirm, and decode."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import xxhash

from reshard.api.arguments.option_checks import check_dtypes
from reshard.api.lossless.buckets import Bucket, find_buckets
from reshard.api.lossless.encoding import EncodedBucket, capacity_of, decode_bucket, digest_regions, encode_bucket
from reshard.codecs import has_base
from reshard.coordination import (
    CallGroup,
    Decision,
    RoundRequest,
    calling,
    describe_error,
    find_call_group,
    gather_reports,
    rebuild_error,
)
from reshard.coordination.liveness.lost_ranks import ranks_lost_with_regions_error
from reshard.errors import DisagreementError, RankLostError, ReshardError, VerificationError
from reshard.formatting import describe_ranks, format_ranks
from reshard.public_api import caller_level
from reshard.runtime.autograd import mark_written
from reshard.sharding import Layout, Mesh, TensorSpec

#: Extra time after the time limit of the transfer in which ranks wait for each other's outcome.
LOSSLESS_OUTCOME_GRACE_SECONDS = 0.5

ArraysOrNone = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class EncodingReport:
    """The way in which a call sent its tensors; the same on all ranks.

    Attributes:
        base: digest of the version to which the differences refer; None if the tensors were sent in full.
        because: the reason why ``"delta"`` sent the tensors in full; "" otherwise.
        encoded_bytes, plain_bytes: size of all buckets, and of the regions that they encode, each counted once.
    """

    base: str | None
    because: str
    encoded_bytes: int
    plain_bytes: int


class CallArrays(NamedTuple):
    """The arrays of one rank by name, None where the rank has none.

    Attributes:
        tensors: source shards.
        bases: source shards of the earlier version.
        outs: destination shards.
    """

    tensors: ArraysOrNone
    bases: ArraysOrNone
    outs: ArraysOrNone


class LosslessTransfer:
    """One rank's part of a call whose tensors travel as buckets.

    Args:
        codec: ``"delta"`` or ``"bf16-lossless"``.
        specs: the tensors before encoding.
        arrays: arrays of this rank.
        purpose: names the caller in errors of the rounds.
        verify: also compare digests of the destination shards with digests of the source.
        lost: in a fault-tolerant call, the ranks lost before it; otherwise None.

    Attributes:
        members: the ranks that take part and are not lost.
        lost: ranks that were lost.
        last_round: call group, number and generation of the last round of surviving ranks; None before it.
    """

    def __init__(
        self,
        call_group: CallGroup,
        codec: str,
        specs: Sequence[TensorSpec],
        arrays: CallArrays,
        timeout_seconds: float,
        purpose: str,
        *,
        verify: bool = False,
        lost: Collection[int] | None = None,
    ) -> None:
        self._call_group, self._codec, self._rank = call_group, codec, call_group.group.rank
        self._fault_tolerant, self.lost = lost is not None, set(lost or ())
        self.members = tuple(rank for rank in call_group.members if rank not in self.lost)
        self._specs = {spec.name or "": spec for spec in specs}
        self._tensors, self._bases, self._outs = arrays
        self._timeout_seconds, self._purpose, self._verify = timeout_seconds, purpose, verify
        call_group.transfers += 1
        self._name = f"encoded transfer {call_group.transfers} of ranks {format_ranks(call_group.members)}"
        self.last_round: tuple[CallGroup, int, int] | None = None
        self._buckets = find_buckets(specs, self._rank)
        self._encoded: dict[str, EncodedBucket] = {}
        # for each bucket: its size, the digest of its plain bytes if requested, and its digest
        self._entries: dict[str, tuple[int, int | None, int]] = {}
        self._kept = "every out is unchanged"

    def offer(self, failure: Exception | None = None) -> EncodingReport:
        """Agree on the base, encode this rank's buckets, and agree on their sizes.

        Args:
            failure: what is wrong with the arrays of this rank; raised on all ranks.

        Raises:
            ArgumentError: the codec does not compress the dtype of a tensor. DisagreementError: replicas of the source
                differ. ReshardError: a rank failed to encode. No data has moved.
        """
        check_dtypes(self._codec, self._specs.values())
        reports = self._encode(self._bases, failure)
        base, because = self._find_base(reports) if has_base(self._codec) else (None, "")
        given = [digest for report in reports.values() for digest in report["sources"].values() if digest is not None]
        if base is None and given:
            warnings.warn(
                f"compression={self._codec!r} sends the tensors in full: {because}", stacklevel=caller_level()
            )
            reports = self._encode({})
        self._kept = f"every out is unchanged{f', at base {base}' if base else ''}"
        self._buckets = self._find_survivors()
        self._entries = self._agree_on_buckets(reports)
        plain = sum(bucket.nbytes for bucket in self._buckets.values())
        return EncodingReport(base, because, sum(size for size, _, _ in self._entries.values()), plain)

    @property
    def is_idle(self) -> bool:
        """Whether this rank sends and receives no bucket, for example because its shards are empty."""
        return not any(self._rank in (*bucket.holders, *bucket.receivers) for bucket in self._buckets.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each bucket."""
        return {name: size for name, (size, _, _) in self._entries.items()}

    def specs(self, capacities: Mapping[str, int] | None = None) -> list[TensorSpec]:
        """The buckets as tensors of a plan, in buffers of these sizes; a little larger than the buckets by default."""
        capacities = capacities or {name: capacity_of(size) for name, size in self.sizes.items()}
        return [
            TensorSpec((capacities[name],), "uint8", Layout(Mesh(bucket.holders)), Layout(Mesh(bucket.receivers)), name)
            for name, bucket in self._buckets.items()
        ]

    def arrays(
        self, capacities: Mapping[str, int] | None = None
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """The buffers to send, and new ones to receive into, of the sizes of :meth:`specs`."""
        capacities = capacities or {name: capacity_of(size) for name, size in self.sizes.items()}
        sent: list[torch.Tensor | None] = [
            torch.from_numpy(self._encoded[name].padded(capacities[name])) if self._rank in bucket.holders else None
            for name, bucket in self._buckets.items()
        ]
        received: list[torch.Tensor | None] = [
            torch.empty(capacities[name], dtype=torch.uint8, device="cpu") if self._rank in bucket.receivers else None
            for name, bucket in self._buckets.items()
        ]
        return sent, received

    def exclude(self, members: Sequence[int]) -> None:
        """Continue without the ranks that are not among ``members``."""
        self.lost |= set(self.members) - set(members)
        self.members = tuple(members)

    def complete(
        self, error: ReshardError | None, received: Sequence[torch.Tensor | None], targets: ArraysOrNone
    ) -> None:
        """Write the destination shards once all ranks have received their buckets.

        Args:
            error: what ended this rank's part of the transfer, or None.
            received: arrays that :meth:`arrays` returned.

        Raises:
            ReshardError: a rank failed. The error says what the destination shards hold.
        """
        arrays = dict(zip(self._buckets, received, strict=True))
        with calling(self._call_group.group):
            failure = error or self._check_received(arrays)
            self._report({"failed": None if failure is None else describe_error(failure)}, "confirms the data of")
            self._kept = "its out is undefined"
            report: dict[str, Any] = {"failed": None}
            try:
                self._decode(arrays, targets)
            except Exception as failed:
                report["failed"] = describe_error(failed)
            self._report(report, "confirms the result of")

    def _find_survivors(self) -> dict[str, Bucket]:
        """The buckets among the ranks that are not lost.

        Raises:
            RankLostError: no surviving rank holds a bucket that a surviving rank needs.
        """
        if not self.lost:
            return self._buckets
        survivors, gone = {}, []
        for name, bucket in self._buckets.items():
            holders, receivers = (
                tuple(rank for rank in ranks if rank not in self.lost) for ranks in (bucket.holders, bucket.receivers)
            )
            if holders and receivers:
                survivors[name] = replace(bucket, holders=holders, receivers=receivers)
            elif receivers:
                gone.append((bucket, receivers))
        if gone:
            needed = {rank for _, receivers in gone for rank in receivers}
            raise self._describe_loss([bucket for bucket, _ in gone], needed)
        return survivors

    def _describe_loss(self, gone: Sequence[Bucket], needed: Iterable[int]) -> RankLostError:
        """The error that no surviving rank holds some buckets, which the ranks in ``needed`` lack."""
        lost, ranks = sorted(self.lost), sorted(needed)
        names = sorted({repr(region.tensor) for bucket in gone for region in bucket.regions if region.tensor})
        return ranks_lost_with_regions_error(lost, names, ranks, self._kept)

    def explain(self, error: ReshardError) -> ReshardError:
        """The error of a failed recovery, which names tensors in place of buckets and says what every out holds."""
        if not isinstance(error, RankLostError):
            explained = rebuild_error(type(error).__name__, f"{error}; {self._kept}")
            for note in getattr(error, "__notes__", ()):
                explained.add_note(note)
            return explained
        if not error.regions:
            return RankLostError(f"{error}; {self._kept}", error.ranks, (), error.plan, error._recover)
        gone = [
            bucket
            for name, bucket in self._buckets.items()
            if any(region.startswith(f"{name!r} [") for region in error.regions)
        ]
        return self._describe_loss(gone, {rank for bucket in gone for rank in bucket.receivers} - self.lost)

    def _encode(self, bases: ArraysOrNone, failure: Exception | None = None) -> dict[int, Any]:
        """Encode this rank's buckets, as differences if it has all bases; returns the reports of all ranks."""
        report: dict[str, Any] = {"failed": None, "buckets": {}, "sources": {}, "outs": {}}
        try:
            if failure is not None:
                raise failure
            for name, bucket in self._buckets.items():
                if self._rank in bucket.holders:
                    base = _shards_of(bucket, bases)
                    encoded = encode_bucket(
                        bucket,
                        _shards_of(bucket, self._tensors) or {},
                        base,
                        self._codec,
                        with_digest=self._verify,
                        with_base_digest=True,
                    )
                    self._encoded[name] = encoded
                    own = xxhash.xxh3_64(encoded.data.data).intdigest()
                    report["buckets"][name] = encoded.nbytes, encoded.digest, own
                    report["sources"][name] = encoded.base_digest
                if self._rank in bucket.receivers and has_base(self._codec):
                    out = _shards_of(bucket, self._outs)
                    report["outs"][name] = None if out is None else digest_regions(bucket, out, "dst")
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
        for name, bucket in self._buckets.items():
            rank_digests = [(rank, reports[rank]["sources"][name]) for rank in bucket.holders if rank in reports]
            rank_digests += [(rank, reports[rank]["outs"][name]) for rank in bucket.receivers if rank in reports]
            if not rank_digests:
                continue
            first, digest = rank_digests[0]
            for rank, other in rank_digests:
                if other != digest:
                    names = ", ".join(sorted({repr(region.tensor) for region in bucket.regions if region.tensor}))
                    what = f" of {names}" if names else ""
                    return None, f"rank {rank} holds another base{what} than rank {first}"
            digests.append(digest)
        return xxhash.xxh3_64(repr(digests).encode()).hexdigest(), ""

    def _agree_on_buckets(self, reports: Mapping[int, Any]) -> dict[str, tuple[int, int | None, int]]:
        """Size and digests of each bucket, which all its holders must report alike."""
        entries = {}
        for name, bucket in self._buckets.items():
            first = bucket.holders[0]
            entries[name] = tuple(reports[first]["buckets"][name])
            for rank in bucket.holders:
                if tuple(reports[rank]["buckets"][name]) != entries[name]:
                    raise DisagreementError(
                        f"ranks {first} and {rank} hold the same regions, but other values in them; {self._kept}"
                    )
        return entries  # type: ignore[return-value]

    def _report(self, report: dict[str, Any], purpose: str) -> dict[int, Any]:
        limit = self._timeout_seconds + LOSSLESS_OUTCOME_GRACE_SECONDS
        what = f"{purpose} {self._name} {self._purpose}".strip()
        if not self._fault_tolerant:
            return exchange_reports(self._call_group, report, what, limit, self._kept)
        while True:
            call_group = find_call_group(self._call_group.group, self.members)
            request = RoundRequest(self._rank, payload=report, purpose=what)
            decide = functools.partial(_gather_survivors, call_group)
            round_number, decision = call_group.agree(request, decide, limit, fault_tolerant=True)
            if not decision.lost:
                self.last_round = call_group, round_number, decision.generation
                return _raise_failure(decision.payloads, self._kept)
            self.exclude([rank for rank in self.members if rank not in decision.lost])

    def _check_received(self, received: ArraysOrNone) -> ReshardError | None:
        for name, bucket in self._buckets.items():
            size, _, digest = self._entries[name]
            array = received[name]
            if array is not None and xxhash.xxh3_64(array[:size].numpy().data).intdigest() != digest:
                return VerificationError(
                    f"the encoded data from {describe_ranks(bucket.holders)} arrived at rank {self._rank} with "
                    "other bytes than were sent"
                )
        return None

    def _decode(self, received: ArraysOrNone, targets: ArraysOrNone) -> None:
        shards = {name: array for name, array in targets.items() if array is not None}
        mark_written(shards.values())
        for name, bucket in self._buckets.items():
            array = received[name]
            if array is None:
                continue
            digest = decode_bucket(bucket, array.numpy(), shards, with_digest=self._verify)
            if digest != self._entries[name][1]:
                raise VerificationError(
                    f"rank {self._rank} does not hold what {describe_ranks(bucket.holders)} sent: out changed "
                    "during the transfer"
                )


def exchange_reports(
    call_group: CallGroup, report: Mapping[str, Any], purpose: str, timeout_seconds: float, kept: str = ""
) -> dict[int, Any]:
    """The reports of all ranks.

    Args:
        report: with ``"failed"``: class and text of this rank's error, or None.
        kept: what holds in spite of an error.

    Raises:
        ReshardError: the error of the first rank that failed, the same on all ranks; or a rank did not report.
    """
    what = f"; {kept}" if kept else ""
    request = RoundRequest(call_group.group.rank, payload=dict(report), purpose=purpose)
    try:
        _, decision = call_group.agree(request, _gather, timeout_seconds)
    except ReshardError as error:
        raise rebuild_error(type(error).__name__, f"{error}{what}") from error
    return _raise_failure(decision.payloads, kept)


def _raise_failure(reports: dict[int, Any], kept: str) -> dict[int, Any]:
    """Raise the error of the first rank that failed; returns the reports if none did."""
    for rank, report in sorted(reports.items()):
        if report["failed"] is not None:
            name, text = report["failed"]
            prefix = "" if text.startswith("rank ") else f"rank {rank}: "
            raise rebuild_error(name, f"{prefix}{text}{f'; {kept}' if kept else ''}")
    return reports


def _gather_survivors(call_group: CallGroup, requests: list[RoundRequest]) -> Decision:
    return gather_reports(requests, call_group.members, call_group.rounds.find_dead())


def _gather(requests: list[RoundRequest]) -> Decision:
    payloads = {request.rank: request.payload for request in requests}
    return Decision(generation=max(request.generation for request in requests), payloads=payloads)


def _shards_of(bucket: Bucket, arrays: ArraysOrNone) -> dict[str, torch.Tensor] | None:
    """The shards that hold a bucket's regions; None if one is missing."""
    shard_of = {region.tensor: arrays.get(region.tensor) for region in bucket.regions}
    shards = {name: array for name, array in shard_of.items() if array is not None}
    return shards if len(shards) == len(shard_of) else None
