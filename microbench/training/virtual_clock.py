"""Steps on a virtual clock: what steps in planned and in ready order take if nothing but the stages takes time."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from reshard.scheduler import Pipeline, Schedule
from reshard.scheduler.ir.actions import Kind, StageChannel
from reshard.scheduler.runtime.rank_actions import ChannelEnd, Computation, compile_actions
from reshard.scheduler.runtime.ready_order import NextComputation, OrderMode, ReadyPlan, ReadyQueue

#: Time of a message on this machine. At 0, no message would come after the rank that takes it has become idle.
CLOCK_MESSAGE_SECONDS = 5e-4


class _Rank:
    """A rank in one step.

    Attributes:
        arrivals: by channel and microbatch, when the message arrives.
        doing: the computation in progress.
        until: when it ends.
    """

    def __init__(self, schedule: Schedule, pipeline: Pipeline, pp_rank: int, order: OrderMode) -> None:
        own = [stage for stage, its in enumerate(schedule.pp_rank_of_stage) if its == pp_rank]
        stages: Any = {stage: SimpleNamespace(module=nn.Linear(1, 1)) for stage in own}
        transfers: Any = [None]
        used = [0] * schedule.num_microbatches
        actions = compile_actions(schedule, [pipeline], transfers, used, pp_rank, pp_rank, stages)
        self._plan, self._order = ReadyPlan.of(actions, schedule, pipeline), order
        self._microbatch_of_slot = {
            end.slot: item.action.microbatch for item in self._plan.computations for end in item.inputs
        }
        self._queue = ReadyQueue(
            self._plan,
            is_posted=lambda end: not end.is_local or self._has_arrived(end),
            has_arrived=self._has_arrived,
            may_move=lambda stage: True,
            wait=lambda ends: None,
        )
        self._now, self._num_done = 0.0, 0
        self.arrivals: dict[tuple[StageChannel, int], float] = {}
        self.doing: NextComputation | None = None
        self.until = 0.0

    def _has_arrived(self, end: ChannelEnd) -> bool:
        return self.arrivals.get((end.channel, self._microbatch_of_slot[end.slot]), float("inf")) <= self._now

    def begin(self, now: float, costs: Mapping[int, Any]) -> bool:
        """Begin the next computation. Returns whether there is one."""
        self._now = now
        if self._num_done == len(self._plan.computations):
            return False
        turn = self._queue.find_turn() if self._order == "ready" else NextComputation(self._num_done, 0, is_moved=False)
        if not isinstance(turn, NextComputation):
            return False
        item = self._plan.computations[turn.place]
        if not all(map(self._has_arrived, item.inputs)):
            return False
        self.doing, self.until = turn, now + _seconds_of(item, costs)
        return True

    def end(self) -> Computation:
        """End the computation in progress, and return it."""
        assert self.doing is not None
        turn, self.doing = self.doing, None
        self._num_done += 1
        if self._order == "ready":
            self._queue.end(turn)
        return self._plan.computations[turn.place]

    @property
    def is_done(self) -> bool:
        """Whether the rank has computed all."""
        return self._num_done == len(self._plan.computations)


def _seconds_of(item: Computation, costs: Mapping[int, Any]) -> float:
    kind, stage = item.action.kind, costs[item.action.stage]
    seconds = 0.0
    if kind is Kind.F:
        seconds += stage.forward_seconds
    if kind in (Kind.B, Kind.I):
        seconds += stage.input_grad_seconds
    if kind in (Kind.B, Kind.W):
        seconds += stage.weight_grad_seconds
    return seconds


def simulate_step(schedule: Schedule, pipeline: Pipeline, costs: Mapping[int, Any], order: OrderMode) -> float:
    """Seconds of a step.

    Args:
        schedule, pipeline: what the ranks run.
        costs: ``{stage: its costs}``, of which an attribute such as ``forward_seconds`` is read once per computation.
        order: the order of the computations.
    """
    ranks = [_Rank(schedule, pipeline, number, order) for number in range(len(schedule.rank_actions))]
    events = [(0.0, number) for number in range(len(ranks))]
    now = 0.0
    while events:
        now, number = heapq.heappop(events)
        rank = ranks[number]
        if rank.doing is not None and now >= rank.until:
            item = rank.end()
            for end in item.outputs:
                receiver = schedule.pp_rank_of_stage[end.other]
                at = now if end.is_local else now + CLOCK_MESSAGE_SECONDS
                ranks[receiver].arrivals[end.channel, item.action.microbatch] = at
                heapq.heappush(events, (at, receiver))
        if rank.doing is None and rank.begin(now, costs):
            heapq.heappush(events, (rank.until, number))
    assert all(rank.is_done for rank in ranks)
    return now
