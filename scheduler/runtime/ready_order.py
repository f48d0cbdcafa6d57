"""Compute what has arrived: with ``order="ready"``, the planned order of a rank's computations is a preference.

A rank takes the first computation of its plan whose inputs have arrived. No result depends on the times of messages,
because these computations keep their order in the plan:

* all forwards, which may draw random numbers and change buffers;
* the backwards of a stage, and its weight-gradient passes, which add to the same gradients;
* a weight-gradient pass and other passes of its stage, unless they are known to add to different gradients;
* computations of stages that share a parameter.

So both ends of a channel know the order of its messages. A computation moves ahead only if all that the plan has before
it can then follow in planned order within the plan's peak of memory.

No deadlock: take the computation that comes first in a valid order of all pp ranks and has not run. Everything before
it in the plan has run. So it is the next computation of its kind, its inputs have been sent, their receives are posted,
and there is memory for it. Its rank computes something else at the moment, or takes it at once.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ..ir.actions import Action, Kind, StageChannel
from ..ir.communication import RECVS_AHEAD
from ..ir.schedule import Schedule, in_flight_change
from ..pipeline import Pipeline
from .p2p import PendingTransfer
from .rank_actions import ChannelEnd, Computation, RankActions, Transfer

#: ``"planned"``: compute in the order of the schedule; ``"ready"``: compute what has arrived.
OrderMode = Literal["planned", "ready"]
ORDERS: tuple[OrderMode, ...] = ("planned", "ready")

#: Intervals of polling: of transfers whose end does not wake the rank, and of all other transfers.
_POLL_SECONDS, _CHECK_SECONDS = 0.0005, 0.2


@dataclass(frozen=True)
class ComputationQueue:
    """Computations of a rank that keep their order.

    Attributes:
        indices: their places in the plan.
        backwards: for weight-gradient passes, the number of the queue of backwards of the same stages; else None.
    """

    indices: tuple[int, ...]
    backwards: int | None = None


@dataclass(frozen=True)
class RecvOrder:
    """The receives of a channel.

    Attributes:
        transfers: in the order in which the sender computes the data.
        needed: for each computation that takes a message, in order, how many receives must be posted before it.
    """

    transfers: tuple[Transfer, ...]
    needed: tuple[int, ...]


@dataclass(frozen=True)
class ReadyPlan:
    """The computations of a rank in planned order, and what limits another order.

    Attributes:
        computations: the computations.
        changes: by how much each changes the memory in use: bytes of activations, or microbatches in flight if the
            pipeline gives no bytes.
        limit: the largest memory in use in planned order.
        queues: each computation is in one of them.
        recvs: for each channel on which the rank receives.
        sends: for each computation, the sends of what it computes.
        shared: stages of this rank that share a parameter with another one.
    """

    computations: tuple[Computation, ...]
    changes: tuple[float, ...]
    limit: float
    queues: tuple[ComputationQueue, ...]
    recvs: Mapping[StageChannel, RecvOrder]
    sends: tuple[tuple[Transfer, ...], ...]
    shared: frozenset[int]

    @classmethod
    def of(cls, actions: RankActions, schedule: Schedule, pipeline: Pipeline) -> ReadyPlan:
        """The plan of the rank that has these actions of the schedule."""
        computations = tuple(item for item in actions if isinstance(item, Computation))
        transfers = [item for item in actions if isinstance(item, Transfer)]
        sends = {(item.channel, item.action.microbatch): _unblocked(item) for item in transfers if item.is_send}
        sizes = [stage.activation_bytes for stage in pipeline.stages]
        if not any(sizes):
            sizes = [1] * len(sizes)
        changes = tuple(in_flight_change(item.action.kind) * sizes[item.action.stage] for item in computations)
        now = limit = 0.0
        for change in changes:
            now += change
            limit = max(limit, now)
        groups = _group_by_parameters(computations)
        return cls(
            computations,
            changes,
            limit,
            _make_queues(computations, groups),
            _order_recvs(computations, transfers, schedule),
            tuple(
                tuple(sends[end.channel, item.action.microbatch] for end in item.outputs if not end.is_local)
                for item in computations
            ),
            frozenset(stage for stage, group in groups.items() if [*groups.values()].count(group) > 1),
        )


def _unblocked(item: Transfer) -> Transfer:
    return replace(item, action=replace(item.action, blocks=False))


def _group_by_parameters(computations: Sequence[Computation]) -> dict[int, int]:
    """``{stage: the first of the stages that share parameters with it, or itself}``."""
    runs = {item.action.stage: item.run for item in computations}
    groups = {stage: stage for stage in sorted(runs)}
    first: dict[int, int] = {}  # by the id of a parameter, the first stage that has it
    for stage, run in sorted(runs.items()):
        for parameter in run.module.parameters():
            one, other = groups[stage], groups[first.setdefault(id(parameter), stage)]
            groups = {key: min(one, other) if group in (one, other) else group for key, group in groups.items()}
    return groups


def _make_queues(computations: Sequence[Computation], groups: Mapping[int, int]) -> tuple[ComputationQueue, ...]:
    members: dict[tuple[Kind, int], list[int]] = {}
    for index, item in enumerate(computations):
        kind, group = item.action.kind, groups[item.action.stage]
        key = (Kind.F, -1) if kind is Kind.F else (Kind.W if kind is Kind.W else Kind.B, group)
        members.setdefault(key, []).append(index)
    numbers = {key: number for number, key in enumerate(members)}
    return tuple(
        ComputationQueue(tuple(indices), numbers[Kind.B, group] if kind is Kind.W else None)
        for (kind, group), indices in members.items()
    )


def _order_recvs(
    computations: Sequence[Computation], transfers: Sequence[Transfer], schedule: Schedule
) -> dict[StageChannel, RecvOrder]:
    recvs = {(item.channel, item.action.microbatch): _unblocked(item) for item in transfers if not item.is_send}
    taken: dict[StageChannel, list[int]] = {}  # microbatches, in the order in which this rank takes them
    for item in computations:
        for end in item.inputs:
            if not end.is_local:
                taken.setdefault(end.channel, []).append(item.action.microbatch)
    orders = {}
    for channel, microbatches in taken.items():
        kinds = (Kind.F,) if channel.is_forward else (Kind.B, Kind.I)
        producers = schedule.rank_actions[schedule.pp_rank_of_stage[channel.sender]]
        sent = [a.microbatch for a in producers if a.stage == channel.sender and a.kind in kinds]
        place = {microbatch: number for number, microbatch in enumerate(sent)}
        needed = itertools.accumulate((place[microbatch] + 1 for microbatch in microbatches), max)
        orders[channel] = RecvOrder(tuple(recvs[channel, microbatch] for microbatch in sent), tuple(needed))
    return orders


class NextComputation(NamedTuple):
    """The computation to run next.

    Attributes:
        place: its place in the plan.
        queue: the number of its queue.
        is_moved: whether it is a weight-gradient pass that runs before a backward of its stage, although it comes
            after that backward in the plan.
    """

    place: int
    queue: int
    is_moved: bool


class ReadyQueue:
    """The computations that a rank has not done yet in one step.

    Args:
        plan: the plan of the rank.
        is_posted: whether this rank has computed an input, or posted its receive.
        has_arrived: whether such an input is there.
        may_move: whether weight-gradient passes and input-gradient passes of a stage add to different gradients.
        wait: blocks until one of some inputs may have arrived.
    """

    def __init__(
        self,
        plan: ReadyPlan,
        is_posted: Callable[[ChannelEnd], bool],
        has_arrived: Callable[[ChannelEnd], bool],
        may_move: Callable[[int], bool],
        wait: Callable[[Sequence[ChannelEnd]], None],
    ) -> None:
        self._plan, self._is_posted, self._has_arrived = plan, is_posted, has_arrived
        self._may_move, self._wait = may_move, wait
        self._undone = list(range(len(plan.computations)))  # in planned order
        self._at = [0] * len(plan.queues)
        self._in_use = 0.0
        self._done: set[tuple[Kind, int, int]] = set()

    def __iter__(self) -> Iterator[NextComputation]:
        """The computations, each of which the caller runs before it asks for the next one."""
        while self._undone:
            turn = self.find_turn()
            while not isinstance(turn, NextComputation):
                self._wait(turn)
                turn = self.find_turn()
            yield turn
            self.end(turn)

    def find_turn(self) -> NextComputation | list[ChannelEnd]:
        """The computation that comes first in the plan and has its inputs; or inputs, if one of them must come first.

        If only one computation may run, it is returned even if it lacks inputs.
        """
        heads = [
            (queue.indices[at], number)
            for number, (queue, at) in enumerate(zip(self._plan.queues, self._at, strict=True))
            if at < len(queue.indices)
        ]
        heads = sorted(head for head in heads if self._may_run(*head))
        missing: list[ChannelEnd] = []
        for index, number in heads:
            lacks = [end for end in self._plan.computations[index].inputs if not self._has_arrived(end)]
            if not lacks or len(heads) == 1:
                return NextComputation(index, number, self._is_moved(index, number))
            missing += lacks
        return missing

    def end(self, turn: NextComputation) -> None:
        """Note that a computation has run."""
        action = self._plan.computations[turn.place].action
        self._done.add((action.kind, action.stage, action.microbatch))
        self._in_use += self._plan.changes[turn.place]
        del self._undone[bisect_left(self._undone, turn.place)]
        self._at[turn.queue] += 1

    def _may_run(self, index: int, number: int) -> bool:
        """Whether a computation, the next of its queue, lacks nothing but messages on the way."""
        item = self._plan.computations[index]
        if not self._is_after_its_pass(item.action) or not all(map(self._is_posted, item.inputs)):
            return False
        return self._keeps_sums(index, number) and self._leaves_memory(index)

    def _is_after_its_pass(self, action: Action) -> bool:
        """Whether the pass of this stage and microbatch that this one needs has run."""
        needs = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}.get(action.kind)
        return needs is None or (needs, action.stage, action.microbatch) in self._done

    def _is_moved(self, index: int, number: int) -> bool:
        return any(earlier < index for earlier in self._left_backwards(number)[:1])

    def _left_backwards(self, number: int) -> tuple[int, ...]:
        """The backwards that have not run, of the stages of a queue of weight-gradient passes."""
        backwards = self._plan.queues[number].backwards
        return () if backwards is None else self._plan.queues[backwards].indices[self._at[backwards] :]

    def _keeps_sums(self, index: int, number: int) -> bool:
        """Whether a weight-gradient pass adds to no gradient to which the plan lets another pass add before."""
        if not self._is_moved(index, number):
            return True
        actions = [self._plan.computations[i].action for i in self._left_backwards(number) if i < index]
        stage = self._plan.computations[index].action.stage
        return stage not in self._plan.shared and all(a.kind is Kind.I for a in actions) and self._may_move(stage)

    def _leaves_memory(self, index: int) -> bool:
        """Whether all that the plan has before a computation can run after it within the plan's peak."""
        change = self._plan.changes[index]
        if change <= 0 or index == self._undone[0]:
            return True
        in_use = self._in_use + change
        for earlier in self._undone[: bisect_left(self._undone, index)]:
            if in_use > self._plan.limit:
                return False
            in_use += self._plan.changes[earlier]
        return in_use <= self._plan.limit


class RecvWindows:
    """The receives of a rank in one step: ``RECVS_AHEAD`` are posted on each channel in addition to those needed next.

    Args:
        recvs: see :class:`ReadyPlan`.
        post: posts one.
    """

    def __init__(self, recvs: Mapping[StageChannel, RecvOrder], post: Callable[[Transfer], None]) -> None:
        self._recvs, self._post = recvs, post
        self._posted, self._taken = dict.fromkeys(recvs, 0), dict.fromkeys(recvs, 0)
        for channel in recvs:
            self._open(channel)

    def take(self, channel: StageChannel) -> None:
        """Note that a computation has taken a message, and post the receives of the next ones."""
        self._taken[channel] += 1
        self._open(channel)

    def _open(self, channel: StageChannel) -> None:
        order, taken = self._recvs[channel], self._taken[channel]
        if taken < len(order.needed):
            for item in order.transfers[self._posted[channel] : order.needed[taken] + RECVS_AHEAD]:
                self._post(item)
                self._posted[channel] += 1


class ArrivalWait:
    """Lets the thread of a step wait for the first of several transfers."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self._noted: set[PendingTransfer] = set()  # transfers whose end wakes the thread

    def wait(self, transfers: Sequence[PendingTransfer]) -> None:
        """Block until one of them may have arrived; it may also return without reason."""
        self._woken.clear()
        seconds = _CHECK_SECONDS
        for transfer in transfers:
            if transfer not in self._noted:
                if transfer.wake_at_end(self._woken.set):
                    self._noted.add(transfer)
                else:
                    seconds = _POLL_SECONDS
        if not any(transfer.has_arrived() for transfer in transfers):
            self._woken.wait(seconds)
