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
from .data_parallel import LossShards, check_loss_replicas, loss_shards_of
from .grad_sync import ReplicaSync, hear, is_of_a_connection, put_back, set_aside
from .p2p import StageTransfer, StageTransfers
from .stage import StageRun, Tensors
from .tied_params import TiedParameters
from .timeline_gather import Moment, StepRecord, TransferRecord


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
    """What an engine holds on a rank; of pipelines and transfers the last ones are those of the last microbatch."""

    schedule: Schedule
    row: int
    stages: Mapping[int, StageRun]
    pipelines: tuple[Pipeline, ...]
    transfers: tuple[StageTransfers, ...]
    replicas: tuple[ReplicaSync, ...]
    ties: TiedParameters
    num_loss_shards: LossShards


class Iteration:
    """One rank's part of a step.

    Args:
        parts: what the engine holds. feed: by stage of this rank. weights: of each microbatch's loss in the total.
    """

    def __init__(self, parts: Parts, feed: Mapping[int, Sequence[Mapping[str, Any]]], weights: Sequence[float]) -> None:
        self.parts, self.feed, self.weights = parts, feed, weights
        self.schedule, self.pipeline, self.stages = parts.schedule, parts.pipelines[0], parts.stages
        self.under_way: dict[tuple[Channel, int], StageTransfer] = {}  # received, or handed on within this row
        self.sends: deque[StageTransfer] = deque()
        self.losses: dict[int, torch.Tensor] = {}
        self.gives_loss: dict[int, bool] = {}
        self.measured = StepRecord(parts.row)
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
        summed = [parameter for replicas in self.parts.replicas for parameter in replicas.parameters()]
        kept = set_aside([*summed, *self.parts.ties.parameters()])
        try:
            for replicas in self.parts.replicas:
                replicas.begin(self.look)
            for action in self.actions:
                self.doing = action
                if action.kind.is_transfer:
                    self.move(action)
                else:
                    self.compute(action)
            self.doing = None
            for transfer in self.sends:
                transfer.wait()
            already: set[int] = set()
            for replicas in self.parts.replicas:
                replicas.add_gradients(self.look, already)
            self.parts.ties.add_gradients()
            for passage in self.measured.passages:  # on a GPU a transfer that was waited for may still fail
                passage.transfer.synchronize()
        except Exception as error:
            if is_of_a_connection(error):
                hear(self.look)  # raises, if somebody knows better
            raise
        finally:
            put_back(kept)
            for replicas in self.parts.replicas:
                replicas.end()
        num = self.schedule.num_microbatches
        losses = tuple(float(self.losses[m]) for m in range(num)) if self.losses else ()
        loss = sum(w * x for w, x in zip(self.weights, losses, strict=True)) if losses else None
        return Step(losses, loss, time.monotonic() - begun, self.waited)

    def look(self) -> None:
        """Raise what another rank told of."""
        for transfers in self.parts.transfers:
            transfers.look()
        for replicas in self.parts.replicas:
            replicas.check()

    def is_last(self, microbatch: int) -> bool:
        """Whether it may be smaller than others."""
        return microbatch == self.schedule.num_microbatches - 1

    def transfers(self, microbatch: int) -> StageTransfers:
        """Those that move it."""
        return self.parts.transfers[-1 if self.is_last(microbatch) else 0]

    def move(self, action: Action) -> None:
        """Start one end of a transfer; wait for its end if it blocks."""
        begun = time.monotonic()
        channel, microbatch = action.channel, action.microbatch
        if action.kind.is_send:
            held = self.under_way.pop((channel, microbatch))
            tensors = held.wait()
            _check_unchanged(channel, tensors, held.versions)
            transfer = self.transfers(microbatch).send(channel, tensors)
            transfer.made_at = held.made_at
            transfer.keep(lambda: _check_unchanged(channel, tensors, held.versions))
            self.sends.append(transfer)
            while self.sends and self.sends[0].is_over():
                self.sends.popleft().wait()
        else:
            transfer = self.transfers(microbatch).recv(channel)
            self.under_way[channel, microbatch] = transfer
        self.measured.passages.append(TransferRecord(channel, microbatch, action.kind.is_send, transfer))
        if action.blocks:
            transfer.wait()
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
            check_loss_replicas(stage, run.module, self.parts.num_loss_shards, mesh.size)
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
                transfer = self.transfers(microbatch).send(channel, tensors)
                transfer.keep(functools.partial(_check_unchanged, channel, tensors, versions))
            else:
                transfer = StageTransfer(None, tensors)
                transfer.versions = versions
            transfer.made_at = now
            self.under_way[channel, microbatch] = transfer


def _check_unchanged(channel: Channel, tensors: Tensors, versions: Mapping[str, int]) -> None:
    for name, version in versions.items():
        if tensors[name]._version != version:
            raise ArgumentError(
                f"stage {channel.sender} changed {name!r} in place after it gave it to stage {channel.receiver}, which "
                "may have got either; return a copy"
            )
