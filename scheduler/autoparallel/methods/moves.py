"""Local moves: the changes of a candidate that are tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ..costs.search_problem import Candidate, SearchProblem, Stages
from ..inputs.layer_choices import LayerChoice
from ..inputs.stages import StagePlan, pp_ranks_of


def neighbours(problem: SearchProblem, candidate: Candidate) -> Iterator[Candidate]:
    """Candidates that differ by one move, in a fixed order.

    Moves: move a cut by one or two layers; take another choice for all layers of a stage; recompute one layer more or
    less; change ZeRO or recomputation in all stages; join two stages; take another number of microbatches.
    """
    stages, count = candidate.stages, candidate.num_microbatches
    others = (*_other_choices(problem, stages, count), *_alike(problem, stages))
    for changed in (*_moved_cuts(stages), *others, *_merged(problem, stages)):
        if _is_valid(problem, changed, count):
            yield replace(candidate, method="auto", stages=changed, predicted_seconds=None)
    yield from _other_counts(problem, candidate)


def changed_alike(problem: SearchProblem, candidate: Candidate) -> Iterator[Candidate]:
    """Candidates with the same ZeRO or recomputation in all stages, two stages exchanged, or other microbatches.

    An exchange is also combined with the same ZeRO or recomputation: it may gain only if backwards can then be split.
    """
    count = candidate.num_microbatches
    alike = tuple(_alike(problem, candidate.stages))
    exchanged = itertools.chain.from_iterable(_exchanged(problem, stages) for stages in (candidate.stages, *alike))
    for changed in dict.fromkeys((*alike, *exchanged)):
        if changed != candidate.stages and _is_valid(problem, changed, count):
            yield replace(candidate, method="auto", stages=changed, predicted_seconds=None)
    yield from _other_counts(problem, candidate)


def _other_counts(problem: SearchProblem, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with the next smaller and the next larger number of microbatches."""
    at = problem.microbatch_counts.index(candidate.num_microbatches)
    for other in problem.microbatch_counts[max(0, at - 1) : at + 2]:
        if other != candidate.num_microbatches and _is_valid(problem, candidate.stages, other):
            yield replace(candidate, method="auto", num_microbatches=other, predicted_seconds=None)


def fewer_microbatches(problem: SearchProblem, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with each smaller number of microbatches."""
    for count in problem.microbatch_counts:
        if count < candidate.num_microbatches and _is_valid(problem, candidate.stages, count):
            yield replace(candidate, method="auto", num_microbatches=count, predicted_seconds=None)


def _moved_cuts(stages: Stages) -> Iterator[Stages]:
    """One or two layers moved over a cut. They take the choice of the nearest layer of their new stage."""
    for index in range(1, len(stages)):
        left, right = stages[index - 1], stages[index]
        for step in (-1, 1, -2, 2):
            giver = left if step < 0 else right
            if giver.num_layers <= abs(step):
                continue
            cut = left.end_layer + step
            before = left.choices[:step] if step < 0 else left.choices + (left.choices[-1],) * step
            after = (right.choices[0],) * -step + right.choices if step < 0 else right.choices[step:]
            yield (
                *stages[: index - 1],
                replace(left, end_layer=cut, choices=before),
                replace(right, first_layer=cut, choices=after),
                *stages[index + 1 :],
            )


def _other_choices(problem: SearchProblem, stages: Stages, count: int) -> Iterator[Stages]:
    pp_ranks = pp_ranks_of(stages)
    for index, stage in enumerate(stages):
        for choice in problem.choices(stage.num_ranks, problem.num_samples // count):
            if pp_ranks[index] in pp_ranks[:index]:
                continue
            changed = tuple(
                replace(item, choices=(choice,) * item.num_layers) if pp_rank == pp_ranks[index] else item
                for item, pp_rank in zip(stages, pp_ranks, strict=True)
            )
            if changed != stages:
                yield changed
        if len(problem.rules.recompute) == 2:
            number = sum(choice.recompute for choice in stage.choices)
            for other in (number - 1, number + 1):
                if 0 <= other <= stage.num_layers:
                    choices = tuple(replace(c, recompute=i < other) for i, c in enumerate(stage.choices))
                    yield _with(stages, index, replace(stage, choices=choices))


def _alike(problem: SearchProblem, stages: Stages) -> Iterator[Stages]:
    """The same ZeRO, or the same recomputation, in all stages: backwards can be split only if no stage has either."""
    for zero in problem.rules.zero if len(stages) > 1 else ():
        yield tuple(
            replace(
                stage, choices=tuple(replace(c, zero=zero) if _replicas(stage, c) > 1 else c for c in stage.choices)
            )
            for stage in stages
        )
    for flag in problem.rules.recompute if len(stages) > 1 else ():
        yield tuple(
            replace(stage, choices=tuple(replace(choice, recompute=flag) for choice in stage.choices))
            for stage in stages
        )


def _replicas(stage: StagePlan, choice: LayerChoice) -> int:
    return choice.grid[2] if choice.grid else stage.num_ranks // choice.tp


def _merged(problem: SearchProblem, stages: Stages) -> Iterator[Stages]:
    is_shared = len(set(pp_ranks_of(stages))) < len(stages)
    for index in range(1, 1 if is_shared else len(stages)):
        left, right = stages[index - 1], stages[index]
        if not problem.cluster.is_mesh(left.first_rank, right.end_rank):
            continue
        choice = left.choices[0]
        if not choice.fits(right.end_rank - left.first_rank):
            continue
        layers = right.end_layer - left.first_layer
        merged = StagePlan(left.first_layer, right.end_layer, left.first_rank, right.end_rank, (choice,) * layers)
        yield (*stages[: index - 1], merged, *stages[index + 1 :])


def _exchanged(problem: SearchProblem, stages: Stages) -> Iterator[Stages]:
    """Two neighbours of unequal numbers of ranks in the other order, each with its number of layers and its choices."""
    is_shared = len(set(pp_ranks_of(stages))) < len(stages)
    for index in range(1, 1 if is_shared else len(stages)):
        left, right = stages[index - 1], stages[index]
        cut, middle = left.first_layer + right.num_layers, left.first_rank + right.num_ranks
        if left.num_ranks == right.num_ranks or not (
            problem.cluster.is_mesh(left.first_rank, middle) and problem.cluster.is_mesh(middle, right.end_rank)
        ):
            continue
        first = StagePlan(left.first_layer, cut, left.first_rank, middle, right.choices)
        second = StagePlan(cut, right.end_layer, middle, right.end_rank, left.choices)
        yield (*stages[: index - 1], first, second, *stages[index + 1 :])


def _with(stages: Stages, at: int, stage: StagePlan) -> Stages:
    return (*stages[:at], stage, *stages[at + 1 :])


def _is_valid(problem: SearchProblem, stages: Stages, count: int) -> bool:
    """Whether the rules of the search allow every choice of every stage."""
    for stage in stages:
        allowed: set[LayerChoice] = set(problem.choices(stage.num_ranks, problem.num_samples // count))
        if not allowed.issuperset(stage.choices):
            return False
        if problem.rules.executable and len({choice.stage_key for choice in stage.choices}) > 1:
            return False
        first = stage.first_layer
        for choice, run in itertools.groupby(stage.choices):
            end = first + len(list(run))
            if not problem.can_have(choice, first, end):
                return False
            first = end
    return True
