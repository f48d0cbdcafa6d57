"""Galvatron-BMW, complete: decision trees, a knapsack for each stage, and the balance of memory and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ..costs.search_problem import Candidate, SearchProblem
from .knapsack import PackedStage, pack_stage
from .pure import even_cuts

#: A partition of the layers: first layers of all stages, and the number of layers.
Cuts = tuple[int, ...]


def bmw(problem: SearchProblem) -> tuple[Candidate, ...]:
    """Balanced plans, one of each number of microbatches and pipeline degree; the four fastest, fastest first.

    Stages have equal meshes. The search starts from the partition that balances memory. It moves one layer at a time
    away from the slowest stage, as long as two rules hold: no stage becomes slower than the slowest stage was, and no
    stage needs more memory than in the partition that balances time. The published code never calls this part: see
    :func:`galvatron_released`.

    Source: Wang et al., "Improving Automatic Parallel Training via Balanced Memory Workload Optimization" (2023).
    """
    return _best(problem, "bmw", _balanced)


def galvatron_released(problem: SearchProblem) -> tuple[Candidate, ...]:
    """The search of the released code of Galvatron-BMW: stages of equal numbers of layers only."""

    def even(problem: SearchProblem, degree: int, count: int) -> Sequence[PackedStage] | None:
        return _pack(problem, tuple(even_cuts(len(problem.graph.layers), degree)), count)

    return _best(problem, "galvatron", even)


def _best(
    problem: SearchProblem, name: str, divide: Callable[[SearchProblem, int, int], Sequence[PackedStage] | None]
) -> tuple[Candidate, ...]:
    candidates = []
    for count in problem.microbatch_counts:
        for degree in degrees(problem):
            packed = divide(problem, degree, count)
            if packed:
                stages = tuple(item.stage for item in packed)
                candidates.append(Candidate(name, stages, count, seconds_of(packed, count)))
    return tuple(
        sorted(
            candidates,
            key=lambda candidate: (candidate.predicted_seconds, len(candidate.stages), candidate.num_microbatches),
        )
    )[:4]


def degrees(problem: SearchProblem) -> Iterator[int]:
    """Pipeline degrees: powers of two that divide the devices into equal meshes. Pipelines cross the slowest links."""
    total, degree = problem.cluster.num_ranks, 1
    while degree <= min(total, len(problem.graph.layers)):
        size = total // degree
        if total % degree == 0 and all(problem.cluster.is_mesh(index, index + size) for index in range(0, total, size)):
            yield degree
        degree *= 2


def seconds_of(packed: Sequence[PackedStage], count: int) -> float:
    """Seconds of a step: one microbatch through all stages, then the others at the rate of the slowest stage."""
    times = [item.seconds for item in packed]
    return sum(times) + (count - 1) * max(times)


def _balanced(problem: SearchProblem, degree: int, count: int) -> Sequence[PackedStage] | None:
    """The stages after all moves; None if neither extreme fits."""
    by_time, by_memory = (partition(_weights(problem, degree, count, what), degree) for what in ("time", "memory"))
    timed = _pack(problem, by_time, count)
    max_bytes = max(item.memory_bytes for item in timed) if timed else math.inf
    cuts, packed = by_memory, _pack(problem, by_memory, count)
    if packed is None:
        return timed
    gained = True
    while gained:
        gained, times = False, [item.seconds for item in packed]
        slowest = times.index(max(times))
        for moved in _moves_away(cuts, slowest):
            other = _pack(problem, moved, count)
            if other is None:
                continue
            is_fast = max(item.seconds for item in other) <= times[slowest]
            is_small = max(item.memory_bytes for item in other) <= max_bytes
            if is_fast and is_small and seconds_of(other, count) < seconds_of(packed, count):
                cuts, packed, gained = moved, other, True
                break
    if timed and seconds_of(timed, count) < seconds_of(packed, count):
        return timed
    return packed


def _moves_away(cuts: Cuts, stage: int) -> Iterator[Cuts]:
    """Move one layer at either end of a stage to the neighbouring stage."""
    if cuts[stage + 1] - cuts[stage] < 2:
        return
    if stage > 0:
        yield (*cuts[:stage], cuts[stage] + 1, *cuts[stage + 1 :])
    if stage < len(cuts) - 2:
        yield (*cuts[: stage + 1], cuts[stage + 1] - 1, *cuts[stage + 2 :])


def _pack(problem: SearchProblem, cuts: Cuts, count: int) -> list[PackedStage] | None:
    degree = len(cuts) - 1
    size, packed = problem.cluster.num_ranks // degree, []
    for stage in range(degree):
        ranks = (stage * size, (stage + 1) * size)
        packed_stage = pack_stage(problem, cuts[stage], cuts[stage + 1], ranks, count, min(count, degree - stage))
        if packed_stage is None:
            return None
        packed.append(packed_stage)
    return packed


def _weights(problem: SearchProblem, degree: int, count: int, what: str) -> list[list[float]]:
    """``[stage][layer]``: time or memory of a layer under its first choice, with 1F1B's microbatches in flight."""
    size = problem.cluster.num_ranks // degree
    weights = []
    for stage in range(degree):
        place = problem.place(stage * size, (stage + 1) * size)
        choices = problem.choices(size, problem.num_samples // count)
        held = min(count, degree - stage)
        layer_weights = []
        for layer in range(len(problem.graph.layers)):
            able = next((choice for choice in choices if problem.can_have(choice, layer, layer + 1)), None)
            cost = problem.layer_cost(layer, able, place, count) if able else None
            seconds = cost.forward_seconds + cost.backward_seconds if cost else 1.0
            nbytes = cost.state_bytes + held * cost.activation_bytes if cost else 1.0
            layer_weights.append(seconds if what == "time" else nbytes)
        weights.append(layer_weights)
    return weights


def partition(weights: Sequence[Sequence[float]], degree: int) -> Cuts:
    """First layers of stages whose largest sum of weights is least, with no stage empty. ``weights[stage][layer]``."""
    num = len(weights[0])
    best = [[math.inf] * (num + 1) for _ in range(degree + 1)]
    came = [[0] * (num + 1) for _ in range(degree + 1)]
    best[0][0] = 0.0
    for stage in range(1, degree + 1):
        for end in range(stage, num + 1):
            total = 0.0
            for first in range(end - 1, stage - 2, -1):
                total += weights[stage - 1][first]
                value = max(best[stage - 1][first], total)
                if value < best[stage][end]:
                    best[stage][end], came[stage][end] = value, first
    cuts = [num]
    for stage in range(degree, 0, -1):
        cuts.append(came[stage][cuts[-1]])
    return tuple(reversed(cuts))
