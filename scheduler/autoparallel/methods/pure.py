"""Plans that people choose by hand: a single kind of parallelism, and Megatron's rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..costs.search_problem import Candidate, SearchProblem, Stages
from ..inputs.layer_choices import LayerChoice
from ..inputs.stages import StagePlan


def pure(problem: SearchProblem) -> tuple[Candidate, ...]:
    """Data parallelism, ZeRO, tensor with data parallelism, pipelines of equal stages, and Megatron's rule.

    A pipeline has equal numbers of layers and devices. Each variant is tried with every allowed number of
    microbatches, without and with recomputation, and the six fastest are returned. Variants whose 1F1B does not fit the
    memory are left out.

    Source of the rule: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021): tensor
    parallelism up to the devices of a host, then the fewest stages that fit, then data parallelism.
    """
    candidates = []
    for count in problem.microbatch_counts:
        for degree in _pipeline_degrees(problem):
            for stages in even_stages(problem, degree, count):
                costs, _ = problem.costs(stages, count)
                fits = all(cost.max_in_flight >= min(count, degree - index) for index, cost in enumerate(costs))
                if fits:
                    candidates.append((one_f_one_b_seconds(problem, stages, count), stages, count))
    candidates.sort(key=lambda trial: (float(f"{trial[0]:.9g}"), len(trial[1]), str(trial[1])))
    return tuple(Candidate("pure", stages, count, seconds) for seconds, stages, count in candidates[:6])


def even_stages(problem: SearchProblem, degree: int, count: int) -> Iterator[Stages]:
    """Pipelines of ``degree`` stages with equal layers and devices, one for each choice of all their layers."""
    size = problem.cluster.num_ranks // degree
    firsts = [stage * size for stage in range(degree)]
    if not all(problem.cluster.is_mesh(first, first + size) for first in firsts):
        return
    cuts = even_cuts(len(problem.graph.layers), degree)
    for choice in problem.choices(size, problem.num_samples // count):
        if problem.can_have(choice, 0, len(problem.graph.layers)):
            yield uniform_stages(cuts, firsts, size, choice)


def uniform_stages(cuts: Sequence[int], firsts: Sequence[int], size: int, choice: LayerChoice) -> Stages:
    """Stages of equal meshes that begin at ``cuts`` and ``firsts``, with one choice for all layers."""
    return tuple(
        StagePlan(start, end, first, first + size, (choice,) * (end - start))
        for start, end, first in zip(cuts, cuts[1:], firsts, strict=False)
    )


def even_cuts(num_layers: int, degree: int) -> list[int]:
    """First layers of ``degree`` stages as equal as possible, larger ones first, and the number of layers."""
    share, extra = divmod(num_layers, degree)
    cuts = [0]
    for stage in range(degree):
        cuts.append(cuts[-1] + share + (stage < extra))
    return cuts


def one_f_one_b_seconds(problem: SearchProblem, stages: Stages, count: int) -> float:
    """Seconds of 1F1B if edges cost nothing.

    They are one pass through all stages, the time of the slowest stage for each further microbatch, and the longest
    gradient sum.
    """
    costs, _ = problem.costs(stages, count)
    slowest = max(cost.seconds for cost in costs)
    return sum(cost.seconds for cost in costs) + (count - 1) * slowest + max(cost.ending_seconds for cost in costs)


def _pipeline_degrees(problem: SearchProblem) -> list[int]:
    ranks, layers = problem.cluster.num_ranks, len(problem.graph.layers)
    return [d for d in range(1, min(ranks, layers) + 1) if ranks % d == 0]
