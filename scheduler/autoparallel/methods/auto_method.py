"""``auto``: candidates of all methods, decided by the simulator, then improved by local moves."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from reshard.errors import ArgumentError
from reshard.formatting import count_of

from ..costs.grid_costs import why_no_grid
from ..costs.iteration import Evaluation, evaluate
from ..costs.search_problem import Candidate, SearchProblem
from ..costs.step_bounds import step_bound
from ..inputs.layer_choices import GridShape
from ..inputs.stages import check_stages
from .alpa import alpa, num_sums
from .bmw import bmw, galvatron_released
from .interleaving import interleaved
from .joint import joint
from .moves import changed_alike, fewer_microbatches, neighbours
from .pure import pure
from .shortage import smallest_shortages

#: A search method: candidates, its own choice first.
Method = Callable[[SearchProblem], Sequence[Candidate]]
#: Methods by name.
METHODS: dict[str, Method] = {
    "joint": joint,
    "bmw": bmw,
    "galvatron": galvatron_released,
    "alpa": alpa,
    "pure": pure,
}
#: A function that is called with the part of the work that is done, from 0 to 1, and the name of the next step.
Report = Callable[[float, str], None]
#: Share of each method in the time of ``auto``, for 24 layers on 16 to 64 ranks, rounded.
TIME_SHARES = {"joint": 0.25, "bmw": 0.3, "galvatron": 0.08, "alpa": 0.35, "pure": 0.02}
#: ``auto`` skips ``alpa`` if one pass of its dynamic program needs more additions than this.
MAX_SUMS = 250_000_000
#: Computations that local moves may simulate to improve one training plan.
MOVE_BUDGET = 40_000
#: Computations that may be simulated to make a training plan fit that just does not.
SHRINK_BUDGET = 4_000
#: ``NUM_FINALISTS``: number of the best training plans that local moves improve, and for which ``auto_schedule`` is
#: tried at the end. Both also happen to the best one of each number of microbatches, if it takes at most
#: ``NEAR_FINALIST`` times as long as the best.
NUM_FINALISTS, NEAR_FINALIST = 2, 1.1
#: Two numbers: of the best training plans whose meshes interleaved candidates use, and of interleaved candidates that
#: are simulated.
NUM_INTERLEAVED, MAX_INTERLEAVED = 8, 24
#: An interleaved candidate is improved by moves if it takes at most this many times as long as the best plan.
NEAR_INTERLEAVED = 1.1
#: Standard error of the median of five measurements over their interquartile range.
ERROR_OF_SPREAD = 0.4
#: A simpler training plan is improved by moves if it takes at most this many times as long as a tie may.
NEAR_TIE = 1.1
#: ``joint`` predicts at most about this many times what a plan with split backwards takes: it knows whole backwards
#: only, and weight gradients are a third of the work.
MAX_SPLIT_GAIN = 1.25
#: A move must shorten the time by at least this fraction.
MIN_GAIN = 1e-6


def auto(
    problem: SearchProblem, report: Report | None = None, below_seconds: float = math.inf
) -> tuple[Candidate, ...]:
    """The candidates of all methods, without ``alpa`` for large problems. :func:`decide` improves them by moves.

    ``joint`` does not know the gain of a split backward. So it also searches only the choices that allow split
    backwards. If no method finds a candidate, the result has the training plans that lack the least memory: one of them
    may just fit.

    Args:
        report: called before each method.
        below_seconds: ``joint`` stops at plans that are slower, even if split backwards gain much.
    """
    limited = functools.partial(joint, below_seconds=below_seconds * MAX_SPLIT_GAIN)
    methods = {name: limited if method is joint else method for name, method in METHODS.items()}
    candidates: dict[str, Candidate] = {}
    names = [name for name, method in METHODS.items() if method is not alpa or num_sums(problem) <= MAX_SUMS]
    total, done = sum(TIME_SHARES[name] for name in names), 0.0
    for name in names:
        if report is not None:
            report(done / total, name)
        for candidate in methods[name](problem):
            candidates.setdefault(candidate.text, candidate)
        done += TIME_SHARES[name]
    rules = replace(problem.rules, zero=(0,), recompute=(False,))
    if rules != problem.rules and 0 in problem.rules.zero and False in problem.rules.recompute:
        for candidate in limited(problem.changed(rules=rules)):
            candidates.setdefault(candidate.text, candidate)
    shortages = () if candidates else smallest_shortages(problem)
    return tuple(candidates.values()) or tuple(_shrink(problem, shortage.candidate) for shortage in shortages)


def _shrink(problem: SearchProblem, candidate: Candidate) -> Candidate:
    """The candidate after moves that each lower the memory that it lacks, until it fits or the tries are spent."""
    best, left, gained = evaluate(problem, candidate), SHRINK_BUDGET, True
    while gained and best is not None and best.short_bytes:
        gained = False
        for changed in neighbours(problem, best.candidate):
            left -= 3 * changed.num_microbatches * len(changed.stages)
            if left < 0:
                break
            evaluation = evaluate(problem, changed)
            if evaluation is not None and evaluation.short_bytes < best.short_bytes:
                best, gained = evaluation, True
                break
    return candidate if best is None else best.candidate


def decide(problem: SearchProblem, candidates: Sequence[Candidate], *, moves: bool) -> list[Evaluation]:
    """Evaluate candidates in the simulator. Candidates that fit come first, then the fastest.

    Args:
        problem: the search.
        candidates: what to evaluate.
        moves: improve the best ones by local moves, and try ``auto_schedule`` on the last ones.

    Raises:
        ArgumentError: there is no candidate.
    """
    evaluations = evaluate_all(problem, candidates)
    return refine(problem, with_interleaved(problem, evaluations)) if moves else evaluations


def with_interleaved(
    problem: SearchProblem, evaluations: Sequence[Evaluation], limit_seconds: float = math.inf
) -> list[Evaluation]:
    """The evaluations, and the interleaved candidates that are faster than they are and than a limit."""
    fits = bool(evaluations) and not evaluations[0].short_bytes
    limit = min(limit_seconds, evaluations[0].seconds if fits else math.inf)
    return sorted([*evaluations, *interleave(problem, evaluations, limit)], key=order)


def evaluate_all(
    problem: SearchProblem, candidates: Sequence[Candidate], below_seconds: float = math.inf
) -> list[Evaluation]:
    """Simulate candidates. The candidates that fit come first, then the fastest. Errors: see :func:`decide`.

    With ``below_seconds``, only candidates that fit the memory and are faster than this count.
    """
    for candidate in candidates or ():
        _check_candidate(problem, candidate)
    if not candidates:
        raise ArgumentError(why_nothing_fits(problem))
    evaluations = (evaluate(problem, candidate, below_seconds=below_seconds) for candidate in candidates)
    return sorted((evaluation for evaluation in evaluations if evaluation is not None), key=order)


def refine(problem: SearchProblem, evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Improve the best evaluated candidates by moves, try ``auto_schedule`` on the best ones, and interleave stages.

    Candidates that are interleaved already have been improved.
    """
    evaluations = list(evaluations)
    plain = [item for item in evaluations if not item.short_bytes and not item.candidate.is_interleaved]
    for start in _finalists(plain):
        better = improve(problem, start)
        if better is not start:
            evaluations.append(better)
    evaluations.sort(key=order)
    for is_interleaved in (False, True):
        alike = [item for item in evaluations if item.candidate.is_interleaved is is_interleaved]
        for item in _finalists(alike):
            evaluations[evaluations.index(item)] = _thorough(problem, item)
    evaluations.sort(key=order)
    if evaluations and not evaluations[0].short_bytes:
        shared = interleave(problem, evaluations, evaluations[0].seconds)
        evaluations += [_thorough(problem, item) for item in shared]
        evaluations += _change_alike(problem, min(evaluations, key=order))
    return sorted(evaluations, key=order)


def _finalists(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The evaluations, the fastest first, that are improved: see :data:`NUM_FINALISTS`."""
    best_of: dict[int, Evaluation] = {}
    for item in evaluations:
        if not item.short_bytes and item.seconds <= evaluations[0].seconds * NEAR_FINALIST:
            best_of.setdefault(item.candidate.num_microbatches, item)
    first = list(evaluations[:NUM_FINALISTS])
    return first + [item for item in best_of.values() if item not in first]


def _change_alike(problem: SearchProblem, best: Evaluation) -> list[Evaluation]:
    """The best candidate after changes of all stages or of the number of microbatches, under ``auto_schedule``.

    Local moves compare candidates under the known schedules, which may rank them otherwise.
    """
    evaluations = []
    for candidate in changed_alike(problem, best.candidate):
        target = best.seconds * (1 - MIN_GAIN)
        if step_bound(problem, candidate) < target:
            better = evaluate(problem, candidate, thorough=True, below_seconds=target)
            if better is not None:
                best = better
                evaluations.append(better)
    return evaluations


def _thorough(problem: SearchProblem, evaluation: Evaluation) -> Evaluation:
    """The evaluation with the schedule of ``auto_schedule`` if that is better."""
    thorough = evaluate(problem, evaluation.candidate, thorough=True)
    return evaluation if thorough is None or order(thorough) >= order(evaluation) else thorough


def interleave(problem: SearchProblem, evaluations: Sequence[Evaluation], limit_seconds: float) -> list[Evaluation]:
    """The fastest interleaved candidates, improved by moves; empty if none is faster than a limit.

    Args:
        evaluations: candidates with one stage on each mesh, the fastest first.
    """
    if problem.rules.max_stages_per_rank < 2 or limit_seconds == math.inf:
        return []
    simulated = _simulate_interleaved(problem, _pipelines(evaluations), limit_seconds, limit_seconds * NEAR_INTERLEAVED)
    improved = [improve(problem, item) for item in _finalists(sorted(simulated, key=order))]
    faster = (item for item in improved if item.seconds < limit_seconds * (1 - MIN_GAIN))
    return sorted(faster, key=order)[:NUM_FINALISTS]


def _pipelines(evaluations: Sequence[Evaluation]) -> list[Candidate]:
    """The candidates of several stages, one on each mesh, that fit the memory."""
    return [
        item.candidate
        for item in evaluations
        if not item.short_bytes and len(item.candidate.stages) > 1 and not item.candidate.is_interleaved
    ]


def _simulate_interleaved(
    problem: SearchProblem, plain: Sequence[Candidate], limit_seconds: float, below_seconds: float
) -> list[Evaluation]:
    """Interleaved candidates, on the meshes of ``plain`` ones and others, that take less than ``below_seconds``.

    Args:
        limit_seconds: see :func:`~.interleaving.interleaved`.
    """
    evaluations: list[Evaluation] = []
    left = MOVE_BUDGET
    for candidate in itertools.islice(interleaved(problem, plain[:NUM_INTERLEAVED], limit_seconds), MAX_INTERLEAVED):
        left -= 3 * candidate.num_microbatches * len(candidate.stages)
        if left < 0:
            break
        evaluation = evaluate(problem, candidate, below_seconds=below_seconds)
        if evaluation is not None:
            evaluations.append(evaluation)
    return evaluations


def simplify(problem: SearchProblem, evaluations: Sequence[Evaluation]) -> Evaluation:
    """The simplest of the candidates that tie with the fastest one, then made simpler by moves.

    Measured times of layers vary, so predictions whose relative difference is at most :data:`ERROR_OF_SPREAD` times the
    spread of the profile are a tie.
    """
    best = evaluations[0]
    if best.short_bytes:
        return best
    limit = best.seconds * (1 + ERROR_OF_SPREAD * problem.spread()[0])
    if limit == best.seconds:
        return best
    ties = [item for item in evaluations if not item.short_bytes and item.seconds <= limit]
    best = min(ties, key=lambda item: (item.candidate.complexity, item.rank_key))
    near = {item.candidate: item for item in evaluations if not item.short_bytes and item.seconds <= limit * NEAR_TIE}
    tried, left, num_thorough = set(), MOVE_BUDGET, NUM_FINALISTS

    def simpler_tie() -> Evaluation | None:
        nonlocal left, num_thorough
        complexity = best.candidate.complexity
        others = [item for item in (*near, *neighbours(problem, best.candidate)) if item.complexity < complexity]
        others += fewer_microbatches(problem, best.candidate)
        for candidate in sorted(others, key=lambda item: item.complexity):
            if candidate.text in tried or step_bound(problem, candidate) > limit:
                continue
            tried.add(candidate.text)
            simpler = near.get(candidate) or evaluate(problem, candidate, below_seconds=limit * NEAR_TIE)
            if simpler is not None and simpler.seconds > limit:
                simpler, left = _shorten(problem, simpler, limit, left)
                if simpler.seconds > limit and num_thorough:
                    simpler, num_thorough = _thorough(problem, simpler), num_thorough - 1
            if simpler is not None and simpler.seconds <= limit:
                return simpler
        return None

    while (simpler := simpler_tie() or _interleaved_tie(problem, evaluations, best, limit)) is not None:
        best = simpler
    return best


def _interleaved_tie(
    problem: SearchProblem, evaluations: Sequence[Evaluation], best: Evaluation, limit: float
) -> Evaluation | None:
    """The simplest interleaved candidate with the next smaller number of microbatches that takes at most ``limit``."""
    counts = [count for count in problem.microbatch_counts if count < best.candidate.num_microbatches]
    if not counts or problem.rules.max_stages_per_rank < 2:
        return None
    fewer = problem.changed(microbatch_counts=(max(counts),))
    plain = [replace(item, num_microbatches=max(counts)) for item in _pipelines(evaluations)]
    simulated = _simulate_interleaved(fewer, plain, limit, limit)
    return min(simulated, key=lambda item: (item.candidate.complexity, item.rank_key), default=None)


def _shorten(problem: SearchProblem, start: Evaluation, limit: float, budget: int) -> tuple[Evaluation, int]:
    """Make moves to faster candidates that are no more complex, until one takes at most ``limit`` seconds.

    Args:
        budget: limit on the computations that are simulated.

    Returns:
        The last evaluation, and what is left of the budget.
    """
    best, gained = start, True
    while gained and best.seconds > limit:
        gained = False
        for candidate in neighbours(problem, best.candidate):
            target = best.seconds * (1 - MIN_GAIN)
            if candidate.complexity > start.candidate.complexity or step_bound(problem, candidate) > limit:
                continue
            budget -= 3 * candidate.num_microbatches * len(candidate.stages)
            if budget < 0:
                return best, 0
            evaluation = evaluate(problem, candidate, below_seconds=target)
            if evaluation is not None:
                best, gained = evaluation, True
                break
    return best, budget


def _check_candidate(problem: SearchProblem, candidate: Candidate) -> None:
    """Raise ArgumentError unless a candidate has all layers, ranks of the cluster, and stages that share samples."""
    if not isinstance(candidate, Candidate):
        raise ArgumentError(f"a method must return Candidates, not {candidate!r:.100}")
    stages, count = candidate.stages, candidate.num_microbatches
    check_stages(stages)
    ends = (stages[-1].end_layer, max(stage.end_rank for stage in stages))
    needed = (len(problem.graph.layers), problem.cluster.num_ranks)
    if ends[0] != needed[0] or ends[1] > needed[1]:
        raise ArgumentError(
            f"the stages of candidate {candidate.text} have {ends[0]} layers on {ends[1]} ranks; the model has "
            f"{needed[0]} layers, and the cluster {needed[1]} ranks"
        )
    if count not in problem.microbatch_counts:
        raise ArgumentError(
            f"candidate {candidate.text} has {count} microbatches; the search allows "
            f"{', '.join(map(str, problem.microbatch_counts))}"
        )
    for stage in stages:
        for choice in stage.choices:
            if problem.num_samples // count % choice.sample_shards(stage.num_ranks):
                raise ArgumentError(
                    f"{problem.num_samples // count} samples of a microbatch do not divide over the "
                    f"{choice.sample_shards(stage.num_ranks)} replicas of {stage}"
                )


def order(evaluation: Evaluation) -> tuple[float, tuple[float, tuple[int, int, int], float, str]]:
    """Sort key of evaluations: training plans that fit the memory, then the fastest."""
    return (evaluation.short_bytes, evaluation.rank_key)


def improve(problem: SearchProblem, start: Evaluation) -> Evaluation:
    """Hill climbing: take the first move that gains until none does, or the tries are spent.

    A move is simulated under the schedule of the best candidate so far, and if it gains, under all schedules. It is
    simulated under all at once if they may be others than before: if backwards can be split only before or after the
    move, or if more layers are recomputed, which leaves memory for more microbatches in flight.
    """

    def can_split(candidate: Candidate) -> bool:
        return problem.can_split(candidate.stages, candidate.num_microbatches)

    def num_recomputed(candidate: Candidate) -> int:
        return sum(choice.recompute for stage in candidate.stages for choice in stage.choices)

    best, tried, gained, left = start, {start.candidate.text}, True, MOVE_BUDGET
    while gained:
        gained = False
        for candidate in neighbours(problem, best.candidate):
            if candidate.text in tried or left <= 0:
                continue
            tried.add(candidate.text)
            target = best.seconds * (1 - MIN_GAIN)
            if step_bound(problem, candidate) >= target:
                continue  # no schedule can make it better
            left -= 3 * candidate.num_microbatches * len(candidate.stages)
            frees_memory = num_recomputed(candidate) > num_recomputed(best.candidate)
            has_others = frees_memory or can_split(candidate) != can_split(best.candidate)
            only = None if has_others else best.schedule_name
            evaluation = evaluate(problem, candidate, below_seconds=target, only=only)
            if evaluation is not None:
                best, gained = evaluate(problem, candidate, below_seconds=evaluation.seconds) or evaluation, True
                break
    return best


def _why_refused(problem: SearchProblem, grid: GridShape) -> str:
    """The layer that cannot be on a grid, and the reason."""
    reasons = ((layer.name, why_no_grid(layer, grid)) for layer in problem.graph.layers)
    name, reason = next((name, reason) for name, reason in reasons if reason is not None)
    return f"layer {name!r} cannot be on grid={'x'.join(map(str, grid))}: {reason}"


def _what_rules_forbid(problem: SearchProblem) -> str:
    """The end of an error: choices that take less memory, and that the rules forbid."""
    forbidden = [] if True in problem.rules.recompute else ["recomputation"]
    forbidden += [] if 3 in problem.rules.zero else ["ZeRO 3"]
    return f"; or allow {' and '.join(forbidden)}" if forbidden else ""


def why_nothing_fits(problem: SearchProblem) -> str:
    """The reason why no training plan uses all devices: the memory that one lacks, or why no stage is possible."""
    total, short = problem.cluster.num_ranks, smallest_shortages(problem)
    if short and short[0].nbytes > 0:
        lacks = short[0]
        stage, count = lacks.candidate.stages[lacks.stage], lacks.candidate.num_microbatches
        limit = problem.cluster.memory_of(stage.first_rank, stage.end_rank)
        return (
            f"nothing fits: with {lacks.nbytes / 1e9:.3g} GB more memory on each device, this does: "
            f"{lacks.candidate.text}; its stage {lacks.stage} needs {(limit + lacks.nbytes) / 1e9:.4g} GB of "
            f"{limit / 1e9:.4g}, with one microbatch of {count_of(problem.num_samples // count, 'sample')} in flight; "
            f"use more devices or memory, or fewer samples{_what_rules_forbid(problem)}"
        )
    max_tp = max(layer.tp_limit for layer in problem.graph.layers)
    if problem.rules.min_tp > max_tp:
        return (
            f"no stage can have tp={problem.rules.min_tp}: the layers of {problem.graph.name} allow tp={max_tp} at "
            "most; use a smaller tp, or pass a tp_plan and max_tp when you trace the model"
        )
    for count in problem.microbatch_counts:
        for choice in problem.choices(total, problem.num_samples // count) if total in problem.meshes(total) else ():
            if not problem.can_have(choice, 0, len(problem.graph.layers)):
                return f"no stage can have all {total} devices: {_why_refused(problem, choice.grid)}"
    return (
        f"no stage can have the samples of a microbatch: {problem.num_samples} samples in "
        f"{', '.join(map(str, problem.microbatch_counts))} microbatches on meshes of {problem.cluster.mesh_sizes} "
        f"devices; use samples that {max(problem.microbatch_counts)} microbatches and the replicas divide"
    )
