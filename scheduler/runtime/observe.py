"""Observation of a step: log records and profiler ranges of the actions of a rank, and measured times of all ranks.

Set the logger ``reshard`` to ``DEBUG`` to log each action when it begins. If a rank hangs, its last record names the
action that it waits in: the stage or the edge, the direction and the microbatch. Under ``torch.profiler``, the same
texts name profiler ranges. Times of all ranks are merged into a timeline of the type that the simulator returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reshard.api.transfers.handle import times_of
from reshard.coordination import CallGroup, Decision, RoundRequest, resolve
from reshard.errors import RemoteError, ReshardError

from .. import torch_compat
from ..ir.actions import Action, Kind, StageChannel
from ..simulation.channels import StageTransfer
from ..simulation.replay import PipelineTimeline, Span
from .p2p import PendingTransfer

logger = logging.getLogger(__name__)

#: ``observe(what, where, microbatch)`` returns a context for one action of a rank, at a stage or in a channel.
Observe = Callable[[str, "int | StageChannel", "int | None"], AbstractContextManager[None]]

_NOTHING = contextlib.nullcontext()


def find_observer(rank: int) -> Observe:
    """The function that records the actions of a rank. It does nothing unless debug messages or a profiler are on."""
    if not (logger.isEnabledFor(logging.DEBUG) or torch_compat.is_profiling()):
        return _ignore
    return functools.partial(_record, rank)


def _ignore(what: str, where: int | StageChannel, microbatch: int | None) -> AbstractContextManager[None]:
    return _NOTHING


@contextlib.contextmanager
def _record(rank: int, what: str, where: int | StageChannel, microbatch: int | None) -> Iterator[None]:
    place = str(where) if isinstance(where, StageChannel) else f"stage {where}"
    text = f"{what} {place}" if microbatch is None else f"{what} {place}, microbatch {microbatch}"
    logger.debug("rank %d begins: %s", rank, text)
    with torch.profiler.record_function(f"reshard: {text}"):
        yield
    logger.debug("rank %d ended: %s", rank, text)


def name_action(error: BaseException, doing: Action | None, schedule: str, rank: int) -> BaseException:
    """Add a note to an error that names the action in which it came. Returns the error to report to other ranks.

    Args:
        doing: the action of this rank; None: unchanged.
        schedule: name of the schedule.
    """
    if doing is None:
        return error
    where = f"in {doing}, microbatch {doing.microbatch} of stage {doing.stage}"
    with contextlib.suppress(Exception):  # an exception may refuse attributes
        error.add_note(f"{where} of the schedule {schedule!r}")
    if isinstance(error, ReshardError):
        return error
    if doing.kind is Kind.I:
        error.add_note(
            "This backward is split into two passes. A module that calls autograd in its forward needs whole "
            "backwards: auto_schedule(..., can_split=False)"
        )
    return RemoteError(f"rank {rank} {where}: {type(error).__name__}: {error}")


class ActionRecord(NamedTuple):
    """Times of an action by this rank's clock. The rank waited from ``since`` to ``start``."""

    action: Action
    since: float
    start: float
    end: float


class TransferRecord(NamedTuple):
    """The end of a transfer on this rank."""

    channel: StageChannel
    microbatch: int
    is_send: bool
    transfer: PendingTransfer


class HostClock:
    """Times of actions on the CPU: moments are ``time.monotonic()``."""

    now = staticmethod(time.monotonic)  # the present moment

    def finish(self) -> None:
        """End the measurement."""

    def seconds(self, moment: Any) -> float:
        """A moment in seconds of this host's ``time.monotonic()``. Call :meth:`finish` first."""
        return float(moment)


class StreamClock(HostClock):
    """Times of actions on the current stream of a GPU: moments are events, since the host runs ahead of the device."""

    def __init__(self) -> None:
        self._last: Any = None
        self._end = 0.0

    def now(self) -> Any:  # type: ignore[override]
        """The present moment, on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # type: ignore[no-untyped-call]
        return event

    def finish(self) -> None:
        """See :class:`HostClock`. Blocks the host until the device has reached this moment."""
        self._last = self.now()
        self._last.synchronize()
        self._end = time.monotonic()

    def seconds(self, moment: Any) -> float:
        """See :class:`HostClock`."""
        return self._end - float(moment.elapsed_time(self._last)) / 1e3


class StepRecord:
    """Measurements of one step on one rank.

    Args:
        pp_rank: the pp rank of the rank.
        device: type of the device that computes.

    Attributes:
        actions: complete after :meth:`finish`.
        transfers: ends of transfers.
        waited_seconds: seconds that computations waited for their inputs, plus the durations of blocking transfers.
    """

    def __init__(self, pp_rank: int, device: str = "cpu") -> None:
        self.pp_rank, self.clock = pp_rank, StreamClock() if device == "cuda" else HostClock()
        self.actions: list[ActionRecord] = []
        self.transfers: list[TransferRecord] = []
        self.waited_seconds = 0.0
        self._moments: list[tuple[Action, Any, Any, Any]] = []

    def note(self, action: Action, since: Any, start: Any) -> None:
        """Note an action that ends now: it waited from ``since`` to ``start``, both moments of the clock."""
        self._moments.append((action, since, start, self.clock.now()))

    def finish(self) -> None:
        """End the measurement, after the last action."""
        self.clock.finish()
        seconds = self.clock.seconds
        self.actions = [ActionRecord(action, *map(seconds, moments)) for action, *moments in self._moments]
        for record in self.transfers:
            computed = record.transfer.computed_at
            record.transfer.computed_at = None if computed is None else seconds(computed)
        self.waited_seconds = sum(
            item.end - item.start if item.action.kind.is_transfer else item.start - item.since for item in self.actions
        )


#: channel, microbatch, whether this end sends; times at which the data was computed, and this end began and ended
_TransferTimes = tuple[StageChannel, int, bool, float | None, float | None, float | None]
#: pp rank, actions, transfers, boot id of the host, and this rank's clock just after the rendezvous
_RankTimes = tuple[int, list[ActionRecord], list[_TransferTimes], str, float]


def gather_timeline(measured: StepRecord, call_group: CallGroup, timeout_seconds: float) -> PipelineTimeline:
    """The timeline of a step. Every rank of the call group must call this.

    Ranks of one host share a clock. A rendezvous aligns the clocks of different hosts to about a millisecond. The
    actions of a pp rank are those of its first rank. A transfer starts when both ends have begun, and ends when the
    last receiver is done.

    Args:
        measured: the record of this rank, finished.
        call_group: call group of all ranks of the pipeline.
        timeout_seconds: limit of each of two rounds.

    Returns:
        The timeline, in seconds from the start of the first action.

    Raises:
        TransferTimeoutError: a rank does not call.
    """
    transfers: list[_TransferTimes] = []
    for record in measured.transfers:
        handle, computed = record.transfer.handle, record.transfer.computed_at
        begun, ended = (None, None) if handle is None else times_of(handle)
        transfers.append((record.channel, record.microbatch, record.is_send, computed, begun, ended))
    rank = call_group.group.rank
    call_group.agree(
        RoundRequest(rank), gather_values, timeout_seconds
    )  # a rendezvous: all ranks leave it at about the same time
    own = (measured.pp_rank, measured.actions, transfers, _boot_id(), time.monotonic())
    _, decision = call_group.agree(RoundRequest(rank, payload=_to_json(own)), gather_values, timeout_seconds)
    return _merge([_from_json(decision.payloads[rank]) for rank in sorted(decision.payloads)])


def gather_values(requests: list[RoundRequest]) -> Decision:
    """A decision with the value of each rank."""
    return dataclasses.replace(resolve(requests, {}), payloads={request.rank: request.payload for request in requests})


def _to_json(own: _RankTimes) -> list[Any]:
    pp_rank, records, transfers, boot, now = own
    actions = [[*dataclasses.astuple(record.action), record.since, record.start, record.end] for record in records]
    return [pp_rank, actions, [[*dataclasses.astuple(channel), *rest] for channel, *rest in transfers], boot, now]


def _from_json(data: Any) -> _RankTimes:
    pp_rank, actions, transfers, boot, now = data
    records = [ActionRecord(Action(Kind(kind), *rest[:-3]), *rest[-3:]) for kind, *rest in actions]
    return pp_rank, records, [(StageChannel(*entry[:3]), *entry[3:]) for entry in transfers], boot, now


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text() if path.exists() else ""


@dataclass
class _Ends:
    """Times of a transfer: data computed on all senders, first begin of each end, and end of the last receiver."""

    ready: float = 0.0
    begun: dict[bool, float] = field(default_factory=dict)
    end: float = 0.0

    @property
    def start(self) -> float:
        """The time at which both ends had begun."""
        return max(self.begun.values(), default=self.ready)


def _merge(ranks: Sequence[Any]) -> PipelineTimeline:
    """The timeline of all ranks, each a ``_RankTimes``, in seconds from the first action."""
    one_clock = len({boot for *_, boot, _ in ranks}) == 1
    clocks = [0.0 if one_clock else now for *_, now in ranks]
    first = min(
        record.since - clock for (_, actions, *_), clock in zip(ranks, clocks, strict=True) for record in actions
    )
    ends: dict[tuple[StageChannel, int], _Ends] = {}
    for (_, _, records, *_), clock in zip(ranks, clocks, strict=True):
        for channel, microbatch, is_send, computed, begun, ended in records:
            at = ends.setdefault((channel, microbatch), _Ends())
            if computed is not None and is_send:
                at.ready = max(at.ready, computed - clock - first)
            if begun is not None:
                at.begun[is_send] = min(at.begun.get(is_send, math.inf), begun - clock - first)
            if ended is not None and not is_send:
                at.end = max(at.end, ended - clock - first)
    ready: dict[tuple[int, int, bool], float] = {}
    for (channel, microbatch), index in ends.items():
        consumer = channel.receiver, microbatch, channel.is_forward
        ready[consumer] = max(index.ready, ready.get(consumer, 0.0))
    spans = []
    shown: set[int] = set()
    for (pp_rank, actions, *_), clock in zip(ranks, clocks, strict=True):
        if pp_rank in shown:
            continue
        shown.add(pp_rank)
        for record in actions:
            since, start, end = (when - clock - first for when in (record.since, record.start, record.end))
            spans.append(Span(pp_rank, record.action, start, end, _exposed(record.action, since, start, ready)))
    transfers = [
        StageTransfer(channel, microbatch, index.ready, index.start, max(index.end, index.start))
        for (channel, microbatch), index in ends.items()
    ]
    return PipelineTimeline(
        tuple(sorted(spans, key=lambda span: (span.start, span.pp_rank))),
        tuple(sorted(transfers, key=lambda transfer: transfer.start)),
    )


def _exposed(action: Action, since: float, start: float, ready: Mapping[tuple[int, int, bool], float]) -> float:
    """The time that a computation waited for transfers after their data was computed."""
    if action.kind is Kind.W or action.kind.is_transfer:
        return 0.0
    computed = ready.get((action.stage, action.microbatch, action.kind is Kind.F))
    return 0.0 if computed is None else max(0.0, start - max(since, computed))
