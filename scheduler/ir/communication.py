"""Add transfers to the computations of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Pipeline
from .actions import Action, Kind
from .schedule import Schedule

#: Receives posted on a channel in addition to the one that the next computation needs. Two keep the channel busy: one
#: in progress and one queued after it.
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
    """A schedule with every send right after its producer and every receive ahead of its consumer.

    Args:
        name: name of the schedule.
        rows: computations of each row, in order.
        pipeline, row_of_stage, num_microbatches: what the schedule is for.
        recvs_ahead: receives posted on a channel in addition to the one that the next computation needs.
    """
    send_order: _SendOrder = {}
    for row in rows:
        for action in row:
            if action.kind is not Kind.W:
                send_order.setdefault((action.stage, action.kind is Kind.F), []).append(action.microbatch)
    return Schedule(
        name,
        tuple(tuple(_with_transfers(row, pipeline, row_of_stage, recvs_ahead, send_order)) for row in rows),
        tuple(row_of_stage),
        num_microbatches,
    )


def compute_rows(schedule: Schedule) -> list[list[Action]]:
    """The computations of each row, without transfers."""
    return [[action for action in row if not action.kind.is_transfer] for row in schedule.rows]


#: (stage, is forward) -> microbatches in the order in which the stage computes, and so sends, them.
_SendOrder = dict[tuple[int, bool], list[int]]
#: The receiving end of a channel: (receiver, sender, kind of receive).
_RecvEnd = tuple[int, int, Kind]


def _with_transfers(
    row: Sequence[Action], pipeline: Pipeline, row_of_stage: Sequence[int], recvs_ahead: int, send_order: _SendOrder
) -> list[Action]:
    consumers: dict[_RecvEnd, dict[int, int]] = {}  # microbatch -> index of the computation that needs it
    for index, action in enumerate(row):
        for other, kind in _ends_of(action, pipeline)[0]:
            if row_of_stage[other] != row_of_stage[action.stage]:
                consumers.setdefault((action.stage, other, kind), {})[action.microbatch] = index
    due: list[tuple[int, int, _RecvEnd, int]] = []  # index of the computation by which each receive must be posted
    for number, (end, consumer) in enumerate(consumers.items()):
        order = send_order.get((end[1], end[2] is Kind.RECV_F), [])
        before = len(row)
        # Receives keep the sender's order, so each is due no later than those after it.
        for microbatch in [*sorted(consumer.keys() - set(order)), *order][::-1]:
            before = min(before, consumer.get(microbatch, before))
            if microbatch in consumer:
                due.append((before, number, end, microbatch))
    due.reverse()
    due.sort(key=lambda entry: entry[:2])
    recvs: dict[int, list[Action]] = {}  # index of a computation -> receives to post right before it
    earlier: dict[_RecvEnd, list[int]] = {}  # due indices of the earlier receives on the same channel
    for index, _, end, microbatch in due:
        indices = earlier.setdefault(end, [])
        # Post when the computation that needs the receive ``recvs_ahead`` places earlier on this channel begins.
        at = index if not recvs_ahead else indices[-recvs_ahead] if len(indices) >= recvs_ahead else 0
        recvs.setdefault(at, []).append(Action(end[2], end[0], microbatch, end[1]))
        indices.append(index)
    out: list[Action] = []
    for index, action in enumerate(row):
        out += recvs.get(index, [])
        out.append(action)
        for other, kind in _ends_of(action, pipeline)[1]:
            if row_of_stage[other] != row_of_stage[action.stage]:
                out.append(Action(kind, action.stage, action.microbatch, other))
    return out


_Ends = list[tuple[int, Kind]]


def _ends_of(action: Action, pipeline: Pipeline) -> tuple[_Ends, _Ends]:
    """Receives before and sends after a computation, each with the stage at the other end."""
    inputs, outputs = pipeline.inputs[action.stage], pipeline.outputs[action.stage]
    if action.kind is Kind.F:
        return [(other, Kind.RECV_F) for other in inputs], [(other, Kind.SEND_F) for other in outputs]
    if action.kind in (Kind.B, Kind.I):
        return [(other, Kind.RECV_B) for other in outputs], [(other, Kind.SEND_B) for other in inputs]
    return [], []
