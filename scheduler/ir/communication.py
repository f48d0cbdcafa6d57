"""Puts transfers among the computations of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Pipeline
from .schedule import Action, Kind, Schedule

#: Receives that a stage has posted on a channel beyond the one that its next computation needs: one under way and one
#: behind it keep the channel busy.
RECVS_AHEAD = 2


def add_transfers(
    name: str,
    rows: Sequence[Sequence[Action]],
    pipeline: Pipeline,
    row_of_stage: Sequence[int],
    num_microbatches: int,
    *,
    recvs_ahead: int = RECVS_AHEAD,
) -> Schedule:
    """A schedule with every send right after its producer, and every receive ahead of its consumer.

    Args:
        rows: computations alone. recvs_ahead: how many a stage posts on a channel before it needs the first.
    """
    made: _Made = {}
    for row in rows:
        for action in row:
            if action.kind is not Kind.W:
                made.setdefault((action.stage, action.kind is Kind.F), []).append(action.microbatch)
    return Schedule(
        name,
        tuple(tuple(_with_transfers(row, pipeline, row_of_stage, recvs_ahead, made)) for row in rows),
        tuple(row_of_stage),
        num_microbatches,
    )


def compute_rows(schedule: Schedule) -> list[list[Action]]:
    """Computations alone."""
    return [[action for action in row if not action.kind.is_transfer] for row in schedule.rows]


#: Of each stage, forward and backward, the order in which it makes microbatches: they come to others in that order.
_Made = dict[tuple[int, bool], list[int]]


def _with_transfers(
    row: Sequence[Action], pipeline: Pipeline, row_of_stage: Sequence[int], recvs_ahead: int, made: _Made
) -> list[Action]:
    needs: dict[tuple[int, int, Kind], dict[int, int]] = {}  # of each channel where a microbatch is needed
    for place, action in enumerate(row):
        for other, kind in _channels_of(action, pipeline)[0]:
            if row_of_stage[other] != row_of_stage[action.stage]:
                needs.setdefault((action.stage, other, kind), {})[action.microbatch] = place
    due: list[tuple[int, int, tuple[int, int, Kind], int]] = []  # by when each has to be received
    for number, (line, needed) in enumerate(needs.items()):
        order = made.get((line[1], line[2] is Kind.RECV_F), [])
        before = len(row)
        for microbatch in [*sorted(needed.keys() - set(order)), *order][::-1]:
            before = min(before, needed.get(microbatch, before))
            if microbatch in needed:
                due.append((before, number, line, microbatch))
    due.reverse()
    due.sort(key=lambda one: one[:2])
    recvs: dict[int, list[Action]] = {}  # by the place of the computation that they stand before
    places: dict[tuple[int, int, Kind], list[int]] = {}  # of each channel those of what came before
    for place, _, line, microbatch in due:
        taken = places.setdefault(line, [])
        # posted when the computation so many before it on this channel begins
        at = place if not recvs_ahead else taken[-recvs_ahead] if len(taken) >= recvs_ahead else 0
        recvs.setdefault(at, []).append(Action(line[2], line[0], microbatch, line[1]))
        taken.append(place)
    out: list[Action] = []
    for place, action in enumerate(row):
        out += recvs.get(place, [])
        out.append(action)
        for other, kind in _channels_of(action, pipeline)[1]:
            if row_of_stage[other] != row_of_stage[action.stage]:
                out.append(Action(kind, action.stage, action.microbatch, other))
    return out


_Ends = list[tuple[int, Kind]]


def _channels_of(action: Action, pipeline: Pipeline) -> tuple[_Ends, _Ends]:
    """What a computation receives before it and sends behind it, each with the stage at the other end."""
    before, behind = pipeline.inputs[action.stage], pipeline.outputs[action.stage]
    if action.kind is Kind.F:
        return [(other, Kind.RECV_F) for other in before], [(other, Kind.SEND_F) for other in behind]
    if action.kind in (Kind.B, Kind.I):
        return [(other, Kind.RECV_B) for other in behind], [(other, Kind.SEND_B) for other in before]
    return [], []
