"""Whether a schedule does what its pipeline needs, each thing once and in an order that ends."""

from __future__ import annotations

from collections import Counter

from reshard.errors import ScheduleError

from ..graph import Pipeline, check_limit
from ..ir.schedule import Action, Channel, Kind, Schedule, check_fits
from .replay import simulate

#: Of a long row so many actions are shown before and behind a place.
_SHOWN = 6


def check_schedule(schedule: Schedule, pipeline: Pipeline, memory_limit_bytes: int | None = None) -> None:
    """Check every action and the order of all.

    * Each stage computes every microbatch once, on its own row: a forward, then a whole backward or its two halves.
    * What crosses between rows is sent once behind its producer, received once ahead of its consumer, and both ends of
      a channel have the same order. Nothing else is sent.
    * It ends, transfers that block included.
    * No row keeps more than ``memory_limit_bytes`` of activations at once.

    Raises:
        ScheduleError: the first of these that does not hold, with the row and the place.
    """
    check_fits(schedule, pipeline)
    if memory_limit_bytes is not None:
        check_limit(memory_limit_bytes)
    if schedule.num_microbatches < 1:
        raise ScheduleError(f"the schedule has {schedule.num_microbatches} microbatches; it needs one at least")
    wrong = [row for row in schedule.row_of_stage if not 0 <= row < len(schedule.rows)]
    if wrong:
        raise ScheduleError(f"a stage is on row {wrong[0]}; there are {len(schedule.rows)}")
    _check_once(schedule, pipeline)
    for row, actions in enumerate(schedule.rows):
        _check_order(schedule, pipeline, row, actions)
    _check_channels(schedule)
    simulate(schedule, pipeline)
    if memory_limit_bytes is not None:
        for row, peak in enumerate(schedule.peak_bytes(pipeline)):
            if peak > memory_limit_bytes:
                raise ScheduleError(
                    f"row {row} keeps {peak:,} bytes of activations at once; at most {memory_limit_bytes:,} are allowed"
                )


def _check_once(schedule: Schedule, pipeline: Pipeline) -> None:
    count = Counter(action for _, action in schedule)
    seen = Counter((action.kind, action.stage, action.microbatch, action.other) for _, action in schedule)
    for action, _ in count.items():
        if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches):
            raise ScheduleError(
                f"{action}: there are stages 0 to {schedule.num_stages - 1} and "
                f"microbatches 0 to {schedule.num_microbatches - 1}"
            )
    expected: Counter[tuple[Kind, int, int, int | None]] = Counter()
    first_ones = range(min(schedule.num_microbatches, sum(seen.values()) + 1))  # with more, one of these is missing
    for stage in range(schedule.num_stages):
        for microbatch in first_ones:
            halves = seen[Kind.I, stage, microbatch, None] or seen[Kind.W, stage, microbatch, None]
            for kind in (Kind.F, Kind.I, Kind.W) if halves else (Kind.F, Kind.B):
                expected[kind, stage, microbatch, None] = 1
    for edge in pipeline.edges:
        if schedule.row_of_stage[edge.src] == schedule.row_of_stage[edge.dst]:
            continue
        for microbatch in first_ones:
            expected[Kind.SEND_F, edge.src, microbatch, edge.dst] = 1
            expected[Kind.RECV_F, edge.dst, microbatch, edge.src] = 1
            expected[Kind.SEND_B, edge.dst, microbatch, edge.src] = 1
            expected[Kind.RECV_B, edge.src, microbatch, edge.dst] = 1
    for key in sorted(seen.keys() | expected.keys(), key=lambda k: (k[2], k[1], k[0], k[3] or 0)):
        if seen[key] != expected[key]:
            raise ScheduleError(
                f"{Action(*key)} is there {seen[key]} times, not {expected[key]}"
                f"{_why(Action(*key), schedule, pipeline)}"
            )


def _why(action: Action, schedule: Schedule, pipeline: Pipeline) -> str:
    """What may be behind a transfer that is missing or too many."""
    if action.other is None:
        return ""
    src, dst = sorted((action.stage, action.other))
    if (src, dst) not in pipeline.edge_between:
        return f"; the pipeline has no edge {src} -> {dst}: was the schedule made for another one?"
    ends = {schedule.row_of_stage[stage] for stage in (src, dst) if stage < schedule.num_stages}
    if len(ends) == 1:
        return f"; both ends of edge {src} -> {dst} are on one row"
    return f"; the pipeline has an edge {src} -> {dst}: was the schedule made for another one?"


def _check_order(schedule: Schedule, pipeline: Pipeline, row: int, actions: tuple[Action, ...]) -> None:
    done: set[tuple[Kind, int, int, int | None]] = set()

    def need(place: int, action: Action, kind: Kind, other: int | None = None) -> None:
        if (kind, action.stage, action.microbatch, other) not in done:
            before = Action(kind, action.stage, action.microbatch, other)
            raise ScheduleError(f"{action} stands before {before}: {show(schedule, row, place)}")

    for place, action in enumerate(actions):
        stage = action.stage
        if schedule.row_of_stage[stage] != row:
            raise ScheduleError(
                f"{action} is on row {row}, its stage on row {schedule.row_of_stage[stage]}: "
                f"{show(schedule, row, place)}"
            )
        is_backward = action.kind in (Kind.B, Kind.I)
        if is_backward:
            need(place, action, Kind.F)
        if action.kind is Kind.W:
            need(place, action, Kind.I)
        if action.kind is Kind.SEND_F:
            need(place, action, Kind.F)
        if action.kind is Kind.SEND_B:
            need(place, action, Kind.I if (Kind.I, stage, action.microbatch, None) in done else Kind.B)
        if action.kind is Kind.F or is_backward:
            for other in pipeline.outputs[stage] if is_backward else pipeline.inputs[stage]:
                if schedule.row_of_stage[other] != row:
                    need(place, action, Kind.RECV_B if is_backward else Kind.RECV_F, other)
        done.add((action.kind, stage, action.microbatch, action.other))


def _check_channels(schedule: Schedule) -> None:
    ends: dict[tuple[Channel, bool], list[int]] = {}
    for _, action in schedule:
        if action.kind.is_transfer:
            ends.setdefault((action.channel, action.kind.is_send), []).append(action.microbatch)
    for (channel, is_send), order in ends.items():
        other = ends.get((channel, not is_send), [])
        if is_send and order != other:
            nth = next(i for i, pair in enumerate(zip(order, other, strict=True)) if pair[0] != pair[1])
            raise ScheduleError(
                f"stage {channel.sender} sends microbatch {order[nth]} to stage {channel.receiver} where that receives "
                f"{other[nth]}"
            )


def has_one_order(schedule: Schedule) -> bool:
    """Whether any two rows start the transfers from one to the other in the same order, of all channels together.

    Where transfers of several channels share a connection that matches them by order, as NCCL does, they must.
    """
    ends: dict[tuple[int, int, bool], list[tuple[Channel, int]]] = {}
    for _, action in schedule:
        if action.kind.is_transfer:
            channel, row_of = action.channel, schedule.row_of_stage
            end = row_of[channel.sender], row_of[channel.receiver], action.kind.is_send
            ends.setdefault(end, []).append((channel, action.microbatch))
    return all(order == ends.get((sender, to, not is_send)) for (sender, to, is_send), order in ends.items())


def show(schedule: Schedule, row: int, place: int) -> str:
    """A place of a row with what stands around it."""
    actions = schedule.rows[row]
    before = [str(action) for action in actions[max(0, place - _SHOWN) : place]]
    after = [str(action) for action in actions[place + 1 : place + 1 + _SHOWN]]
    return f"row {row}: {' '.join([*before, f'[{actions[place]}]', *after])}"
