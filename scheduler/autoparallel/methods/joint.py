"""The joint search by the recurrence of :mod:`.recurrence_tables`: stages, devices, choices, depths, edges at once."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..costs.search_problem import Candidate, SearchProblem, Stages, end_of
from .recurrence_tables import Tables, make_tables

#: Ratio of consecutive bottleneck times that are tried. The answer is within this factor of the best one.
PACE_STEP = 1.01
#: Maximum number of distinct plans that :func:`joint` returns, in total and for one number of microbatches.
NUM_CANDIDATES, PER_COUNT = 6, 3


def joint(problem: SearchProblem, below_seconds: float = math.inf) -> tuple[Candidate, ...]:
    """The plans that are fastest in the model of :mod:`.recurrence_tables`, with true prices of all their edges, best
    first.

    Plans count only if they take less than ``below_seconds`` in this model.
    """
    candidates: list[Candidate] = []
    counts: dict[int, int] = {}
    for candidate in best_plans(problem, below_seconds):
        if counts.get(candidate.num_microbatches, 0) < PER_COUNT and candidate.text not in {
            item.text for item in candidates
        }:
            counts[candidate.num_microbatches] = counts.get(candidate.num_microbatches, 0) + 1
            candidates.append(candidate)
        best = candidates[0].predicted_seconds or 0.0
        if len(candidates) == NUM_CANDIDATES or (candidate.predicted_seconds or 0.0) > 1.5 * best:
            break
    return tuple(candidates)


@dataclass(frozen=True, order=True)
class _Entry:
    """A bottleneck time to be searched. ``seconds`` is a lower bound on its best plan, or the time of that plan.

    An infinite bottleneck time stands for all that :func:`bottleneck_times` leaves out.
    """

    seconds: float
    count: int
    bottleneck_seconds: float
    is_exact: bool
    stages: Stages


def best_plans(problem: SearchProblem, below_seconds: float = math.inf) -> Iterator[Candidate]:
    """Plans of all bottleneck times and numbers of microbatches that are faster than a limit, by seconds in the model.

    Edges start with lower bounds of their prices. The planner computes the true prices of the edges of the best plan,
    and the same bottleneck time is searched again. Once the best plan has true prices only, no other plan is better.
    Bottleneck times are searched in the order of their bounds, so most are never searched.
    """
    tables: dict[int, Tables] = {}
    prices: dict[int, dict[int, tuple[float, float]]] = {}
    trips: dict[int, float] = {}
    heap: list[_Entry] = []
    for count in problem.microbatch_counts:
        made = make_tables(problem, count)
        if made is None:
            continue
        tables[count], prices[count] = made, {}
        trip = made.min_trip()
        if trip < math.inf:
            times = bottleneck_times(made)
            heap += [_Entry(trip + (count - 1) * seconds, count, seconds, False, ()) for seconds in times]
            heap.append(_Entry(trip + (count - 1) * times[-1], count, math.inf, False, ()))
            trips[count] = trip
    heapq.heapify(heap)
    while heap and heap[0].seconds < below_seconds:
        entry = heapq.heappop(heap)
        count, bottleneck_seconds = entry.count, entry.bottleneck_seconds
        if entry.is_exact:
            yield Candidate("joint", entry.stages, count, entry.seconds)
            continue
        made = tables[count]
        if bottleneck_seconds == math.inf:
            for seconds in longer_times(made, prices[count]):
                heapq.heappush(heap, _Entry(trips[count] + (count - 1) * seconds, count, seconds, False, ()))
            continue
        trip, excess, stages = made.best_stages(bottleneck_seconds, prices[count])
        if not stages:
            continue
        is_exact = not price_edges(made, stages, prices[count])
        heapq.heappush(
            heap, _Entry(trip + (count - 1) * bottleneck_seconds + excess, count, bottleneck_seconds, is_exact, stages)
        )


def longer_times(tables: Tables, prices: dict[int, tuple[float, float]]) -> Iterator[float]:
    """The bottleneck times, 1 % apart, above those of :func:`bottleneck_times` at which the best plan may be.

    Transfers may take longer than all computation. Without a limit, the best plan has the least round trip and excess
    of all plans, with one microbatch in flight. It is allowed at a bottleneck time as long as its round trip and its
    ports, so no longer bottleneck time has a better plan.
    """
    trip, _, stages = tables.best_stages(math.inf, prices)
    while stages and price_edges(tables, stages, prices):
        trip, _, stages = tables.best_stages(math.inf, prices)
    ports = tables.port_in.max() * tables.received.max() + tables.port_out.max() * tables.sent.max()
    seconds = bottleneck_times(tables)[-1]
    while stages and seconds < max(trip, ports):
        seconds *= PACE_STEP
        yield seconds


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
