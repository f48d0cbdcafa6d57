"""Simulate a schedule: each row computes its actions in order, and transfers share links."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from reshard.errors import ArgumentError, ScheduleError

from ..graph import Loads, Pipeline
from ..ir.schedule import Action, Channel, Kind, Schedule, check_fits
from .dependencies import describe_cycle

#: Relative tolerance of times and of transferred shares: smaller differences are rounding errors.
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Span:
    """One action of a row, in seconds.

    ``exposed_seconds`` is the time that the row was idle, before a computation or in a blocking transfer, although the
    data was already computed: it waited only for transfers.
    """

    row: int
    action: Action
    start: float
    end: float
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class StageTransfer:
    """One transfer. Times in seconds: its data was computed at ``ready``, and it moved from ``start`` to ``end``."""

    channel: Channel
    microbatch: int
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """Start and end times of a schedule.

    Attributes:
        spans: computations and blocking transfers of all rows, sorted by start time.
        transfers: all transfers, sorted by start time.
    """

    spans: tuple[Span, ...]
    transfers: tuple[StageTransfer, ...]

    @cached_property
    def makespan_seconds(self) -> float:
        """End of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def _check_row(self, row: int) -> None:
        rows = {span.row for span in self.spans}
        if row not in rows:
            raise ArgumentError(f"the timeline has no row {row!r}, only {sorted(rows)}")

    def exposed_seconds(self, row: int) -> float:
        """How long a row was idle and waited only for transfers, whose data was already computed."""
        self._check_row(row)
        return sum(span.exposed_seconds for span in self.spans if span.row == row)

    def busy_seconds(self, row: int) -> float:
        """How long a row computed."""
        self._check_row(row)
        return sum(span.end - span.start for span in self.spans if span.row == row and not span.action.kind.is_transfer)


def simulate(schedule: Schedule, pipeline: Pipeline) -> PipelineTimeline:
    """Predict when each action starts and ends.

    A row does one computation at a time, in order. Each computation waits for the transfers of its inputs. A transfer
    starts once both ends have posted it and the earlier transfers of its channel have ended. Transfers that share links
    progress at max-min fair rates.

    Raises:
        ScheduleError: the schedule deadlocks, or the two ends of a channel post its transfers in different orders. The
            error text shows the position of every row.
    """
    check_fits(schedule, pipeline)
    return _Replay(schedule, pipeline).run()


@dataclass
class ChannelState:
    """The transfers of one channel, in the order in which its ends posted them.

    Attributes:
        seconds: duration of a transfer without contention.
        loads: busy time of each link in one transfer.
        sent: ``(microbatch, time when its data was computed)`` of each posted send.
        received: microbatch of each posted receive.
        at: index of the first transfer that has not ended.
        remaining: fraction of the current transfer still to move, from 1 to 0; None between transfers.
        started: start time of the current transfer.
        rate: speed of the current transfer relative to its speed without contention.
        arrived: arrival time by microbatch.
    """

    channel: Channel
    seconds: float
    loads: Loads
    sent: list[tuple[int, float]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    at: int = 0
    remaining: float | None = None
    started: float = 0.0
    rate: float = 0.0
    arrived: dict[int, float] = field(default_factory=dict)

    @cached_property
    def link_shares(self) -> dict[str, float]:
        """Fraction of each link's capacity that a transfer uses at rate 1."""
        link_shares: dict[str, float] = {}
        for link, busy in self.loads:
            if busy:
                link_shares[link] = link_shares.get(link, 0.0) + busy / self.seconds
        return link_shares

    @property
    def seconds_remaining(self) -> float:
        """Time until the current transfer ends at its current rate; infinite if nothing moves."""
        return math.inf if self.remaining is None or not self.rate else self.remaining * self.seconds / self.rate

    def begin(self, now: float) -> None:
        """Start the next transfer."""
        self.remaining, self.started, self.rate = 1.0, now, 0.0

    def advance(self, step: float) -> bool:
        """Move the current transfer for ``step`` seconds. Returns whether it is complete."""
        assert self.remaining is not None
        self.remaining -= step * self.rate / self.seconds
        return self.remaining <= _TOLERANCE

    def end(self, now: float) -> StageTransfer:
        """End the current transfer."""
        microbatch, ready = self.sent[self.at]
        self.remaining = None
        self.at += 1
        self.arrived[microbatch] = now
        return StageTransfer(self.channel, microbatch, ready, self.started, now)


def make_channel_states(pipeline: Pipeline) -> dict[Channel, ChannelState]:
    """Initial states of the forward and the backward channel of every edge."""
    states = {}
    for edge in pipeline.edges:
        forward, backward = Channel(edge.src, edge.dst, True), Channel(edge.dst, edge.src, False)
        states[forward] = ChannelState(forward, edge.forward_seconds, edge.forward_loads)
        states[backward] = ChannelState(backward, edge.backward_seconds, edge.backward_loads)
    return states


class _Replay:
    """The state of one simulation. ``at`` is the index of each row's current action."""

    def __init__(self, schedule: Schedule, pipeline: Pipeline) -> None:
        self.schedule, self.pipeline = schedule, pipeline
        self.at = [0] * len(schedule.rows)
        self.until: list[float | None] = [None] * len(schedule.rows)  # end of each row's current computation
        self.idle_since = [0.0] * len(schedule.rows)
        self.posted = [False] * len(schedule.rows)  # whether the row has posted its current, blocking transfer
        self.done: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, microbatch) -> end time
        self.channels = make_channel_states(pipeline)
        self.spans: list[Span] = []
        self.transfers: list[StageTransfer] = []
        self.now = 0.0

    def run(self) -> PipelineTimeline:
        while True:
            self.start_all()
            active = [state for state in self.channels.values() if state.remaining is not None]
            share_links(active)
            ends = [end for end in self.until if end is not None]
            step = min(
                [end - self.now for end in ends] + [state.seconds_remaining for state in active], default=math.inf
            )
            if step == math.inf:
                break
            self.now += step
            for state in active:
                if state.advance(step):
                    self.transfers.append(state.end(self.now))
            for row, end in enumerate(self.until):
                if end is not None and end <= self.now * (1 + _TOLERANCE):
                    self.finish(row)
        if any(at < len(row) for at, row in zip(self.at, self.schedule.rows, strict=True)):
            raise ScheduleError(
                f"the schedule deadlocks: no row can do its action in brackets; {self.describe()}; "
                f"{describe_cycle(self.schedule, self.pipeline)}"
            )
        return PipelineTimeline(
            tuple(sorted(self.spans, key=lambda span: (span.start, span.row))),
            tuple(sorted(self.transfers, key=lambda transfer: transfer.start)),
        )

    def describe(self) -> str:
        """The position of each row, as text: nearby actions, with the current one in brackets."""
        rows = []
        for row, (at, actions) in enumerate(zip(self.at, self.schedule.rows, strict=True)):
            before = " ".join(map(str, actions[max(0, at - 4) : at]))
            after = " ".join(map(str, actions[at + 1 : at + 4]))
            rows.append(f"row {row}: {before} [{actions[at]}] {after}" if at < len(actions) else f"row {row} is done")
        return "; ".join(rows)

    def start_all(self) -> None:
        """Start all computations and transfers that can start now."""
        moved = True
        while moved:
            moved = False
            for row, actions in enumerate(self.schedule.rows):
                while (
                    self.until[row] is None and self.at[row] < len(actions) and self.advance(row, actions[self.at[row]])
                ):
                    moved = True
            for state in self.channels.values():
                while state.remaining is None and state.at < min(len(state.sent), len(state.received)):
                    if state.sent[state.at][0] != state.received[state.at]:
                        raise ScheduleError(
                            f"stage {state.channel.sender} sends microbatch {state.sent[state.at][0]} to stage "
                            f"{state.channel.receiver}, which expects {state.received[state.at]} next; "
                            f"{self.describe()}"
                        )
                    state.begin(self.now)
                    if state.seconds == 0:
                        self.transfers.append(state.end(self.now))
                    moved = True

    def advance(self, row: int, action: Action) -> bool:
        """Start a row's current action if it can start now. Returns whether anything changed."""
        if action.kind.is_transfer:
            return self.post(row, action)
        ready = self.find_ready(action)
        if ready is None:
            return False
        since = self.idle_since[row]
        self.until[row] = self.now + self.seconds_of(action)
        self.spans.append(Span(row, action, self.now, self.until[row] or 0.0, max(0.0, self.now - max(since, ready))))
        return True

    def post(self, row: int, action: Action) -> bool:
        """Post one end of a transfer; a blocking one keeps the row until it ends. Returns whether anything changed."""
        state = self.channels.get(action.channel)
        if state is None:
            raise ScheduleError(f"row {row}: the pipeline has no edge for {action}")
        if not self.posted[row]:
            if action.kind.is_send:
                ready = self.done.get((action.kind is Kind.SEND_F, action.stage, action.microbatch))
                if ready is None:
                    raise ScheduleError(f"row {row}: {action} comes before the computation of its data")
                state.sent.append((action.microbatch, ready))
            else:
                state.received.append(action.microbatch)
            self.posted[row] = True
            if action.blocks:
                self.idle_since[row] = self.now
                return True
        if action.blocks:
            if action.microbatch not in state.arrived:
                return False
            sent = dict(state.sent)[action.microbatch]
            since = self.idle_since[row]
            self.spans.append(Span(row, action, since, self.now, max(0.0, self.now - max(since, sent))))
        self.posted[row] = False
        self.at[row] += 1
        self.idle_since[row] = self.now
        return True

    def find_ready(self, action: Action) -> float | None:
        """When the last input of a computation was computed; None if an input is not computed or has not arrived."""
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
                state = self.channels[Channel(other, stage, is_forward)]
                if microbatch not in state.arrived:
                    return None
            ready = max(ready, made)
        return ready

    def seconds_of(self, action: Action) -> float:
        """Duration of a computation."""
        stage = self.pipeline.stages[action.stage]
        return {
            Kind.F: stage.forward_seconds,
            Kind.B: stage.backward_seconds,
            Kind.I: stage.input_grad_seconds,
            Kind.W: stage.weight_grad_seconds,
        }[action.kind]

    def finish(self, row: int) -> None:
        """End the current computation of a row and step to its next action."""
        action = self.schedule.rows[row][self.at[row]]
        if action.kind is not Kind.W:
            self.done[action.kind is Kind.F, action.stage, action.microbatch] = self.now
        self.until[row] = None
        self.at[row] += 1
        self.idle_since[row] = self.now


def share_links(active: Iterable[ChannelState]) -> None:
    """Set the rate of each transfer by max-min fairness over shared links. Without contention the rate is 1."""
    states = list(active)
    loads = [state.link_shares for state in states]
    if not any(loads):
        for state in states:
            state.rate = 1.0
        return
    capacity = {link: 1.0 for load in loads for link in load}
    rate = [0.0] * len(states)
    unfrozen = set(range(len(states)))
    while unfrozen:
        increase = 1.0 - max(rate[i] for i in unfrozen)  # all unfrozen transfers have the same rate
        for link, remaining in capacity.items():
            total = sum(loads[i].get(link, 0.0) for i in unfrozen)
            if total:
                increase = min(increase, remaining / total)
        for i in unfrozen:
            rate[i] += increase
            for link, share in loads[i].items():
                capacity[link] -= share * increase
        full = {link for link, remaining in capacity.items() if remaining <= 1e-12}
        unfrozen = {i for i in unfrozen if rate[i] < 1 - 1e-12 and not full & loads[i].keys()}
    for state, each in zip(states, rate, strict=True):
        state.rate = each
