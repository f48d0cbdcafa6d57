"""What a step really did, on all ranks, as a timeline like that of the simulator."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.coordination.communicator import Channel as AgreementChannel
from reshard.coordination.decide import Decision, Request, resolve

from ..ir.schedule import Action, Channel, Kind
from ..simulation.replay import PipelineTimeline, Span, StageTransfer as TimedTransfer
from .p2p import StageTransfer


@dataclass(frozen=True)
class Moment:
    """What this rank did, by its own clock; before ``start`` it waited from ``since`` on."""

    action: Action
    since: float
    start: float
    end: float


@dataclass(frozen=True)
class TransferRecord:
    """One end of a transfer, that of this rank."""

    channel: Channel
    microbatch: int
    is_send: bool
    transfer: StageTransfer


@dataclass
class StepRecord:
    """One rank's part of a step."""

    row: int
    moments: list[Moment] = field(default_factory=list)
    passages: list[TransferRecord] = field(default_factory=list)


_Times = tuple[Channel, int, bool, float | None, float | None, float | None]
_Own = tuple[int, list[Moment], list[_Times], str, float]  # row, moments, transfers, the machine, and its clock


def gather(measured: StepRecord, channel: AgreementChannel, timeout_seconds: float) -> PipelineTimeline:
    """The timeline of all ranks of a channel, each of which calls.

    Ranks of one machine share a clock; between machines clocks are set by meeting, to a millisecond or so. A row is
    shown by its first rank, a transfer from when both sides had come to when the last receiver had all.

    Raises:
        TransferTimeoutError: a rank does not call.
    """
    passages: list[_Times] = []
    for passage in measured.passages:
        handle = passage.transfer.handle
        begun, ended = (None, None) if handle is None else (handle.begun_at, handle.ended_at)
        passages.append((passage.channel, passage.microbatch, passage.is_send, passage.transfer.made_at, begun, ended))
    rank = channel.group.rank
    channel.agree(Request(rank), _put_together, timeout_seconds)
    own = (measured.row, measured.moments, passages, _boot_id(), time.monotonic())
    _, decision = channel.agree(Request(rank, said=_to_json(own)), _put_together, timeout_seconds)
    return _merge([_from_json(decision.said[rank]) for rank in sorted(decision.said)])


def _put_together(requests: list[Request]) -> Decision:
    decision = resolve(requests, {})
    decision.said = {request.rank: request.said for request in requests}
    return decision


def _to_json(own: _Own) -> list[Any]:
    row, moments, passages, boot, now = own
    done = [[*dataclasses.astuple(one.action), one.since, one.start, one.end] for one in moments]
    return [row, done, [[*dataclasses.astuple(channel), *rest] for channel, *rest in passages], boot, now]


def _from_json(said: Any) -> _Own:
    row, done, passages, boot, now = said
    moments = [Moment(Action(Kind(kind), *rest[:4]), *rest[4:]) for kind, *rest in done]
    return row, moments, [(Channel(*entry[:3]), *entry[3:]) for entry in passages], boot, now


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text() if path.exists() else ""


@dataclass
class _Ends:
    """When a transfer's data was there on all ranks, when each side first came, and when the last rank had it."""

    ready: float = 0.0
    begun: dict[bool, float] = field(default_factory=dict)
    end: float = 0.0

    @property
    def start(self) -> float:
        """When it could flow."""
        return max(self.begun.values(), default=self.ready)


def _merge(everybody: Sequence[Any]) -> PipelineTimeline:
    one_clock = len({said[3] for said in everybody}) == 1
    clocks = [0.0 if one_clock else said[4] for said in everybody]
    first = min(
        moment.since - clock for (_, moments, *_), clock in zip(everybody, clocks, strict=True) for moment in moments
    )
    ends: dict[tuple[Channel, int], _Ends] = {}
    for (_, _, passages, *_), clock in zip(everybody, clocks, strict=True):
        for channel, microbatch, is_send, made, begun, ended in passages:
            at = ends.setdefault((channel, microbatch), _Ends())
            if made is not None and is_send:
                at.ready = max(at.ready, made - clock - first)
            if begun is not None:
                at.begun[is_send] = min(at.begun.get(is_send, math.inf), begun - clock - first)
            if ended is not None and not is_send:
                at.end = max(at.end, ended - clock - first)
    ready: dict[tuple[int, int, bool], float] = {}
    for (channel, microbatch), at in ends.items():
        wanted = channel.receiver, microbatch, channel.is_forward
        ready[wanted] = max(at.ready, ready.get(wanted, 0.0))
    spans = []
    shown: set[int] = set()
    for (row, moments, *_), clock in zip(everybody, clocks, strict=True):
        if row in shown:
            continue
        shown.add(row)
        for moment in moments:
            since, start, end = (when - clock - first for when in (moment.since, moment.start, moment.end))
            spans.append(Span(row, moment.action, start, end, _exposed(moment.action, since, start, ready)))
    transfers = [
        TimedTransfer(channel, microbatch, at.ready, at.start, max(at.end, at.start))
        for (channel, microbatch), at in ends.items()
    ]
    return PipelineTimeline(
        tuple(sorted(spans, key=lambda span: (span.start, span.row))),
        tuple(sorted(transfers, key=lambda transfer: transfer.start)),
    )


def _exposed(action: Action, since: float, start: float, ready: Mapping[tuple[int, int, bool], float]) -> float:
    """How long a computation waited for transfers whose data had been computed."""
    if action.kind is Kind.W or action.kind.is_transfer:
        return 0.0
    computed = ready.get((action.stage, action.microbatch, action.kind is Kind.F))
    return 0.0 if computed is None else max(0.0, start - max(since, computed))
