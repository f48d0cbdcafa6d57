"""Passes that move transfers within a schedule, or make them block. They return a new schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reshard.errors import ArgumentError, ScheduleError

from ..graph import Pipeline
from ..ir.actions import Kind
from ..ir.communication import RECVS_AHEAD, add_transfers, compute_rows
from ..ir.schedule import Schedule, check_fits
from ..simulation.replay import simulate

Pass = Callable[[Schedule, Pipeline], Schedule]


@dataclass(frozen=True)
class Report:
    """What a pass changed: the number of transfers moved or made to block, and the makespans before and after."""

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
    """Post every send right after its producer and every receive ahead of its consumer. No transfer blocks."""
    check_fits(schedule, pipeline)
    return add_transfers(
        schedule.name, compute_rows(schedule), pipeline, schedule.row_of_stage, schedule.num_microbatches
    )


def block_transfers(schedule: Schedule, pipeline: Pipeline) -> Schedule:
    """Make every send block its row, as an engine without overlap does.

    Receives are posted as far ahead as it takes to avoid deadlock: two neighbours that send to each other must both
    have posted their receives.
    """
    check_fits(schedule, pipeline)
    recvs_ahead = RECVS_AHEAD
    while True:
        ahead = add_transfers(
            schedule.renamed(", blocking"),
            compute_rows(schedule),
            pipeline,
            schedule.row_of_stage,
            schedule.num_microbatches,
            recvs_ahead=recvs_ahead,
        )
        rows = [
            tuple(replace(action, blocks=True) if action.kind.is_send else action for action in row)
            for row in ahead.rows
        ]
        blocking = replace(ahead, rows=tuple(rows))
        if recvs_ahead >= schedule.num_microbatches or _completes(blocking, pipeline):
            return blocking
        recvs_ahead *= 2


def _completes(schedule: Schedule, pipeline: Pipeline) -> bool:
    try:
        simulate(schedule, pipeline)
    except ScheduleError:
        return False
    return True


def defer_recvs(schedule: Schedule, pipeline: Pipeline) -> Schedule:
    """Post every receive right before its consumer and make it block. A baseline: the receiver overlaps no transfer.

    A send is still posted right after its producer, but its transfer starts only when the receive is posted.
    """
    check_fits(schedule, pipeline)
    ahead = add_transfers(
        schedule.name,
        compute_rows(schedule),
        pipeline,
        schedule.row_of_stage,
        schedule.num_microbatches,
        recvs_ahead=0,
    )
    rows = []
    for row in ahead.rows:
        rows.append(tuple(replace(a, blocks=True) if a.kind in (Kind.RECV_F, Kind.RECV_B) else a for a in row))
    return replace(ahead, name=schedule.renamed(", at the consumer"), rows=tuple(rows))


def apply_passes(schedule: Schedule, pipeline: Pipeline, passes: Sequence[Pass]) -> tuple[Schedule, tuple[Report, ...]]:
    """Apply passes in order. Returns the last schedule and a report for each pass."""
    check_fits(schedule, pipeline)
    reports = []
    if not isinstance(passes, Sequence) or not all(map(callable, passes)):
        raise ArgumentError(f"passes must be a list of functions such as overlap_transfers, not {passes!r}")
    for one in passes:
        changed = one(schedule, pipeline)
        if not isinstance(changed, Schedule):
            raise ArgumentError(f"a pass returned {type(changed).__name__}, not a Schedule")
        reports.append(
            Report(
                getattr(one, "__name__", type(one).__name__),
                _count_moved(schedule, changed),
                simulate(schedule, pipeline).makespan_seconds,
                simulate(changed, pipeline).makespan_seconds,
            )
        )
        schedule = changed
    return schedule, tuple(reports)


def _count_moved(before: Schedule, after: Schedule) -> int:
    """Number of transfers that follow another computation than before, or whose ``blocks`` changed."""

    def positions(schedule: Schedule) -> dict[tuple[object, ...], tuple[int, bool]]:
        found: dict[tuple[object, ...], tuple[int, bool]] = {}
        for row in schedule.rows:
            num_computed = 0
            for action in row:
                if action.kind.is_transfer:
                    found[action.kind, action.stage, action.microbatch, action.other] = num_computed, action.blocks
                else:
                    num_computed += 1
        return found

    old, new = positions(before), positions(after)
    return sum(new[key] != old.get(key) for key in new)
