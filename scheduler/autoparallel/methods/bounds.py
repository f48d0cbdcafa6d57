"""Lower bounds on the step time of any training plan of a problem that uses all of its devices.

With one stage on each mesh, a step of m microbatches takes at least, for each stage i and each share s from 0 to 1::

    sum over stages j before i of (f_j + s a_j + x_j + s y_j)  +  m (f_i + b_i - s w_i)  +  (1 - s) sync_i

Notation, in seconds: f is a forward, b a whole backward, w the weight gradients that a split defers, and a = b - w. x
and y are the edge behind a stage, forward and backward. sync is the gradient sums. The first microbatch passes all
stages before i, and stage i then computes all microbatches. After that, stage i sums its gradients (s = 0), and the
last gradients pass the stages before i (s = 1). Both bounds hold, and so does each weighted mean of them. The same
holds for m transfers over the edge behind stage i. If a layer does not read the layer before it, nothing is counted for
the stages before i.

A recurrence over the stages, from the last one, finds the least value of all divisions of layers and devices. There,
each stage has the least time of its choices, and the memory of one microbatch with all layers recomputed.

With several stages on a mesh, a step takes at least the work of all layers divided by the number of devices. The same
holds with gradient sums added during which a device cannot compute other stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..costs.collective_costs import StagePlace
from ..costs.layer_costs import LayerCost
from ..costs.search_problem import SearchProblem
from ..inputs.layer_choices import LayerChoice
from .range_bytes import bytes_of_cuts

#: Values of the share s that are tried.
SHARES = (0.0, 0.5, 1.0)
#: With more devices, the recurrence takes too long, and only :func:`work_bound` counts.
MAX_RANKS = 128
#: A bound is lowered by this fraction, because the simulator adds numbers in another order.
MARGIN = 1e-8


def work_bound(problem: SearchProblem) -> float:
    """Seconds that no plan beats: the least work of each layer on any mesh, spread evenly over all devices."""
    if "work bound" not in problem.memo:
        places = dict.fromkeys(place for _, _, place in _positions(problem))
        work_by_count = [_work(problem, tuple(places), count) for count in problem.microbatch_counts]
        problem.memo["work bound"] = min(work_by_count) * (1 - MARGIN) / problem.cluster.num_ranks
    return float(problem.memo["work bound"])


def step_bound_of_any(problem: SearchProblem) -> float:
    """Seconds that no plan beats, as the module describes; infinite if no plan fits the memory."""
    return min(single_stage_bound(problem), _interleaved_bound(problem))


def single_stage_bound(problem: SearchProblem) -> float:
    """Seconds that no plan with one stage on each mesh beats."""
    if problem.cluster.num_ranks > MAX_RANKS:
        return work_bound(problem)
    if "step bound" not in problem.memo:
        positions = list(_positions(problem))
        bounds = [_recurrence(problem, positions, count) for count in problem.microbatch_counts]
        problem.memo["step bound"] = max(work_bound(problem), min(bounds) * (1 - MARGIN))
    return float(problem.memo["step bound"])


def _interleaved_bound(problem: SearchProblem) -> float:
    """Seconds that no plan with several stages on each of at least two meshes beats; infinite if there is none.

    The mean over all devices of the seconds in which each computes, and sums gradients without computing at the same
    time.
    """
    total = problem.cluster.num_ranks
    if total < 2 or len(problem.graph.layers) < 4 or problem.rules.max_stages_per_rank < 2:
        return math.inf
    if "interleaved bound" not in problem.memo:
        places = dict.fromkeys(place for _, number, place in _positions(problem) if number < total)
        bounds = [_work(problem, tuple(places), count, with_sums=True) for count in problem.microbatch_counts]
        problem.memo["interleaved bound"] = min(bounds) * (1 - MARGIN) / total
    return float(problem.memo["interleaved bound"])


def _positions(problem: SearchProblem) -> Iterator[tuple[int, int, StagePlace]]:
    """``(devices left, devices, place)`` of all possible stages. The devices left include the devices of the stage."""
    total, cluster = problem.cluster.num_ranks, problem.cluster
    for used in range(1, total + 1):
        begin = total - used
        host_end = cluster.hosts_of(begin, begin + 1)[0]
        end_of_host = next(end for host, _, end in cluster.hosts if host == host_end[0])
        ends = list(range(begin + 1, end_of_host + 1))
        if begin in cluster.host_starts:
            ends += [end for _, first, end in cluster.hosts if first > begin]
        for end in ends:
            yield used, end - begin, problem.place(begin, end)


def _costs(problem: SearchProblem, place: StagePlace, count: int) -> list[list[tuple[LayerCost, LayerCost]]]:
    """For each choice of a stage, two costs of each layer: the least in time, and the least in activations."""
    choices = problem.choices(place.num_ranks, problem.num_samples // count)
    never = LayerCost(*[math.inf] * 12)
    costs_of: dict[LayerChoice, list[tuple[LayerCost, LayerCost]]] = {}
    for choice in choices:
        plain = replace(choice, recompute=False)
        if plain in costs_of:
            continue
        ways = [item for item in (plain, replace(choice, recompute=True)) if item in choices]
        costs = []
        for number in range(len(problem.layer_classes)):
            layer = problem.class_of.index(number)
            if problem.can_have(choice, layer, layer + 1):
                pair = [problem.layer_cost(layer, option, place, count) for option in ways]
                costs.append((pair[0], pair[-1]))
            else:
                costs.append((never, never))
        costs_of[plain] = [costs[number] for number in problem.class_of]
    return list(costs_of.values())


def _work(problem: SearchProblem, places: tuple[StagePlace, ...], count: int, *, with_sums: bool = False) -> float:
    """The least device-seconds of a step; ``with_sums``: with sums of gradients during which nothing is computed."""
    min_seconds = np.full(len(problem.graph.layers), np.inf)
    for place in places:
        for costs in _costs(problem, place, count):
            seconds = [
                count * (cost.forward_seconds + cost.backward_seconds) + (cost.late_sync_seconds if with_sums else 0.0)
                for cost, _ in costs
            ]
            min_seconds = np.minimum(min_seconds, place.num_ranks * np.array(seconds))
    return float(min_seconds.sum())


@dataclass(frozen=True, eq=False)
class _Stages:
    """Least values of stages of layers ``first`` to ``end - 1`` on one place, infinite where no choice is possible.

    Attributes:
        passed: seconds of one microbatch that passes, f + s a, as ``[share, first, end]``.
        filled: seconds of all microbatches and sums, m (f + b - s w) + (1 - s) sync, as ``[share, first, end]``.
        needed_bytes: memory of a device, as ``[first, end]``.
    """

    passed: np.ndarray
    filled: np.ndarray
    needed_bytes: np.ndarray


def _stages(problem: SearchProblem, place: StagePlace, count: int) -> list[_Stages]:
    """One table for each choice; one for all if the layers of a stage may mix them."""
    rows = []
    for costs in _costs(problem, place, count):
        forward, backward, weight, sync, state = (
            np.array([getattr(cost, name) for cost, _ in costs])
            for name in ("forward_seconds", "backward_seconds", "weight_grad_seconds", "sync_seconds", "state_bytes")
        )
        is_able = np.isfinite(forward)
        # a stage counts shared parameters once, and a step of one microbatch never has all gradients and activations
        needed = np.zeros(len(costs)) if problem.graph.ties else np.where(is_able, state, 0.0)
        if count > 1:
            needed += [cost.activation_bytes if able else 0.0 for (_, cost), able in zip(costs, is_able, strict=True)]
        f, b, w, sums = (np.where(is_able, item, 0.0) for item in (forward, backward, weight, sync))
        never = np.where(is_able, 0.0, np.inf)
        passed = np.stack([f + s * (b - w) + never for s in SHARES])
        filled = np.stack([count * (f + b - s * w) + (1 - s) * sums + never for s in SHARES])
        rows.append((passed, filled, needed))
    if not problem.rules.executable and rows:
        minima = [np.min([row[number] for row in rows], axis=0) for number in (0, 1)]
        rows = [(minima[0], minima[1], np.zeros(minima[0].shape[1]))]
    return [_Stages(*map(_range_sums, row)) for row in rows]


def _range_sums(values: np.ndarray) -> np.ndarray:
    """``[..., first, end]``: the sums of all ranges of ``[..., layer]``."""
    num = values.shape[-1]
    rows = np.where(np.triu(np.ones((num, num), dtype=bool)), values[..., None, :], 0.0)
    sums = np.zeros((*values.shape[:-1], num + 1, num + 1))
    sums[..., :num, 1:] = np.cumsum(rows, axis=-1)
    return sums


def _recurrence(problem: SearchProblem, positions: list[tuple[int, int, StagePlace]], count: int) -> float:
    """The bound for one number of microbatches."""
    size, total = len(problem.graph.layers) + 1, problem.cluster.num_ranks
    is_range = np.triu(np.ones((size, size), dtype=bool), 1)
    is_sequential = problem.graph.is_sequential
    num_samples = problem.num_samples // count
    sent, returned = (num_samples * _cut_bytes(problem, is_backward)[None] for is_backward in (False, True))
    shares = np.array(SHARES)[:, None, None]
    tables = {place: _stages(problem, place, count) for place in dict.fromkeys(place for _, _, place in positions)}
    fitting: dict[tuple[StagePlace, float], tuple[np.ndarray, np.ndarray]] = {}
    sizes_at: dict[int, list[int]] = {}
    for used, number, _ in positions:
        sizes_at.setdefault(used, []).append(number)
    bound = np.full((total + 1, len(SHARES), size), np.inf)
    bound[0, :, -1] = 0.0  # no layer and no device is left
    for used, number, place in positions:
        begin, cut = total - used, total - used + number
        memory = problem.cluster.memory_of(begin, cut)
        if (place, memory) not in fitting:
            fitting[place, memory] = _least_of(tables[place], memory, is_range)
        passed, filled = fitting[place, memory]
        ends = [(cut, cut + after) for after in sizes_at.get(used - number, ())]
        factor = min((problem.edge_costs.bound_per_byte((begin, cut), end) for end in ends), default=0.0)
        there, back = sent * factor, returned * factor
        over_edge = passed + count * np.maximum(there, back)
        beyond = passed + there + shares * back if is_sequential else np.where(np.isfinite(passed), 0.0, np.inf)
        beyond = beyond + bound[used - number][:, None, :]
        seconds = np.maximum(np.maximum(filled, beyond), np.where(is_range, over_edge, np.inf))
        bound[used] = np.minimum(bound[used], seconds.min(axis=-1))
    return float(bound[total, :, 0].max())


def _least_of(tables: list[_Stages], memory_bytes: float, is_range: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``[share, first, end]``: least ``passed`` and ``filled`` of the choices that fit the memory."""
    never = np.full((len(SHARES), *is_range.shape), np.inf)
    passed, filled = never, never
    for table in tables:
        fits = is_range & (table.needed_bytes <= memory_bytes)
        passed = np.minimum(passed, np.where(fits, table.passed, np.inf))
        filled = np.minimum(filled, np.where(fits, table.filled, np.inf))
    return passed, filled


def _cut_bytes(problem: SearchProblem, is_gradient: bool) -> np.ndarray:
    """``[first, cut]``: least bytes of a sample, or of its gradients, from a stage to the one behind it."""
    graph = problem.graph
    if is_gradient:
        graph = replace(graph, tensors=tuple(tensor for tensor in graph.tensors if tensor.has_gradient))
    table = bytes_of_cuts(graph)
    size = len(graph.layers) + 1
    if graph.is_chain:
        return np.broadcast_to(table[0, :, 0], (size, size))
    numbers = np.arange(size)
    first, cut, end = numbers[:, None, None], numbers[None, :, None], numbers[None, None, :]
    min_bytes = np.where((first < cut) & (cut < end), table, np.inf).min(axis=2)
    return np.where(np.isfinite(min_bytes), min_bytes, 0.0)  # 0: no stage is behind this one
