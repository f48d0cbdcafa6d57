"""One iteration of a schedule on this rank: its row's actions, one after the other."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import ArgumentError

from ..graph import Pipeline
from ..ir.schedule import Action, Channel, Kind, Schedule
from .data_parallel import LossShards, check_copies_of_loss, loss_shards_of
from .grad_sync import Copies, hear, is_of_a_connection, put_back, set_aside
from .p2p import Crossing, Crossings
from .stage import StageRun, Tensors
from .tied_params import Ties
from .timeline_gather import Measured, Moment, Passage


@dataclass(frozen=True)
class Step:
    """What one iteration gave on this rank.

    Attributes:
        losses: of each microbatch, where a stage of this rank gives one; else empty.
        loss: their weighted sum, None without them. seconds: from the first action to the last gradient.
        waited_seconds: what this rank waited for transfers, and for those who had yet to compute what they bring.
    """

    losses: tuple[float, ...]
    loss: float | None
    seconds: float
    waited_seconds: float


@dataclass(frozen=True)
class Parts:
    """What an engine holds on a rank; of pipelines and crossings the last ones are those of the last microbatch."""

    schedule: Schedule
    row: int
    stages: Mapping[int, StageRun]
    pipelines: tuple[Pipeline, ...]
    crossings: tuple[Crossings, ...]
    copies: tuple[Copies, ...]
    ties: Ties
    num_loss_shards: LossShards


class Iteration:
    """One rank's part of a step.

    Args:
        parts: what the engine holds. feed: by stage of this rank. weights: of each microbatch's loss in the total.
    """

    def __init__(self, parts: Parts, feed: Mapping[int, Sequence[Mapping[str, Any]]], weights: Sequence[float]) -> None:
        self.parts, self.feed, self.weights = parts, feed, weights
        self.schedule, self.pipeline, self.stages = parts.schedule, parts.pipelines[0], parts.stages
        self.under_way: dict[tuple[Channel, int], Crossing] = {}  # received, or handed on within this row
        self.sends: deque[Crossing] = deque()
        self.losses: dict[int, torch.Tensor] = {}
        self.gives_loss: dict[int, bool] = {}
        self.measured = Measured(parts.row)
        self.waited = 0.0
        self.doing: Action | None = None
        self.last_backward = {
            action.stage: action.microbatch for action in self.actions if action.kind in (Kind.B, Kind.I)
        }

    @property
    def actions(self) -> tuple[Action, ...]:
        """What this rank does, in order."""
        return self.schedule.rows[self.parts.row]

    def run(self) -> Step:
        """Do all of it."""
        begun = time.monotonic()
        summed = [parameter for copies in self.parts.copies for parameter in copies.parameters()]
        kept = set_aside([*summed, *self.parts.ties.parameters()])
        try:
            for copies in self.parts.copies:
                copies.begin(self.look)
            for action in self.actions:
                self.doing = action
                if action.kind.is_transfer:
                    self.move(action)
                else:
                    self.compute(action)
            self.doing = None
            for crossing in self.sends:
                crossing.wait()
            already: set[int] = set()
            for copies in self.parts.copies:
                copies.add_gradients(self.look, already)
            self.parts.ties.add_gradients()
            for passage in self.measured.passages:  # on a GPU a transfer that was waited for may still fail
                passage.crossing.synchronize()
        except Exception as error:
            if is_of_a_connection(error):
                hear(self.look)  # raises, if somebody knows better
            raise
        finally:
            put_back(kept)
            for copies in self.parts.copies:
                copies.end()
        num = self.schedule.num_microbatches
        losses = tuple(float(self.losses[m]) for m in range(num)) if self.losses else ()
        loss = sum(w * x for w, x in zip(self.weights, losses, strict=True)) if losses else None
        return Step(losses, loss, time.monotonic() - begun, self.waited)

    def look(self) -> None:
        """Raise what another rank told of."""
        for crossings in self.parts.crossings:
            crossings.look()
        for copies in self.parts.copies:
            copies.check()

    def is_last(self, microbatch: int) -> bool:
        """Whether it may be smaller than others."""
        return microbatch == self.schedule.num_microbatches - 1

    def crossings(self, microbatch: int) -> Crossings:
        """Those that move it."""
        return self.parts.crossings[-1 if self.is_last(microbatch) else 0]

    def move(self, action: Action) -> None:
        """Start one end of a transfer; wait for its end if it blocks."""
        begun = time.monotonic()
        channel, microbatch = action.channel, action.microbatch
        if action.kind.is_send:
            held = self.under_way.pop((channel, microbatch))
            tensors = held.wait()
            _check_unchanged(channel, tensors, held.versions)
            crossing = self.crossings(microbatch).send(channel, tensors)
            crossing.made_at = held.made_at
            crossing.keep(lambda: _check_unchanged(channel, tensors, held.versions))
            self.sends.append(crossing)
            while self.sends and self.sends[0].is_over():
                self.sends.popleft().wait()
        else:
            crossing = self.crossings(microbatch).recv(channel)
            self.under_way[channel, microbatch] = crossing
        self.measured.passages.append(Passage(channel, microbatch, action.kind.is_send, crossing))
        if action.blocks:
            crossing.wait()
            self.waited += time.monotonic() - begun
            self.measured.moments.append(Moment(action, begun, begun, time.monotonic()))

    def compute(self, action: Action) -> None:
        """Wait for what the computation needs, and do it."""
        stage, microbatch = action.stage, action.microbatch
        since = time.monotonic()
        if action.kind is Kind.W:
            begun = since
            self.stages[stage].finish(microbatch)
        elif action.kind is Kind.F:
            received = self.collect(stage, microbatch, is_forward=True)
            begun = time.monotonic()
            self.forward(stage, microbatch, received)
        else:
            received = self.collect(stage, microbatch, is_forward=False)
            begun = time.monotonic()
            weight = self.weights[microbatch] / loss_shards_of(stage, self.parts.num_loss_shards)
            is_last = self.last_backward[stage] == microbatch
            back = self.stages[stage].backward(microbatch, received, weight, is_last=is_last)
            self.hand_on(stage, microbatch, back, is_forward=False)
        self.waited += begun - since
        self.measured.moments.append(Moment(action, since, begun, time.monotonic()))

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensors]) -> None:
        """One forward, and what follows from it."""
        run = self.stages[stage]
        sent = run.forward(microbatch, received, self.feed[stage][microbatch])
        tensors = self.parts.pipelines[-1 if self.is_last(microbatch) else 0]
        expected = {edge.dst: edge.tensors for edge in tensors.edges if edge.src == stage}
        run.check_sizes(microbatch, sent, expected)
        loss = run.loss_of(microbatch)
        if self.gives_loss.setdefault(stage, loss is not None) != (loss is not None):
            raise ArgumentError(
                f"stage {stage} gives a loss for some microbatches and none for others; see {microbatch}"
            )
        if loss is not None:
            mesh = self.pipeline.stages[stage].mesh
            assert mesh is not None
            check_copies_of_loss(stage, run.module, self.parts.num_loss_shards, mesh.size)
            self.losses[microbatch] = self.losses.get(microbatch, 0.0) + loss
        self.hand_on(stage, microbatch, sent, is_forward=True)

    def collect(self, stage: int, microbatch: int, *, is_forward: bool) -> dict[int, Tensors]:
        """What a computation needs from each other stage."""
        others = self.pipeline.inputs[stage] if is_forward else self.pipeline.outputs[stage]
        return {other: self.under_way.pop((Channel(other, stage, is_forward), microbatch)).wait() for other in others}

    def hand_on(self, stage: int, microbatch: int, sent: Mapping[int, Tensors], *, is_forward: bool) -> None:
        """Keep what a computation made until it is sent; within a row it goes to the other stage at once."""
        now = time.monotonic()
        for other, tensors in sent.items():
            channel = Channel(stage, other, is_forward)
            versions = {name: array._version for name, array in tensors.items()}
            if self.schedule.row_of_stage[other] == self.parts.row:
                crossing = self.crossings(microbatch).send(channel, tensors)
                crossing.keep(functools.partial(_check_unchanged, channel, tensors, versions))
            else:
                crossing = Crossing(None, tensors)
                crossing.versions = versions
            crossing.made_at = now
            self.under_way[channel, microbatch] = crossing


def _check_unchanged(channel: Channel, tensors: Tensors, versions: Mapping[str, int]) -> None:
    for name, version in versions.items():
        if tensors[name]._version != version:
            raise ArgumentError(
                f"stage {channel.sender} changed {name!r} in place after it gave it to stage {channel.receiver}, which "
                "may have got either; return a copy"
            )
