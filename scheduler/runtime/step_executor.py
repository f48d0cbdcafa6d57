"""One iteration of a schedule on one rank: the actions of its pp rank, in order."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reshard.errors import ArgumentError
from reshard.gradients.declared_sums import declared_sums
from reshard.runtime.cuda.stream import STREAMS

from ..gradients.data_parallel import (
    LossShards,
    align_gradients,
    check_loss_replicas,
    loss_shards_of,
    reshard_parameters,
)
from ..gradients.replica_sync import ReplicaSync, restore_gradients, stash_gradients
from ..gradients.tied_params import TiedParameters
from ..ir.actions import Action, Kind
from ..ir.schedule import Schedule
from ..pipeline import Pipeline
from .gradient_passes import GradientPasses
from .observe import StepRecord, TransferRecord, find_observer
from .p2p import PendingTransfer, StageTransfers
from .rank_actions import Computation, RankActions, Transfer, compile_actions, find_sum_places, only_forwards
from .ready_order import ArrivalWait, NextComputation, ReadyPlan, ReadyQueue, RecvWindows
from .stage import StageRun, Tensors
from .warm_up import warm_up

_UNWATCHED = contextlib.nullcontext()


@dataclass
class StageTotals:
    """Weighted sums over the microbatches of one stage on this rank.

    Attributes:
        loss: None if the stage has no loss.
        metrics: ``{name: sum}``.
        weight: the sum of the weights.
    """

    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0

    def add(self, weight: float, loss: float | None, metrics: Mapping[str, float]) -> None:
        """Add a microbatch. A microbatch of weight 0 changes no sum, even if its loss is not finite."""
        self.weight += weight
        if loss is not None:
            self.loss = (self.loss or 0.0) + (weight * loss if weight else 0.0)
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + (weight * value if weight else 0.0)


@dataclass(frozen=True)
class RankStepResult:
    """The result of one iteration on one rank.

    Attributes:
        losses: loss of each microbatch; empty if no stage of this rank returns a loss.
        loss: weighted sum of ``losses``, None if they are empty.
        metrics: ``{name: weighted sum over microbatches}``.
        totals: the same sums for each stage of this rank.
        seconds: from the first action to the last gradient sum.
        waited_seconds: time that this rank waited for transfers, including the time that senders computed the data.
    """

    losses: tuple[float, ...]
    loss: float | None
    metrics: Mapping[str, float]
    totals: Mapping[int, StageTotals]
    seconds: float
    waited_seconds: float


@dataclass(frozen=True)
class StepProgram:
    """A schedule with the transfers of this rank, for given tensor shapes.

    Attributes:
        schedule: the schedule.
        pipelines: pipelines that differ in tensor shapes only.
        transfers: the Movers of each pipeline.
        pipeline_of: for each microbatch, the index of its pipeline in ``pipelines``.
        actions: actions of this rank.
        forwards: actions of a step without training.
        sum_places: ``{stage: index of an action}``. The all-reduce of the stage's gradients over its replicas starts
            before this action. A stage is absent if this rank computes nothing after it.
        ready: plan of a step in ready order, which computes what has arrived. None: the step does the ``actions`` in
            order.
    """

    schedule: Schedule
    pipelines: tuple[Pipeline, ...]
    transfers: tuple[StageTransfers, ...]
    pipeline_of: tuple[int, ...]
    actions: RankActions
    forwards: RankActions
    sum_places: Mapping[int, int]
    ready: ReadyPlan | None = None

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        pipelines: Sequence[Pipeline],
        transfers: Sequence[StageTransfers],
        pipeline_of: Sequence[int],
        rank: int,
        pp_rank: int,
        stages: Mapping[int, StageRun],
    ) -> StepProgram:
        """The program of a rank. ``rank``, ``pp_rank`` and ``stages``: see :class:`EngineState`."""
        actions = compile_actions(schedule, pipelines, transfers, pipeline_of, rank, pp_rank, stages)
        parts = tuple(pipelines), tuple(transfers), tuple(pipeline_of)
        return cls(schedule, *parts, actions, only_forwards(actions), find_sum_places(actions))

    def in_ready_order(self) -> StepProgram:
        """Return a copy whose steps with training compute what has arrived."""
        return replace(self, ready=ReadyPlan.of(self.actions, self.schedule, self.pipelines[0]))

    def close(self) -> None:
        """Close the Movers."""
        for transfer in self.transfers:
            transfer.close()


@dataclass(frozen=True)
class EngineState:
    """State of an engine on one rank, shared by all programs.

    Attributes:
        rank, pp_rank: this rank, and its pp rank in each schedule.
        stages: the stages of this rank, by number.
        replicas: one for each of these stages under DDP.
        ties: parameters that several stages share.
        num_loss_shards: number of replicas that see different data, for all stages or ``{stage: number}``.
        device: type of the device of the stages.
        passes: the gradients that passes of these stages change.
    """

    rank: int
    pp_rank: int
    stages: Mapping[int, StageRun]
    replicas: tuple[ReplicaSync, ...]
    ties: TiedParameters
    num_loss_shards: LossShards
    device: str
    passes: GradientPasses


@dataclass(frozen=True)
class StepInputs:
    """Inputs and settings of one iteration on one rank.

    Attributes:
        feed: ``{stage: [{name: tensor} per microbatch]}``, inputs that no edge brings.
        weights: weight of each microbatch on this rank.
        scale: factor for the weight of the loss in each backward; modules may then return a weight. None: the factor is
            1 / (number of replicas that see different data), and modules must return no weight.
        train: whether to run backwards and sum gradients, and not forwards only.
        fillers: each ``(stage, microbatch)`` of which this replica has no samples. The stage runs on one sample that
            does not count.
    """

    feed: Mapping[int, Sequence[Mapping[str, Any]]]
    weights: Sequence[float]
    scale: float | None = None
    train: bool = True
    fillers: Collection[tuple[int, int]] = ()


class RankStep:
    """One rank's part of a step.

    Args:
        state: what the engine holds on this rank.
        program: the schedule and the transfers to run.
        inputs: the data of this step.
    """

    def __init__(self, state: EngineState, program: StepProgram, inputs: StepInputs) -> None:
        self.state, self.program, self.inputs = state, program, inputs
        self.schedule, self.pipeline, self.stages = program.schedule, program.pipelines[0], state.stages
        self.actions = program.actions if inputs.train else program.forwards
        self.pending: dict[int, PendingTransfer] = {}  # by slot: posted receives, and outputs not yet sent
        self.sends: deque[PendingTransfer] = deque()
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: list[tuple[int, float, torch.Tensor | None, Mapping[str, float]]] = []
        self.weights: dict[tuple[int, int], float] = {}  # by stage and microbatch, until the backward
        self.has_loss: dict[int, bool] = {}  # by stage
        self.measured = StepRecord(state.pp_rank, state.device)
        self.observe = find_observer(state.rank)
        self.doing: Action | None = None

    def run(self) -> RankStepResult:
        """Run the iteration. Raises what a module raises, or a ReshardError if another rank failed."""
        begun = time.monotonic()
        to_sum = [parameter for replicas in self.state.replicas for parameter in replicas.parameters()]
        to_sum += self.state.ties.parameters()
        to_sum += [parameter for run in self.stages.values() for _, parameter, _ in declared_sums(run.module)]
        stashed = stash_gradients(to_sum) if self.inputs.train else []
        try:
            self.warm_up()
            places = self.find_places_of_sums()
            for replicas in self.state.replicas:
                replicas.begin(self.check_errors, places.get(replicas.stage))
            for run in self.stages.values():
                run.begin()
            if self.inputs.train and self.program.ready is not None:
                self.run_ready(self.program.ready)
            else:  # without training, there are only forwards, which keep their order
                self.run_planned(places)
            self.doing = None
            for transfer in reversed(self.sends):  # one wait for the last of a channel ends the others too
                transfer.wait()
            for run in self.stages.values():
                if self.inputs.train:
                    align_gradients(run.module)
                else:
                    reshard_parameters(run.module)
            if self.inputs.train:
                self.finish_sums(places)
                for run in self.stages.values():
                    run.sum_declared_gradients()
                self.state.ties.add_gradients()
            if self.state.device in STREAMS:  # a transfer can fail after wait() has returned
                for record in self.measured.transfers:
                    record.transfer.synchronize()
            self.measured.finish()
        finally:
            restore_gradients(stashed)
            for replicas in self.state.replicas:
                replicas.end()
        num = self.schedule.num_microbatches
        losses = tuple(float(self.losses.get(m, math.nan)) for m in range(num)) if self.losses else ()
        weights = self.inputs.weights
        loss = sum(w * x for w, x in zip(weights, losses, strict=True) if w) if losses else None
        totals = {stage: StageTotals() for stage in self.stages}
        metrics: dict[str, float] = {}
        for stage, weight, stage_loss, values in self.outputs:
            totals[stage].add(weight, None if stage_loss is None else float(stage_loss), values)
            for name, value in values.items():
                metrics[name] = metrics.get(name, 0.0) + (weight * value if weight else 0.0)
        return RankStepResult(losses, loss, metrics, totals, time.monotonic() - begun, self.measured.waited_seconds)

    def find_places_of_sums(self) -> dict[int, int]:
        """``{stage: index}`` of the actions before which sums of gradients over replicas start in this step.

        Only stages that train have an entry, and only if their gradients are complete at that point. Two conditions
        ensure this: no other stage of this rank shares a parameter with the stage, and no parameter is a DTensor. The
        gradient of a DTensor gets its placements after the last action.
        """
        places = self.program.sum_places
        if not self.inputs.train or self.program.ready is not None:
            return {}
        if not any(replicas.stage in places for replicas in self.state.replicas):
            return {}
        used = Counter(id(parameter) for run in self.stages.values() for parameter in run.module.parameters())
        own = {replicas.stage: replicas.parameters() for replicas in self.state.replicas if replicas.stage in places}
        return {
            stage: places[stage]
            for stage, parameters in own.items()
            if any(item.requires_grad for item in parameters)
            and all(used[id(item)] == 1 and not hasattr(item, "placements") for item in parameters)
        }

    def start_sum(self, stage: int) -> None:
        """Start to sum the gradients of a stage over replicas, while this rank goes on."""
        self.doing = None
        (replicas,) = (item for item in self.state.replicas if item.stage == stage)
        with self.observe("start to sum gradients of", stage, None):
            replicas.start_sum(self.check_errors, replicas.parameters())

    def finish_sums(self, started: Collection[int]) -> None:
        """Sum gradients over replicas. Wait for the sums of the ``started`` stages."""
        summed: set[int] = set()
        for replicas in self.state.replicas:
            with self.observe("sum gradients of", replicas.stage, None):
                if replicas.stage in started:
                    replicas.finish_sum(self.check_errors)
                else:
                    parameters = [item for item in replicas.parameters() if id(item) not in summed]
                    summed.update(map(id, parameters))
                    replicas.add_gradients(self.check_errors, parameters)

    def run_planned(self, places_of_sums: Mapping[int, int]) -> None:
        """Do the actions in planned order, and start sums of gradients at their places."""
        stage_at = {place: stage for stage, place in places_of_sums.items()}
        for index, item in enumerate(self.actions):
            if index in stage_at:
                self.start_sum(stage_at[index])
            self.doing = item.action
            if isinstance(item, Transfer):
                self.move(item)
            else:
                self.compute(item, self.measured.clock.now())

    def run_ready(self, plan: ReadyPlan) -> None:
        """Do each computation once its inputs have arrived, and then its sends."""
        passes, pending, arrivals = self.state.passes, self.pending, ArrivalWait()
        passes.begin()
        windows = RecvWindows(plan.recvs, self.move)
        queue = ReadyQueue(
            plan,
            is_posted=lambda end: end.slot in pending,
            has_arrived=lambda end: pending[end.slot].has_arrived(),
            may_move=passes.may_move,
            wait=lambda ends: arrivals.wait([pending[end.slot] for end in ends]),
        )
        since = self.measured.clock.now()
        for turn in queue:
            item = plan.computations[turn.place]
            self.doing = item.action
            self.compute(item, since, turn)
            for send in plan.sends[turn.place]:
                self.move(send)
            for end in item.inputs:
                if not end.is_local:
                    windows.take(end.channel)
            since = self.measured.clock.now()

    def warm_up(self) -> None:
        """On a GPU, run each stage once for each shape of its tensors, before their first transfer."""
        for index, (pipeline, transfers) in enumerate(zip(self.program.pipelines, self.program.transfers, strict=True)):
            if transfers.must_warm_up:
                transfers.must_warm_up = False
                for run in self.stages.values():
                    fed = self.inputs.feed[run.stage]
                    usual = [m for m, number in enumerate(self.program.pipeline_of) if number == index]
                    usual = [m for m in usual if (run.stage, m) not in self.inputs.fillers]
                    if usual:
                        warm_up(run, pipeline, fed[usual[0]], self.state.rank, self.inputs.train)

    def check_errors(self) -> None:
        """Raise an error that another rank reported, if any."""
        for transfers in self.program.transfers:
            transfers.check_errors()
        for replicas in self.state.replicas:
            replicas.check_errors()

    def move(self, item: Transfer) -> None:
        """Start this rank's part of a transfer, and wait for the transfer if the action blocks."""
        begun = self.measured.clock.now()
        action, channel, microbatch = item.action, item.channel, item.action.microbatch
        if item.is_send:
            transfer = self.pending.pop(item.slot)
            with self.observe("send over", channel, microbatch):
                item.transfers.send(transfer)
            self.sends.append(transfer)
            while self.sends and self.sends[0].is_done():
                self.sends.popleft().take()
        else:
            with self.observe("receive over", channel, microbatch):
                transfer = item.transfers.recv(channel)
            self.pending[item.slot] = transfer
        self.measured.transfers.append(TransferRecord(channel, microbatch, item.is_send, transfer))
        if action.blocks:
            with self.observe("wait for", channel, microbatch):
                transfer.wait()
            self.measured.note(action, begun, begun)

    def compute(self, item: Computation, since: Any, turn: NextComputation | None = None) -> None:
        """Wait for the inputs of a computation, then run it.

        Args:
            item: the computation.
            since: the moment from which this rank has waited for its inputs.
            turn: its place in the plan, if it may depart from the plan.
        """
        action, run, now = item.action, item.run, self.measured.clock.now
        stage, microbatch = action.stage, action.microbatch
        watched = _UNWATCHED if turn is None else self.state.passes.watch(action, turn.is_moved)
        if action.kind is Kind.W:
            begun = now()
            with self.observe("weight gradients of", stage, microbatch), watched:
                run.finish(microbatch)
        elif action.kind is Kind.F:
            received = self.collect(item)
            begun = now()
            with self.observe("forward of", stage, microbatch):
                self.forward(item, received)
        else:
            received = self.collect(item)
            begun = now()
            weight, scale = self.weights.pop((stage, microbatch), 0.0), self.inputs.scale
            weight = weight / loss_shards_of(stage, self.state.num_loss_shards) if scale is None else weight * scale
            what = "backward of" if action.kind is Kind.B else "input gradients of"
            with self.observe(what, stage, microbatch), watched:
                gradients = run.backward(microbatch, received, weight, is_last=item.is_last)
            self.pass_on(item, gradients)
        self.measured.note(action, since, begun)

    def forward(self, item: Computation, received: Mapping[int, Tensors]) -> None:
        """Run one forward, check its outputs, and pass them on."""
        run, stage, microbatch = item.run, item.action.stage, item.action.microbatch
        train, is_split = self.inputs.train, item.is_split
        if self.is_empty(item):
            sent = run.skip(microbatch, received, item.sent.tensors, is_split=is_split)
        else:
            fillers = item.sent.tensors if (stage, microbatch) in self.inputs.fillers else None
            fed = self.inputs.feed[stage][microbatch]
            sent = run.forward(microbatch, received, fed, train=train, is_split=is_split, without_samples=fillers)
            self.take_loss(stage, microbatch)
        run.check_sizes(microbatch, sent, item.sent)
        if not train:
            run.drop(microbatch)
        self.pass_on(item, sent)

    def is_empty(self, item: Computation) -> bool:
        """Whether this replica has no samples of a microbatch, and need not run for collectives of FSDP."""
        if self.inputs.scale is None or self.inputs.weights[item.action.microbatch]:
            return False
        return item.sent.are_empty and not item.run.is_fsdp

    def take_loss(self, stage: int, microbatch: int) -> None:
        """Keep the loss and the metrics of a forward. Raises ArgumentError if a loss is missing or a weight unused."""
        run = self.stages[stage]
        loss, metrics, given = run.loss_of(microbatch)
        if given is not None and self.inputs.scale is None:
            raise ArgumentError(
                f"stage {stage} gives its loss a weight, which a ScheduleEngine does not use; pass loss_weights to step"
            )
        if given is None or (stage, microbatch) in self.inputs.fillers:
            given = self.inputs.weights[microbatch]
        weight = self.weights[stage, microbatch] = given
        self.outputs.append((stage, weight, loss, metrics))
        is_first = stage not in self.has_loss
        if self.has_loss.setdefault(stage, loss is not None) != (loss is not None):
            raise ArgumentError(
                f"stage {stage} gives a loss for some microbatches and none for others, see microbatch {microbatch}"
            )
        if loss is not None:
            mesh = self.pipeline.stages[stage].mesh
            assert mesh is not None
            if self.inputs.scale is None and is_first:
                check_loss_replicas(stage, run.module, self.state.num_loss_shards, mesh.size)
            earlier = self.losses.get(microbatch)
            self.losses[microbatch] = loss if earlier is None else earlier + loss

    def collect(self, item: Computation) -> dict[int, Tensors]:
        """Wait for the inputs of a computation, and return them by the stage that sends them."""
        inputs = {}
        for end in item.inputs:
            transfer = self.pending.pop(end.slot)
            with self.observe("wait for", end.channel, item.action.microbatch):
                inputs[end.other] = transfer.take()
        return inputs

    def pass_on(self, item: Computation, sent: Mapping[int, Tensors]) -> None:
        """Keep the outputs of a computation until they are sent. Pass them at once to stages of the same pp rank."""
        now = self.measured.clock.now()
        for end in item.outputs:
            transfer = self.pending[end.slot] = PendingTransfer(end.channel, sent[end.other], now)
            if end.is_local:
                item.transfers.send(transfer)
