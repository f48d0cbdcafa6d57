"""The fastest training plan on all devices of a cluster, or on a part of them."""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reshard.errors import ArgumentError
from reshard.formatting import count_of

from .costs.iteration import Evaluation, evaluate
from .costs.search_problem import SearchProblem
from .inputs.layer_profile import LayerProfile
from .methods.auto_method import Report, auto, evaluate_all, refine, why_nothing_fits, with_interleaved
from .methods.bounds import single_stage_bound, step_bound_of_any, work_bound
from .methods.pure import pure
from .plan_choice import ChosenPlan, choose_fastest_plan, simplest
from .plan_making import make_training_plan
from .result.training_plan import TrainingPlan

#: Local moves improve a part of the cluster if its best candidate takes at most this many times the time of the best
#: plan. On one of 107 random clusters, moves more than halved the time of a candidate.
NEAR = 3.0


@dataclass(eq=False)
class _ClusterPart:
    """A part of a cluster, or all of it with its hosts in some order.

    Attributes:
        ranks: ranks of the cluster; empty for all ranks in their order.
        problem: the search on these ranks.
        bound_seconds: no training plan that uses all these ranks is faster.
        evaluations: evaluated candidates, the fastest first; empty if the part was not searched or has none.
        is_refined: whether moves have improved them.
    """

    ranks: tuple[int, ...]
    problem: SearchProblem
    bound_seconds: float = 0.0
    evaluations: Sequence[Evaluation] = ()
    is_refined: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of the fastest candidate; infinite if none fits the memory."""
        return math.inf if not self.evaluations or self.evaluations[0].short_bytes else self.evaluations[0].seconds


def choose_part(problem: SearchProblem, report: Report | None = None) -> TrainingPlan:
    """The fastest training plan of a problem on all devices, in any order of the hosts, or on a part of them.

    A part is not searched if its bound is slower than a known training plan. Local moves improve only the best parts.
    The fastest candidates of the parts are compared, and only the winner is made simpler. ``report`` is called before
    each method with the part of the methods that is done, of all that may run.
    """
    whole = _ClusterPart((), problem)
    parts = _search_parts(whole, report or (lambda done, text: None))
    bound = min((part.bound_seconds for part in parts), default=math.inf)
    best: ChosenPlan | None = None
    used: tuple[int, ...] = ()
    parts = sorted((part for part in parts if part.seconds < math.inf), key=lambda part: part.seconds)
    for part in parts:
        limit = math.inf if best is None else best[1].seconds
        if part.bound_seconds >= limit or part.seconds > NEAR * limit:
            continue
        choice = choose_fastest_plan(part.problem) if part.problem.compression is not None else _refined(part)
        whole.evaluations = [choice[1], *choice[2]] if part is whole else whole.evaluations
        if choice[1].seconds < limit:
            best, used = choice, part.ranks
    if best is None:
        on_parts = "; nor does anything fit on a part of the cluster" if problem.cluster.num_ranks > 1 else ""
        raise ArgumentError(why_nothing_fits(problem) + on_parts)
    plan = make_training_plan(*simplest(best), bound, is_of_parts=True)
    return _on_ranks(plan, used, whole) if used else plan


def _refined(part: _ClusterPart) -> ChosenPlan:
    if not part.is_refined:
        part.evaluations, part.is_refined = refine(part.problem, part.evaluations), True
    return part.problem, part.evaluations[0], part.evaluations[1:]


def _search_parts(whole: _ClusterPart, report: Report) -> list[_ClusterPart]:
    """All parts that may have the fastest training plan, with their candidates."""
    problem = whole.problem
    speeds = {name: 1 / (_model_seconds(problem, profile) or 1.0) for name, profile in problem.profiles.items()}
    parts = [whole]
    parts += [
        _ClusterPart(ranks, problem.changed(cluster=problem.cluster.select(ranks)))
        for ranks in problem.cluster.parts(speeds)
    ]
    # a problem with codecs uses each codec only where it is faster; no engine does that, so its plans give no limit
    raw = (part.problem if problem.compression is None else part.problem.changed(compression=None) for part in parts)
    report(0.0, "bounds")
    limit, promising = _quick_limit(list(raw))
    # The part with the fastest quick plan is searched first, with all moves: its plans then rule out plans of other
    # parts. The bound of the work alone takes less time, so the better bound is computed for promising parts only.
    queue = [
        (-math.inf if number == promising else work_bound(part.problem), number, False)
        for number, part in enumerate(parts)
    ]
    heapq.heapify(queue)
    searched: list[_ClusterPart] = []
    while queue:
        bound, number, is_better = heapq.heappop(queue)
        part = parts[number]
        if bound > limit or (searched and bound >= limit):
            break
        if not is_better and number != promising:
            heapq.heappush(queue, (step_bound_of_any(part.problem), number, True))
            continue
        part.bound_seconds = step_bound_of_any(part.problem)
        searched.append(part)
        left = sum(bound < limit for bound, _, _ in queue)
        of_part = functools.partial(_report_part, report, part, len(searched) - 1, left)
        _search_part(part, of_part, limit)
        if problem.compression is None:
            if number == promising and part.seconds < math.inf:
                _refined(part)
            limit = min(limit, part.seconds)
    whole.bound_seconds = step_bound_of_any(problem)
    return searched


def _search_part(part: _ClusterPart, report: Report, limit: float) -> None:
    """Search a part for candidates from which moves may reach a limit."""
    problem, is_raw = part.problem, part.problem.compression is None
    near = NEAR * limit or math.inf
    if not is_raw or single_stage_bound(problem) <= limit:
        with contextlib.suppress(ArgumentError):  # nothing fits there
            part.evaluations = evaluate_all(problem, auto(problem, report, near if is_raw else math.inf), near)
    part.evaluations = with_interleaved(problem, part.evaluations, near)


def _report_part(report: Report, part: _ClusterPart, num_before: int, num_left: int, done: float, method: str) -> None:
    """Report how much of the search of a part is done, after ``num_before`` others and before at most ``num_left``."""
    where = count_of(part.problem.cluster.num_ranks, "rank")
    report((num_before + done) / (num_before + 1 + num_left), f"{method} on {where}")


def _quick_limit(problems: Sequence[SearchProblem]) -> tuple[float, int]:
    """Seconds of the fastest plan of ``pure`` for any of the problems, and its problem; infinite if none fits."""
    limit, promising = math.inf, 0
    for number, problem in sorted(enumerate(problems), key=lambda item: work_bound(item[1])):
        if work_bound(problem) >= limit:
            break
        for candidate in pure(problem)[:1]:
            evaluation = evaluate(problem, candidate, below_seconds=limit)
            if evaluation is not None and not evaluation.short_bytes:
                limit, promising = evaluation.seconds, number
    return limit, promising


def _model_seconds(problem: SearchProblem, profile: LayerProfile) -> float:
    """Seconds of all layers for one sample."""
    times = [profile.times(layer.key, 1)[0].at(1) for layer in problem.graph.layers]
    return sum(layer_times.forward_seconds + layer_times.backward_seconds for layer_times in times)


def _on_ranks(plan: TrainingPlan, ranks: tuple[int, ...], whole: _ClusterPart) -> TrainingPlan:
    """The training plan of a part of a cluster, or of its hosts in another order, as a plan of the whole cluster."""
    cluster = whole.problem.cluster
    on_all = whole.seconds if whole.evaluations else single_stage_bound(whole.problem)
    names = list(dict.fromkeys(cluster.host_of(rank) for rank in ranks))
    return replace(
        plan,
        cluster_hash=cluster.hash,
        hosts=tuple((names[host], first, end) for host, first, end in plan.hosts),
        ranks=ranks,
        num_cluster_ranks=cluster.num_ranks,
        on_all_seconds=on_all if math.isfinite(on_all) else 0.0,
        is_on_all_bound=not whole.evaluations,
    )
