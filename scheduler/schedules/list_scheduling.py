"""Orders computations by running the pipeline forward in time: whoever is free takes what is most pressing."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..graph import Pipeline
from ..ir.schedule import Action, Channel, Kind
from ..simulation.replay import ChannelState, make_channel_states, share_links


@dataclass(frozen=True)
class Policy:
    """How a free row chooses.

    Attributes:
        most_in_flight: of each stage the microbatches that may be begun and not finished.
        splits: whether the backward of each stage is done in halves.
        forward_first: whether a forward goes before a backward while both could go.
        weights_first: whether the weights' half goes before a forward.
        patience: a row rather waits than begin the weights' half, if something more pressing comes within this part
            of it.
    """

    most_in_flight: tuple[int, ...]
    splits: tuple[bool, ...]
    forward_first: bool = False
    weights_first: bool = False
    patience: float = 0.0


@dataclass
class _Stage:
    """How far one stage has come: microbatches whose computations have begun, of each kind."""

    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    finished: int = 0
    came: dict[tuple[int, bool], int] = field(default_factory=dict)  # from each neighbour, how many have arrived


def order_greedily(
    pipeline: Pipeline, num_microbatches: int, row_of_stage: Sequence[int], policy: Policy
) -> list[list[Action]]:
    """Computations of each row in the order in which they begin; microbatches of a stage in their order."""
    return _Greedy(pipeline, num_microbatches, row_of_stage, policy).run()


class _Greedy:
    def __init__(self, pipeline: Pipeline, num_microbatches: int, row_of_stage: Sequence[int], policy: Policy) -> None:
        self.pipeline, self.num, self.row_of, self.policy = pipeline, num_microbatches, row_of_stage, policy
        self.stages = [_Stage() for _ in pipeline.stages]
        self.on_row: list[list[int]] = [[] for _ in range(max(row_of_stage) + 1)]
        for stage, row in enumerate(row_of_stage):
            self.on_row[row].append(stage)
        self.lines = make_channel_states(pipeline)
        for stage in range(len(pipeline.stages)):
            for other in pipeline.inputs[stage]:
                self.stages[stage].came[other, True] = 0
            for other in pipeline.outputs[stage]:
                self.stages[stage].came[other, False] = 0
        self.order: list[list[Action]] = [[] for _ in self.on_row]
        self.doing: list[Action | None] = [None] * len(self.on_row)
        self.ends: list[tuple[float, int]] = []  # of computations, with their row
        self.now = 0.0

    def run(self) -> list[list[Action]]:
        while True:
            self.begin_all()
            flowing = [line for line in self.lines.values() if line.left is not None]
            share_links(flowing)
            step = min(
                [line.seconds_left for line in flowing] + [self.ends[0][0] - self.now if self.ends else math.inf]
            )
            if step == math.inf:
                return self.order
            self.now += step
            for line in flowing:
                if line.flow(step):
                    self.arrive(line)
            while self.ends and self.ends[0][0] <= self.now * (1 + 1e-12):
                self.end(heapq.heappop(self.ends)[1])

    def begin_all(self) -> None:
        for row, doing in enumerate(self.doing):
            if doing is None:
                action = self.choose(row)
                if action is not None:
                    self.begin(row, action)

    def choose(self, row: int) -> Action | None:
        """The most pressing computation that can go now, None to wait."""
        policy = self.policy
        ready: dict[Kind, list[Action]] = {Kind.F: [], Kind.I: [], Kind.W: []}
        for stage in self.on_row[row]:
            at = self.stages[stage]
            if at.backwards < min(at.forwards, self.num) and self.has_come(stage, False, at.backwards):
                kind = Kind.I if policy.splits[stage] else Kind.B
                ready[Kind.I].append(Action(kind, stage, at.backwards))
            if (
                at.forwards < self.num
                and at.forwards - at.finished < policy.most_in_flight[stage]
                and self.has_come(stage, True, at.forwards)
            ):
                ready[Kind.F].append(Action(Kind.F, stage, at.forwards))
            if policy.splits[stage] and at.weights < at.backwards:
                ready[Kind.W].append(Action(Kind.W, stage, at.weights))
        order = [Kind.F, Kind.I] if policy.forward_first else [Kind.I, Kind.F]
        order.insert(1 if policy.weights_first else 2, Kind.W)
        for kind in order:
            if ready[kind]:
                # of several the oldest microbatch, and then the stage that is nearest to the end
                action = min(ready[kind], key=lambda a: (a.microbatch, -a.stage))
                return None if kind is Kind.W and self.should_wait(row, action) else action
        return None

    def should_wait(self, row: int, action: Action) -> bool:
        """Whether something more pressing arrives soon."""
        limit = self.policy.patience * self.pipeline.stages[action.stage].weight_grad_seconds
        if not limit:
            return False
        for stage in self.on_row[row]:
            at = self.stages[stage]
            for (other, is_forward), came in at.came.items():
                line = self.lines[Channel(other, stage, is_forward)]
                if line.left is None or line.seconds_left >= limit:
                    continue
                if came == (at.forwards if is_forward else at.backwards) and (
                    not is_forward or at.forwards - at.finished < self.policy.most_in_flight[stage]
                ):
                    return True
        return False

    def has_come(self, stage: int, is_forward: bool, microbatch: int) -> bool:
        others = self.pipeline.inputs[stage] if is_forward else self.pipeline.outputs[stage]
        came = self.stages[stage].came
        return all(came[other, is_forward] > microbatch for other in others)

    def begin(self, row: int, action: Action) -> None:
        stage, costs = self.stages[action.stage], self.pipeline.stages[action.stage]
        if action.kind is Kind.F:
            stage.forwards += 1
            seconds = costs.forward_seconds
        elif action.kind is Kind.W:
            stage.weights += 1
            seconds = costs.weight_grad_seconds
        else:
            stage.backwards += 1
            seconds = costs.input_grad_seconds if action.kind is Kind.I else costs.backward_seconds
        self.order[row].append(action)
        self.doing[row] = action
        heapq.heappush(self.ends, (self.now + seconds, row))

    def end(self, row: int) -> None:
        action = self.doing[row]
        assert action is not None
        self.doing[row] = None
        stage = action.stage
        if action.kind in (Kind.B, Kind.W):
            self.stages[stage].finished += 1
        if action.kind is Kind.W:
            return
        is_forward = action.kind is Kind.F
        for other in self.pipeline.outputs[stage] if is_forward else self.pipeline.inputs[stage]:
            if self.row_of[other] == self.row_of[stage]:
                self.stages[other].came[stage, is_forward] += 1
                continue
            line = self.lines[Channel(stage, other, is_forward)]
            line.sent.append((action.microbatch, self.now))
            self.go_on(line)

    def arrive(self, line: ChannelState) -> None:
        line.end(self.now)
        self.stages[line.channel.receiver].came[line.channel.sender, line.channel.is_forward] += 1
        self.go_on(line)

    def go_on(self, line: ChannelState) -> None:
        """Let the next transfer of a channel flow."""
        while line.left is None and line.at < len(line.sent):
            line.begin(self.now)
            if line.seconds == 0:
                line.end(self.now)
                self.stages[line.channel.receiver].came[line.channel.sender, line.channel.is_forward] += 1
