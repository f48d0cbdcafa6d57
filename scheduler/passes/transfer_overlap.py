"""Passes that move transfers within a schedule, or make them block. They return a new schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from reshard.errors import ArgumentError, ScheduleError
from reshard.formatting import brief

from ..ir.actions import Action, Kind, StageChannel
from ..ir.communication import RECVS_AHEAD, add_transfers, computations
from ..ir.schedule import Schedule, check_fits
from ..pipeline import Pipeline
from ..simulation.replay import simulate_schedule

Pass = Callable[[Schedule, Pipeline], Schedule]


@dataclass(frozen=True)
class OverlapReport:
    """The effect of a pass: the number of transfers moved or made to block, and the makespans before and after."""

    name: str
    num_moved: int
    before_seconds: float
    after_seconds: float

    def __str__(self) -> str:
        gain = self.before_seconds / self.after_seconds if self.after_seconds else 1.0
        return (
            f"{self.name}: {self.num_moved} transfers moved, {self.before_seconds:.6g} s -> {self.after_seconds:.6g} s "
            f"({gain:.3f} times as fast)"
        )


def overlap_transfers(schedule: Schedule, pipeline: Pipeline) -> Schedule:
    """Post every send right after its producer and every receive ahead of its consumer, in one order on all pp ranks.

    No transfer blocks.
    """
    check_fits(schedule, pipeline)
    return add_transfers(
        schedule.name, computations(schedule), pipeline, schedule.pp_rank_of_stage, schedule.num_microbatches
    )


def block_transfers(schedule: Schedule, pipeline: Pipeline) -> Schedule:
    """Make every send block its rank, as an engine without overlap does. A baseline, for CPU tensors only.

    Receives are posted as far ahead as it takes to avoid deadlock: two neighbours that send to each other must both
    have posted their receives.
    """
    ahead = overlap_transfers(schedule, pipeline)
    recvs_ahead = RECVS_AHEAD
    while True:
        rank_actions = [_move_recvs(actions, pipeline, recvs_ahead) for actions in ahead.rank_actions]
        blocking = replace(
            ahead,
            name=schedule.renamed(", blocking"),
            rank_actions=tuple(
                tuple(replace(action, blocks=action.kind.is_send) for action in actions) for actions in rank_actions
            ),
        )
        if recvs_ahead >= schedule.num_microbatches or _completes(blocking, pipeline):
            return blocking
        recvs_ahead *= 2


def _completes(schedule: Schedule, pipeline: Pipeline) -> bool:
    try:
        simulate_schedule(schedule, pipeline)
    except ScheduleError:
        return False
    return True


def defer_recvs(schedule: Schedule, pipeline: Pipeline) -> Schedule:
    """Post every receive right before its consumer and make it block. A baseline, for CPU tensors only.

    The receiver overlaps no transfer. A send is still posted right after its producer, but its transfer starts only
    when the receive is posted.
    """
    ahead = overlap_transfers(schedule, pipeline)
    rank_actions = []
    for actions in ahead.rank_actions:
        late = _move_recvs(actions, pipeline, 0)
        rank_actions.append(tuple(replace(a, blocks=True) if a.kind in _CONSUMERS else a for a in late))
    return replace(ahead, name=schedule.renamed(", at the consumer"), rank_actions=tuple(rank_actions))


#: Kinds of the computations that need what a receive brings.
_CONSUMERS = {Kind.RECV_F: (Kind.F,), Kind.RECV_B: (Kind.B, Kind.I)}


def _move_recvs(actions: Sequence[Action], pipeline: Pipeline, recvs_ahead: int) -> list[Action]:
    """Move the receives of a pp rank: ``recvs_ahead`` are posted on a channel beyond the one that is needed next.

    Pp ranks may then post transfers in different orders.
    """
    rest = [action for action in actions if action.kind not in _CONSUMERS]
    place = {(a.kind, a.stage, a.microbatch): index for index, a in enumerate(rest) if not a.kind.is_transfer}
    channels: dict[StageChannel, list[Action]] = {}
    for action in actions:
        if action.kind in _CONSUMERS:
            channels.setdefault(action.channel, []).append(action)
    moved: list[tuple[int, int, int, Action]] = []
    for recvs in channels.values():
        due = [
            min(place.get((kind, recv.stage, recv.microbatch), len(rest)) for kind in _CONSUMERS[recv.kind])
            for recv in recvs
        ]
        first = min(due)
        # Receives keep the sender's order, so each is due no later than those after it.
        due = [*accumulate(reversed(due), min)][::-1]
        for nth, recv in enumerate(recvs):
            at = due[nth] if not recvs_ahead else due[nth - recvs_ahead] if nth >= recvs_ahead else 0
            moved.append((due[nth], first, at, recv))
    posted: dict[int, list[Action]] = {}  # receives before each action
    for *_, position, recv in sorted(moved, key=lambda entry: (*entry[:2], entry[3].other)):
        posted.setdefault(position, []).append(recv)
    out: list[Action] = []
    for index, action in enumerate(rest):
        out += [*posted.get(index, ()), action]
    return out


def apply_passes(
    schedule: Schedule, pipeline: Pipeline, passes: Sequence[Pass]
) -> tuple[Schedule, tuple[OverlapReport, ...]]:
    """Apply passes in order. Returns the last schedule and a report for each pass."""
    check_fits(schedule, pipeline)
    reports = []
    if not isinstance(passes, Sequence) or not all(map(callable, passes)):
        raise ArgumentError(f"passes must be a list of functions such as overlap_transfers, not {brief(passes)}")
    for compute_pass in passes:
        changed = compute_pass(schedule, pipeline)
        if not isinstance(changed, Schedule):
            raise ArgumentError(f"a pass returned {type(changed).__name__}, not a Schedule")
        reports.append(
            OverlapReport(
                getattr(compute_pass, "__name__", type(compute_pass).__name__),
                _count_moved(schedule, changed),
                simulate_schedule(schedule, pipeline).makespan_seconds,
                simulate_schedule(changed, pipeline).makespan_seconds,
            )
        )
        schedule = changed
    return schedule, tuple(reports)


def _count_moved(before: Schedule, after: Schedule) -> int:
    """Number of transfers that follow another computation than before, or whose ``blocks`` changed."""

    def positions(schedule: Schedule) -> dict[tuple[object, ...], tuple[int, bool]]:
        moved: dict[tuple[object, ...], tuple[int, bool]] = {}
        for actions in schedule.rank_actions:
            num_computed = 0
            for action in actions:
                if action.kind.is_transfer:
                    moved[action.kind, action.stage, action.microbatch, action.other] = num_computed, action.blocks
                else:
                    num_computed += 1
        return moved

    old, new = positions(before), positions(after)
    return sum(new[key] != old.get(key) for key in new)
