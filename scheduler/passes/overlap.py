"""From schedule to schedule: where transfers stand, and whether they block. None changes its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reshard.errors import ArgumentError, ScheduleError

from ..graph import Pipeline
from ..ir.communication import RECVS_AHEAD, add_transfers, compute_rows
from ..ir.schedule import Kind, Schedule, check_fits
from ..simulation.replay import simulate

Pass = Callable[[Schedule, Pipeline], Schedule]


@dataclass(frozen=True)
class Report:
    """What a pass did: how many actions stand elsewhere or wait otherwise, and the makespans before and after."""

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
    """Every send right behind its producer, every receive ahead of its consumer, none waited for before it must be."""
    check_fits(schedule, pipeline)
    return add_transfers(
        schedule.name, compute_rows(schedule), pipeline, schedule.row_of_stage, schedule.num_microbatches
    )


def block_transfers(schedule: Schedule, pipeline: Pipeline) -> Schedule:
    """Every send is waited for at once, on the row's own time, as a plain engine does it.

    A receive is posted ahead of the send before its consumer, since otherwise two neighbours that send to each other
    would wait for ever; as far ahead as it takes.
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
        if recvs_ahead >= schedule.num_microbatches or _ends(blocking, pipeline):
            return blocking
        recvs_ahead *= 2


def _ends(schedule: Schedule, pipeline: Pipeline) -> bool:
    try:
        simulate(schedule, pipeline)
    except ScheduleError:
        return False
    return True


def defer_recvs(schedule: Schedule, pipeline: Pipeline) -> Schedule:
    """Every transfer starts when the row that needs it comes to it, and that row waits: a known predecessor's way.

    The sender's end is posted behind its producer but does not flow before the receiver has come.
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
    """One pass after the other, and what each did."""
    check_fits(schedule, pipeline)
    reports = []
    if not isinstance(passes, Sequence) or not all(map(callable, passes)):
        raise ArgumentError(f"passes are a list of functions such as overlap_transfers, not {passes!r}")
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
    """Transfers that stand behind another computation than before, or wait otherwise."""

    def places(schedule: Schedule) -> dict[tuple[object, ...], tuple[int, bool]]:
        found: dict[tuple[object, ...], tuple[int, bool]] = {}
        for row in schedule.rows:
            behind = 0
            for action in row:
                if action.kind.is_transfer:
                    found[action.kind, action.stage, action.microbatch, action.other] = behind, action.blocks
                else:
                    behind += 1
        return found

    old, new = places(before), places(after)
    return sum(new[key] != old.get(key) for key in new)
