"""The trainer's side: publish versions of a model to engines."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.coordination import describe_error, publish_exceptions, rebuild_error
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, ReshardError, TransferTimeoutError
from reshard.formatting import count_of, format_bytes, format_seconds
from reshard.timeouts import DEFAULT_JOIN_SECONDS, DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology import Topology
from reshard.weights.membership.team import AGREE_SECONDS, Team, leave_opening, lost_store_error, run_collectively
from reshard.weights.model.holdings import ShardRegions, StateReader
from reshard.weights.model.manifest import merge_states, state_of_rank
from reshard.weights.model.quantize import Quantize, Quantizer
from reshard.weights.routes.format_choice import check_compression, keeps_base
from reshard.weights.routes.route import RouteOptions
from reshard.weights.sender import Sender
from reshard.weights.snapshot import Snapshot


@dataclass(frozen=True)
class PublishReport:
    """The result of publishing one version. ``str()`` gives it as a sentence.

    Attributes:
        version: the version.
        engines: for each engine that was a member, ``""`` if it holds the version, else the reason why not. Empty if
            there was no engine. That is no failure: engines that join later fetch the version.
        seconds: time from the first byte to the last one, on this rank. This and the following are 0 if nothing was
            sent.
        bound_seconds, predicted_seconds: lower bound and prediction of that time, for the links of the topology. The
            bound is 0 if nothing must cross hosts and the topology limits no rate inside them.
        nbytes: bytes of the model.
        base: the version to which differences referred in the last transfer; None if all engines got whole tensors.
        formats: ``{lossless format: bytes of the model}`` in the last transfer, with ``compression``.
        encoded_bytes: bytes that travelled in the last transfer, each counted once.
    """

    version: int
    engines: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    bound_seconds: float = 0.0
    predicted_seconds: float = 0.0
    nbytes: int = 0
    base: int | None = None
    formats: Mapping[str, int] = field(default_factory=dict)
    encoded_bytes: int = 0

    def __str__(self) -> str:
        """For example ``version 3: 2 engines hold it: 1.2 GiB in 1.1 s (predicted 1.08 s, lower bound 1.03 s)``."""
        if not self.engines:
            return f"version {self.version}: no engine is connected; engines that come later fetch it"
        lacking = {engine: why for engine, why in self.engines.items() if why}
        num_holders = len(self.engines) - len(lacking)
        parts = []
        if num_holders:
            parts.append(f"{count_of(num_holders, 'engine')} hold{'s' * (num_holders == 1)} it")
            if self.nbytes:
                bound = f"lower bound {format_seconds(self.bound_seconds)}"
                if not self.bound_seconds:
                    bound = "lower bound 0, because nothing must cross hosts"
                encoded = f", of which {format_bytes(self.encoded_bytes)} travelled" if self.formats else ""
                parts[0] += (
                    f": {format_bytes(self.nbytes)}{encoded} in {format_seconds(self.seconds)} (predicted "
                    f"{format_seconds(self.predicted_seconds)}, {bound})"
                )
        if lacking:
            named = ((f"engine {engine}: ", why) for engine, why in lacking.items())
            reasons = "; ".join(f"{name}{why.removeprefix(name)}" for name, why in named)
            parts.append(f"{count_of(len(lacking), 'engine')} do{'es' * (len(lacking) == 1)} not hold it ({reasons})")
        return f"version {self.version}: {'; '.join(parts)}"


def _find_dtype(dtype: Any) -> torch.dtype | None:
    """The torch dtype of any name of it."""
    return None if dtype is None else getattr(torch, dtype_name(dtype))


class PublishHandle:
    """A version on its way to the engines."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._done = threading.Event()
        self._report = PublishReport(version)
        self._error: ReshardError | None = None

    def done(self) -> bool:
        """Whether each engine holds the version or was dropped."""
        return self._done.is_set()

    def wait(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> PublishReport:
        """Wait until each live engine holds the version, verified and whole, or was dropped.

        Raises:
            TransferTimeoutError: not within ``timeout_seconds``.
            ReshardError: the version could not be sent, for example because a rank of the trainer was lost.
        """
        if not self._done.wait(check_timeout(timeout_seconds)):
            raise TransferTimeoutError(f"version {self.version} has not reached all engines in {timeout_seconds:g} s")
        if self._error is not None:
            raise rebuild_error(type(self._error).__name__, str(self._error))
        return self._report

    def _end(self, report: PublishReport, error: ReshardError | None) -> None:
        if not self._done.is_set():
            self._report, self._error = report, error
            self._done.set()


class Publisher:
    """Publishes versions of a model to the engines that subscribe to its name.

    Every rank of the trainer makes one, with the same arguments. A thread sends; the trainer goes on meanwhile.

    Args:
        model: a module, or a mapping of tensors. Each rank holds its own shards: DTensors of any placements, or plain
            tensors, which count as whole.
        store: a ``torch.distributed`` store that the trainer and all engines reach.
        name: what engines subscribe to. One trainer publishes it at a time.
        group: the process group of the trainer. Default: the world, or this process alone if there is none.
        shards: ``{name: (global shape, [region, ...])}`` for plain tensors that are shards, such as the fused tensors
            of an engine; a region is a ``(start, stop)`` pair per dim, and the regions are joined along one dim in this
            order.
        memory_bytes: memory for data in transit on each rank, beyond the snapshot of its shards; at least 192 KiB.
        dtype: dtype in which floating-point tensors are published. Default: their own.
        compression: ``"delta"``: send only the changes since the previous version, without loss, to engines that hold
            it; the trainer keeps a copy of that version; ``"lossless"``: compress each version by itself. Each region
            of a tensor travels in the format with the smallest predicted time of encoding, transfer and decoding, which
            may be raw. ``"bf16-lossless"`` of :class:`reshard.Mover` is one of these formats. The snapshots are then in
            host memory.
        quantize: which tensors are published in float8 instead, with the scales of their blocks.
        join_seconds: how long an engine may take to connect, and to answer when a version is published. Later ones
            fetch the version from other engines.
        timeout_seconds: limit of each transfer.
        topology: hosts and links of all ranks; the trainer's come first. Default: by host names.

    Raises:
        ArgumentError: an argument does not fit, or another trainer publishes this name; on all ranks alike.
    """

    @publish_exceptions(leave_opening)
    def __init__(
        self,
        model: Any,
        store: Any,
        name: str = "default",
        group: Any = None,
        *,
        shards: Mapping[str, ShardRegions] | None = None,
        memory_bytes: int = 1 << 30,
        dtype: Any = None,
        compression: str | None = None,
        quantize: Sequence[Quantize] = (),
        join_seconds: float = DEFAULT_JOIN_SECONDS,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        topology: Topology | None = None,
    ) -> None:
        self._team = Team(store, name, "trainer", group, AGREE_SECONDS)
        self._timeout_seconds = timeout_seconds
        reader = StateReader(model, shards)
        self._handle: PublishHandle | None = None
        self._done_message: Mapping[str, Any] | None = None  # of the last version that has ended
        self._failure: ReshardError | None = None
        self._lock = threading.Lock()  # for the three before
        self._last: int | None = None

        def describe() -> dict[str, Any]:
            self._options = RouteOptions(join_seconds, timeout_seconds, memory_bytes, topology, self._team.rank)
            self._compression = check_compression(compression)
            state = state_of_rank(reader.read(), _find_dtype(dtype))
            return {"state": state if self._compression is None else {**state, "devices": ["cpu"]}}

        with self._team.closing_on_error():
            states = run_collectively(self._team.group, describe, "describes the trainer", AGREE_SECONDS)
            manifest = merge_states({rank: state["state"] for rank, state in states.items()}, "the trainer")
            self._quantizer = Quantizer(quantize, manifest) if quantize else None
            self._manifest = manifest if self._quantizer is None else self._quantizer.manifest
            self._snapshot = Snapshot(
                reader,
                manifest,
                _find_dtype(dtype),
                self._quantizer,
                on_host=self._compression is not None,
                keeps_base=keeps_base(self._compression),
            )
            claims = run_collectively(self._team.group, self._claim, "claims the name", AGREE_SECONDS)
            self._last = claims[0]["last"]
            self._sender = Sender(
                self._team,
                self._manifest,
                self._snapshot,
                self._end,
                self._options,
                self._compression,
            )
            self._team.start(self._sender.handle_message, self._fail, self._sender.close)

    @property
    def version(self) -> int | None:
        """The last version that was published under the name, also by an earlier trainer; None if none was."""
        return self._last

    @publish_exceptions(lambda error, args, _: args[0]._team.leave_unbegun(error))
    def publish(self, version: int) -> PublishHandle:
        """Publish the weights as they are now. Every rank of the trainer calls it; it returns before they are sent.

        The weights are copied first, so the optimizer may change them at once. Waits for the last version, if that is
        still on its way.

        Args:
            version: its number, larger than that of any version before.

        Returns:
            A handle; its ``wait`` ends when each live engine holds the version or was dropped.

        Raises:
            ArgumentError: the version is not larger, or the tensors of the model have changed; on all ranks alike.
            RemoteError: an interrupt has ended this call or an earlier one on another rank: make a new Publisher.
        """
        with self._team.ending_calls():
            return self._publish(version)

    def _publish(self, version: int) -> PublishHandle:
        if self._handle is not None and not self._handle.done():
            with contextlib.suppress(ReshardError):
                self._handle.wait(self._timeout_seconds)

        def measure() -> dict[str, Any]:
            check()
            assert self._quantizer is not None
            return {"measured": self._quantizer.measure(self._snapshot.read().holdings)}

        def check() -> None:
            self._check_usable()
            if isinstance(version, bool) or not isinstance(version, int):
                raise ArgumentError(f"version is {version!r:.40}; it must be an integer")
            if self._last is not None and version <= self._last:
                raise ArgumentError(f"version {version} is not larger than {self._last}, the last of this name")

        def copy() -> dict[str, Any]:
            check()
            self._snapshot.take(self._snapshot.read(), measured, version, self._last, self._timeout_seconds)
            return {"version": version}

        kept = "" if self._last is None else f"engines keep version {self._last}"
        seconds = self._timeout_seconds + AGREE_SECONDS  # others may still send the version before
        measured: list[Any] = []
        if self._quantizer is not None and self._quantizer.has_shared:
            measurements = run_collectively(self._team.group, measure, "measures what it quantizes", seconds, kept)
            measured += [report["measured"] for report in measurements.values()]
        reports = run_collectively(self._team.group, copy, "publishes a version", seconds, kept)
        versions = {report["version"] for report in reports.values()}
        if len(versions) > 1:
            raise ArgumentError(f"ranks of the trainer publish different versions: {sorted(versions)}")
        self._last = version
        handle = PublishHandle(version)
        with self._lock:
            self._handle = handle
            self._end_handle()
        self._sender.watch(handle.done)
        if self._team.is_leader:
            try:
                self._team.outbox.post(self._team.address(0), {"kind": "publish", "version": version})
            except RuntimeError as error:
                handle._end(PublishReport(version), lost_store_error(error))
        return handle

    def close(self) -> None:
        """Stop publishing. Engines keep their versions."""
        is_usable = not self._team.is_closed and self._failure is None
        if is_usable and self._handle is not None and not self._handle.done():
            with contextlib.suppress(ReshardError):
                self._handle.wait(self._timeout_seconds)
        self._team.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._team.is_closed:
            raise ArgumentError("this Publisher is closed")
        if self._failure is not None:
            raise rebuild_error(*describe_error(self._failure))

    def _claim(self) -> dict[str, Any]:
        if not self._team.is_leader:
            return {}
        self._team.roster.write_manifest("trainer", self._team.id, self._manifest)
        return {"last": self._team.roster.claim(self._team.id, socket.gethostname(), os.getpid())}

    def _end(self, message: Mapping[str, Any]) -> None:
        """End the handle of a version, as the leader says."""
        with self._lock:
            self._done_message = message
            self._end_handle()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = lost_store_error(error)
            self._end_handle()

    def _end_handle(self) -> None:
        """End the handle if its version has ended, which may be before this rank has made the handle."""
        handle, message = self._handle, self._done_message
        if handle is not None and message is not None and handle.version == message["version"]:
            error = None if message["failed"] is None else rebuild_error(*message["failed"])
            handle._end(PublishReport(**message["report"]), error)
        if handle is not None and self._failure is not None:
            handle._end(PublishReport(handle.version), self._failure)
