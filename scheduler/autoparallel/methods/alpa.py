"""Stages by Alpa's dynamic programming: unequal meshes, and edges that cost nothing."""

from __future__ import annotations

import math

import numpy as np

from ..problem import Candidate, Problem, Stages
from ..result.stages import StagePlan
from .pace import Tables, make_tables

#: Limits of the slowest stage are all times of stages, or this many of them, evenly spread, if there are more.
MOST_LIMITS = 300
#: Times of stages whose relative difference is smaller count as one limit.
SAME = 1e-6


def alpa(problem: Problem) -> tuple[Candidate, ...]:
    """The best stages for each number of microbatches if edges took no time, best first.

    The time of a stage has its part of the gradient sum. A stage with s - 1 stages behind it keeps s microbatches in
    flight, as 1F1B does.

    Source: Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning" (2022),
    with the times of stages from the profile in place of those of its intra-operator search.
    """
    found = []
    for count in problem.microbatches:
        tables = make_tables(problem, count)
        if tables is not None:
            seconds, stages = best_stages(tables)
            if stages:
                found.append(Candidate("alpa", stages, count, seconds))
    return tuple(sorted(found, key=lambda each: (each.predicted_seconds, each.microbatches)))[:3]


def best_stages(tables: Tables) -> tuple[float, Stages]:
    """Least sum of the times of all stages and m - 1 times that of the slowest one, with the stages."""
    most = min(len(tables.problem.graph.layers), tables.problem.cluster.num_ranks)
    times = [_fastest(tables, depth) for depth in range(1, most + 1)]
    values = np.unique(np.concatenate([each[0][np.isfinite(each[0])] for each in times]))
    if not len(values):
        return math.inf, ()
    limits = values[np.concatenate([[True], np.diff(values) > SAME * values[:-1]])]
    if len(limits) > MOST_LIMITS:
        limits = limits[np.unique(np.linspace(0, len(limits) - 1, MOST_LIMITS).astype(int))]
    more = tables.microbatches - 1
    least, best = _with_limit(tables, times, math.inf)
    if not best:
        return math.inf, ()
    low, high = 0, len(limits) - 1  # the tightest limit under which any stages exist
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _with_limit(tables, times, limits[middle])[1] else (middle + 1, high)
    seconds = least + more * max(time for time, _ in best)
    for limit in limits[low:]:
        if least + more * limit >= seconds:
            break  # no sum is smaller than that without a limit
        found, stages = _with_limit(tables, times, limit)
        slowest = max(time for time, _ in stages)
        if found + more * slowest < seconds:
            seconds, best = found + more * slowest, stages
    return seconds, tuple(stage for _, stage in best)


def _fastest(tables: Tables, in_flight: int) -> tuple[np.ndarray, np.ndarray]:
    """``[class, u, first, end]``: seconds of the fastest option that fits with some microbatches in flight, and it."""
    num_classes, num_ends = tables.next_at.shape
    size = len(tables.problem.graph.layers) + 1
    seconds = np.full((num_classes, num_ends, size, size), np.inf)
    option = np.zeros(seconds.shape, dtype=np.int64)
    held = min(in_flight, tables.microbatches)
    upper = np.triu(np.ones((size, size), dtype=bool), 1)
    for o, c in enumerate(tables.option_class):
        needed = tables.fixed[o] + held * tables.activation[o]
        for at in np.flatnonzero(tables.allowed[o]):
            whole = tables.forward[o] + tables.backward[o] + tables.sync[o] / tables.microbatches
            time = np.where((needed <= tables.memory[c, at]) & upper, whole, np.inf)
            is_faster = time < seconds[c, at]
            seconds[c, at] = np.where(is_faster, time, seconds[c, at])
            option[c, at] = np.where(is_faster, o, option[c, at])
    return seconds, option


def _with_limit(
    tables: Tables, times: list[tuple[np.ndarray, np.ndarray]], limit: float
) -> tuple[float, list[tuple[float, StagePlan]]]:
    """Least sum of stage times with no stage slower than a limit, and ``(seconds, stage)`` of each stage."""
    num_classes, num_ends = tables.next_at.shape
    size = len(tables.problem.graph.layers) + 1
    sums = [np.full((num_ends, size), np.inf)]
    sums[0][0, -1] = 0.0  # no layer and no device is left
    chosen: list[np.ndarray] = []
    for seconds, _ in times:
        before, now = sums[-1], np.full((num_ends, size), np.inf)
        pick = np.zeros((num_ends, size, 2), dtype=np.int64)
        for c in range(num_classes):
            for at in np.flatnonzero(tables.next_at[c] >= 0):
                rest = before[tables.next_at[c, at]]
                if np.isinf(rest).all():
                    continue
                stage = np.where(seconds[c, at] <= limit, seconds[c, at], np.inf) + rest[None, :]
                end = stage.argmin(axis=1)
                value = stage[np.arange(size), end]
                is_less = value < now[at]
                now[at] = np.where(is_less, value, now[at])
                pick[at][is_less] = np.stack([np.full(size, c), end], axis=1)[is_less]
        sums.append(now)
        chosen.append(pick)
    depth = min(range(1, len(sums)), key=lambda d: (sums[d][-1, 0], d))
    least = float(sums[depth][-1, 0])
    if math.isinf(least):
        return least, []
    stages: list[tuple[float, StagePlan]] = []
    left, first = num_ends - 1, 0
    for number in range(depth - 1, -1, -1):
        c, end = (int(each) for each in chosen[number][left, first])
        seconds, option = times[number]
        chosen_option = int(option[c, left, first, end])
        stages.append((float(seconds[c, left, first, end]), tables.stage(first, end, left, chosen_option)))
        left, first = int(tables.next_at[c, left]), end
    return least, stages
