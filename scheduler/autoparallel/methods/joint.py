"""The joint search by the recurrence of :mod:`.recurrence_tables`: stages, devices, choices, depths, edges at once."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ..costs.search_problem import Candidate, SearchProblem, Stages, end_of
from .recurrence_tables import Tables, make_tables

#: Ratio of consecutive bottleneck times that are tried. The answer is within this factor of the best one.
PACE_STEP = 1.01
#: Maximum number of distinct plans that :func:`joint` returns, in total and for one number of microbatches, and the
#: longest time of a plan over that of the first one.
NUM_CANDIDATES, PER_COUNT, NEAR = 6, 3, 1.5
#: The number of an infinite bottleneck time.
_NO_LIMIT = 1 << 62
#: Relative tolerance of equal seconds.
_SAME = 1e-12


def joint(problem: SearchProblem, below_seconds: float = math.inf) -> tuple[Candidate, ...]:
    """The plans that are fastest in the model of :mod:`.recurrence_tables`, with true prices of all their edges, best
    first.

    Plans count only if they take less than ``below_seconds`` in this model.
    """
    return tuple(itertools.islice(best_plans(problem, below_seconds), NUM_CANDIDATES))


@dataclass(frozen=True, order=True)
class _Entry:
    """A range of bottleneck times still to be searched, or one searched time, for a number of microbatches.

    Attributes:
        first, end: numbers of the times from ``first`` to ``end - 1``; of the searched time if ``end`` is 0.
        seconds: lower bound on their plans. If it is exact, it is the time of the plan of ``stages``.
        value: least sum of round trip and excess at a bottleneck time that is no shorter; a lower bound.
    """

    seconds: float
    count: int
    first: int
    end: int
    is_exact: bool = False
    value: float = 0.0
    stages: Stages = ()


@dataclass(eq=False)
class _BottleneckSearch:
    """The search for one number of microbatches.

    Attributes:
        times: bottleneck times by number, ascending.
        prices: seconds of edges that the planner has computed.
        exact: least sums of round trip and excess, by the number of the bottleneck time.
        step: difference to the next number that is searched if none above it is known.
    """

    tables: Tables
    times: list[float]
    prices: dict[int, tuple[float, float]] = field(default_factory=dict)
    exact: dict[int, float] = field(default_factory=dict)
    step: int = 0

    def time_of(self, number: int) -> float:
        """The bottleneck time of a number."""
        if number == _NO_LIMIT:
            return math.inf
        while number >= len(self.times):
            self.times.append(self.times[-1] * PACE_STEP)
        return self.times[number]

    def entry(self, first: int, end: int, value: float, stages: Stages = (), is_exact: bool = False) -> _Entry:
        """An entry of the heap."""
        count = self.tables.num_microbatches
        steady = (count - 1) * self.time_of(first) if count > 1 else 0.0
        return _Entry(value + steady, count, first, end, is_exact, value, stages)

    def search_one(self, number: int) -> Iterator[_Entry]:
        """The best plan at a bottleneck time with the known prices; nothing if no plan fits."""
        trip, excess, stages = self.tables.best_stages(self.time_of(number), self.prices)
        if stages:
            yield self.entry(number, 0, trip + excess, stages)

    def price(self, entry: _Entry) -> Iterator[_Entry]:
        """The best plan of a bottleneck time that was searched, with more prices."""
        price_edges(self.tables, entry.stages, self.prices)
        for candidate in self.search_one(entry.first):
            if price_edges(self.tables, candidate.stages, self.prices):
                yield candidate
                continue
            self.exact[entry.first] = candidate.value
            yield replace(candidate, is_exact=True)
            if entry.first == _NO_LIMIT:
                yield self.entry(0, _NO_LIMIT, candidate.value)

    def divide(self, entry: _Entry) -> Iterator[_Entry]:
        """Search one of several bottleneck times. It bounds the plans of those below it, which allow no other plans."""
        first, end = entry.first, entry.end
        if self.exact.get(first - 1, math.inf) <= entry.value * (1 + _SAME):
            return  # the plan of the time before them is the best of all of them
        number = (first + end) // 2
        if end == _NO_LIMIT:
            number, self.step = first + self.step, max(1, 2 * self.step)
        for entry_of_number in self.search_one(number):
            yield entry_of_number
            if first < number:
                yield self.entry(first, number, entry_of_number.value)
        if number + 1 < end:
            yield self.entry(number + 1, end, entry.value)


def best_plans(problem: SearchProblem, below_seconds: float = math.inf) -> Iterator[Candidate]:
    """Distinct plans that are faster than a limit, by seconds in the model: the best of their bottleneck times.

    At most :data:`PER_COUNT` of each number of microbatches that take at most :data:`NEAR` times as long as the first.

    Edges start with lower bounds of their prices. The planner computes the true prices of the edges of the best plan,
    and the same bottleneck time is searched again. Once the best plan has true prices only, no other plan is better.
    A longer bottleneck time allows all plans of a shorter one, so the sum of round trip and excess at a searched time
    is a bound for all shorter ones. Times are searched in the order of their bounds, so most are never searched.
    """
    counts: dict[int, _BottleneckSearch] = {}
    heap: list[_Entry] = []
    for count in problem.microbatch_counts:
        tables = make_tables(problem, count)
        if tables is not None and (trip := tables.min_trip()) < math.inf:
            counts[count] = _BottleneckSearch(tables, bottleneck_times(tables))
            first = _NO_LIMIT if count == 1 else 0  # a limit does not make the step of one microbatch shorter
            heap.append(counts[count].entry(first, _NO_LIMIT, trip))
    heapq.heapify(heap)
    count_of_plan: dict[str, int] = {}  # numbers of microbatches by the text of the plan
    while heap and heap[0].seconds < below_seconds:
        entry = heapq.heappop(heap)
        search = counts[entry.count]
        if sum(count == entry.count for count in count_of_plan.values()) >= PER_COUNT:
            continue
        if entry.is_exact:
            candidate = Candidate("joint", entry.stages, entry.count, entry.seconds)
            if candidate.text not in count_of_plan:
                below_seconds = min(below_seconds, math.nextafter(NEAR * entry.seconds, math.inf))
                count_of_plan[candidate.text] = entry.count
                yield candidate
            continue
        if entry.first == _NO_LIMIT and not entry.stages:
            more = search.search_one(_NO_LIMIT)
        else:
            more = search.price(entry) if entry.stages else search.divide(entry)
        for item in more:
            heapq.heappush(heap, item)


def price_edges(tables: Tables, stages: Stages, prices: dict[int, tuple[float, float]]) -> bool:
    """Price the edges between neighbours that have no price yet. Returns whether there were any."""
    problem, num_samples, added = tables.problem, tables.problem.num_samples // tables.num_microbatches, False
    for src, dst in itertools.pairwise(stages):
        index = tables.edge_index(src, dst)
        if index in prices:
            continue
        added = True
        tensors = problem.graph.between(src.first_layer, src.end_layer, dst.end_layer)
        if not tensors:
            prices[index] = (0.0, 0.0)
            continue
        price = problem.edge_costs.price(tensors, num_samples, end_of(src, -1), end_of(dst, 0))
        prices[index] = (price.forward_seconds, price.backward_seconds)
    return added


def bottleneck_times(tables: Tables) -> list[float]:
    """Candidate bottleneck times, 1 % apart, from the lower bound to the longest time of a plan with one stage."""
    num = len(tables.problem.graph.layers)
    total = tables.forward + tables.backward
    first = np.arange(num)
    # bounds on the bottleneck time: the time of the slowest layer on its best option; all work, divided over all
    # devices
    slowest = float(total[:, first, first + 1].min(axis=0).max())
    devices = np.array([tables.classes[c].num_ranks for c in tables.option_class])
    work = float((total[:, first, first + 1] * devices[:, None]).min(axis=0).sum())
    lowest = max(slowest, work / tables.problem.cluster.num_ranks) * (1 - 1e-9)
    highest = float(total[:, 0, num].max(where=np.isfinite(total[:, 0, num]), initial=slowest))
    if lowest <= 0:
        return [max(highest, 1e-9)]
    steps = math.ceil(math.log(max(highest / lowest, 1.0)) / math.log(PACE_STEP)) + 1
    return [lowest * PACE_STEP**step for step in range(steps)]
