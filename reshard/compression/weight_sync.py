"""Send versions of weights from trainers to inference replicas as lossless differences, shard to shard."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from reshard.api.handle import times_of
from reshard.api.lossless.encoding import decode_bucket, digest_regions, encode_bucket, find_capacities
from reshard.api.lossless.regions import Bucket, find_buckets
from reshard.api.lossless.transfer import exchange_reports
from reshard.api.mover import Mover
from reshard.api.tensor_checks import detach_source, wait_for_collective
from reshard.codecs.formats import FORMATS
from reshard.compression.sync_formats import AUTO, SyncFormats, check_compression
from reshard.compression.sync_shards import Shards, SyncShards
from reshard.coordination import (
    calling,
    describe_error,
    find_channel,
    find_group,
    leave_interrupted,
    publish_exceptions,
    publish_interruption,
    report_error,
)
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, DisagreementError, ReshardError, VerificationError
from reshard.formatting import brief, describe_ranks
from reshard.planner import plan_tensors, predict
from reshard.runtime.autograd import mark_written
from reshard.sharding import AnyLayout, Layout, Mesh, TensorSpec, check_integer, check_shape
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology import Topology


@dataclass(frozen=True)
class SyncReport:
    """What one transfer of weights did.

    Attributes:
        version: what all ranks hold now.
        base: the version to which the differences refer; None if the weights were sent in full.
        because: why the weights were sent in full; "" otherwise.
        formats: ``{format: plain bytes of the regions that travelled in it}``.
        encoded_bytes: size of all buckets as they travel, each counted once.
        plain_bytes: size of the weights in these buckets.
    """

    version: int
    base: int | None
    because: str
    encoded_bytes: int
    plain_bytes: int
    formats: Mapping[str, int] = field(default_factory=dict)


def _leave_interrupted(error: BaseException, args: tuple[Any, ...], _: dict[str, Any]) -> None:
    sync: WeightSync = args[0]
    leave_interrupted(error, sync._group, lambda: sync._channel.members)


#: Limit on the number of a version, without its sign.
MAX_VERSION = 2**62


class WeightSync:
    """Sends weights from their shards to the shards of replicas, version by version, as differences to the last one.

    Each source rank keeps a copy of its shards at the last version whose data all ranks have received. The first
    transfer, and any transfer for which some rank does not hold that version, sends the weights in full. Digests check
    that replicas of the source are equal, that differences arrive as they were sent, and that every receiver holds the
    version to which they refer. Receivers compute this last digest while the differences are on their way.

    Args:
        src, dst: the layouts, or ``{name: layout}``.
        shape, dtype: ``{name: global shape}``, and one dtype for all tensors or ``{name: dtype}``.
        group: the process group (default: the world) or the result of :func:`reshard.join`.
        topology: hosts and links of the ranks; default: one host.
        compression: ``"auto"`` chooses a format for each tensor and version by the predicted time of encoding, transfer
            and decoding. Or the format of all tensors: ``"delta"`` for few changes, ``"bitmap"`` for many,
            ``"xor-zstd"`` for the least bytes, ``"bf16-lossless"``, ``"raw"``.
        timeout_seconds: limit of each agreement, and of the transfer.

    Attributes:
        version: the version that this rank holds; None if it holds none that all ranks confirmed.

    Raises:
        LayoutError, ArgumentError: the layouts or shapes are wrong, or the compression does not fit the dtypes.
    """

    def __init__(
        self,
        src: AnyLayout | Mapping[str, AnyLayout],
        dst: AnyLayout | Mapping[str, AnyLayout],
        shape: Mapping[str, Sequence[int]],
        dtype: Any,
        *,
        group: Any = None,
        topology: Topology | None = None,
        compression: str = AUTO,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        try:
            self._specs = _read_specs(src, dst, shape, dtype)
            check_compression(compression, {spec.name or "": spec.dtype for spec in self._specs})
            if topology is not None and not isinstance(topology, Topology):
                raise ArgumentError(f"topology must be a Topology, not {type(topology).__name__}")
            self._timeout_seconds = check_timeout(timeout_seconds)
        except ReshardError as error:
            with contextlib.suppress(ReshardError):
                report_error(find_group(group), error)  # the other ranks raise it in their first call
            raise
        self._group, self._topology = find_group(group), topology
        ranks = {rank for spec in self._specs for side in (spec.src, spec.dst) for rank in side.ranks}
        self._channel = find_channel(self._group, tuple(sorted(ranks)))
        self._buckets = find_buckets(self._specs, self._group.rank)
        self._base: dict[str, torch.Tensor] = {}
        self._mover: Mover | None = None
        self._capacity: dict[str, int] = {}
        self._sent: dict[str, Any] = {}
        self._received: dict[str, Any] = {}
        self._buffers: dict[str, np.ndarray] = {}  # of encoded buckets
        self._has_sent = False  # whether the Mover has moved buckets before
        self._formats = SyncFormats(compression, self._buckets, self._predict_seconds(topology))
        self._digests: dict[str, int] = {}  # of the plain bytes of each bucket, at the last version
        self.version: int | None = None

    @publish_exceptions(_leave_interrupted)
    def __call__(self, tensors: Shards | None, out: Shards | None, *, version: int) -> SyncReport:
        """Send a version. All ranks of the layouts must call it.

        Args:
            tensors: this rank's source shards by name, or DTensors; None outside the source, also in place of one
                shard. Shards on a GPU are copied to the host, and those of ``out`` back.
            out: this rank's destination shards by name, which must hold the last version; None outside the destination.
                They change only after all ranks have received their data.
            version: number of the new version, the same on all ranks.

        Raises:
            DisagreementError: ranks pass different versions, or replicas of the source differ.
            VerificationError: ``out`` of a receiver does not hold the last version, and has not changed; or data
                arrived with other bytes than were sent. The next transfer sends the weights in full.
            ReshardError: a rank failed, or its arguments are wrong. If that happened before all ranks had received
                their data, all keep the old version.
        """
        with publish_interruption(self._group, lambda: self._channel.members), calling(self._group):
            given = SyncShards(self._specs, self._group, tensors, out)
            reports, data = self._offer(given, version, None if self.version is None else self._base)
            because = _why_full(reports)
            self._formats.agree({rank: report["formats"] for rank, report in reports.items()})
            if because:
                reports, data = self._offer(given, version, {})
            tensors, out = given.tensors, given.out
            version = int(version)
            entries = _agree_on_buckets(reports, self._buckets)
            try:
                if not _have_equal_buffers(reports, self._buckets):  # some rank has made its WeightSync anew
                    self._close_mover()
                received = self._move(data, entries, None if because else out)
            except VerificationError:
                self.version = None
                raise
            base, self.version = self.version, None  # until all ranks hold the new version
            failure = None
            try:
                self._keep_base(tensors, {} if because else data)
                if out is not None:
                    mark_written(out.values())
                    self._apply(received, out, entries)
                    given.copy_back()
            except Exception as error:
                failure = describe_error(error)
            self._report({"failed": failure}, "confirms a version")
            self.version, self._digests = version, {name: entry.digest for name, entry in entries.items()}
        plain = sum(bucket.nbytes for bucket in self._buckets.values())
        encoded = sum(entry.nbytes for entry in entries.values())
        formats: dict[str, int] = {}
        for entry in entries.values():
            for name, nbytes in entry.formats.items():
                formats[name] = formats.get(name, 0) + nbytes
        return SyncReport(version, None if because else base, because, encoded, plain, formats)

    def _predict_seconds(self, topology: Topology | None) -> float | None:
        """The predicted time of the plain bytes of all buckets; None without a topology."""
        if topology is None or not self._buckets:
            return None
        return predict(plan_tensors(self._bucket_specs({}), topology=topology)).seconds

    def _bucket_specs(self, sizes: Mapping[str, int]) -> list[TensorSpec]:
        """The buckets as tensors of a plan, of these sizes or of their plain ones."""
        return [
            TensorSpec(
                (sizes.get(name, max(bucket.nbytes, 1)),),
                "uint8",
                Layout(Mesh(bucket.holders)),
                Layout(Mesh(bucket.receivers)),
                name,
            )
            for name, bucket in self._buckets.items()
        ]

    def _offer(
        self, given: SyncShards, version: int, base: Shards | None
    ) -> tuple[dict[int, Any], dict[str, np.ndarray]]:
        """Check the arrays, encode this rank's buckets, and tell all ranks their sizes and digests.

        Args:
            given: the arrays of this rank.
            base: the version to which differences refer; empty: encode the weights in full; None: encode nothing.

        Returns:
            The reports of all ranks, and the encoded buckets of this rank.
        """
        data: dict[str, np.ndarray] = {}
        report: dict[str, Any] = {"failed": None, "version": None, "base": self.version, "buckets": {}}
        report["capacity"] = self._capacity if self._mover is not None else {}
        try:
            report["formats"] = self._formats.report()
            report["version"] = check_integer(version, "version", -MAX_VERSION, MAX_VERSION)
            given.read()
            sources = self._sources(given.tensors)
            for name, bucket in self._buckets.items():
                if self._group.rank in bucket.holders and base is not None:
                    encoded = encode_bucket(
                        bucket, sources, base or None, self._formats, buffer=self._buffers.get(name)
                    )
                    self._buffers[name], data[name] = encoded.buffer, encoded.data
                    sent = xxhash.xxh3_64(encoded.data.data).intdigest() if base else None
                    report["buckets"][name] = encoded.nbytes, encoded.digest, sent, encoded.formats
        except Exception as error:
            report["failed"] = describe_error(error)
        return self._report(report, "offers a version"), data

    def _sources(self, tensors: Shards | None) -> dict[str, torch.Tensor]:
        """The source shards whose bytes this rank encodes: detached, without lazy conjugations or negations."""
        names = [spec.name or "" for spec in self._specs if self._group.rank in spec.src.ranks]
        return {name: detach_source(wait_for_collective(tensors[name])) for name in names} if tensors else {}

    def _report(self, report: dict[str, Any], purpose: str, held: str | None = None) -> dict[int, Any]:
        """The reports of all ranks; raises the error of the first rank that failed, and says what ranks hold."""
        if held is None:
            held = "" if self.version is None else f"all ranks keep version {self.version}"
        return exchange_reports(self._channel, {"failed": None} | report, purpose, self._timeout_seconds, held)

    def _move(
        self, data: Mapping[str, np.ndarray], entries: Mapping[str, _Entry], base: Shards | None
    ) -> Mapping[str, torch.Tensor | None]:
        """Move the buckets, and return the buffers that received some: each holds a bucket, then unused bytes.

        Args:
            base: this rank's destination shards if the buckets are differences to what they hold.
        """
        failure, seconds, is_first = None, 0.0, False
        sizes = {name: entry.nbytes for name, entry in entries.items()}
        try:
            if any(self._group.rank in (*item.holders, *item.receivers) for item in self._buckets.values()):
                mover = self._find_mover(sizes)
                is_first, self._has_sent = not self._has_sent, True
                for name, bucket in data.items():
                    self._sent[name][: len(bucket)] = torch.from_numpy(bucket)
                handle = mover.start({name: self._sent.get(name) for name in sizes}, out=self._received)
                lost = self._find_lost(base, entries)
                handle.wait()
                begun, ended = times_of(handle)
                seconds = (ended or 0.0) - (begun or 0.0)
                if base is not None:
                    self._check_received(entries)
                if lost is not None:
                    raise VerificationError(
                        f"out does not hold version {self.version} of the weights from "
                        f"{describe_ranks(self._buckets[lost].holders)}, to which the differences refer; the next "
                        "transfer sends the weights in full"
                    )
        except Exception as error:
            failure = describe_error(error)
        try:
            report = {"failed": failure, "seconds": seconds, "is_first": is_first}
            reports = self._report(report, "confirms the data", "no out has changed").values()
        except Exception:
            self._mover = None  # its connections may be broken
            raise
        longest = max(report["seconds"] for report in reports)
        moved = sum(self._capacity.values()) if self._capacity else 0
        self._formats.add_transfer(moved, longest, any(report["is_first"] for report in reports))
        return self._received

    def _find_mover(self, sizes: Mapping[str, int]) -> Mover:
        """A Mover whose buffers hold buckets of these sizes. It is kept while they are not much larger than needed."""
        capacity = find_capacities(sizes, self._capacity)
        if self._mover is not None and capacity == self._capacity:
            return self._mover
        self._close_mover()
        self._capacity, self._has_sent = capacity, False
        plan = plan_tensors(self._bucket_specs(capacity), topology=self._topology)
        with self._group.nesting():
            self._mover = Mover(plan, self._group, timeout_seconds=self._timeout_seconds)
        rank = self._group.rank
        self._sent, self._received = (
            {
                name: torch.zeros(size, dtype=torch.uint8, device="cpu")
                if rank in getattr(self._buckets[name], side)
                else None
                for name, size in self._capacity.items()
            }
            for side in ("holders", "receivers")
        )
        return self._mover

    def _close_mover(self) -> None:
        if self._mover is not None:
            self._mover.close()
        self._mover, self._capacity = None, {}

    def _keep_base(self, tensors: Shards | None, differences: Mapping[str, np.ndarray]) -> None:
        """Update the base to the new version: by the differences, or by a copy if there are none."""
        if differences:
            for name, bucket in differences.items():
                decode_bucket(self._buckets[name], bucket, self._base, "src", with_digest=False)
            return
        for name, tensor in self._sources(tensors).items():
            if name in self._base:
                self._base[name].copy_(tensor)
            else:
                self._base[name] = tensor.clone()

    def _find_lost(self, out: Shards | None, entries: Mapping[str, _Entry]) -> str | None:
        """The first bucket with differences to a version that this rank's destination shards do not hold, or None."""
        for name, bucket in self._buckets.items():
            has_base = any(FORMATS[item].has_base for item in entries[name].formats)
            needed = out is not None and self._group.rank in bucket.receivers and has_base
            if needed and digest_regions(bucket, out or {}, "dst") != self._digests[name]:
                return name
        return None

    def _check_received(self, entries: Mapping[str, _Entry]) -> None:
        for name, bucket in self._buckets.items():
            if self._group.rank in bucket.receivers:
                data = self._received[name][: entries[name].nbytes].numpy()
                if xxhash.xxh3_64(data.data).intdigest() != entries[name].sent_digest:
                    raise _wrong_bytes(bucket)

    def _apply(self, received: Mapping[str, Any], out: Shards, entries: Mapping[str, _Entry]) -> None:
        """Turn the last version into the new one. If weights came in full, check the digest of their plain bytes."""
        for name, bucket in self._buckets.items():
            if self._group.rank in bucket.receivers:
                in_full = entries[name].sent_digest is None
                digest = decode_bucket(bucket, received[name].numpy(), out, with_digest=in_full)
                if in_full and digest != entries[name].digest:
                    raise _wrong_bytes(bucket)


class _Entry(NamedTuple):
    """A report on a bucket, equal on all its holders.

    Attributes:
        nbytes: size of the encoded bucket.
        digest: digest of the plain bytes that it encodes.
        sent_digest: digest of the encoded bucket if it holds differences; None if it holds the weights in full.
        formats: see :class:`EncodedBucket`.
    """

    nbytes: int
    digest: int
    sent_digest: int | None
    formats: Mapping[str, int]


def _wrong_bytes(bucket: Bucket) -> VerificationError:
    return VerificationError(
        f"weights from {describe_ranks(bucket.holders)} arrived with other bytes than were sent; the next transfer "
        "sends the weights in full"
    )


def _why_full(reports: Mapping[int, Any]) -> str:
    """Why the weights must be sent in full; "" if all ranks hold the same version."""
    bases = {rank: report["base"] for rank, report in sorted(reports.items())}
    if all(base is None for base in bases.values()):
        return "no rank holds a version"
    lacking = [rank for rank, base in bases.items() if base is None]
    if lacking:
        return f"{describe_ranks(lacking)} hold{'s' * (len(lacking) == 1)} no version"
    if len(set(bases.values())) > 1:
        return f"ranks hold versions {sorted(set(bases.values()))}"
    return ""


def _have_equal_buffers(reports: Mapping[int, Any], buckets: Mapping[str, Bucket]) -> bool:
    """Whether all ranks that send or receive have Movers for the same buffers, or none has one."""
    ranks = {rank for bucket in buckets.values() for rank in (*bucket.holders, *bucket.receivers)}
    found = [reports[rank]["capacity"] for rank in sorted(ranks)]
    return all(item == found[0] for item in found)


def _agree_on_buckets(reports: Mapping[int, Any], buckets: Mapping[str, Bucket]) -> dict[str, _Entry]:
    """The report on each bucket, after checking that its holders report the same.

    Raises:
        DisagreementError: ranks send different versions, or replicas of a region differ.
    """
    versions = {rank: report["version"] for rank, report in sorted(reports.items())}
    first = next(iter(versions))
    for rank, version in versions.items():
        if version != versions[first]:
            raise DisagreementError(f"rank {first} passes version {versions[first]}, rank {rank} version {version}")
    entries = {}
    for name, bucket in buckets.items():
        found = [tuple(reports[rank]["buckets"][name]) for rank in bucket.holders]
        for rank, entry in zip(bucket.holders, found, strict=True):
            if entry != found[0]:
                raise DisagreementError(
                    f"ranks {bucket.holders[0]} and {rank} hold the same regions, but other weights in them"
                )
        entries[name] = _Entry(*found[0])
    return entries


def _read_specs(src: Any, dst: Any, shape: Any, dtype: Any) -> list[TensorSpec]:
    """The tensors of a WeightSync, whose arguments these are."""

    def of(value: Any, name: str, what: str) -> Any:
        if isinstance(value, Mapping) and name not in value:
            raise ArgumentError(f"{what} has no entry for {name!r}, which shape has")
        return value[name] if isinstance(value, Mapping) else value

    if not isinstance(shape, Mapping) or not all(isinstance(name, str) for name in shape):
        raise ArgumentError(f"shape must be {{name: global shape}}, not {brief(shape)}")
    return [
        TensorSpec(
            check_shape(shape[name]),
            dtype_name(of(dtype, name, "dtype")),
            of(src, name, "src"),
            of(dst, name, "dst"),
            name,
        )
        for name in sorted(shape)
    ]
