"""The fastest candidate of a method on all devices of a problem, with the codecs that make its step shorter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError
from reshard.formatting import brief

from .costs.codec_costs import parts_of_policy
from .costs.iteration import Evaluation, evaluate
from .costs.search_problem import SearchProblem
from .methods.auto_method import METHODS, Method, auto, decide, simplify, why_nothing_fits

if TYPE_CHECKING:
    from reshard.compression import Policy

#: Codecs are used only if they shorten a step by at least this fraction.
MIN_GAIN = 0.01
#: A problem with the chosen codecs, the chosen evaluation, and evaluations to which it was compared.
ChosenPlan = tuple[SearchProblem, Evaluation, Sequence[Evaluation]]


def choose(problem: SearchProblem, method: str | Method = "auto") -> ChosenPlan:
    """The fastest candidate that fits the memory; with ``auto``, a simpler one if the profile shows no difference.

    Errors: see :func:`~.searching.search`.
    """
    chosen = choose_fastest_plan(problem, method)
    return simplest(chosen) if _is_auto(method) else chosen


def choose_fastest_plan(problem: SearchProblem, method: str | Method = "auto") -> ChosenPlan:
    """The fastest candidate that fits the memory. Errors: see :func:`~.searching.search`."""
    if problem.compression is None:
        evaluations = _run_method(problem, method)
        return problem, evaluations[0], evaluations[1:]
    return _choose_codecs(problem, problem.compression, method)


def simplest(chosen: ChosenPlan) -> ChosenPlan:
    """Replace the chosen plan by a simpler plan that is as fast. Plans with codecs are returned unchanged.

    See :func:`~.methods.auto_method.simplify`.
    """
    problem, best, others = chosen
    if problem.compression is not None:
        return chosen
    evaluations = [best, *others]
    simple = simplify(problem, evaluations)
    return problem, simple, [item for item in evaluations if item is not simple]


def _choose_codecs(problem: SearchProblem, policy: Policy, method: str | Method) -> ChosenPlan:
    """The fastest candidate with a subset of the codecs of a policy, or with none if they gain too little.

    Two searches find stages: one without codecs, and one that uses a codec wherever it is faster. An engine compresses
    the traffic of all stages in the same way. So each subset of the policy is then simulated on the stages of both
    searches, and compared with the fastest candidate without codecs.
    """
    raw = problem.changed(compression=None)
    plain = _run_method(raw, method)
    encoded = _run_method(problem, method)
    best, best_problem = plain[0], raw
    starts = (simplify(raw, plain), simplify(problem, encoded)) if _is_auto(method) else (plain[0], encoded[0])
    for start in starts:
        for part in parts_of_policy(policy, start.candidate.stages, problem.graph):
            fixed = problem.changed(compression=part, compress_all=True)
            evaluation = evaluate(fixed, start.candidate)
            if evaluation is not None and not evaluation.short_bytes and evaluation.seconds < best.seconds:
                best, best_problem = evaluation, fixed
    if best.seconds >= (1 - MIN_GAIN) * plain[0].seconds:
        return raw, plain[0], plain[1:]
    thorough = evaluate(best_problem, best.candidate, thorough=True)
    if thorough is not None and not thorough.short_bytes and thorough.seconds < best.seconds:
        best = thorough
    return best_problem, best, [plain[0], *encoded[1:]]


def _run_method(problem: SearchProblem, method: str | Method) -> list[Evaluation]:
    """Evaluated candidates of a method; the first one is the fastest that fits the memory."""
    evaluations = decide(problem, _find_method(method)(problem), moves=_is_auto(method))
    best = evaluations[0]
    if best.short_bytes:
        raise ArgumentError(why_nothing_fits(problem))
    return evaluations


def _is_auto(method: str | Method) -> bool:
    return isinstance(method, str) and method == "auto"


def _find_method(method: str | Method) -> Method:
    if callable(method):
        return method
    if _is_auto(method):
        return auto
    if not isinstance(method, str) or method not in METHODS:
        raise ArgumentError(f"no search method {brief(method)}; choose auto, {', '.join(METHODS)}, or pass a function")
    return METHODS[method]
