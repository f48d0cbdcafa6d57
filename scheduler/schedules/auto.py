"""Our schedule: as deep as its own communication needs, within a memory limit, backwards split where that gains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from reshard.errors import ArgumentError, ScheduleError

from ..graph import Pipeline, check_limit
from ..ir.communication import add_transfers, compute_rows
from ..ir.schedule import Action, Kind, Schedule
from ..simulation.replay import simulate
from .classic import check_microbatches, eager_1f1b, gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from .list_scheduling import Policy, order_greedily

NAME = "auto_schedule"
#: What part of the makespan is given up for memory: real computations are slower the more is kept, by more than this.
SLACK = 0.003
#: Makespans that differ by less are equal, and then memory decides, and then how few actions there are.
_SAME = 1e-9


@dataclass(frozen=True)
class _Found:
    schedule: Schedule
    policy: Policy | None  # None: one of the known schedules
    seconds: float
    peak_bytes: int
    num_actions: int

    def beats(self, other: _Found | None, allowed_seconds: float) -> bool:
        """Whether it is faster; where both are fast enough, or as fast, whether it keeps less or has fewer actions."""
        if other is None:
            return True
        enough = max(self.seconds, other.seconds) <= allowed_seconds
        if not enough and abs(self.seconds - other.seconds) > _SAME * other.seconds:
            return self.seconds < other.seconds
        return (self.peak_bytes, self.num_actions) < (other.peak_bytes, other.num_actions)


def auto_schedule(
    pipeline: Pipeline,
    num_microbatches: int,
    *,
    memory_limit_bytes: int | None = None,
    row_of_stage: Sequence[int] | None = None,
    can_split: bool = True,
) -> Schedule:
    """The fastest schedule found for a pipeline by :func:`simulate`, but for 0.3 % that are given up for memory.

    Each stage needs as many microbatches in flight as fit the time from its forward to its backward, transfers
    included, at the pace of the slowest stage or link. With that depth, and around it, orders are found by running the
    pipeline forward in time under a few policies; depths are lowered, and backwards left whole, where nothing is lost.
    The schedules of :mod:`~reshard.scheduler.schedules.classic` that keep as little are candidates too.

    Args:
        memory_limit_bytes: of the activations that a device keeps at once; omitted, no stage has more microbatches in
            flight than its communication needs: where that is free, those of 1F1B. row_of_stage: who computes what;
            omitted, one stage per row. can_split: whether backwards may be done in halves.

    Raises:
        ArgumentError: no microbatch, or rows that are not numbered from 0. ScheduleError: not even one microbatch at a
            time fits the limit.
    """
    check_microbatches(pipeline, num_microbatches)
    if memory_limit_bytes is not None:
        check_limit(memory_limit_bytes)
    if row_of_stage is not None and not isinstance(row_of_stage, Sequence):
        raise ArgumentError(f"row_of_stage is a list of the rows of all stages, not {row_of_stage!r}")
    if not isinstance(can_split, bool):
        raise ArgumentError(f"can_split is {can_split!r}; it must be True or False")
    rows = tuple(range(len(pipeline.stages))) if row_of_stage is None else tuple(row_of_stage)
    if any(isinstance(row, bool) or not isinstance(row, int) for row in rows):
        raise ArgumentError(f"rows {list(rows)} must be integers")
    if len(rows) != len(pipeline.stages) or max(rows) >= len(rows) or set(rows) != set(range(max(rows) + 1)):
        raise ArgumentError(f"rows {list(rows)}: each of {len(pipeline.stages)} stages needs one, numbered from 0")
    depths_tried = [tuple(min(d, num_microbatches) for d in depths) for depths in _depths(pipeline)]
    most = depths_tried[-1] if memory_limit_bytes is None else (num_microbatches,) * len(rows)
    if memory_limit_bytes is not None:
        depths_tried += [tuple(min(d + 1, num_microbatches) for d in depths) for depths in depths_tried] + [most]
    search = _Search(pipeline, num_microbatches, rows, memory_limit_bytes, most)
    for schedule in _known(pipeline, num_microbatches, rows, can_split):
        search.look_at(schedule, None)
    if memory_limit_bytes is not None:  # with more room it is never slower than without
        free = auto_schedule(pipeline, num_microbatches, row_of_stage=row_of_stage, can_split=can_split)
        search.look_at(free, None)
    for depths in depths_tried:
        for policy in _policies(depths, can_split):
            search.try_policy(policy)
    if search.best is None:
        raise ScheduleError(
            f"no schedule was found that keeps at most {memory_limit_bytes or math.inf:,} bytes of activations; one "
            "microbatch takes "
            f"{max(stage.activation_bytes for stage in pipeline.stages):,}"
        )
    search.improve()
    search.spare()
    search.join_halves()
    return replace(search.best.schedule, name=NAME)


class _Search:
    def __init__(
        self,
        pipeline: Pipeline,
        num_microbatches: int,
        rows: tuple[int, ...],
        memory_limit_bytes: int | None,
        most_in_flight: tuple[int, ...],
    ) -> None:
        self.pipeline, self.num, self.rows = pipeline, num_microbatches, rows
        self.limit, self.most = memory_limit_bytes, most_in_flight
        self.best: _Found | None = None
        self.tried: dict[Policy, _Found | None] = {}
        self.known_seconds = math.inf  # of the fastest known schedule that fits
        self.allowed_seconds = 0.0  # what is fast enough

    def look_at(self, schedule: Schedule, policy: Policy | None) -> bool:
        """Keep it if it is the best so far; returns whether it is."""
        found = self.measure(schedule, policy)
        if found is not None and policy is None:
            self.known_seconds = min(self.known_seconds, found.seconds)
        return self.keep_best(found)

    def keep_best(self, found: _Found | None) -> bool:
        if found is None or not found.beats(self.best, self.allowed_seconds):
            return False
        self.best = found
        return True

    def measure(self, schedule: Schedule, policy: Policy | None) -> _Found | None:
        """None if it keeps too much, or never ends."""
        peaks = schedule.peak_bytes(self.pipeline)
        if self.limit is not None and max(peaks) > self.limit:
            return None
        if any(depth > most for depth, most in zip(schedule.in_flight, self.most, strict=True)):
            return None
        try:
            seconds = simulate(schedule, self.pipeline).makespan_seconds
        except ScheduleError:
            return None
        return _Found(schedule, policy, seconds, sum(peaks), sum(map(len, schedule.rows)))

    def try_policy(self, policy: Policy) -> bool:
        """Keep what it gives if that is the best so far; returns whether it is."""
        policy = replace(policy, most_in_flight=self.within_limit(policy.most_in_flight))
        if policy not in self.tried:
            self.tried[policy] = self.run_policy(policy)
        return self.keep_best(self.tried[policy])

    def run_policy(self, policy: Policy) -> _Found | None:
        if min(policy.most_in_flight) < 1:
            return None
        order = order_greedily(self.pipeline, self.num, self.rows, policy)
        if sum(map(len, order)) != sum(3 if split else 2 for split in policy.splits) * self.num:
            return None  # it came to a halt: a row was full of what waits for another stage of it
        return self.measure(add_transfers(NAME, order, self.pipeline, self.rows, self.num), policy)

    def within_limit(self, depths: tuple[int, ...]) -> tuple[int, ...]:
        """Depths lowered so that what a row keeps fits; the deepest stage of a row gives way first."""
        if self.limit is None:
            return depths
        lowered = list(depths)
        for row in set(self.rows):
            stages = [stage for stage, its in enumerate(self.rows) if its == row]
            kept = [self.pipeline.stages[stage].activation_bytes for stage in stages]
            while sum(lowered[s] * k for s, k in zip(stages, kept, strict=True)) > self.limit:
                deepest = max(stages, key=lambda s: lowered[s])
                if lowered[deepest] < 1:
                    break
                lowered[deepest] -= 1
        return tuple(lowered)

    def improve(self) -> None:
        """Lower depths and join backwards again while nothing is lost; deepen where something is gained."""
        moved = True
        while moved and self.best is not None and self.best.policy is not None:
            moved = False
            for change in self.changes(self.best.policy):
                if self.try_policy(change):
                    moved = True
                    break

    def spare(self) -> None:
        """Give up a little time for memory, but none that a known schedule would win by."""
        assert self.best is not None
        fastest = self.best.seconds
        self.allowed_seconds = max(fastest, min(fastest * (1 + SLACK), self.known_seconds)) * (1 + _SAME)
        self.improve()

    def join_halves(self) -> None:
        """Where both halves of a backward follow each other, make them one, for as many microbatches as can be."""
        assert self.best is not None
        for row in range(len(self.best.schedule.rows)):
            most, least_bad = 0, self.num + 1
            tried = self.num
            while most < tried < least_bad:
                before = self.best.schedule
                rows = compute_rows(before)
                rows[row] = _join(rows[row], tried)
                joined = add_transfers(NAME, rows, self.pipeline, self.rows, self.num)
                if joined.rows == before.rows or self.look_at(joined, self.best.policy):
                    most = tried
                else:
                    least_bad = tried
                tried = (most + least_bad) // 2

    def changes(self, policy: Policy) -> Iterable[Policy]:
        for stage in range(len(self.rows)):
            for step in (-1, 1):
                depths = list(policy.most_in_flight)
                depths[stage] += step
                if 1 <= depths[stage] <= self.most[stage]:
                    yield replace(policy, most_in_flight=tuple(depths))
            if policy.splits[stage]:
                whole = tuple(split and other != stage for other, split in enumerate(policy.splits))
                yield replace(policy, splits=whole)


def _join(actions: Sequence[Action], num_microbatches: int) -> list[Action]:
    """Whole backwards in place of both halves in a row, for the first microbatches."""
    joined: list[Action] = []
    for action in actions:
        before = joined[-1] if joined else None
        both = action.kind is Kind.W and before == replace(action, kind=Kind.I)
        if both and action.microbatch < num_microbatches:
            joined[-1] = replace(action, kind=Kind.B)
        else:
            joined.append(action)
    return joined


def _known(pipeline: Pipeline, num_microbatches: int, rows: tuple[int, ...], can_split: bool) -> Iterable[Schedule]:
    num = len(rows)
    if sorted(rows) == list(range(num)):  # one stage each, in whatever order
        builders: list[Callable[[Pipeline, int], Schedule]] = [one_f_one_b, eager_1f1b, gpipe]
        for build in [*builders, zb_h1] if can_split else builders:
            made = build(pipeline, num_microbatches)
            yield replace(made, rows=tuple(made.rows[rows.index(row)] for row in range(num)), row_of_stage=rows)
    num_rows = max(rows) + 1
    deals_out = num > num_rows and rows == tuple(stage % num_rows for stage in range(num))
    if deals_out and num % num_rows == 0 and num_microbatches % num_rows == 0:
        yield interleaved_1f1b(pipeline, num_microbatches, num_rows)


def _policies(depths: tuple[int, ...], can_split: bool) -> Iterable[Policy]:
    num = len(depths)
    yield Policy(depths, (False,) * num)
    yield Policy(depths, (False,) * num, forward_first=True)
    if can_split:
        for forward_first, weights_first, patience in itertools.product((False, True), (False, True), (0.0, 0.5, 1.0)):
            yield Policy(depths, (True,) * num, forward_first, weights_first, patience)


def _depths(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """How many microbatches each stage needs in flight: at least, by its round trip, and with some for each boundary.

    The second is the rule: a boundary with k forwards more in flight than the next one hides its transfers if k - 1 of
    them take the stages as long as the transfers.
    """
    stages, num = pipeline.stages, len(pipeline.stages)
    pace = max([stage.forward_seconds + stage.backward_seconds for stage in stages] + _link_seconds(pipeline))
    round_trip = [0.0] * num
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
    """What one microbatch takes of each channel and of each link that channels share."""
    busy: dict[str, float] = {}
    alone: list[float] = []
    for edge in pipeline.edges:
        for seconds, loads in (
            (edge.forward_seconds, edge.forward_loads),
            (edge.backward_seconds, edge.backward_loads),
        ):
            alone.append(seconds)
            for link, part in loads:
                busy[link] = busy.get(link, 0.0) + part
    return [*alone, *busy.values()]
