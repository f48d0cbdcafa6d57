"""One iteration of a schedule on one rank: the actions of its row, in order."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import ArgumentError

from ..graph import Pipeline
from ..ir.schedule import Action, Channel, Kind, Schedule
from .data_parallel import LossShards, check_loss_replicas, loss_shards_of
from .grad_sync import ReplicaSync, is_connection_error, restore_gradients, stash_gradients, wait_for_root_cause
from .p2p import PendingTransfer, StageTransfers
from .stage import StageRun, Tensors
from .tied_params import TiedParameters
from .timeline_gather import ActionRecord, StepRecord, TransferRecord


@dataclass(frozen=True)
class Step:
    """The result of one iteration on one rank.

    Attributes:
        losses: loss of each microbatch; empty if no stage of this rank returns a loss.
        loss: weighted sum of ``losses``, or None. metrics: weighted sums over microbatches.
        seconds: from the first action to the last gradient sum.
        waited_seconds: time that this rank waited for transfers, including the computation of their data.
    """

    losses: tuple[float, ...]
    loss: float | None
    metrics: Mapping[str, float]
    seconds: float
    waited_seconds: float


@dataclass(frozen=True)
class Program:
    """A schedule with the transfers of this rank, for given tensor shapes.

    Attributes:
        schedule: the schedule.
        pipelines: pipelines that differ in tensor shapes only. transfers: the Movers of each.
        used: for each microbatch, the index of its pipeline.
    """

    schedule: Schedule
    pipelines: tuple[Pipeline, ...]
    transfers: tuple[StageTransfers, ...]
    used: tuple[int, ...]

    def close(self) -> None:
        """Close the Movers."""
        for each in self.transfers:
            each.close()


@dataclass(frozen=True)
class Parts:
    """What an engine holds on one rank, for all programs."""

    row: int
    stages: Mapping[int, StageRun]
    replicas: tuple[ReplicaSync, ...]
    ties: TiedParameters
    num_loss_shards: LossShards


@dataclass(frozen=True)
class StepInputs:
    """What an iteration computes on.

    Attributes:
        feed: ``{stage: [{name: tensor} per microbatch]}``.
        weights: weight of each microbatch's loss on this rank in the loss that the step returns.
        loss_grads: ``{stage: [gradient that the loss of each microbatch starts its backward with]}``; default: the
            weights over the number of replicas that see different data.
        train: run backwards and sum gradients; otherwise run forwards only.
        stash: keep all gradients of earlier steps apart until ``on_gradients`` returns, not only those summed over
            ranks.
        on_gradients: called with the gradients of this step only, once they are summed.
    """

    feed: Mapping[int, Sequence[Mapping[str, Any]]]
    weights: Sequence[float]
    loss_grads: Mapping[int, Sequence[float]] | None = None
    train: bool = True
    stash: bool = False
    on_gradients: Callable[[], None] | None = None


class Iteration:
    """One rank's part of a step.

    Args:
        parts: what the engine holds.
        program: what to run.
        inputs: what to compute on.
    """

    def __init__(self, parts: Parts, program: Program, inputs: StepInputs) -> None:
        self.parts, self.program, self.inputs = parts, program, inputs
        self.schedule, self.pipeline, self.stages = program.schedule, program.pipelines[0], parts.stages
        self.pending: dict[tuple[Channel, int], PendingTransfer] = {}  # receives posted, and outputs not yet sent
        self.sends: deque[PendingTransfer] = deque()
        self.losses: dict[int, torch.Tensor] = {}
        self.metrics: dict[int, dict[str, float]] = {}  # by microbatch
        self.has_loss: dict[int, bool] = {}  # by stage
        self.measured = StepRecord(parts.row)
        self.waited = 0.0
        self.doing: Action | None = None
        self.split = {(action.stage, action.microbatch) for action in self.actions if action.kind is Kind.W}
        self.last_backward = {
            action.stage: action.microbatch for action in self.actions if action.kind in (Kind.B, Kind.I)
        }

    @property
    def actions(self) -> tuple[Action, ...]:
        """Actions of this rank, in order. Without training, those of the forwards."""
        row = self.schedule.rows[self.parts.row]
        if self.inputs.train:
            return row
        return tuple(
            action
            for action in row
            if (action.channel.is_forward if action.kind.is_transfer else action.kind is Kind.F)
        )

    def run(self) -> Step:
        """Run the iteration."""
        begun = time.monotonic()
        summed = [parameter for replicas in self.parts.replicas for parameter in replicas.parameters()]
        summed += self.parts.ties.parameters()
        if self.inputs.stash:
            summed += [parameter for run in self.stages.values() for parameter in run.module.parameters()]
        stashed = stash_gradients(summed) if self.inputs.train else []
        try:
            for replicas in self.parts.replicas:
                replicas.begin(self.check_errors)
            for action in self.actions:
                self.doing = action
                if action.kind.is_transfer:
                    self.move(action)
                else:
                    self.compute(action)
            self.doing = None
            for transfer in self.sends:
                transfer.wait()
            if self.inputs.train:
                already: set[int] = set()
                for replicas in self.parts.replicas:
                    replicas.add_gradients(self.check_errors, already)
                self.parts.ties.add_gradients()
                if self.inputs.on_gradients is not None:
                    self.inputs.on_gradients()
            for record in self.measured.transfers:  # on a GPU, a transfer can fail after wait() has returned
                record.transfer.synchronize()
        except Exception as error:
            if is_connection_error(error):
                wait_for_root_cause(self.check_errors)  # raises the root cause, if another rank reports it
            raise
        finally:
            restore_gradients(stashed)
            for replicas in self.parts.replicas:
                replicas.end()
        num = self.schedule.num_microbatches
        losses = tuple(float(self.losses[m]) for m in range(num)) if self.losses else ()
        weights = self.inputs.weights
        loss = sum(w * x for w, x in zip(weights, losses, strict=True) if w) if losses else None
        metrics: dict[str, float] = {}
        for microbatch, values in self.metrics.items():
            for name, value in values.items():
                metrics[name] = metrics.get(name, 0.0) + (weights[microbatch] * value if weights[microbatch] else 0.0)
        return Step(losses, loss, metrics, time.monotonic() - begun, self.waited)

    def check_errors(self) -> None:
        """Raise an error that another rank reported, if any."""
        for transfers in self.program.transfers:
            transfers.check_errors()
        for replicas in self.parts.replicas:
            replicas.check_errors()

    def transfers(self, microbatch: int) -> StageTransfers:
        """The Movers for a microbatch."""
        return self.program.transfers[self.program.used[microbatch]]

    def move(self, action: Action) -> None:
        """Start one end of a transfer, and wait for the transfer if the action blocks."""
        begun = time.monotonic()
        channel, microbatch = action.channel, action.microbatch
        if action.kind.is_send:
            output = self.pending.pop((channel, microbatch))
            tensors = output.wait()
            _check_unchanged(channel, tensors, output.versions)
            transfer = self.transfers(microbatch).send(channel, tensors)
            transfer.computed_at = output.computed_at
            transfer.check_at_end(lambda: _check_unchanged(channel, tensors, output.versions))
            self.sends.append(transfer)
            while self.sends and self.sends[0].is_done():
                self.sends.popleft().wait()
        else:
            transfer = self.transfers(microbatch).recv(channel)
            self.pending[channel, microbatch] = transfer
        self.measured.transfers.append(TransferRecord(channel, microbatch, action.kind.is_send, transfer))
        if action.blocks:
            transfer.wait()
            self.waited += time.monotonic() - begun
            self.measured.actions.append(ActionRecord(action, begun, begun, time.monotonic()))

    def compute(self, action: Action) -> None:
        """Wait for the inputs of a computation, and do it."""
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
            if self.inputs.loss_grads is not None:
                weight = self.inputs.loss_grads[stage][microbatch]
            else:
                weight = self.inputs.weights[microbatch] / loss_shards_of(stage, self.parts.num_loss_shards)
            is_last = self.last_backward[stage] == microbatch
            back = self.stages[stage].backward(microbatch, received, weight, is_last=is_last)
            self.hand_on(stage, microbatch, back, is_forward=False)
        self.waited += begun - since
        self.measured.actions.append(ActionRecord(action, since, begun, time.monotonic()))

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensors]) -> None:
        """Run one forward, check its outputs, and pass them on."""
        run = self.stages[stage]
        train = self.inputs.train
        is_split = (stage, microbatch) in self.split
        sent = run.forward(microbatch, received, self.inputs.feed[stage][microbatch], train=train, is_split=is_split)
        tensors = self.program.pipelines[self.program.used[microbatch]]
        expected = {edge.dst: edge.tensors for edge in tensors.edges if edge.src == stage}
        run.check_sizes(microbatch, sent, expected)
        loss, metrics = run.loss_of(microbatch)
        if metrics:
            self.metrics.setdefault(microbatch, {}).update(metrics)
        if self.has_loss.setdefault(stage, loss is not None) != (loss is not None):
            raise ArgumentError(
                f"stage {stage} gives a loss for some microbatches and none for others, see microbatch {microbatch}"
            )
        if loss is not None:
            mesh = self.pipeline.stages[stage].mesh
            assert mesh is not None
            if self.inputs.loss_grads is None:
                check_loss_replicas(stage, run.module, self.parts.num_loss_shards, mesh.size)
            self.losses[microbatch] = self.losses.get(microbatch, 0.0) + loss
        if not train:
            run.drop(microbatch)
        self.hand_on(stage, microbatch, sent, is_forward=True)

    def collect(self, stage: int, microbatch: int, *, is_forward: bool) -> dict[int, Tensors]:
        """Wait for the inputs of a computation, by stage that sends them."""
        others = self.pipeline.inputs[stage] if is_forward else self.pipeline.outputs[stage]
        return {other: self.pending.pop((Channel(other, stage, is_forward), microbatch)).wait() for other in others}

    def hand_on(self, stage: int, microbatch: int, sent: Mapping[int, Tensors], *, is_forward: bool) -> None:
        """Keep the outputs of a computation until they are sent. Within a row, pass them on at once."""
        now = time.monotonic()
        for other, tensors in sent.items():
            channel = Channel(stage, other, is_forward)
            versions = {name: array._version for name, array in tensors.items()}
            if self.schedule.row_of_stage[other] == self.parts.row:
                transfer = self.transfers(microbatch).send(channel, tensors)
                transfer.check_at_end(functools.partial(_check_unchanged, channel, tensors, versions))
            else:
                transfer = PendingTransfer(None, tensors)
                transfer.versions = versions
            transfer.computed_at = now
            self.pending[channel, microbatch] = transfer


def _check_unchanged(channel: Channel, tensors: Tensors, versions: Mapping[str, int]) -> None:
    for name, version in versions.items():
        if tensors[name]._version != version:
            raise ArgumentError(
                f"stage {channel.sender} changed {name!r} in place after returning it, so stage {channel.receiver} may "
                "have received either value; return a copy"
            )
