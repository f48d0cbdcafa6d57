"""Simulate a schedule: each row computes its actions in order, and transfers share links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.errors import ArgumentError, ScheduleError

from ..graph import Pipeline
from ..ir.actions import Action, Kind, StageChannel, compute_seconds
from ..ir.schedule import Schedule, check_fits
from .channels import TOLERANCE, ChannelState, LinkRates, StageTransfer, make_channel_states
from .dependencies import describe_cycle

#: Relative tolerance of the limit of :func:`simulate_within`: sums of times in another order differ by less.
LIMIT_TOLERANCE = 1e-8


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


def simulate_schedule(schedule: Schedule, pipeline: Pipeline) -> PipelineTimeline:
    """Predict when each action starts and ends.

    A row does one computation at a time, in order. Each computation waits for the transfers of its inputs. A transfer
    starts once both ends have posted it and the earlier transfers of its channel have ended. Transfers that share links
    progress at max-min fair rates.

    Raises:
        ScheduleError: the schedule deadlocks, or the two ends of a channel post its transfers in different orders. The
            error text shows the position of every row.
    """
    check_fits(schedule, pipeline)
    timeline = _Replay(schedule, pipeline).run()
    assert timeline is not None
    return timeline


def simulate_within(
    schedule: Schedule, pipeline: Pipeline, limit_seconds: float, after_seconds: Sequence[float]
) -> PipelineTimeline | None:
    """:func:`simulate_schedule`, but stop as soon as no row can be done by a limit.

    Args:
        schedule, pipeline: what to simulate.
        limit_seconds: latest time that is of interest.
        after_seconds: ``(rows,)`` seconds that each row needs after its last computation.

    Returns:
        The timeline; None if a row certainly ends later than ``limit_seconds``. A returned timeline may end later, too.

    Raises:
        ScheduleError: see :func:`simulate_schedule`. A schedule that is stopped before its deadlock raises nothing.
    """
    check_fits(schedule, pipeline)
    return _Replay(schedule, pipeline, limit_seconds, after_seconds).run()


class _Replay:
    """The state of one simulation. ``at`` is the index of each row's current action.

    A row or a channel is examined again only after an event for which it may have waited.
    """

    def __init__(
        self,
        schedule: Schedule,
        pipeline: Pipeline,
        limit_seconds: float = math.inf,
        after_seconds: Sequence[float] = (),
    ) -> None:
        self.schedule, self.pipeline = schedule, pipeline
        num_rows = len(schedule.rows)
        self.at = [0] * num_rows
        self.until: list[float | None] = [None] * num_rows  # end of each row's current computation
        self.idle_since = [0.0] * num_rows
        self.posted = [False] * num_rows  # whether the row has posted its current, blocking transfer
        self.done: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, microbatch) -> end time
        self.channels = make_channel_states(pipeline)
        self.states = list(self.channels.values())
        self.rates = LinkRates()
        self.rows_to_try, self.channels_to_try = set(range(num_rows)), set[int]()
        row_of = schedule.row_of_stage
        self.is_regular = all(
            row_of[stage] == row
            for row, actions in enumerate(schedule.rows)
            for stage in {action.stage for action in actions}
        )
        self.seconds = {
            (kind, number): compute_seconds(kind, stage)
            for number, stage in enumerate(pipeline.stages)
            for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        }
        self.spans: list[Span] = []
        self.transfers: list[StageTransfer] = []
        self.now = 0.0
        self.latest = limit_seconds * (1 + LIMIT_TOLERANCE)
        self.is_late = False
        self.left: list[float] | None = None  # seconds that each row still needs, if there is a limit
        if limit_seconds < math.inf:
            self.left = [
                after + sum(self.seconds[a.kind, a.stage] for a in actions if not a.kind.is_transfer)
                for after, actions in zip(after_seconds, schedule.rows, strict=True)
            ]

    def run(self) -> PipelineTimeline | None:
        while True:
            self.start_all()
            if self.left is not None and self.is_late:
                return None
            active = [state for state in self.states if state.remaining is not None]
            self.rates.set(active)
            ends = [end for end in self.until if end is not None]
            step = min(
                [end - self.now for end in ends] + [state.seconds_remaining for state in active], default=math.inf
            )
            if step == math.inf:
                break
            self.now += step
            for state in active:
                if state.advance(step):
                    self.end_transfer(state)
            done = self.now * (1 + TOLERANCE)
            for row, end in enumerate(self.until):
                if end is not None and end <= done:
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
        while self.rows_to_try or self.channels_to_try:
            rows, self.rows_to_try = sorted(self.rows_to_try), set()
            for row in rows:
                actions = self.schedule.rows[row]
                while (
                    self.until[row] is None and self.at[row] < len(actions) and self.advance(row, actions[self.at[row]])
                ):
                    pass
            numbers, self.channels_to_try = sorted(self.channels_to_try), set()
            for state in (self.states[number] for number in numbers):
                while state.remaining is None and state.at < min(len(state.sent), len(state.received)):
                    if state.sent[state.at][0] != state.received[state.at]:
                        raise ScheduleError(
                            f"stage {state.channel.sender} sends microbatch {state.sent[state.at][0]} to stage "
                            f"{state.channel.receiver}, which expects {state.received[state.at]} next; "
                            f"{self.describe()}"
                        )
                    state.begin(self.now)
                    if state.seconds == 0:
                        self.end_transfer(state)

    def end_transfer(self, state: ChannelState) -> None:
        """End the current transfer of a channel, and wake the rows at its ends."""
        self.transfers.append(state.end(self.now))
        self.channels_to_try.add(state.number)
        row_of = self.schedule.row_of_stage
        self.wake(row_of[state.channel.sender], row_of[state.channel.receiver])

    def wake(self, *rows: int) -> None:
        """Examine some rows again; all rows if a row has actions of stages that are not its own."""
        self.rows_to_try.update(rows if self.is_regular else range(len(self.at)))

    def advance(self, row: int, action: Action) -> bool:
        """Start a row's current action if it can start now. Returns whether anything changed."""
        if action.kind.is_transfer:
            return self.post(row, action)
        ready = self.find_ready(action)
        if ready is None:
            return False
        since, seconds = self.idle_since[row], self.seconds[action.kind, action.stage]
        self.until[row] = self.now + seconds
        self.spans.append(Span(row, action, self.now, self.now + seconds, max(0.0, self.now - max(since, ready))))
        if self.left is not None:
            self.is_late = self.is_late or self.now + self.left[row] > self.latest
            self.left[row] -= seconds
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
            self.channels_to_try.add(state.number)
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
                state = self.channels[StageChannel(other, stage, is_forward)]
                if microbatch not in state.arrived:
                    return None
            ready = max(ready, made)
        return ready

    def finish(self, row: int) -> None:
        """End the current computation of a row and step to its next action."""
        action = self.schedule.rows[row][self.at[row]]
        if action.kind is not Kind.W:
            self.done[action.kind is Kind.F, action.stage, action.microbatch] = self.now
        self.until[row] = None
        self.at[row] += 1
        self.idle_since[row] = self.now
        self.wake(row)
