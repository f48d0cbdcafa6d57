"""The missing memory if no training plan fits."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..costs.search_problem import Candidate, SearchProblem
from .recurrence_tables import Tables, make_tables


class Shortage(NamedTuple):
    """The training plan that lacks the least memory.

    Attributes:
        nbytes: bytes that the worst device lacks; not positive if the plan fits.
        candidate: its stages, which hold one microbatch each.
        stage: number of the worst stage.
    """

    nbytes: float
    candidate: Candidate
    stage: int


def smallest_shortages(problem: SearchProblem) -> list[Shortage]:
    """For each number of microbatches, the training plan that lacks the least memory; the smallest shortage first.

    The list is empty if no stage can process the samples, even with unlimited memory. A plan that lacks a few bytes
    here may fit, because all gradients and buffers count here; see :func:`~..costs.device_peaks.peak_of_stage`.
    """
    shortages = []
    for count in problem.microbatch_counts:
        tables = make_tables(problem, count)
        chosen = () if tables is None else _smallest(tables)
        if tables is not None and chosen:
            stages = tuple(tables.stage(*item) for item in chosen)
            costs = [problem.stage_cost(stage, count) for stage in stages]
            lacks = [cost.memory_bytes(1) - cost.limit_bytes for cost in costs]
            shortages.append(Shortage(max(lacks), Candidate("smallest", stages, count), lacks.index(max(lacks))))
    return sorted(
        shortages, key=lambda shortage: (shortage.nbytes, shortage.candidate.complexity, shortage.candidate.text)
    )


def _smallest(tables: Tables) -> tuple[tuple[int, int, int, int], ...]:
    """``(first, end, devices left, option)`` of the stages whose worst device lacks least; or nothing."""
    size = len(tables.problem.graph.layers) + 1
    num_ends, upper = len(tables.ends), np.triu(np.ones((size, size), dtype=bool), 1)
    needed = np.where(upper & np.isfinite(tables.forward), tables.needed_bytes(slice(None), 1), np.inf)
    min_shortage = np.full((num_ends, size), np.inf)
    min_shortage[0, -1] = -np.inf  # no layer and no device is left
    came: dict[tuple[int, int], tuple[int, int, int]] = {}  # option, end and devices left after the stage
    for position in range(1, num_ends):
        for c in np.flatnonzero(tables.next_at[:, position] >= 0).tolist():
            options = np.flatnonzero((tables.allowed[:, position] > 0) & (tables.option_class == c))
            if not len(options):
                continue
            rest = int(tables.next_at[c, position])
            of_range = needed[options]
            worst = np.maximum(of_range.min(axis=0) - tables.memory[c, position], min_shortage[rest][None, :])
            worst = np.where(upper, worst, np.inf)
            ends = worst.argmin(axis=1)
            for first in np.flatnonzero(worst.min(axis=1) < min_shortage[position]).tolist():
                end = int(ends[first])
                min_shortage[position, first] = worst[first, end]
                came[position, first] = (int(options[of_range[:, first, end].argmin()]), end, rest)
    if math.isinf(min_shortage[-1, 0]):
        return ()
    stages, position, first = [], num_ends - 1, 0
    while position:
        option, end, rest = came[position, first]
        stages.append((first, end, position, option))
        position, first = rest, end
    return tuple(stages)
