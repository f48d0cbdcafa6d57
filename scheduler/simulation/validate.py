"""Check that a schedule makes every computation and transfer of its pipeline once, in an order without deadlock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from reshard.errors import ScheduleError
from reshard.formatting import format_ranks

from ..ir.actions import Action, Kind, StageChannel
from ..ir.schedule import Schedule, check_fits
from ..pipeline import Pipeline, check_limits
from .replay import simulate_schedule

#: An error text shows this many actions of the pp rank before and after the wrong action.
_SHOWN = 6


def check_schedule(
    schedule: Schedule, pipeline: Pipeline, activation_limit_bytes: float | Sequence[float] | None = None
) -> None:
    """Check a schedule completely.

    * Each stage computes every microbatch once, on its own pp rank: a forward, then a whole backward, or an
      input-gradient pass and later a weight-gradient pass.
    * Each edge between two pp ranks moves every microbatch once in each direction. A send comes after the computation
      of its tensors, and a receive before the computation that needs them. Both ends of a channel use the same order.
      There are no other transfers.
    * The schedule does not deadlock, not even where transfers block.
    * No device keeps more than ``activation_limit_bytes`` of activations at once.

    Raises:
        ScheduleError: the schedule breaks a rule. The text names the first broken rule and shows the wrong action.
        ArgumentError: an argument has the wrong type, or the memory limit is negative.
    """
    check_fits(schedule, pipeline)
    limit = math.inf if activation_limit_bytes is None else activation_limit_bytes
    check_limits(limit, len(schedule.rank_actions))
    if schedule.num_microbatches < 1:
        raise ScheduleError(f"the schedule has {schedule.num_microbatches} microbatches; it needs at least one")
    wrong = [pp_rank for pp_rank in schedule.pp_rank_of_stage if not 0 <= pp_rank < len(schedule.rank_actions)]
    if wrong:
        raise ScheduleError(
            f"a stage is on pp rank {wrong[0]}, but the schedule has only {len(schedule.rank_actions)} pp ranks"
        )
    _check_once(schedule, pipeline)
    for pp_rank, actions in enumerate(schedule.rank_actions):
        _check_order(schedule, pipeline, pp_rank, actions)
    _check_channels(schedule)
    simulate_schedule(schedule, pipeline)
    check_peaks(schedule, pipeline, limit)


def check_peaks(schedule: Schedule, pipeline: Pipeline, activation_limit_bytes: float | Sequence[float]) -> None:
    """Raise ScheduleError if a device keeps more bytes of activations at once than the limit of its pp rank."""
    limits = check_limits(activation_limit_bytes, len(schedule.rank_actions))
    for pp_rank, (peak, limit) in enumerate(zip(schedule.peak_bytes(pipeline), limits, strict=True)):
        if peak > limit:
            stages = [stage for stage, place in enumerate(schedule.pp_rank_of_stage) if place == pp_rank]
            raise ScheduleError(
                f"pp rank {pp_rank} keeps {peak:,} bytes of activations at once; at most {limit:,} are allowed "
                f"(schedule {schedule.name!r}, {'stage' if len(stages) == 1 else 'stages'} {format_ranks(stages)})"
            )


def _check_once(schedule: Schedule, pipeline: Pipeline) -> None:
    count = Counter(action for _, action in schedule)
    seen = Counter((action.kind, action.stage, action.microbatch, action.other) for _, action in schedule)
    for action, _ in count.items():
        if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches):
            raise ScheduleError(
                f"{action} does not exist: there are stages 0 to {schedule.num_stages - 1} and "
                f"microbatches 0 to {schedule.num_microbatches - 1}"
            )
    expected: Counter[tuple[Kind, int, int, int | None]] = Counter()
    # k actions cannot cover k + 1 microbatches. Checking that many suffices, and is fast if num_microbatches is huge.
    microbatches = range(min(schedule.num_microbatches, sum(seen.values()) + 1))
    for stage in range(schedule.num_stages):
        for microbatch in microbatches:
            is_split = seen[Kind.I, stage, microbatch, None] or seen[Kind.W, stage, microbatch, None]
            for kind in (Kind.F, Kind.I, Kind.W) if is_split else (Kind.F, Kind.B):
                expected[kind, stage, microbatch, None] = 1
    for edge in pipeline.edges:
        if schedule.pp_rank_of_stage[edge.src] == schedule.pp_rank_of_stage[edge.dst]:
            continue
        for microbatch in microbatches:
            expected[Kind.SEND_F, edge.src, microbatch, edge.dst] = 1
            expected[Kind.RECV_F, edge.dst, microbatch, edge.src] = 1
            expected[Kind.SEND_B, edge.dst, microbatch, edge.src] = 1
            expected[Kind.RECV_B, edge.src, microbatch, edge.dst] = 1
    for key in sorted(seen.keys() | expected.keys(), key=lambda k: (k[2], k[1], k[0], k[3] or 0)):
        if seen[key] != expected[key]:
            raise ScheduleError(
                f"{Action(*key)} occurs {seen[key]} times, not {expected[key]}"
                f"{_explain(Action(*key), schedule, pipeline)}"
            )


def _explain(action: Action, schedule: Schedule, pipeline: Pipeline) -> str:
    """The likely cause of a missing or superfluous transfer, as text; empty for a computation."""
    if action.other is None:
        return ""
    src, dst = sorted((action.stage, action.other))
    if (src, dst) not in pipeline.edge_between:
        return f"; the pipeline has no edge {src} -> {dst}: was the schedule made for another pipeline?"
    ends = {schedule.pp_rank_of_stage[stage] for stage in (src, dst) if stage < schedule.num_stages}
    if len(ends) == 1:
        return f"; both ends of edge {src} -> {dst} are on one pp rank, which needs no transfer"
    return f"; each microbatch crosses edge {src} -> {dst} of the pipeline once: was the schedule made for another one?"


def _check_order(schedule: Schedule, pipeline: Pipeline, pp_rank: int, actions: tuple[Action, ...]) -> None:
    done: set[tuple[Kind, int, int, int | None]] = set()

    def need(index: int, action: Action, kind: Kind, other: int | None = None) -> None:
        if (kind, action.stage, action.microbatch, other) not in done:
            before = Action(kind, action.stage, action.microbatch, other)
            raise ScheduleError(f"{action} comes before {before}: {show(schedule, pp_rank, index)}")

    for index, action in enumerate(actions):
        stage = action.stage
        if schedule.pp_rank_of_stage[stage] != pp_rank:
            raise ScheduleError(
                f"{action} is on pp rank {pp_rank}, but its stage is on pp rank {schedule.pp_rank_of_stage[stage]}: "
                f"{show(schedule, pp_rank, index)}"
            )
        is_backward = action.kind in (Kind.B, Kind.I)
        if action.overlaps:
            following = next((later for later in actions[index + 1 :] if not later.kind.is_transfer), None)
            if following is None or following.kind not in (Kind.B, Kind.I):
                raise ScheduleError(
                    f"{action} overlaps the next computation, which must be a backward, not {following}: "
                    f"{show(schedule, pp_rank, index)}"
                )
        if is_backward:
            need(index, action, Kind.F)
        if action.kind is Kind.W:
            need(index, action, Kind.I)
        if action.kind is Kind.SEND_F:
            need(index, action, Kind.F)
        if action.kind is Kind.SEND_B:
            need(index, action, Kind.I if (Kind.I, stage, action.microbatch, None) in done else Kind.B)
        if action.kind is Kind.F or is_backward:
            for other in pipeline.outputs[stage] if is_backward else pipeline.inputs[stage]:
                if schedule.pp_rank_of_stage[other] != pp_rank:
                    need(index, action, Kind.RECV_B if is_backward else Kind.RECV_F, other)
        done.add((action.kind, stage, action.microbatch, action.other))


def _check_channels(schedule: Schedule) -> None:
    ends: dict[tuple[StageChannel, bool], list[int]] = {}
    for _, action in schedule:
        if action.kind.is_transfer:
            ends.setdefault((action.channel, action.kind.is_send), []).append(action.microbatch)
    for (channel, is_send), order in ends.items():
        other = ends.get((channel, not is_send), [])
        if is_send and order != other:
            nth = next(i for i, pair in enumerate(zip(order, other, strict=True)) if pair[0] != pair[1])
            raise ScheduleError(
                f"stage {channel.sender} sends microbatch {order[nth]} to stage {channel.receiver}, which expects "
                f"{other[nth]} next"
            )


def check_one_order(schedule: Schedule) -> None:
    """Check that all pp ranks of a schedule post their transfers in one order.

    Such a schedule cannot deadlock, not even if a pp rank that has posted a transfer does nothing more until the
    transfer is complete. On a GPU, any later CUDA call of the host may block that long.

    Raises:
        ScheduleError: pp ranks post transfers in different orders. The text shows pp ranks that could wait for each
            other. Or a transfer has no other end.
    """
    posts = [[(index, a) for index, a in enumerate(actions) if a.kind.is_transfer] for actions in schedule.rank_actions]
    at = [0] * len(posts)
    for pp_rank, actions in enumerate(posts):
        for index, action in actions:
            if action.other is None or action.other >= schedule.num_stages:
                raise ScheduleError(
                    f"a transfer names no stage from 0 to {schedule.num_stages - 1}: {show(schedule, pp_rank, index)}"
                )
            if schedule.pp_rank_of_stage[action.other] == pp_rank:
                raise ScheduleError(f"both ends of a transfer are on one pp rank: {show(schedule, pp_rank, index)}")

    def find_other(pp_rank: int) -> int:
        action = posts[pp_rank][at[pp_rank]][1]
        return schedule.pp_rank_of_stage[action.other]  # type: ignore[index]  # a transfer names another stage

    pp_ranks = list(range(len(posts)))  # pp ranks that may go on
    while pp_ranks:
        pp_rank = pp_ranks.pop()
        while at[pp_rank] < len(posts[pp_rank]):
            action, other = posts[pp_rank][at[pp_rank]][1], find_other(pp_rank)
            theirs = posts[other][at[other]][1] if at[other] < len(posts[other]) else None
            if theirs is None or (theirs.channel, theirs.microbatch) != (action.channel, action.microbatch):
                break
            at[pp_rank] += 1
            at[other] += 1
            pp_ranks.append(other)
    pp_rank = next((pp_rank for pp_rank, actions in enumerate(posts) if at[pp_rank] < len(actions)), -1)
    if pp_rank < 0:
        return
    chain = [pp_rank]
    while (other := find_other(chain[-1])) not in chain:
        if at[other] == len(posts[other]):
            index = posts[chain[-1]][at[chain[-1]]][0]
            raise ScheduleError(
                f"pp rank {chain[-1]} posts a transfer of which pp rank {other} does not post the other end: "
                f"{show(schedule, chain[-1], index)}"
            )
        chain.append(other)
    cycle = chain[chain.index(find_other(chain[-1])) :]
    shown = "; ".join(show(schedule, pp_rank, posts[pp_rank][at[pp_rank]][0]) for pp_rank in sorted(cycle))
    raise ScheduleError(
        "pp ranks post transfers in different orders, so on a GPU they could wait for each other at the actions in "
        f"brackets: {shown}. overlap_transfers(schedule, pipeline) gives all pp ranks one order"
    )


def show(schedule: Schedule, pp_rank: int, index: int) -> str:
    """The text of an action, in brackets, among the actions before and after it in its pp rank."""
    actions = schedule.rank_actions[pp_rank]
    before = [str(action) for action in actions[max(0, index - _SHOWN) : index]]
    after = [str(action) for action in actions[index + 1 : index + 1 + _SHOWN]]
    return f"pp rank {pp_rank}: {' '.join([*before, f'[{actions[index]}]', *after])}"
