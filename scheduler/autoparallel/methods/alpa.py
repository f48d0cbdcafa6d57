"""Stages by Alpa's dynamic programming: unequal meshes, and edges that cost nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..costs.search_problem import Candidate, SearchProblem, Stages
from ..inputs.stages import StagePlan
from .recurrence_tables import Tables, make_tables

#: Number of limits on the time of the slowest stage that are tried. If there are more times of stages, the limits are
#: spread evenly among them.
MAX_LIMITS = 300
#: Times whose relative difference is smaller count as one limit.
SAME = 1e-6


def alpa(problem: SearchProblem) -> tuple[Candidate, ...]:
    """The best stages for each number of microbatches if edges took no time, best first.

    The time of a stage has its part of the gradient sum. A stage with s - 1 stages after it keeps s microbatches in
    flight, as 1F1B does.

    Source: Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning" (2022),
    with the times of stages from the profile in place of those of its intra-operator search.
    """
    candidates = []
    for count in problem.microbatch_counts:
        tables = make_tables(problem, count)
        if tables is not None:
            seconds, stages = best_stages(tables)
            if stages:
                candidates.append(Candidate("alpa", stages, count, seconds))
    candidates.sort(key=lambda candidate: (candidate.predicted_seconds, candidate.num_microbatches))
    return tuple(candidates[:3])


def num_sums(problem: SearchProblem) -> int:
    """The largest number of sums of times that one pass of the dynamic programming compares."""
    num_ranks, num_layers = problem.cluster.num_ranks, len(problem.graph.layers)
    return num_ranks * len(problem.cluster.mesh_sizes) * min(num_layers, num_ranks) * num_layers**2


def best_stages(tables: Tables) -> tuple[float, Stages]:
    """The least value of the sum of the times of all stages plus m - 1 times the slowest time, with the stages."""
    max_stages = min(len(tables.problem.graph.layers), tables.problem.cluster.num_ranks)
    places = _Places(tables)
    # a stage holds at most all microbatches
    different = [places.fastest(held) for held in range(1, min(max_stages, tables.num_microbatches) + 1)]
    times = different + [different[-1]] * (max_stages - len(different))
    values = np.unique(np.concatenate([item[0][np.isfinite(item[0])] for item in different]))
    if not len(values):
        return math.inf, ()
    limits = values[np.concatenate([np.diff(values) > SAME * values[:-1], [True]])]  # the largest of equal ones
    if len(limits) > MAX_LIMITS:
        limits = limits[np.unique(np.linspace(0, len(limits) - 1, MAX_LIMITS).astype(int))]
    more = tables.num_microbatches - 1
    min_seconds, best = _with_limit(places, times, math.inf)
    if not best:
        return math.inf, ()
    low, high = 0, len(limits) - 1  # bisection: the lowest limit that some division into stages meets
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _with_limit(places, times, limits[middle])[1] else (middle + 1, high)
    seconds = min_seconds + more * max(time for time, _ in best)
    for limit in limits[low:]:
        if min_seconds + more * limit >= seconds:
            break  # with any limit, the sum of the stages is at least ``min_seconds``
        limited_seconds, stages = _with_limit(places, times, limit)
        slowest = max(time for time, _ in stages)
        if limited_seconds + more * slowest < seconds:
            seconds, best = limited_seconds + more * slowest, stages
    return seconds, tuple(stage for _, stage in best)


@dataclass(frozen=True, eq=False)
class _Places:
    """The positions at which stages may begin. Those with equal class, memory and options share a table of times."""

    tables: Tables

    @cached_property
    def kinds(self) -> tuple[tuple[int, np.ndarray], ...]:
        """``(class, u)`` of each kind of place: the numbers of devices left where a stage of the class may begin."""
        places_of: dict[tuple[int, float, bytes], list[int]] = {}
        for c, sample in enumerate(self.tables.next_at):
            for index in np.flatnonzero(sample >= 0).tolist():
                key = c, float(self.tables.memory[c, index]), self.tables.allowed[:, index].tobytes()
                places_of.setdefault(key, []).append(index)
        return tuple((c, np.array(ends)) for (c, _, _), ends in places_of.items())

    @cached_property
    def kind_at(self) -> dict[tuple[int, int], int]:
        """The kind of the place of each class and ``u``."""
        return {(c, at): kind for kind, (c, ends) in enumerate(self.kinds) for at in ends.tolist()}

    def fastest(self, held: int) -> tuple[np.ndarray, np.ndarray]:
        """``[kind, first, end]``: seconds of the fastest option that fits ``held`` microbatches, and the option."""
        tables, size = self.tables, len(self.tables.problem.graph.layers) + 1
        seconds = np.full((len(self.kinds), size, size), np.inf)
        option = np.zeros(seconds.shape, dtype=np.int64)
        upper = np.triu(np.ones((size, size), dtype=bool), 1)
        for o, of_class in enumerate(tables.option_class):
            needed = tables.needed_bytes(o, held)
            whole = tables.forward[o] + tables.backward[o] + tables.sync[o] / tables.num_microbatches
            for kind, (c, ends) in enumerate(self.kinds):
                if c != of_class or not tables.allowed[o, ends[0]]:
                    continue
                time = np.where((needed <= tables.memory[c, ends[0]]) & upper, whole, np.inf)
                is_faster = time < seconds[kind]
                seconds[kind] = np.where(is_faster, time, seconds[kind])
                option[kind] = np.where(is_faster, o, option[kind])
        return seconds, option


def _with_limit(
    places: _Places, times: list[tuple[np.ndarray, np.ndarray]], limit: float
) -> tuple[float, list[tuple[float, StagePlan]]]:
    """Least sum of stage times with no stage slower than a limit, and ``(seconds, stage)`` of each stage."""
    tables = places.tables
    num_ends, size = tables.next_at.shape[1], len(tables.problem.graph.layers) + 1
    sums = [np.full((num_ends, size), np.inf)]
    sums[0][0, -1] = 0.0  # no layer and no device is left
    chosen: list[tuple[np.ndarray, np.ndarray]] = []
    for seconds, _ in times:
        before, now = sums[-1], np.full((num_ends, size), np.inf)
        classes, stops = (np.zeros((num_ends, size), dtype=np.int64) for _ in range(2))
        for kind, (c, ends) in enumerate(places.kinds):
            rest = before[tables.next_at[c, ends]]
            is_reached = np.isfinite(rest).any(axis=1)
            if not is_reached.any():
                continue
            at, stage = ends[is_reached], np.where(seconds[kind] <= limit, seconds[kind], np.inf)
            sum_at = stage[None, :, :] + rest[is_reached][:, None, :]
            end = sum_at.argmin(axis=2)
            value = np.take_along_axis(sum_at, end[:, :, None], axis=2)[:, :, 0]
            is_less = value < now[at]
            now[at] = np.where(is_less, value, now[at])
            classes[at] = np.where(is_less, c, classes[at])
            stops[at] = np.where(is_less, end, stops[at])
        sums.append(now)
        chosen.append((classes, stops))
    depth = min(range(1, len(sums)), key=lambda d: (sums[d][-1, 0], d))
    min_sum = float(sums[depth][-1, 0])
    if math.isinf(min_sum):
        return min_sum, []
    stages: list[tuple[float, StagePlan]] = []
    left, first = num_ends - 1, 0
    for number in range(depth - 1, -1, -1):
        c, end = (int(item[left, first]) for item in chosen[number])
        seconds, option = (item[places.kind_at[c, left], first, end] for item in times[number])
        stages.append((float(seconds), tables.stage(first, end, left, int(option))))
        left, first = int(tables.next_at[c, left]), end
    return min_sum, stages
