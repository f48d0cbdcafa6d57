"""Reference implementation of ``native/pipeline/list_scheduling.h``: the same floating point operations."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from reshard.scheduler.ir.actions import Action, Kind, StageChannel
from reshard.scheduler.pipeline import Pipeline
from reshard.scheduler.schedules.list_scheduling import DispatchRule
from reshard.scheduler.simulation.channels import LinkRates, make_channel_states


@dataclass
class _Stage:
    """Progress of one stage: numbers of computations begun, and of microbatches finished and received."""

    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    finished: int = 0
    arrived: dict[tuple[int, bool], int] = field(default_factory=dict)  # (other stage, is forward) -> microbatches


def order_greedily(
    pipeline: Pipeline, num_microbatches: int, pp_rank_of_stage: Sequence[int], policy: DispatchRule
) -> list[list[Action]]:
    """The computations of each pp rank, by start time. A stage computes its microbatches in order.

    The result is incomplete if the policy deadlocks.
    """
    return _ListScheduler(pipeline, num_microbatches, pp_rank_of_stage, policy).run()


class _ListScheduler:
    def __init__(self, pipeline, num_microbatches, pp_rank_of_stage, policy):
        self.pipeline, self.num, self.pp_rank_of, self.policy = pipeline, num_microbatches, pp_rank_of_stage, policy
        self.stages = [_Stage() for _ in pipeline.stages]
        self.stages_of_pp_rank: list[list[int]] = [[] for _ in range(max(pp_rank_of_stage) + 1)]
        for stage, pp_rank in enumerate(pp_rank_of_stage):
            self.stages_of_pp_rank[pp_rank].append(stage)
        self.channels = make_channel_states(pipeline)
        self.rates = LinkRates()
        for stage in range(len(pipeline.stages)):
            for other in pipeline.inputs[stage]:
                self.stages[stage].arrived[other, True] = 0
            for other in pipeline.outputs[stage]:
                self.stages[stage].arrived[other, False] = 0
        self.order: list[list[Action]] = [[] for _ in self.stages_of_pp_rank]
        self.running: list[Action | None] = [None] * len(self.stages_of_pp_rank)
        self.ends: list[tuple[float, int]] = []  # heap of (end of computation, pp rank)
        self.used = [0.0] * len(self.stages_of_pp_rank)
        self.now = 0.0

    def run(self):
        while True:
            self.begin_all()
            active = [state for state in self.channels.values() if state.remaining is not None]
            self.rates.set(active)
            step = min(
                [state.seconds_remaining for state in active] + [self.ends[0][0] - self.now if self.ends else math.inf]
            )
            if step == math.inf:
                return self.order
            self.now += step
            for state in active:
                if state.advance(step):
                    self.arrive(state)
                    self.start_next(state)
            while self.ends and self.ends[0][0] <= self.now * (1 + 1e-12):
                self.end(heapq.heappop(self.ends)[1])

    def begin_all(self):
        for pp_rank, running in enumerate(self.running):
            if running is None:
                action = self.choose(pp_rank)
                if action is not None:
                    self.begin(pp_rank, action)

    def choose(self, pp_rank):
        """The most urgent computation that is ready, or None to stay idle."""
        policy = self.policy
        ready: dict[Kind, list[Action]] = {Kind.F: [], Kind.I: [], Kind.W: []}
        for stage in self.stages_of_pp_rank[pp_rank]:
            at = self.stages[stage]
            if at.backwards < min(at.forwards, self.num) and self.has_arrived(stage, False, at.backwards):
                kind = Kind.I if policy.splits[stage] else Kind.B
                ready[Kind.I].append(Action(kind, stage, at.backwards))
            if at.forwards < self.num and self.has_room(stage) and self.has_arrived(stage, True, at.forwards):
                ready[Kind.F].append(Action(Kind.F, stage, at.forwards))
            if policy.splits[stage] and at.weights < at.backwards:
                ready[Kind.W].append(Action(Kind.W, stage, at.weights))
        order = [Kind.F, Kind.I] if policy.forward_first else [Kind.I, Kind.F]
        order.insert(1 if policy.weights_first else 2, Kind.W)
        for kind in order:
            if ready[kind]:
                action = min(ready[kind], key=self.urgency)
                return None if kind is Kind.W and self.should_wait(pp_rank, action) else action
        return None

    def has_room(self, stage):
        """Whether a stage may begin one more microbatch, and each later stage of its pp rank can still go on."""
        at, pp_rank = self.stages[stage], self.pp_rank_of[stage]
        if at.forwards - at.finished >= self.policy.max_in_flight[stage]:
            return False
        needed = self.used[pp_rank] + self.pipeline.stages[stage].activation_bytes
        for later in self.stages_of_pp_rank[pp_rank]:
            if later > stage and self.stages[later].forwards == self.stages[later].finished < self.num:
                needed += self.pipeline.stages[later].activation_bytes
        return needed <= self.policy.max_bytes[pp_rank]

    def urgency(self, action):
        """Sort key of computations of one kind."""
        if not self.policy.group:
            return action.microbatch, -action.stage
        sign = 1 if action.kind is Kind.F else -1
        return action.microbatch // self.policy.group, sign * action.stage, action.microbatch

    def should_wait(self, pp_rank, action):
        """Whether an input of a more urgent computation arrives soon."""
        limit = self.policy.patience * self.pipeline.stages[action.stage].weight_grad_seconds
        if not limit:
            return False
        for stage in self.stages_of_pp_rank[pp_rank]:
            at = self.stages[stage]
            for (other, is_forward), arrived in at.arrived.items():
                state = self.channels[StageChannel(other, stage, is_forward)]
                if state.remaining is None or state.seconds_remaining >= limit:
                    continue
                if arrived == (at.forwards if is_forward else at.backwards) and (
                    not is_forward or self.has_room(stage)
                ):
                    return True
        return False

    def has_arrived(self, stage, is_forward, microbatch):
        """Whether all inputs of a forward or backward are there."""
        others = self.pipeline.inputs[stage] if is_forward else self.pipeline.outputs[stage]
        arrived = self.stages[stage].arrived
        return all(arrived[other, is_forward] > microbatch for other in others)

    def begin(self, pp_rank, action):
        stage, costs = self.stages[action.stage], self.pipeline.stages[action.stage]
        if action.kind is Kind.F:
            stage.forwards += 1
            self.used[pp_rank] += costs.activation_bytes
            seconds = costs.forward_seconds
        elif action.kind is Kind.W:
            stage.weights += 1
            seconds = costs.weight_grad_seconds
        else:
            stage.backwards += 1
            seconds = costs.input_grad_seconds if action.kind is Kind.I else costs.backward_seconds
        self.order[pp_rank].append(action)
        self.running[pp_rank] = action
        heapq.heappush(self.ends, (self.now + seconds, pp_rank))

    def end(self, pp_rank):
        action = self.running[pp_rank]
        assert action is not None
        self.running[pp_rank] = None
        stage = action.stage
        if action.kind in (Kind.B, Kind.W):
            self.stages[stage].finished += 1
            self.used[pp_rank] -= self.pipeline.stages[stage].activation_bytes
        if action.kind is Kind.W:
            return
        is_forward = action.kind is Kind.F
        for other in self.pipeline.outputs[stage] if is_forward else self.pipeline.inputs[stage]:
            if self.pp_rank_of[other] == self.pp_rank_of[stage]:
                self.stages[other].arrived[stage, is_forward] += 1
                continue
            state = self.channels[StageChannel(stage, other, is_forward)]
            state.sent.append((action.microbatch, self.now))
            self.start_next(state)

    def arrive(self, state):
        """End the current transfer of a channel."""
        state.end(self.now)
        self.stages[state.channel.receiver].arrived[state.channel.sender, state.channel.is_forward] += 1

    def start_next(self, state):
        """Start the next transfer of a channel. Transfers that take no time end at once."""
        while state.remaining is None and state.at < len(state.sent):
            state.begin(self.now)
            if state.seconds == 0:
                self.arrive(state)
