"""Interleaved stages: each mesh computes several stages of the model in turn.

Two gains and one cost:

- Shorter stages fill and drain the pipeline sooner.
- A mesh may compute layers that are far apart. So work can be balanced although a model has few layers.
- There are more transfers and more activations.

There are two placements. Mesh r of n meshes computes these stages:

- looped: r, r + n, r + 2 n, ... (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters",
  2021).
- V: r and 2 n - 1 - r (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..costs.layer_costs import fixed_bytes_of
from ..costs.search_problem import Candidate, SearchProblem
from ..inputs.layer_choices import LayerChoice
from ..inputs.stages import StagePlan

#: Largest number of stages of a mesh.
MAX_STAGES_PER_MESH = 4
#: ``MAX_SEQUENCES``: number of sequences of two or three meshes that are tried. ``MAX_CUTS``: if there are at most this
#: many ways to cut the layers into stages, all are tried.
MAX_SEQUENCES, MAX_CUTS = 64, 300
#: Number of cuts that are tried, the fastest first, because the fastest may need too much memory.
NUM_CUTS = 4
#: With at most this many stages, a local move may take a layer from any stage to any other. With more, only to a
#: neighbour.
MAX_LONG_MOVES = 24
#: A candidate is simulated only if its estimate is at most this many times the best known time.
NEAR_ESTIMATE = 1.25


@dataclass(frozen=True)
class _Mesh:
    """Ranks with one choice for all layers, and the seconds of each layer for one microbatch and for its gradient sum.

    Layers that cannot have the choice take infinitely long. During ``early_sync_seconds`` of a sum, the ranks may
    compute other stages.
    """

    first_rank: int
    end_rank: int
    choice: LayerChoice
    seconds: tuple[float, ...]
    sync_seconds: tuple[float, ...]
    early_sync_seconds: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        return self.end_rank - self.first_rank


def interleaved(problem: SearchProblem, plain: Sequence[Candidate], limit_seconds: float) -> Iterator[Candidate]:
    """Candidates with several stages on each mesh. Of each placement, the shortest estimates come first.

    The placements alternate: estimates leave out edges, so candidates with many stages look better than they are. The
    meshes are those of known candidates, and other sequences of two or three. For each number of microbatches, the cuts
    balance the seconds of the meshes.

    Args:
        plain: candidates with one stage on each mesh, the best first.
        limit_seconds: time of the best known plan; slower estimates do not count.
    """
    kinds: dict[tuple[int, bool], list[Candidate]] = {}
    for count, meshes in _sequences(problem, plain):
        total = sum(mesh.num_ranks for mesh in meshes)
        work = sum(map(min, *([mesh.num_ranks * seconds for seconds in mesh.seconds] for mesh in meshes))) / total
        if count * work >= limit_seconds:
            continue
        can_split = not any(mesh.choice.recompute or mesh.choice.zero for mesh in meshes)
        for placement in _placements(len(meshes), len(problem.graph.layers), problem.rules.max_stages_per_rank):
            is_v = placement[-1] == 0
            if not is_v or can_split:  # the known schedules of a V split backwards
                made = _candidates(problem, meshes, placement, count, limit_seconds * NEAR_ESTIMATE)
                kinds.setdefault((len(placement) // len(meshes), is_v), []).extend(made)
    for candidates in kinds.values():
        candidates.sort(key=lambda candidate: (float(f"{candidate.predicted_seconds:.9g}"), candidate.text))
    turns = itertools.zip_longest(
        *(filter(functools.partial(_may_fit, problem), kinds[kind]) for kind in sorted(kinds))
    )
    yield from (candidate for turn in turns for candidate in turn if candidate is not None)


def _candidates(
    problem: SearchProblem, meshes: Sequence[_Mesh], placement: Sequence[int], count: int, limit_seconds: float
) -> Iterator[Candidate]:
    """Candidates with the best cuts whose estimated step is shorter than a limit."""
    for cuts in _best_cuts(meshes, placement):
        estimate, stages = _estimate(cuts, meshes, placement, count), _stages(cuts, meshes, placement)
        if estimate < limit_seconds and all(
            problem.can_have(item.choices[0], item.first_layer, item.end_layer) for item in stages
        ):
            yield Candidate("interleaved", stages, count, estimate)


def _stages(cuts: Sequence[int], meshes: Sequence[_Mesh], placement: Sequence[int]) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(first, end, meshes[r].first_rank, meshes[r].end_rank, (meshes[r].choice,) * (end - first))
        for first, end, r in zip(cuts, cuts[1:], placement, strict=False)
    )


def _sequences(problem: SearchProblem, plain: Sequence[Candidate]) -> Iterator[tuple[int, tuple[_Mesh, ...]]]:
    """Numbers of microbatches, and meshes that fill the cluster."""
    seen: set[object] = set()
    known: dict[object, tuple[_Mesh, ...]] = {}
    for candidate in plain:
        if 1 < len(candidate.stages) == len(set(candidate.pp_ranks)):
            choices = [Counter(stage.choices).most_common(1)[0][0] for stage in candidate.stages]
            ranks = [(stage.first_rank, stage.end_rank) for stage in candidate.stages]
            key = (candidate.num_microbatches, *zip(ranks, choices, strict=True))
            if key not in known:
                count = candidate.num_microbatches
                made = zip(ranks, choices, strict=True)
                known[key] = tuple(_mesh(problem, *item, choice, count) for item, choice in made)
                yield count, known[key]
    sequences = list(itertools.islice(_rank_sequences(problem), MAX_SEQUENCES + 1))
    for count in problem.microbatch_counts if len(sequences) <= MAX_SEQUENCES else ():
        for sequence in sequences:
            for meshes in itertools.product(*(_fastest(problem, first, end, count) for first, end in sequence)):
                key = (count, *(((mesh.first_rank, mesh.end_rank), mesh.choice) for mesh in meshes))
                if key not in known and key not in seen:
                    seen.add(key)
                    yield count, meshes


def _rank_sequences(problem: SearchProblem) -> Iterator[tuple[tuple[int, int], ...]]:
    """``((first rank, end rank), ...)`` of two or three meshes that fill the cluster."""
    total, max_num = problem.cluster.num_ranks, len(problem.graph.layers) // 2
    starts = [rank for rank in range(1, total) if problem.cluster.is_mesh(0, rank)]
    for num in (2, 3):
        for inner in itertools.combinations(range(1, total), num - 1) if num <= max_num else ():
            bounds = (0, *inner, total)
            if inner[0] in starts and all(itertools.starmap(problem.cluster.is_mesh, itertools.pairwise(bounds))):
                yield tuple(itertools.pairwise(bounds))


def _fastest(problem: SearchProblem, first: int, end: int, count: int) -> list[_Mesh]:
    """The mesh with its choices: the fastest, the fastest that allows split backwards, and one with recomputation.

    If some layers cannot have a choice, the mesh also gets the choice that is fastest for the other layers.
    """
    choices = problem.choices(end - first, problem.num_samples // count)
    made = [_mesh(problem, first, end, item, count) for item in choices]
    whole = [mesh for mesh in made if math.isfinite(sum(mesh.seconds))]
    whole.sort(key=lambda mesh: count * sum(mesh.seconds) + sum(mesh.sync_seconds))
    min_seconds = [min(values) for values in zip(*(mesh.seconds for mesh in made), strict=True)]

    def slowdown(mesh: _Mesh) -> float:
        pairs = [pair for pair in zip(mesh.seconds, min_seconds, strict=True) if math.isfinite(pair[0])]
        return sum(own for own, _ in pairs) / (sum(minimum for _, minimum in pairs) or 1.0)

    partial = [mesh for mesh in made if mesh not in whole and math.isfinite(min(mesh.seconds))]
    groups = (
        whole,
        [mesh for mesh in whole if not mesh.choice.recompute and not mesh.choice.zero],
        [mesh for mesh in whole if mesh.choice.recompute],
        sorted(partial, key=slowdown),
    )
    return list(dict.fromkeys(group[0] for group in groups if group))


def _mesh(problem: SearchProblem, first: int, end: int, choice: LayerChoice, count: int) -> _Mesh:
    key = ("interleaving", first, end, choice, count)
    if key not in problem.memo:
        place = problem.place(first, end)
        costs = [
            problem.layer_cost(layer, choice, place, count) if problem.can_have(choice, layer, layer + 1) else None
            for layer in range(len(problem.graph.layers))
        ]
        seconds = tuple(math.inf if cost is None else cost.forward_seconds + cost.backward_seconds for cost in costs)
        sync_seconds = tuple(0.0 if cost is None else cost.sync_seconds for cost in costs)
        early = tuple(0.0 if cost is None else cost.early_sync_seconds for cost in costs)
        problem.memo[key] = _Mesh(first, end, choice, seconds, sync_seconds, early)
    mesh: _Mesh = problem.memo[key]
    return mesh


def _placements(num: int, num_layers: int, limit: int) -> Iterator[tuple[int, ...]]:
    """The mesh of each stage, for ``num`` meshes with up to ``limit`` stages each."""
    for stages_per_mesh in range(2, min(limit, MAX_STAGES_PER_MESH, num_layers // num) + 1):
        yield tuple(range(num)) * stages_per_mesh
        if stages_per_mesh == 2:
            yield (*range(num), *reversed(range(num)))


def _estimate(cuts: Sequence[int], meshes: Sequence[_Mesh], placement: Sequence[int], count: int) -> float:
    """An estimate of the seconds of a step: the work of the busiest mesh, and filling and draining the pipeline.

    The first stage of a mesh ends last. So no computation hides its sum of gradients.
    """
    busy, sync = [0.0] * len(meshes), [0.0] * len(meshes)
    for number, (first, end, r) in enumerate(zip(cuts, cuts[1:], placement, strict=False)):
        busy[r] += sum(meshes[r].seconds[first:end])
        hidden = meshes[r].early_sync_seconds[first:end] if r in placement[:number] else ()
        sync[r] += sum(meshes[r].sync_seconds[first:end]) - sum(hidden)
    filled = max(busy) * (len(meshes) - 1) * len(meshes) / len(placement)
    return max(count * item + after for item, after in zip(busy, sync, strict=True)) + filled


def _best_cuts(meshes: Sequence[_Mesh], placement: Sequence[int]) -> list[tuple[int, ...]]:
    """The first layer of each stage, and the number of layers, such that the busiest meshes work as short as possible.

    Small problems try all cuts. Others start with equal parts of the work, which moves improve.
    """
    num_layers, num = len(meshes[0].seconds), len(placement)
    sums = [[0.0, *itertools.accumulate(map(_finite, mesh.seconds))] for mesh in meshes]
    refused = [[0, *itertools.accumulate(map(math.isinf, mesh.seconds))] for mesh in meshes]

    def busy(cuts: Sequence[int]) -> tuple[int, list[float]]:
        """Number of layers on meshes that cannot have them, and the seconds of each mesh, the busiest first."""
        total, num_refused = [0.0] * len(meshes), 0
        for first, end, r in zip(cuts, cuts[1:], placement, strict=False):
            total[r] += sums[r][end] - sums[r][first]
            num_refused += refused[r][end] - refused[r][first]
        return num_refused, sorted(total, reverse=True)

    if math.comb(num_layers - 1, num - 1) <= MAX_CUTS:
        inners = itertools.combinations(range(1, num_layers), num - 1)
        return heapq.nsmallest(
            NUM_CUTS, ((0, *inner, num_layers) for inner in inners), key=lambda cuts: (busy(cuts), cuts)
        )
    cuts = _equal_cuts(meshes, placement)
    best, gained = busy(cuts), True
    while gained:
        gained = False
        for moved in _moved(cuts, num if num <= MAX_LONG_MOVES else 1):
            if (changed := busy(moved)) < best:
                cuts, best, gained = moved, changed, True
                break
    return [cuts]


def _equal_cuts(meshes: Sequence[_Mesh], placement: Sequence[int]) -> tuple[int, ...]:
    """Cuts that give each stage about the same seconds."""
    num_layers, num = len(meshes[0].seconds), len(placement)
    bottleneck_seconds = len(meshes) / sum(1 / (sum(map(_finite, mesh.seconds)) or 1.0) for mesh in meshes) / num
    cuts, owed = [0], 0.0
    for number, r in enumerate(placement[:-1]):
        owed += bottleneck_seconds
        layer, last = cuts[-1], num_layers - (num - 1 - number)
        while layer < last and (layer == cuts[-1] or _finite(meshes[r].seconds[layer]) / 2 <= owed):
            owed -= _finite(meshes[r].seconds[layer])
            layer += 1
        cuts.append(layer)
    return (*cuts, num_layers)


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0


def _moved(cuts: tuple[int, ...], max_length: int) -> Iterator[tuple[int, ...]]:
    """Cuts after a move: up to ``max_length`` neighbouring cuts move by a layer, so two stages change by a layer."""
    for length, step in itertools.product(range(1, max_length + 1), (-1, 1)):
        for first in range(1, len(cuts) - length):
            end = first + length
            moved = (*cuts[:first], *(cut + step for cut in cuts[first:end]), *cuts[end:])
            if moved[first - 1] < moved[first] and moved[end - 1] < moved[end]:
                yield moved


def _may_fit(problem: SearchProblem, candidate: Candidate) -> bool:
    """Whether each device has the memory for one microbatch in flight of each of its stages."""
    costs = [problem.stage_cost(stage, candidate.num_microbatches) for stage in candidate.stages]
    for pp_rank in range(max(candidate.pp_ranks) + 1):
        own = [cost for cost, number in zip(costs, candidate.pp_ranks, strict=True) if number == pp_rank]
        late = sum(cost.late_bytes for cost in own)
        if fixed_bytes_of(own) - late + max(cost.activation_bytes for cost in own) > own[0].limit_bytes:
            return False
    return True
