"""One stage of Galvatron-BMW: a choice for each layer, fastest within the memory, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..costs.collective_costs import StagePlace
from ..costs.layer_costs import LayerCost
from ..costs.search_problem import SearchProblem
from ..costs.tied_costs import tied_share
from ..inputs.layer_choices import LayerChoice
from ..inputs.layer_graph import is_shared, own_layer
from ..inputs.stages import StagePlan

#: Steps of the memory of a device. What a layer needs is rounded up to whole steps.
STEPS = 512


@dataclass(frozen=True)
class PackedStage:
    """The fastest choices of a stage: seconds per microbatch with its part of the gradient sum, and bytes at the
    peak.
    """

    stage: StagePlan
    seconds: float
    memory_bytes: float


def pack_stage(
    problem: SearchProblem, first: int, end: int, ranks: tuple[int, int], count: int, in_flight: int
) -> PackedStage | None:
    """The fastest choices of layers ``first`` to ``end - 1`` that fit, or None.

    ``C(l, E, s) = min over s' of C(l - 1, E - O(l, s), s') + c(l, s) + R(l, s', s)``: c is the time of layer l under
    choice s, O its states and activations in flight, and R the change of layout between layers. Memory
    that no layer alone accounts for (working memory of the largest layer, buffers) is reserved.

    Args:
        problem: the search.
        first, end: the layers.
        ranks: first rank and end.
        count: microbatches of a step.
        in_flight: microbatches whose activations the stage keeps.

    Source: Wang et al., "Improving Automatic Parallel Training via Balanced Memory Workload Optimization" (2023).
    """
    place, limit = problem.place(*ranks), problem.cluster.memory_of(*ranks)
    key = ("packed stage", first, end, place, limit, count, in_flight)
    if key not in problem.memo:
        problem.memo[key] = _pack_best(problem, first, end, ranks, count, in_flight)
    best: PackedStage | None = problem.memo[key]
    if best is None or best.stage.first_rank == ranks[0]:
        return best
    return replace(best, stage=replace(best.stage, first_rank=ranks[0], end_rank=ranks[1]))


def _pack_best(
    problem: SearchProblem, first: int, end: int, ranks: tuple[int, int], count: int, in_flight: int
) -> PackedStage | None:
    """Like :func:`pack_stage`, which keeps the result for all ranks on equal places."""
    best: PackedStage | None = None
    for choices in problem.rules.uniform(problem.choices(ranks[1] - ranks[0], problem.num_samples // count)):
        if not all(problem.can_have(choice, first, end) for choice in choices):
            continue
        packed_stage = _pack(problem, first, end, ranks, count, in_flight, choices)
        if packed_stage is not None and (best is None or packed_stage.seconds < best.seconds):
            best = packed_stage
    return best


def _pack(
    problem: SearchProblem,
    first: int,
    end: int,
    ranks: tuple[int, int],
    count: int,
    in_flight: int,
    choices: Sequence[LayerChoice],
) -> PackedStage | None:
    place, num = problem.place(*ranks), len(choices)
    costs = [[problem.layer_cost(layer, s, place, count) for s in choices] for layer in range(first, end)]
    costs = _with_ties(problem, first, end, costs, choices, place)
    limit = problem.cluster.memory_of(*ranks)
    aside = held_back(problem, first, end, ranks, count, choices, in_flight)
    if aside >= limit:
        return None
    step = (limit - aside) / STEPS
    table = np.full((num, STEPS + 1), np.inf)
    came = np.zeros((len(costs), num, STEPS + 1), dtype=np.int32)
    for index, layer_costs in enumerate(costs):
        moved = [
            [problem.relayout_between(first + index, before, after, place, count) * 2 for before in choices]
            for after in choices
        ]
        now = np.full((num, STEPS + 1), np.inf)
        for s, cost in enumerate(layer_costs):
            needed = math.ceil((cost.state_bytes + in_flight * cost.activation_bytes) / step - 1e-9)
            seconds = cost.forward_seconds + cost.backward_seconds + cost.sync_seconds / count
            if needed > STEPS:
                continue
            if index == 0:
                now[s, needed:] = seconds
                continue
            sums = table[:, : STEPS + 1 - needed] + np.array(moved[s])[:, None] + seconds
            came[index, s, needed:] = sums.argmin(axis=0)
            now[s, needed:] = sums.min(axis=0)
        table = now
    last = int(table[:, STEPS].argmin())
    seconds = float(table[last, STEPS])
    if math.isinf(seconds):
        return None
    picked, left = [last], STEPS
    for index in range(len(costs) - 1, 0, -1):
        cost = costs[index][picked[-1]]
        before = int(came[index, picked[-1], left])
        left -= math.ceil((cost.state_bytes + in_flight * cost.activation_bytes) / step - 1e-9)
        picked.append(before)
    stage = StagePlan(first, end, *ranks, tuple(choices[s] for s in reversed(picked)))
    return PackedStage(stage, seconds, problem.stage_cost(stage, count).memory_bytes(in_flight))


def held_back(
    problem: SearchProblem,
    first: int,
    end: int,
    ranks: tuple[int, int],
    count: int,
    choices: Sequence[LayerChoice],
    in_flight: int,
) -> float:
    """Bytes of a device that no layer's states or activations may use, whatever the choices."""
    place = problem.place(*ranks)
    costs = [problem.layer_cost(layer, s, place, count) for layer in range(first, end) for s in choices]
    working = max(cost.recompute_bytes + cost.panel_bytes for cost in costs)
    working += 3 * max(cost.gathered_bytes for cost in costs)
    stages = [StagePlan(first, end, *ranks, (s,) * (end - first)) for s in choices]
    working += max(
        problem.buffer_bytes(stage, count)[0] + in_flight * problem.kept_bytes(stage, count) for stage in stages
    )
    return max(working, *(problem.ties.least(stage, place)[1] for stage in stages))


def _with_ties(
    problem: SearchProblem,
    first: int,
    end: int,
    costs: list[list[LayerCost]],
    choices: Sequence[LayerChoice],
    place: StagePlace,
) -> list[list[LayerCost]]:
    """Costs in which layers that share parameters count them once, and their sums over stages take time."""
    changed = [list(layer_costs) for layer_costs in costs]
    for tied, number in problem.graph.ties:
        own = own_layer(tied, first, end)
        for layer in [item for item in tied if own is not None and first <= item <= own]:
            share, layer_costs = tied_share(problem.graph, layer, number), changed[layer - first]
            for s, (cost, plain) in enumerate(zip(layer_costs, costs[layer - first], strict=True)):
                if layer != own:
                    layer_costs[s] = replace(cost, state_bytes=cost.state_bytes - share * plain.state_bytes)
                elif is_shared(tied, first, end):
                    seconds, _ = problem.ties.min_of(tied, number, layer, choices[s], place)
                    layer_costs[s] = replace(cost, sync_seconds=cost.sync_seconds + seconds)
    return changed
