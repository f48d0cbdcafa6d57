"""When each action of a schedule starts and ends: rows compute in order, transfers share links."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from reshard.errors import ArgumentError, ScheduleError

from ..graph import Loads, Pipeline
from ..ir.schedule import Action, Channel, Kind, Schedule, check_fits

#: Ends closer together than this part of the step happen at once.
_TOGETHER = 1e-12


@dataclass(frozen=True)
class Span:
    """What a row did, from when to when, in seconds; before that it waited ``exposed_seconds`` for a transfer alone."""

    row: int
    action: Action
    start: float
    end: float
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class StageTransfer:
    """One transfer: when its data was there, when both ends had come and it flowed, and when it had arrived."""

    channel: Channel
    microbatch: int
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """When everything happens. ``spans`` are computations and waits of actions that block, by start."""

    spans: tuple[Span, ...]
    transfers: tuple[StageTransfer, ...]

    @cached_property
    def makespan_seconds(self) -> float:
        """When the last computation has ended."""
        return max((span.end for span in self.spans), default=0.0)

    def _check_row(self, row: int) -> None:
        rows = {span.row for span in self.spans}
        if row not in rows:
            raise ArgumentError(f"the timeline has no row {row!r}, only {sorted(rows)}")

    def exposed_seconds(self, row: int) -> float:
        """What a row waited for transfers whose data was there, and had nothing else to do."""
        self._check_row(row)
        return sum(span.exposed_seconds for span in self.spans if span.row == row)

    def busy_seconds(self, row: int) -> float:
        """What a row computed."""
        self._check_row(row)
        return sum(span.end - span.start for span in self.spans if span.row == row and not span.action.kind.is_transfer)


def simulate(schedule: Schedule, pipeline: Pipeline) -> PipelineTimeline:
    """The time each action starts and ends.

    Rows do one computation at a time, in order. A computation waits for the transfers that bring what it needs. A
    transfer flows once both ends have come and those before it on its channel have ended; transfers that share links
    get equal parts of them (max-min), as far as they can use them.

    Raises:
        ScheduleError: the schedule never ends, or its ends of a channel disagree; the text shows where rows stand.
    """
    check_fits(schedule, pipeline)
    return _Run(schedule, pipeline).run()


@dataclass
class ChannelState:
    """A channel: transfers in the order in which their ends have come; ``at`` is the first that has not ended."""

    channel: Channel
    seconds: float
    loads: Loads
    sent: list[tuple[int, float]] = field(default_factory=list)  # microbatch and when its data was there
    received: list[int] = field(default_factory=list)
    at: int = 0
    left: float | None = None  # of the transfer under way, as a part of it
    started: float = 0.0
    rate: float = 0.0
    arrived: dict[int, float] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, float]:
        """What it takes of each link at full rate."""
        parts: dict[str, float] = {}
        for link, busy in self.loads:
            if busy:
                parts[link] = parts.get(link, 0.0) + busy / self.seconds
        return parts

    @property
    def seconds_left(self) -> float:
        """Of the transfer under way at its rate of now."""
        return math.inf if self.left is None or not self.rate else self.left * self.seconds / self.rate

    def begin(self, now: float) -> None:
        """Let the next transfer flow."""
        self.left, self.started, self.rate = 1.0, now, 0.0

    def flow(self, step: float) -> bool:
        """Let time pass; returns whether the transfer is over."""
        assert self.left is not None
        self.left -= step * self.rate / self.seconds
        return self.left <= _TOGETHER

    def end(self, now: float) -> StageTransfer:
        """The transfer has arrived."""
        microbatch, ready = self.sent[self.at]
        self.left = None
        self.at += 1
        self.arrived[microbatch] = now
        return StageTransfer(self.channel, microbatch, ready, self.started, now)


def make_channel_states(pipeline: Pipeline) -> dict[Channel, ChannelState]:
    """The two channels of every edge, with nothing on them yet."""
    lines = {}
    for edge in pipeline.edges:
        there, back = Channel(edge.src, edge.dst, True), Channel(edge.dst, edge.src, False)
        lines[there] = ChannelState(there, edge.forward_seconds, edge.forward_loads)
        lines[back] = ChannelState(back, edge.backward_seconds, edge.backward_loads)
    return lines


class _Run:
    def __init__(self, schedule: Schedule, pipeline: Pipeline) -> None:
        self.schedule, self.pipeline = schedule, pipeline
        self.at = [0] * len(schedule.rows)
        self.until: list[float | None] = [None] * len(schedule.rows)  # the end of what each row computes
        self.idle_since = [0.0] * len(schedule.rows)
        self.joined = [False] * len(schedule.rows)  # its action that blocks has come to its channel
        self.done: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, microbatch) -> when
        self.lines = make_channel_states(pipeline)
        self.spans: list[Span] = []
        self.transfers: list[StageTransfer] = []
        self.now = 0.0

    def run(self) -> PipelineTimeline:
        while True:
            self.settle()
            flowing = [line for line in self.lines.values() if line.left is not None]
            share_links(flowing)
            ends = [end for end in self.until if end is not None]
            step = min([end - self.now for end in ends] + [line.seconds_left for line in flowing], default=math.inf)
            if step == math.inf:
                break
            self.now += step
            for line in flowing:
                if line.flow(step):
                    self.transfers.append(line.end(self.now))
            for row, end in enumerate(self.until):
                if end is not None and end <= self.now * (1 + _TOGETHER):
                    self.finish(row)
        if any(at < len(row) for at, row in zip(self.at, self.schedule.rows, strict=True)):
            raise ScheduleError(f"the schedule never ends: no row can do what is in brackets; {self.describe()}")
        return PipelineTimeline(
            tuple(sorted(self.spans, key=lambda span: (span.start, span.row))),
            tuple(sorted(self.transfers, key=lambda transfer: transfer.start)),
        )

    def describe(self) -> str:
        """Where each row stands."""
        rows = []
        for row, (at, actions) in enumerate(zip(self.at, self.schedule.rows, strict=True)):
            before = " ".join(map(str, actions[max(0, at - 4) : at]))
            after = " ".join(map(str, actions[at + 1 : at + 4]))
            rows.append(f"row {row}: {before} [{actions[at]}] {after}" if at < len(actions) else f"row {row} has ended")
        return "; ".join(rows)

    def settle(self) -> None:
        """Let all rows go as far as they can now."""
        moved = True
        while moved:
            moved = False
            for row, actions in enumerate(self.schedule.rows):
                while (
                    self.until[row] is None and self.at[row] < len(actions) and self.advance(row, actions[self.at[row]])
                ):
                    moved = True
            for line in self.lines.values():
                while line.left is None and line.at < min(len(line.sent), len(line.received)):
                    if line.sent[line.at][0] != line.received[line.at]:
                        raise ScheduleError(
                            f"ends of a channel disagree: microbatch {line.sent[line.at][0]} is sent where "
                            f"{line.received[line.at]} is received; {self.describe()}"
                        )
                    line.begin(self.now)
                    if line.seconds == 0:
                        self.transfers.append(line.end(self.now))
                    moved = True

    def advance(self, row: int, action: Action) -> bool:
        """Do what can be done at once of a row's next action; returns whether something was."""
        if action.kind.is_transfer:
            return self.join(row, action)
        ready = self.find_ready(action)
        if ready is None:
            return False
        since = self.idle_since[row]
        self.until[row] = self.now + self.seconds_of(action)
        self.spans.append(Span(row, action, self.now, self.until[row] or 0.0, max(0.0, self.now - max(since, ready))))
        return True

    def join(self, row: int, action: Action) -> bool:
        """Come to a channel; who blocks stays until the transfer has ended."""
        line = self.lines.get(action.channel)
        if line is None:
            raise ScheduleError(f"row {row}: {action} is on no edge of the pipeline")
        if not self.joined[row]:
            if action.kind.is_send:
                ready = self.done.get((action.kind is Kind.SEND_F, action.stage, action.microbatch))
                if ready is None:
                    raise ScheduleError(f"row {row}: {action} stands before what it sends is computed")
                line.sent.append((action.microbatch, ready))
            else:
                line.received.append(action.microbatch)
            self.joined[row] = True
            if action.blocks:
                self.idle_since[row] = self.now
                return True
        if action.blocks:
            if action.microbatch not in line.arrived:
                return False
            sent = dict(line.sent)[action.microbatch]
            since = self.idle_since[row]
            self.spans.append(Span(row, action, since, self.now, max(0.0, self.now - max(since, sent))))
        self.joined[row] = False
        self.at[row] += 1
        self.idle_since[row] = self.now
        return True

    def find_ready(self, action: Action) -> float | None:
        """When the last thing that a computation needs was computed, None if something has not come yet."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.W:
            return self.done.get((False, stage, microbatch))
        is_forward = action.kind is Kind.F
        ready = 0.0
        if not is_forward:
            if (True, stage, microbatch) not in self.done:
                return None
            ready = self.done[True, stage, microbatch]
        for other in self.pipeline.inputs[stage] if is_forward else self.pipeline.outputs[stage]:
            made = self.done.get((is_forward, other, microbatch))
            if made is None:
                return None
            row_of = self.schedule.row_of_stage
            if row_of[other] != row_of[stage]:
                line = self.lines[Channel(other, stage, is_forward)]
                if microbatch not in line.arrived:
                    return None
            ready = max(ready, made)
        return ready

    def seconds_of(self, action: Action) -> float:
        stage = self.pipeline.stages[action.stage]
        return {
            Kind.F: stage.forward_seconds,
            Kind.B: stage.backward_seconds,
            Kind.I: stage.input_grad_seconds,
            Kind.W: stage.weight_grad_seconds,
        }[action.kind]

    def finish(self, row: int) -> None:
        action = self.schedule.rows[row][self.at[row]]
        if action.kind is not Kind.W:
            self.done[action.kind is Kind.F, action.stage, action.microbatch] = self.now
        self.until[row] = None
        self.at[row] += 1
        self.idle_since[row] = self.now


def share_links(flowing: Iterable[ChannelState]) -> None:
    """Set rates, as parts of what each gets alone: max-min over the links that they share."""
    lines = list(flowing)
    loads = [line.parts for line in lines]
    if not any(loads):
        for line in lines:
            line.rate = 1.0
        return
    room = {link: 1.0 for load in loads for link in load}
    rate = [0.0] * len(lines)
    open_ = set(range(len(lines)))
    while open_:
        most = 1.0 - max(rate[i] for i in open_)  # all open lines have the same rate
        for link, left in room.items():
            total = sum(loads[i].get(link, 0.0) for i in open_)
            if total:
                most = min(most, left / total)
        for i in open_:
            rate[i] += most
            for link, part in loads[i].items():
                room[link] -= part * most
        full = {link for link, left in room.items() if left <= 1e-12}
        open_ = {i for i in open_ if rate[i] < 1 - 1e-12 and not full & loads[i].keys()}
    for line, each in zip(lines, rate, strict=True):
        line.rate = each
