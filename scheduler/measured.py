"""What a step really did, on all ranks, as a timeline like that of the simulator."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from reshard.errors import ArgumentError
from reshard.group import Group

from .crossings import Crossing
from .schedule import Action, Channel, Kind
from .simulation import Crossing as TimedCrossing
from .simulation import PipelineTimeline, Span


@dataclass(frozen=True)
class Moment:
    """What this rank did, by its own clock; before ``start`` it waited from ``since`` on."""

    action: Action
    since: float
    start: float
    end: float


@dataclass(frozen=True)
class Passage:
    """One end of a transfer, that of this rank."""

    channel: Channel
    microbatch: int
    is_send: bool
    crossing: Crossing


@dataclass
class Measured:
    """One rank's part of a step."""

    row: int
    moments: list[Moment] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)


_Times = tuple[Channel, int, bool, float | None, float | None, float | None]


def gather(measured: Measured, group: Group) -> PipelineTimeline:
    """The timeline of all ranks of a group, each of which calls.

    Ranks of one machine share a clock; between machines clocks are set by a barrier, to a millisecond or so. A row is
    shown by its first rank, a transfer from when both sides had come to when the last receiver had all.
    """
    passages: list[_Times] = []
    for passage in measured.passages:
        handle = passage.crossing.handle
        begun, ended = (None, None) if handle is None else (handle.begun_at, handle.ended_at)
        passages.append((passage.channel, passage.microbatch, passage.is_send, passage.crossing.made_at, begun, ended))
    own = (measured.row, measured.moments, passages, _boot_id(), 0.0)
    everybody: list[Any] = [own]
    if group.size > 1:
        everybody = [None] * group.size
        if group.process_group is None:
            raise ArgumentError("a joined group has no collectives to gather a timeline with; give a process group")
        dist.barrier(group.process_group)
        dist.all_gather_object(everybody, (*own[:4], time.monotonic()), group=group.process_group)
    return _merge(everybody)


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
    crossings = [
        TimedCrossing(channel, microbatch, at.ready, at.start, max(at.end, at.start))
        for (channel, microbatch), at in ends.items()
    ]
    return PipelineTimeline(
        tuple(sorted(spans, key=lambda span: (span.start, span.row))),
        tuple(sorted(crossings, key=lambda crossing: crossing.start)),
    )


def _exposed(action: Action, since: float, start: float, ready: Mapping[tuple[int, int, bool], float]) -> float:
    """How long a computation waited for transfers whose data had been computed."""
    if action.kind is Kind.W or action.kind.is_transfer:
        return 0.0
    computed = ready.get((action.stage, action.microbatch, action.kind is Kind.F))
    return 0.0 if computed is None else max(0.0, start - max(since, computed))
