"""``auto``: candidates of all methods, decided by the simulator, then improved by local moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reshard.errors import ArgumentError

from ..costs.grid_costs import why_no_grid
from ..costs.iteration import Evaluation, evaluate, step_bound
from ..costs.problem import Candidate, SearchProblem
from ..inputs.choices import GridShape
from ..inputs.stages import StagePlan, check_stages
from .alpa import alpa, num_sums
from .bmw import bmw, galvatron_released
from .joint import joint
from .moves import neighbours
from .pure import pure

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
#: ``auto`` skips ``alpa`` if one pass of its dynamic program needs more additions than this.
MAX_SUMS = 250_000_000
#: Number of evaluated training plans that local moves improve, and limit on the computations that each simulates for
#: them.
NUM_IMPROVED, MOVE_BUDGET = 2, 40_000
#: Number of the best training plans for which ``auto_schedule`` is tried at the end.
NUM_THOROUGH = 2
#: A move must shorten the time by at least this fraction.
MIN_GAIN = 1e-6


def auto(problem: SearchProblem) -> tuple[Candidate, ...]:
    """The candidates of all methods, without ``alpa`` for large problems. :func:`decide` improves them by moves."""
    found: dict[str, Candidate] = {}
    for method in METHODS.values():
        if method is alpa and num_sums(problem) > MAX_SUMS:
            continue
        for candidate in method(problem):
            found.setdefault(candidate.text, candidate)
    return tuple(found.values())


def decide(problem: SearchProblem, candidates: Sequence[Candidate], *, moves: bool) -> list[Evaluation]:
    """Evaluate candidates in the simulator. Candidates that fit come first, then the fastest.

    Args:
        problem: the search. candidates: what to evaluate.
        moves: improve the best ones by local moves, and try ``auto_schedule`` on the last ones.

    Raises:
        ArgumentError: there is no candidate.
    """
    for candidate in candidates or ():
        _check_candidate(problem, candidate)
    if not candidates:
        raise ArgumentError(_why_nothing_fits(problem))
    found = [item for item in (evaluate(problem, candidate) for candidate in candidates) if item is not None]
    found.sort(key=order)
    if not moves:
        return found
    for start in [item for item in found if not item.short_bytes][:NUM_IMPROVED]:
        better = improve(problem, start)
        if better is not start:
            found.append(better)
    found.sort(key=order)
    for item in found[:NUM_THOROUGH]:
        thorough = evaluate(problem, item.candidate, thorough=True)
        if thorough is not None and order(thorough) < order(item):
            found[found.index(item)] = thorough
    found.sort(key=order)
    return found


def _check_candidate(problem: SearchProblem, candidate: Candidate) -> None:
    """Raise ArgumentError unless a candidate has all layers and ranks, and its stages divide the samples."""
    if not isinstance(candidate, Candidate):
        raise ArgumentError(f"a method must return Candidates, not {candidate!r:.100}")
    stages, count = candidate.stages, candidate.num_microbatches
    check_stages(stages)
    ends, needed = (stages[-1].end_layer, stages[-1].end_rank), (len(problem.graph.layers), problem.cluster.num_ranks)
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


def order(found: Evaluation) -> tuple[float, tuple[float, float, int, str]]:
    """Sort key of evaluations: training plans that fit the memory, then the fastest."""
    return (found.short_bytes, found.rank_key)


def improve(problem: SearchProblem, start: Evaluation) -> Evaluation:
    """Hill climbing: take the first move that gains until none does, or the tries are spent."""
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
            found = evaluate(problem, candidate, below_seconds=target)
            if found is not None:
                best, gained = found, True
                break
    return best


def _why_refused(problem: SearchProblem, grid: GridShape) -> str:
    """Which layer cannot be on a grid, and why."""
    reasons = ((layer.name, why_no_grid(layer, grid)) for layer in problem.graph.layers)
    name, reason = next((name, reason) for name, reason in reasons if reason is not None)
    return f"layer {name!r} cannot be on grid={'x'.join(map(str, grid))}: {reason}"


def _why_nothing_fits(problem: SearchProblem) -> str:
    """What the smallest plan lacks, with numbers: all layers on all devices, with all memory-saving choices."""
    count, total = max(problem.microbatch_counts), problem.cluster.num_ranks
    least: tuple[float, str] | None = None
    refused = ""
    for counts in problem.microbatch_counts:
        for choice in problem.choices(total, problem.num_samples // counts) if total in problem.meshes(total) else ():
            if not problem.can_have(choice, 0, len(problem.graph.layers)):
                refused = refused or _why_refused(problem, choice.grid)
                continue
            stage = StagePlan(0, len(problem.graph.layers), 0, total, (choice,) * len(problem.graph.layers))
            needed = problem.stage_cost(stage, counts).memory_bytes(1)
            if least is None or needed < least[0]:
                least = (needed, f"with {counts} microbatches, {choice.describe(total)}")
    limit = problem.cluster.memory_of(0, total)
    if least is None and refused:
        return f"no stage can have all {total} devices: {refused}"
    most = max(layer.tp_limit for layer in problem.graph.layers)
    if least is None and problem.rules.min_tp > most:
        return (
            f"no stage can have tp={problem.rules.min_tp}: the layers of {problem.graph.name} allow tp={most} at "
            "most; use a smaller tp, or pass a tp_plan and max_tp when you trace the model"
        )
    if least is None:
        return (
            f"no stage can have the samples of a microbatch: {problem.num_samples} samples in "
            f"{', '.join(map(str, problem.microbatch_counts))} microbatches on meshes of {problem.cluster.mesh_sizes} "
            f"devices; use samples that {count} microbatches and the replicas divide"
        )
    return (
        f"nothing fits: all layers on {total} devices need {least[0] / 1e9:.3g} GB of {limit / 1e9:.3g} {least[1]}; "
        "use more devices or memory, fewer samples, or allow recomputation and ZeRO 3"
    )
