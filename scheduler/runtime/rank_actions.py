"""A rank's actions of a schedule, each with what does not change from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir.actions import Action, Kind, StageChannel
from ..ir.schedule import Schedule
from ..pipeline import Pipeline
from .p2p import StageTransfers
from .stage import SentShards, StageRun


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """One end of a channel for one microbatch.

    Attributes:
        other: the stage at the other end.
        channel: the channel.
        slot: number of the channel and the microbatch in this schedule.
        is_local: whether the other stage is on the same pp rank.
    """

    other: int
    channel: StageChannel
    slot: int
    is_local: bool


@dataclass(frozen=True, slots=True)
class Transfer:
    """An action that starts one end of a transfer.

    Attributes:
        action: the action.
        is_send: whether this end sends.
        channel, slot: see :class:`ChannelEnd`.
        transfers: the Movers for the microbatch.
    """

    action: Action
    is_send: bool
    channel: StageChannel
    slot: int
    transfers: StageTransfers


@dataclass(frozen=True, slots=True)
class Computation:
    """An action that computes.

    Attributes:
        action: the action.
        run: its stage.
        inputs, outputs: ends of channels, from which its inputs come and to which its outputs go.
        sent: the local shards that the edges of a forward expect.
        transfers: the Movers for the microbatch.
        is_split: whether the backward of the microbatch has two passes.
        is_last: whether it is the last backward of the stage.
    """

    action: Action
    run: StageRun
    inputs: tuple[ChannelEnd, ...]
    outputs: tuple[ChannelEnd, ...]
    sent: SentShards
    transfers: StageTransfers
    is_split: bool
    is_last: bool


RankActions = tuple[Transfer | Computation, ...]


def compile_actions(
    schedule: Schedule,
    pipelines: Sequence[Pipeline],
    transfers: Sequence[StageTransfers],
    pipeline_of: Sequence[int],
    rank: int,
    pp_rank: int,
    stages: Mapping[int, StageRun],
) -> RankActions:
    """The actions of a pp rank, in order.

    Args:
        pipelines, transfers, pipeline_of: see :class:`reshard.scheduler.runtime.step_executor.StepProgram`.
        rank, pp_rank: this rank, and its pp rank.
        stages: its stages.
    """
    actions = schedule.rank_actions[pp_rank]
    split = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.W}
    last = {action.stage: action.microbatch for action in actions if action.kind in (Kind.B, Kind.I)}
    sent = {
        (index, stage): SentShards.of(pipeline, stage, rank)
        for index, pipeline in enumerate(pipelines)
        for stage in stages
    }
    slots: dict[tuple[StageChannel, int], int] = {}

    def slot_of(channel: StageChannel, microbatch: int) -> int:
        return slots.setdefault((channel, microbatch), len(slots))

    def channel_ends(
        action: Action, others: Sequence[int], *, is_forward: bool, is_input: bool
    ) -> tuple[ChannelEnd, ...]:
        ends_of_channels = []
        for other in others:
            ends = (other, action.stage) if is_input else (action.stage, other)
            channel = StageChannel(*ends, is_forward)
            is_local = schedule.pp_rank_of_stage[other] == pp_rank
            ends_of_channels.append(ChannelEnd(other, channel, slot_of(channel, action.microbatch), is_local))
        return tuple(ends_of_channels)

    def compile_action(action: Action) -> Transfer | Computation:
        stage, microbatch = action.stage, action.microbatch
        movers = transfers[pipeline_of[microbatch]]
        if action.kind.is_transfer:
            channel = action.channel
            return Transfer(action, action.kind.is_send, channel, slot_of(channel, microbatch), movers)
        inputs: tuple[ChannelEnd, ...] = ()
        outputs: tuple[ChannelEnd, ...] = ()
        if action.kind is not Kind.W:
            forward = action.kind is Kind.F
            earlier, later = pipelines[0].inputs[stage], pipelines[0].outputs[stage]
            sources, targets = (earlier, later) if forward else (later, earlier)
            inputs = channel_ends(action, sources, is_forward=forward, is_input=True)
            outputs = channel_ends(action, targets, is_forward=forward, is_input=False)
        return Computation(
            action,
            stages[stage],
            inputs,
            outputs,
            sent[pipeline_of[microbatch], stage],
            movers,
            (stage, microbatch) in split,
            last.get(stage) == microbatch,
        )

    return tuple(map(compile_action, actions))


def only_forwards(actions: RankActions) -> RankActions:
    """The forwards and their transfers, without those of the backward."""
    return tuple(
        item
        for item in actions
        if (item.channel.is_forward if isinstance(item, Transfer) else item.action.kind is Kind.F)
    )


def find_sum_places(actions: RankActions) -> dict[int, int]:
    """``{stage: index}`` of the computation before which the sum of its gradients can start.

    This is the first computation after the last computation of the stage. So the tensors of that last computation are
    sent first. A stage has no entry if the rank computes nothing after it.
    """
    computed = [(index, item.action.stage) for index, item in enumerate(actions) if isinstance(item, Computation)]
    last = {stage: number for number, (_, stage) in enumerate(computed)}
    return {stage: computed[number + 1][0] for stage, number in last.items() if number + 1 < len(computed)}
