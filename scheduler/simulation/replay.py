"""Simulate a schedule: each pp rank computes its actions in order, and transfers share links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from reshard.errors import ArgumentError, ScheduleError

from ..ir.actions import Action, Kind, StageChannel, compute_seconds
from ..ir.schedule import Schedule, check_fits
from ..pipeline import Pipeline
from .channels import TOLERANCE, ChannelState, LinkRates, StageTransfer, make_channel_states
from .dependencies import describe_cycle


@dataclass(frozen=True)
class Span:
    """One action of a pp rank, in seconds.

    ``exposed_seconds`` is the time that the pp rank was idle, before a computation or in a blocking transfer, although
    the data was already computed: it waited only for transfers.
    """

    pp_rank: int
    action: Action
    start: float
    end: float
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class PipelineTimeline:
    """Start and end times of a schedule.

    Attributes:
        spans: computations and blocking transfers of all pp ranks, sorted by start time.
        transfers: all transfers, sorted by start time.
    """

    spans: tuple[Span, ...]
    transfers: tuple[StageTransfer, ...]

    @cached_property
    def makespan_seconds(self) -> float:
        """End of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def _check_pp_rank(self, pp_rank: int) -> None:
        pp_ranks = {span.pp_rank for span in self.spans}
        if pp_rank not in pp_ranks:
            raise ArgumentError(f"the timeline has no pp rank {pp_rank!r}, only {sorted(pp_ranks)}")

    def exposed_seconds(self, pp_rank: int) -> float:
        """The time that a pp rank was idle and waited only for transfers, whose data was already computed."""
        self._check_pp_rank(pp_rank)
        return sum(span.exposed_seconds for span in self.spans if span.pp_rank == pp_rank)

    def busy_seconds(self, pp_rank: int) -> float:
        """The time that a pp rank computed."""
        self._check_pp_rank(pp_rank)
        return sum(
            span.end - span.start for span in self.spans if span.pp_rank == pp_rank and not span.action.kind.is_transfer
        )


def simulate_schedule(schedule: Schedule, pipeline: Pipeline) -> PipelineTimeline:
    """Predict when each action starts and ends.

    A pp rank runs one computation at a time, in order. Each computation waits for the transfers of its inputs. A
    transfer starts once both ends have posted it and the earlier transfers of its channel have ended. Transfers that
    share links progress at max-min fair rates.

    Raises:
        ScheduleError: the schedule deadlocks, or the two ends of a channel post its transfers in different orders. The
            error text shows the position of every pp rank.
    """
    check_fits(schedule, pipeline)
    return _ScheduleReplay(schedule, pipeline).run()


class _ScheduleReplay:
    """The state of one simulation. ``at`` is the index of each pp rank's current action.

    A pp rank or a channel is examined again only after an event for which it may have waited.
    """

    def __init__(self, schedule: Schedule, pipeline: Pipeline) -> None:
        self.schedule, self.pipeline = schedule, pipeline
        num_pp_ranks = len(schedule.rank_actions)
        self.at = [0] * num_pp_ranks
        self.until: list[float | None] = [None] * num_pp_ranks  # end of each pp rank's current computation
        self.idle_since = [0.0] * num_pp_ranks
        self.posted = [False] * num_pp_ranks  # whether the pp rank has posted its current, blocking transfer
        self.done: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, microbatch) -> end time
        self.channels = make_channel_states(pipeline)
        self.states = list(self.channels.values())
        self.rates = LinkRates()
        self.pp_ranks_to_try, self.channels_to_try = set(range(num_pp_ranks)), set[int]()
        pp_rank_of = schedule.pp_rank_of_stage
        self.is_regular = all(
            pp_rank_of[stage] == pp_rank
            for pp_rank, actions in enumerate(schedule.rank_actions)
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

    def run(self) -> PipelineTimeline:
        while True:
            self.start_all()
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
            for pp_rank, end in enumerate(self.until):
                if end is not None and end <= done:
                    self.finish(pp_rank)
        if any(index < len(actions) for index, actions in zip(self.at, self.schedule.rank_actions, strict=True)):
            raise ScheduleError(
                f"the schedule deadlocks: no pp rank can do its action in brackets; {self.describe()}; "
                f"{describe_cycle(self.schedule, self.pipeline)}"
            )
        return PipelineTimeline(
            tuple(sorted(self.spans, key=lambda span: (span.start, span.pp_rank))),
            tuple(sorted(self.transfers, key=lambda transfer: transfer.start)),
        )

    def describe(self) -> str:
        """The position of each pp rank, as text: nearby actions, with the current one in brackets."""
        positions = []
        for pp_rank, (index, actions) in enumerate(zip(self.at, self.schedule.rank_actions, strict=True)):
            before = " ".join(map(str, actions[max(0, index - 4) : index]))
            after = " ".join(map(str, actions[index + 1 : index + 4]))
            positions.append(
                f"pp rank {pp_rank}: {before} [{actions[index]}] {after}"
                if index < len(actions)
                else f"pp rank {pp_rank} is done"
            )
        return "; ".join(positions)

    def start_all(self) -> None:
        """Start all computations and transfers that can start now."""
        while self.pp_ranks_to_try or self.channels_to_try:
            pp_ranks, self.pp_ranks_to_try = sorted(self.pp_ranks_to_try), set()
            for pp_rank in pp_ranks:
                actions = self.schedule.rank_actions[pp_rank]
                while (
                    self.until[pp_rank] is None
                    and self.at[pp_rank] < len(actions)
                    and self.advance(pp_rank, actions[self.at[pp_rank]])
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
        """End the current transfer of a channel, and wake the pp ranks at its ends."""
        self.transfers.append(state.end(self.now))
        self.channels_to_try.add(state.number)
        pp_rank_of = self.schedule.pp_rank_of_stage
        self.wake(pp_rank_of[state.channel.sender], pp_rank_of[state.channel.receiver])

    def wake(self, *pp_ranks: int) -> None:
        """Examine some pp ranks again; all pp ranks if a pp rank has actions of stages that are not its own."""
        self.pp_ranks_to_try.update(pp_ranks if self.is_regular else range(len(self.at)))

    def advance(self, pp_rank: int, action: Action) -> bool:
        """Start a pp rank's current action if it can start now. Returns whether anything changed."""
        if action.kind.is_transfer:
            return self.post(pp_rank, action)
        ready = self.find_ready(action)
        if ready is None:
            return False
        since, seconds = self.idle_since[pp_rank], self.seconds[action.kind, action.stage]
        self.until[pp_rank] = self.now + seconds
        self.spans.append(Span(pp_rank, action, self.now, self.now + seconds, max(0.0, self.now - max(since, ready))))
        return True

    def post(self, pp_rank: int, action: Action) -> bool:
        """Post one end of a transfer; a blocking one keeps the pp rank until it ends.

        Returns whether anything changed.
        """
        state = self.channels.get(action.channel)
        if state is None:
            raise ScheduleError(f"pp rank {pp_rank}: the pipeline has no edge for {action}")
        if not self.posted[pp_rank]:
            if action.kind.is_send:
                ready = self.done.get((action.kind is Kind.SEND_F, action.stage, action.microbatch))
                if ready is None:
                    raise ScheduleError(f"pp rank {pp_rank}: {action} comes before the computation of its data")
                state.sent.append((action.microbatch, ready))
            else:
                state.received.append(action.microbatch)
            self.channels_to_try.add(state.number)
            self.posted[pp_rank] = True
            if action.blocks:
                self.idle_since[pp_rank] = self.now
                return True
        if action.blocks:
            if action.microbatch not in state.arrived:
                return False
            sent = dict(state.sent)[action.microbatch]
            since = self.idle_since[pp_rank]
            self.spans.append(Span(pp_rank, action, since, self.now, max(0.0, self.now - max(since, sent))))
        self.posted[pp_rank] = False
        self.at[pp_rank] += 1
        self.idle_since[pp_rank] = self.now
        return True

    def find_ready(self, action: Action) -> float | None:
        """The time at which the last input of a computation was computed; None if an input has not arrived."""
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
            pp_rank_of = self.schedule.pp_rank_of_stage
            if pp_rank_of[other] != pp_rank_of[stage]:
                state = self.channels[StageChannel(other, stage, is_forward)]
                if microbatch not in state.arrived:
                    return None
            ready = max(ready, made)
        return ready

    def finish(self, pp_rank: int) -> None:
        """End the current computation of a pp rank and step to its next action."""
        action = self.schedule.rank_actions[pp_rank][self.at[pp_rank]]
        if action.kind is not Kind.W:
            self.done[action.kind is Kind.F, action.stage, action.microbatch] = self.now
        self.until[pp_rank] = None
        self.at[pp_rank] += 1
        self.idle_since[pp_rank] = self.now
        self.wake(pp_rank)
