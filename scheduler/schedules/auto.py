"""``auto_schedule``: a search over microbatches in flight and split backwards, within a memory limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from reshard.errors import ArgumentError, ScheduleError
from reshard.formatting import brief

from ..graph import Pipeline, check_limit
from ..ir.actions import Action, Kind
from ..ir.communication import add_transfers, computations
from ..ir.schedule import Schedule
from ..simulation.replay import simulate_schedule
from .classic import check_microbatches, eager_1f1b, gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from .list_scheduling import Policy, order_greedily

NAME = "auto_schedule"
#: Share of the makespan given up to save memory. Keeping more activations slows real computations by more than this.
SLACK = 0.003
#: Makespans whose relative difference is smaller count as equal. Memory, then the number of actions, breaks the tie.
_SAME = 1e-9


@dataclass(frozen=True)
class _Candidate:
    schedule: Schedule
    policy: Policy | None  # None for a known schedule
    seconds: float
    peak_bytes: int
    num_actions: int

    def beats(self, other: _Candidate | None, allowed_seconds: float) -> bool:
        """Whether it is faster or, if both are fast enough or equally fast, uses less memory or fewer actions."""
        if other is None:
            return True
        both_fast_enough = max(self.seconds, other.seconds) <= allowed_seconds
        if not both_fast_enough and abs(self.seconds - other.seconds) > _SAME * other.seconds:
            return self.seconds < other.seconds
        return (self.peak_bytes, self.num_actions) < (other.peak_bytes, other.num_actions)


def auto_schedule(
    pipeline: Pipeline,
    num_microbatches: int,
    *,
    memory_limit_bytes: int | None = None,
    pp_rank_of_stage: Sequence[int] | None = None,
    can_split: bool = True,
) -> Schedule:
    """Search for the fastest schedule by :func:`simulate_schedule`. Gives up at most 0.3 % of its speed to save memory.

    To stay busy, a stage needs as many microbatches in flight as the slowest stage or link processes between the
    stage's forward and its backward, transfers included. The search starts from these depths and runs list scheduling
    under several policies, with whole and with split backwards. It then lowers depths and joins split backwards where
    that costs nothing. Schedules of :mod:`~reshard.scheduler.schedules.classic` within the same depths are candidates.

    Args:
        pipeline, num_microbatches: what to schedule.
        memory_limit_bytes: limit of the activations that a device keeps at once. Default: a stage keeps no more
            microbatches in flight than its communication needs; without communication, those of 1F1B.
        pp_rank_of_stage: pp rank that computes each stage; default: one stage per pp rank.
        can_split: whether a backward may be split into an input-gradient pass and a weight-gradient pass.

    Raises:
        ArgumentError: an argument is out of range, or pp ranks are not numbered from 0.
        ScheduleError: a single microbatch in flight exceeds the memory limit.
    """
    check_microbatches(pipeline, num_microbatches)
    if memory_limit_bytes is not None:
        check_limit(memory_limit_bytes)
    if pp_rank_of_stage is not None and not isinstance(pp_rank_of_stage, Sequence):
        raise ArgumentError(
            f"pp_rank_of_stage must be a list with the pp rank of each stage, not {brief(pp_rank_of_stage)}"
        )
    if not isinstance(can_split, bool):
        raise ArgumentError(f"can_split is {brief(can_split)}; it must be True or False")
    pp_ranks = tuple(range(len(pipeline.stages))) if pp_rank_of_stage is None else tuple(pp_rank_of_stage)
    if any(isinstance(pp_rank, bool) or not isinstance(pp_rank, int) for pp_rank in pp_ranks):
        raise ArgumentError(f"pp ranks {brief(pp_ranks)} must be integers")
    if (
        len(pp_ranks) != len(pipeline.stages)
        or max(pp_ranks) >= len(pp_ranks)
        or set(pp_ranks) != set(range(max(pp_ranks) + 1))
    ):
        raise ArgumentError(
            f"pp ranks {brief(list(pp_ranks))}: each of {len(pipeline.stages)} stages needs one, and pp ranks are "
            "numbered from 0"
        )
    depths_tried = [tuple(min(d, num_microbatches) for d in depths) for depths in _depths(pipeline)]
    most = depths_tried[-1] if memory_limit_bytes is None else (num_microbatches,) * len(pp_ranks)
    if memory_limit_bytes is not None:
        depths_tried += [tuple(min(d + 1, num_microbatches) for d in depths) for depths in depths_tried] + [most]
    search = _Search(pipeline, num_microbatches, pp_ranks, memory_limit_bytes, most)
    for schedule in _known(pipeline, num_microbatches, pp_ranks, can_split):
        search.consider(schedule, None)
    if memory_limit_bytes is not None:  # so that a generous limit never gives a slower schedule than no limit
        default = auto_schedule(pipeline, num_microbatches, pp_rank_of_stage=pp_rank_of_stage, can_split=can_split)
        search.consider(default, None)
    for depths in depths_tried:
        for policy in _policies(depths, can_split):
            search.try_policy(policy)
    if search.best is None:
        limit = math.inf if memory_limit_bytes is None else memory_limit_bytes
        raise ScheduleError(
            f"no schedule was found that keeps at most {limit:,} bytes of activations; one "
            f"microbatch takes {max(stage.activation_bytes for stage in pipeline.stages):,}"
        )
    search.improve()
    search.trade_time_for_memory()
    search.join_backwards()
    return replace(search.best.schedule, name=NAME)


class _Search:
    def __init__(
        self,
        pipeline: Pipeline,
        num_microbatches: int,
        pp_ranks: tuple[int, ...],
        memory_limit_bytes: int | None,
        max_in_flight: tuple[int, ...],
    ) -> None:
        self.pipeline, self.num, self.pp_ranks = pipeline, num_microbatches, pp_ranks
        self.limit, self.most = memory_limit_bytes, max_in_flight
        self.best: _Candidate | None = None
        self.tried: dict[Policy, _Candidate | None] = {}
        self.known_seconds = math.inf  # makespan of the fastest known schedule that fits
        self.allowed_seconds = 0.0  # makespans up to this are fast enough

    def consider(self, schedule: Schedule, policy: Policy | None) -> bool:
        """Keep a schedule if it is the best so far. Returns whether it is."""
        found = self.measure(schedule, policy)
        if found is not None and policy is None:
            self.known_seconds = min(self.known_seconds, found.seconds)
        return self.keep_best(found)

    def keep_best(self, found: _Candidate | None) -> bool:
        if found is None or not found.beats(self.best, self.allowed_seconds):
            return False
        self.best = found
        return True

    def measure(self, schedule: Schedule, policy: Policy | None) -> _Candidate | None:
        """A candidate, or None if the schedule keeps too much in flight or deadlocks."""
        peaks = schedule.peak_bytes(self.pipeline)
        if self.limit is not None and max(peaks) > self.limit:
            return None
        if any(depth > most for depth, most in zip(schedule.in_flight, self.most, strict=True)):
            return None
        try:
            seconds = simulate_schedule(schedule, self.pipeline).makespan_seconds
        except ScheduleError:
            return None
        return _Candidate(schedule, policy, seconds, sum(peaks), sum(map(len, schedule.rank_actions)))

    def try_policy(self, policy: Policy) -> bool:
        """Keep the schedule of a policy if it is the best so far. Returns whether it is."""
        policy = replace(policy, max_in_flight=self.within_limit(policy.max_in_flight))
        if policy not in self.tried:
            self.tried[policy] = self.run_policy(policy)
        return self.keep_best(self.tried[policy])

    def run_policy(self, policy: Policy) -> _Candidate | None:
        if min(policy.max_in_flight) < 1:
            return None
        order = order_greedily(self.pipeline, self.num, self.pp_ranks, policy)
        if sum(map(len, order)) != sum(3 if split else 2 for split in policy.splits) * self.num:
            return None  # deadlock: a pp rank's microbatches in flight all wait for another stage of the same pp rank
        return self.measure(add_transfers(NAME, order, self.pipeline, self.pp_ranks, self.num), policy)

    def within_limit(self, depths: tuple[int, ...]) -> tuple[int, ...]:
        """Depths lowered until the activations of every pp rank fit the limit, starting with the deepest stage of a pp
        rank.
        """
        if self.limit is None:
            return depths
        lowered = list(depths)
        for pp_rank in set(self.pp_ranks):
            stages = [stage for stage, of_stage in enumerate(self.pp_ranks) if of_stage == pp_rank]
            sizes = [self.pipeline.stages[stage].activation_bytes for stage in stages]
            while sum(lowered[s] * size for s, size in zip(stages, sizes, strict=True)) > self.limit:
                deepest = max(stages, key=lambda s: lowered[s])
                if lowered[deepest] < 1:
                    break
                lowered[deepest] -= 1
        return tuple(lowered)

    def improve(self) -> None:
        """Hill climbing: apply changes of the policy while one gives a better schedule."""
        improved = True
        while improved and self.best is not None and self.best.policy is not None:
            improved = False
            for change in self.changes(self.best.policy):
                if self.try_policy(change):
                    improved = True
                    break

    def trade_time_for_memory(self) -> None:
        """Save memory at the cost of a little time, but stay as fast as the known schedules."""
        assert self.best is not None
        fastest = self.best.seconds
        self.allowed_seconds = max(fastest, min(fastest * (1 + SLACK), self.known_seconds)) * (1 + _SAME)
        self.improve()

    def join_backwards(self) -> None:
        """Merge adjacent I and W passes of the first microbatches into B on each pp rank, if that shortens the step."""
        assert self.best is not None
        for pp_rank in range(len(self.best.schedule.rank_actions)):
            best, worse = 0, self.num + 1  # bisection over the number of microbatches
            tried = self.num
            while best < tried < worse:
                before = self.best.schedule
                rank_actions = computations(before)
                rank_actions[pp_rank] = _join(rank_actions[pp_rank], tried)
                joined = add_transfers(NAME, rank_actions, self.pipeline, self.pp_ranks, self.num)
                if joined.rank_actions == before.rank_actions or self.consider(joined, self.best.policy):
                    best = tried
                else:
                    worse = tried
                tried = (best + worse) // 2

    def changes(self, policy: Policy) -> Iterable[Policy]:
        """Policies with the depth of one stage changed by one, or its backward not split."""
        for stage in range(len(self.pp_ranks)):
            for step in (-1, 1):
                depths = list(policy.max_in_flight)
                depths[stage] += step
                if 1 <= depths[stage] <= self.most[stage]:
                    yield replace(policy, max_in_flight=tuple(depths))
            if policy.splits[stage]:
                whole = tuple(split and other != stage for other, split in enumerate(policy.splits))
                yield replace(policy, splits=whole)


def _join(actions: Sequence[Action], num_microbatches: int) -> list[Action]:
    """Replace adjacent input-gradient and weight-gradient passes by whole backwards, for the first microbatches."""
    joined: list[Action] = []
    for action in actions:
        before = joined[-1] if joined else None
        is_adjacent = action.kind is Kind.W and before == replace(action, kind=Kind.I)
        if is_adjacent and action.microbatch < num_microbatches:
            joined[-1] = replace(action, kind=Kind.B)
        else:
            joined.append(action)
    return joined


def _known(pipeline: Pipeline, num_microbatches: int, pp_ranks: tuple[int, ...], can_split: bool) -> Iterable[Schedule]:
    """Known schedules that suit the assignment of stages to pp ranks."""
    num = len(pp_ranks)
    if sorted(pp_ranks) == list(range(num)):  # one stage per pp rank, in any order
        builders: list[Callable[[Pipeline, int], Schedule]] = [one_f_one_b, eager_1f1b, gpipe]
        for build in [*builders, zb_h1] if can_split else builders:
            made = build(pipeline, num_microbatches)
            yield replace(
                made,
                rank_actions=tuple(made.rank_actions[pp_ranks.index(pp_rank)] for pp_rank in range(num)),
                pp_rank_of_stage=pp_ranks,
            )
    num_pp_ranks = max(pp_ranks) + 1
    is_interleaved = num > num_pp_ranks and pp_ranks == tuple(stage % num_pp_ranks for stage in range(num))
    if is_interleaved and num % num_pp_ranks == 0 and num_microbatches % num_pp_ranks == 0:
        yield interleaved_1f1b(pipeline, num_microbatches, num_pp_ranks)


def _policies(depths: tuple[int, ...], can_split: bool) -> Iterable[Policy]:
    num = len(depths)
    yield Policy(depths, (False,) * num)
    yield Policy(depths, (False,) * num, forward_first=True)
    if can_split:
        for forward_first, weights_first, patience in itertools.product((False, True), (False, True), (0.0, 0.5, 1.0)):
            yield Policy(depths, (True,) * num, forward_first, weights_first, patience)


def _depths(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """Microbatches in flight that each stage needs: the least by its round trip, and the number by the rule below.

    The rule: an edge hides its transfers if its source has k forwards more in flight than its destination, and the
    stages need as long for k - 1 microbatches as the two transfers take.
    """
    stages, num = pipeline.stages, len(pipeline.stages)
    pace = max([stage.forward_seconds + stage.backward_seconds for stage in stages] + _link_seconds(pipeline))
    round_trip = [0.0] * num  # from the start of a stage's forward to the end of its backward
    by_rule = [1] * num
    for s in reversed(range(num)):
        beyond = 0.0
        for d in pipeline.outputs[s]:
            edge = pipeline.edge_between[s, d]
            transfer = edge.forward_seconds + edge.backward_seconds
            beyond = max(beyond, transfer + round_trip[d])
            by_rule[s] = max(by_rule[s], by_rule[d] + 1 + (math.ceil(transfer / pace - 1e-9) if pace else 0))
        round_trip[s] = beyond + stages[s].forward_seconds + stages[s].backward_seconds
    exact = [max(1, math.ceil(trip / pace - 1e-9)) if pace else 1 for trip in round_trip]
    return [tuple(exact), tuple(by_rule)]


def _link_seconds(pipeline: Pipeline) -> list[float]:
    """How long one microbatch keeps each channel and each shared link busy."""
    busy: dict[str, float] = {}
    alone: list[float] = []
    for edge in pipeline.edges:
        for seconds, loads in (
            (edge.forward_seconds, edge.forward_loads),
            (edge.backward_seconds, edge.backward_loads),
        ):
            alone.append(seconds)
            for link, load_seconds in loads:
                busy[link] = busy.get(link, 0.0) + load_seconds
    return [*alone, *busy.values()]
