"""``auto_schedule``: a search over known schedules and list scheduling, within a memory limit of each pp rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from reshard.errors import ArgumentError, ScheduleError
from reshard.formatting import brief

from ..ir.communication import add_transfers
from ..ir.schedule import Schedule
from ..pipeline import Pipeline, check_limits, check_placement
from ..simulation.schedule_lower_bound import find_lower_bound
from .classic import check_microbatches
from .known_schedules import known_orders
from .list_scheduling import DispatchRule
from .orders import OrderModel, RankOrders

NAME = "auto_schedule"
#: Share of the makespan given up to save memory. Keeping more activations slows real computations by more than this.
SLACK = 0.003
#: Makespans whose relative difference is smaller count as equal. Memory, then the number of actions, breaks the tie.
_SAME = 1e-9
#: Largest ratio of neighbouring memory levels.
_LEVEL_RATIO = 1.5
#: If all microbatches take at most this many times the bytes of the smallest stage, each multiple of these is a level.
_FINE_LEVELS = 24
#: Limits of the search of one level: computations that it orders in all, and the smallest and the largest number of
#: orders.
_COMPUTATIONS, _MIN_TRIES, _MAX_TRIES = 400_000, 24, 400


@dataclass(frozen=True)
class SimulatedOrder:
    """An order of computations, as simulated.

    Attributes:
        order: computations of each pp rank.
        rule: rule of list scheduling that made it; None for a known schedule.
        seconds: makespan.
        peak_bytes: peak bytes of all pp ranks together.
        num_actions: number of computations.
    """

    order: RankOrders
    rule: DispatchRule | None
    seconds: float
    peak_bytes: float
    num_actions: int

    def is_better(self, other: SimulatedOrder) -> bool:
        """Whether it is faster or, if both are equally fast, uses less memory or fewer actions."""
        if abs(self.seconds - other.seconds) > _SAME * other.seconds:
            return self.seconds < other.seconds
        return (self.peak_bytes, self.num_actions) < (other.peak_bytes, other.num_actions)


def best(candidates: Iterable[SimulatedOrder]) -> SimulatedOrder | None:
    """The best of some candidates; of equal candidates, the first."""
    chosen: SimulatedOrder | None = None
    for candidate in candidates:
        if chosen is None or candidate.is_better(chosen):
            chosen = candidate
    return chosen


def auto_schedule(
    pipeline: Pipeline,
    num_microbatches: int,
    *,
    activation_limit_bytes: float | Sequence[float] | None = None,
    pp_rank_of_stage: Sequence[int] | None = None,
    can_split: bool = True,
) -> Schedule:
    """Search for the fastest schedule by :func:`simulate_schedule`. Gives up at most 0.3 % of its speed to save memory.

    Candidates are the known schedules of the placement, and schedules by list scheduling under many rules: a pp rank
    begins a forward if its stages together have the memory for it. The result is at least as fast as every known
    schedule that keeps no more on any pp rank. A larger limit for all pp ranks never makes it slower.

    Args:
        pipeline, num_microbatches: what to schedule.
        activation_limit_bytes: limit of the activations that a device keeps at once, or one limit for each pp rank.
            Default: the bytes of the fullest pp rank if each stage has as many microbatches in flight as under 1F1B,
            or as it needs to hide its communication if that is more.
        pp_rank_of_stage: pp rank that computes each stage; default: one stage per pp rank.
        can_split: whether a backward may be split into an input-gradient pass and a weight-gradient pass.

    Raises:
        ArgumentError: an argument is out of range, or pp ranks are not numbered from 0.
        ScheduleError: a single microbatch in flight exceeds the memory limit.
    """
    check_microbatches(pipeline, num_microbatches)
    if not isinstance(can_split, bool):
        raise ArgumentError(f"can_split is {brief(can_split)}; it must be True or False")
    pp_ranks = check_placement(pipeline, pp_rank_of_stage)
    limits = None if activation_limit_bytes is None else check_limits(activation_limit_bytes, max(pp_ranks) + 1)
    search = _AllLevels(pipeline, num_microbatches, pp_ranks, can_split, limits)
    schedule = search.run()
    if schedule is None:
        assert limits is not None
        raise ScheduleError(
            f"no schedule was found that keeps at most {_limit_text(limits)} bytes of activations; one "
            f"microbatch takes {max(stage.activation_bytes for stage in pipeline.stages):,}"
        )
    return add_transfers(NAME, search.model.actions(schedule.order), pipeline, pp_ranks, num_microbatches)


def _limit_text(limits: tuple[float, ...]) -> str:
    return f"{limits[0]:,}" if len(set(limits)) == 1 else brief(list(limits))


class _AllLevels:
    """A search at levels of memory that depend on the pipeline only, not on the limit.

    The search of a level uses no result of another level. The levels within a larger limit include the levels within a
    smaller one, so a larger limit never gives a slower schedule.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        num_microbatches: int,
        pp_ranks: tuple[int, ...],
        can_split: bool,
        limits: tuple[float, ...] | None,
    ) -> None:
        self.pipeline, self.num, self.pp_ranks, self.can_split = pipeline, num_microbatches, pp_ranks, can_split
        self.num_pp_ranks = max(pp_ranks) + 1
        self.model = OrderModel(pipeline, pp_ranks, num_microbatches)
        self.bytes_of = [stage.activation_bytes for stage in pipeline.stages]
        self.known = list(self.measure_known())
        self.limits = (self.default_bytes(),) * self.num_pp_ranks if limits is None else limits

    def run(self) -> SimulatedOrder | None:
        """The best candidate of the lowest level that is fast enough."""
        levels = self.levels()
        top = max(self.limits)
        within = [level for level in levels if level <= top]
        if len(set(self.limits)) > 1 and top not in within:
            within.append(top)
        best_of_level: dict[float, SimulatedOrder] = {}
        fastest, fastest_known = math.inf, math.inf
        for level in reversed(within):
            limits = tuple(min(limit, level) for limit in self.limits)
            bound = find_lower_bound(
                self.pipeline,
                self.num,
                activation_limit_bytes=limits,
                pp_rank_of_stage=self.pp_ranks,
                can_split=self.can_split,
            )
            if bound.seconds > min(fastest * (1 + SLACK), fastest_known) * (1 + _SAME):
                break  # lower levels have bounds that are at least as large
            known = [candidate for candidate, peaks in self.known if _fits(peaks, limits)]
            fastest_known = min([fastest_known, *(candidate.seconds for candidate in known)])
            candidate = _LevelSearch(self, limits, known, bound.seconds).run()
            if candidate is not None:
                best_of_level[level] = candidate
                fastest = min(fastest, candidate.seconds)
        if not best_of_level:
            return None
        allowed = max(fastest, min(fastest * (1 + SLACK), fastest_known)) * (1 + _SAME)
        lowest = min(level for level, candidate in best_of_level.items() if candidate.seconds <= allowed)
        return self.join_backwards(best_of_level[lowest])

    def measure_known(self) -> Iterator[tuple[SimulatedOrder, list[float]]]:
        """The known schedules of the placement that do not deadlock, each with the peak bytes of each pp rank."""
        for _, rank_actions in known_orders(self.pp_ranks, self.num, can_split=self.can_split):
            order = self.model.numbers(rank_actions)
            candidate = self.measure(order, None)
            if candidate is not None:
                yield candidate, self.model.peak_bytes(order)

    def measure(self, order: RankOrders, rule: DispatchRule | None) -> SimulatedOrder | None:
        """A candidate; None if its order deadlocks."""
        seconds = self.model.makespan_seconds(order)
        if seconds == math.inf:
            return None
        return SimulatedOrder(order, rule, seconds, sum(self.model.peak_bytes(order)), sum(map(len, order)))

    def default_bytes(self) -> float:
        """Bytes that each pp rank may keep if no limit is given; see :func:`auto_schedule`."""
        num = len(self.pp_ranks)
        depths = [max(num - stage, depth) for stage, depth in enumerate(find_depths(self.pipeline)[-1])]
        return max(self.bytes_by_pp_rank(depths))

    def bytes_by_pp_rank(self, depths: Sequence[int]) -> list[float]:
        """Bytes of each pp rank with some microbatches in flight on each stage."""
        sums = [0.0] * self.num_pp_ranks
        for pp_rank, depth, size in zip(self.pp_ranks, depths, self.bytes_of, strict=True):
            sums[pp_rank] += min(depth, self.num) * size
        return sums

    def levels(self) -> list[float]:
        """Levels of memory, ascending: the peaks of the known schedules, the default, and levels in between."""
        num = len(self.pp_ranks)
        low_bytes, high_bytes = max(self.bytes_by_pp_rank([1] * num)), max(self.bytes_by_pp_rank([self.num] * num))
        levels = {low_bytes, high_bytes, self.default_bytes(), *(max(peaks) for _, peaks in self.known)}
        levels |= {max(self.bytes_of)}  # enough where each pp rank keeps one stage at a time
        unit = min((size for size in self.bytes_of if size), default=1)
        if high_bytes / unit <= _FINE_LEVELS:
            levels |= {nth * unit for nth in range(1, int(high_bytes / unit))}
        ascending = sorted(level for level in levels if level <= high_bytes)
        for low, high in itertools.pairwise(list(ascending)):
            steps = math.ceil(math.log(high / low) / math.log(_LEVEL_RATIO) - 1e-9) if low else 1
            ascending += [low * (high / low) ** (step / steps) for step in range(1, steps)]
        return sorted(ascending)

    def join_backwards(self, candidate: SimulatedOrder) -> SimulatedOrder:
        """Merge adjacent I and W passes of the first microbatches into B on each pp rank, if that shortens the step."""
        for pp_rank in range(self.num_pp_ranks):
            good, bad, tried = 0, self.num + 1, self.num  # bisection over the number of microbatches
            while good < tried < bad:
                order = list(candidate.order)
                order[pp_rank] = join(order[pp_rank], tried, len(self.pp_ranks))
                joined = candidate if order == candidate.order else self.measure(order, candidate.rule)
                if joined is candidate or (joined is not None and joined.is_better(candidate)):
                    candidate, good = joined, tried
                else:
                    bad = tried
                tried = (good + bad) // 2
        return candidate


def _fits(peaks: Sequence[float], limits: Sequence[float]) -> bool:
    return all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


class _LevelSearch:
    """The search within one limit of each pp rank."""

    def __init__(
        self, search: _AllLevels, limits: tuple[float, ...], known: Sequence[SimulatedOrder], bound_seconds: float
    ) -> None:
        self.search, self.limits, self.known = search, limits, known
        self.enough_seconds = bound_seconds * (1 + _SAME)
        num_computations = 3 * search.num * len(search.pp_ranks)
        self.tries_left = min(_MAX_TRIES, max(_MIN_TRIES, _COMPUTATIONS // num_computations))
        self.tried: set[DispatchRule] = set()
        self.listed: SimulatedOrder | None = None  # the best by list scheduling

    def run(self) -> SimulatedOrder | None:
        """The best candidate; None if there is none."""
        for rule in self.rules():
            self.try_rule(rule)
        self.improve()
        return best(self.known if self.listed is None else [*self.known, self.listed])

    def try_rule(self, rule: DispatchRule) -> bool:
        """Keep the order of a rule if it is the best so far. Returns whether it is."""
        if rule in self.tried or self.tries_left <= 0 or self.is_optimal:
            return False
        self.tried.add(rule)
        self.tries_left -= 1
        order = self.search.model.order(rule)
        candidate = None if order is None else self.search.measure(order, rule)
        if candidate is None or (self.listed is not None and not candidate.is_better(self.listed)):
            return False
        self.listed = candidate
        return True

    @property
    def is_optimal(self) -> bool:
        """Whether the best by list scheduling is as fast as the lower bound."""
        return self.listed is not None and self.listed.seconds <= self.enough_seconds

    def rules(self) -> Iterator[DispatchRule]:
        """Policies with all choices, the most promising first."""
        num, count = len(self.search.pp_ranks), self.search.num
        everything = (count,) * num
        depths = [tuple(min(depth, count) for depth in item) for item in find_depths(self.search.pipeline)]
        groups = (0,) if num == self.search.num_pp_ranks else (0, self.search.num_pp_ranks)
        splits = ((True,) * num, (False,) * num) if self.search.can_split else ((False,) * num,)
        for max_in_flight in dict.fromkeys([everything, *reversed(depths)]):
            for split, group in itertools.product(splits, groups):
                base = DispatchRule(max_in_flight, self.limits, split, group=group)
                if not split[0]:
                    yield from (replace(base, forward_first=first) for first in (False, True))
                    continue
                for patience, weights_first, forward_first in itertools.product(
                    (0.0, 0.5, 1.0), (False, True), (False, True)
                ):
                    yield replace(base, patience=patience, weights_first=weights_first, forward_first=forward_first)

    def improve(self) -> None:
        """Hill climbing: apply changes of the rule while one gives a better schedule."""
        improved = True
        while improved and self.tries_left > 0 and self.listed is not None:
            improved = any(self.try_rule(change) for change in self.changes(self.listed))

    def changes(self, candidate: SimulatedOrder) -> Iterator[DispatchRule]:
        """Policies with the depth of one stage changed by one, or its backward not split."""
        rule = candidate.rule
        assert rule is not None
        reached = in_flight(candidate.order, len(self.search.pp_ranks))
        for stage, depth in enumerate(reached):
            for changed in (depth - 1, depth + 1):
                if 1 <= changed <= self.search.num:
                    depths = (*reached[:stage], changed, *reached[stage + 1 :])
                    yield replace(rule, max_in_flight=depths)
            if rule.splits[stage]:
                whole = tuple(split and other != stage for other, split in enumerate(rule.splits))
                yield replace(rule, splits=whole)


def in_flight(order: RankOrders, num_stages: int) -> tuple[int, ...]:
    """For each stage, the most microbatches in flight."""
    now, peaks = [0] * num_stages, [0] * num_stages
    for codes in order:
        for code in codes:
            stage, change = (code >> 2) % num_stages, (1, -1, 0, -1)[code & 3]
            now[stage] += change
            peaks[stage] = max(peaks[stage], now[stage])
    return tuple(peaks)


def join(codes: Sequence[int], num_microbatches: int, num_stages: int) -> list[int]:
    """Replace adjacent input-gradient and weight-gradient passes by whole backwards, for the first microbatches."""
    joined: list[int] = []
    for code in codes:
        if code & 3 == 3 and joined and joined[-1] == code - 1 and (code >> 2) // num_stages < num_microbatches:
            joined[-1] = code - 2
        else:
            joined.append(code)
    return joined


def find_depths(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """Microbatches in flight that each stage needs: the least by its round trip, and the number by the rule below.

    The rule: an edge hides its transfers if its source has k forwards more in flight than its destination, and the
    stages need as long for k - 1 microbatches as the two transfers take.
    """
    stages, num = pipeline.stages, len(pipeline.stages)
    bottleneck_seconds = max(
        [stage.forward_seconds + stage.backward_seconds for stage in stages] + link_seconds(pipeline)
    )
    round_trip = [0.0] * num  # from the start of a stage's forward to the end of its backward
    by_rule = [1] * num
    for s in reversed(range(num)):
        beyond = 0.0
        for d in pipeline.outputs[s]:
            edge = pipeline.edge_between[s, d]
            transfer = edge.forward_seconds + edge.backward_seconds
            beyond = max(beyond, transfer + round_trip[d])
            by_rule[s] = max(
                by_rule[s],
                by_rule[d] + 1 + (math.ceil(transfer / bottleneck_seconds - 1e-9) if bottleneck_seconds else 0),
            )
        round_trip[s] = beyond + stages[s].forward_seconds + stages[s].backward_seconds
    exact = [max(1, math.ceil(trip / bottleneck_seconds - 1e-9)) if bottleneck_seconds else 1 for trip in round_trip]
    return [tuple(exact), tuple(by_rule)]


def link_seconds(pipeline: Pipeline) -> list[float]:
    """The time that one microbatch keeps each channel and each shared link busy."""
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
