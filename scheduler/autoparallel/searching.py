"""``search``: from a model, its devices and its profile to a training plan."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reshard.dtypes import ITEMSIZE
from reshard.errors import ArgumentError
from reshard.formatting import brief, count_of

from ..ir.text import format_schedule
from .costs.codec_costs import parts_of_policy, with_codecs
from .costs.iteration import Evaluation, evaluate, evaluate_schedule
from .costs.layer_costs import StateBytes
from .costs.problem import Candidate, SearchProblem
from .inputs.choices import Choice, ChoiceRules, GridShape
from .inputs.cluster import Cluster
from .inputs.layer_graph import Layer, LayerGraph
from .inputs.layer_profile import LayerProfile
from .inputs.stages import StagePlan
from .methods.auto import METHODS, Method, auto, decide, evaluate_all, refine, why_nothing_fits
from .methods.bounds import step_bound_of_any, work_bound
from .result.reports import Alternative, EdgeReport, StageReport, TieReport
from .result.training_plan import TrainingPlan

if TYPE_CHECKING:
    from reshard.compression import Policy

#: Maximum number of alternatives that a training plan lists.
NUM_ALTERNATIVES = 8
#: Codecs are used only if they shorten a step by at least this fraction.
MIN_GAIN = 0.01
#: Local moves improve the candidates of a part of the cluster if they take at most this many times as long as the best.
NEAR = 1.25
#: Spread of measured layer times (see :meth:`LayerProfile.spread`) above which a search warns. At this spread, the
#: median of five measurements has a standard error of about 10 %, which is the error that a prediction may have.
MAX_SPREAD = 0.25
#: Parts of a training plan that ``keep=`` fixes.
KEPT = ("num_microbatches", "tp", "zero", "recompute", "grid", "idle")


def search(
    graph: LayerGraph,
    cluster: Cluster,
    profile: LayerProfile | Mapping[str, LayerProfile],
    *,
    num_samples: int,
    keep: Mapping[str, Any] | None = None,
    method: str | Method = "auto",
    states: StateBytes | None = None,
    rules: ChoiceRules | None = None,
    compression: Policy | None = None,
) -> TrainingPlan:
    """Find the fastest training plan that fits the memory, as the simulator of whole steps predicts it.

    Args:
        graph, cluster: the model and its devices.
        profile: the times of its layers, or ``{type of device: times}`` for a cluster with ``device_types``.
        num_samples: samples of a step.
        keep: parts that are fixed by hand: ``num_microbatches``, ``tp`` and ``zero`` of all stages, ``recompute``, and
            ``grid``: ``(rows, cols, depth)`` of all stages of more than one rank, or None for no grids. ``idle=False``:
            use all devices, with the hosts in their order.
        method: ``auto``, which also tries parts of the cluster and other orders of its hosts; ``joint``, ``bmw``,
            ``alpa``, ``pure``, or a function from a :class:`SearchProblem` to candidates. All but ``auto`` are taken as
            they are, without moves.
        states: bytes of states of a parameter; default: float32 with Adam.
        rules: choices that are allowed; default: all that ``Pipe`` runs.
        compression: codecs that edges (``pp``), sums of gradients over replicas under DDP (``dp``), collectives of
            ZeRO 3 (``zero``) and products on grids (``tp``) may use; default: none. The topology must have their rates.

    Returns:
        The training plan, the same on every rank and from run to run. It has codecs only if its step is then shorter
        than that of the best training plan without them.

    Raises:
        ArgumentError: the profile is of another model, an argument is out of range, or nothing fits the memory.

    Warns:
        UserWarning: the measured times of layers vary so much that the choice may be wrong.
    """
    for what, value, kind in (
        ("graph", graph, LayerGraph),
        ("cluster", cluster, Cluster),
        ("profile", profile, LayerProfile | Mapping),
    ):
        if not isinstance(value, kind):
            name = getattr(kind, "__name__", "LayerProfile, or a mapping from type of device to LayerProfile")
            raise ArgumentError(f"{what} must be a {name}, not {type(value).__name__}")
    keep = {} if keep is None else keep
    states, rules = StateBytes() if states is None else states, ChoiceRules() if rules is None else rules
    problem = make_problem(graph, cluster, profile, num_samples, keep, states, rules)
    warn_if_noisy(problem)
    if compression is not None:
        from reshard.compression import Policy  # imports torch

        if not isinstance(compression, Policy):
            raise ArgumentError(f"compression must be a Policy, not {type(compression).__name__}")
        problem = problem.changed(compression=compression)
    if isinstance(method, str) and method == "auto" and keep.get("idle", True):
        return _choose_devices(problem)
    return choose_training_plan(problem, method)


#: A problem with the codecs that were chosen, the choice, and candidates that it was compared with.
_Choice = tuple[SearchProblem, Evaluation, Sequence[Evaluation]]


@dataclass(eq=False)
class _Part:
    """A part of a cluster, or all of it with its hosts in some order.

    Attributes:
        ranks: of the cluster; empty for all in their order. problem: the search on them.
        bound_seconds: no training plan that uses all of them is faster.
        found: candidates, the fastest first; none yet, or none that fits.
    """

    ranks: tuple[int, ...]
    problem: SearchProblem
    bound_seconds: float = 0.0
    found: Sequence[Evaluation] = ()

    @property
    def seconds(self) -> float:
        """Of the fastest candidate; infinite without one."""
        return math.inf if not self.found or self.found[0].short_bytes else self.found[0].seconds


def _choose_devices(problem: SearchProblem) -> TrainingPlan:
    """The fastest training plan of a problem on all devices, in any order of the hosts, or on a part of them.

    Parts whose bound is slower than a training plan are not searched. Local moves improve the best ones only.
    """
    parts = _search_parts(problem)
    whole = parts[0]
    on_all = whole.seconds
    bound = min(part.bound_seconds for part in parts)
    best: _Choice | None = None
    used: tuple[int, ...] = ()
    parts = sorted((part for part in parts if part.seconds < math.inf), key=lambda part: part.seconds)
    for part in parts:
        limit = math.inf if best is None else best[1].seconds
        if part.bound_seconds >= limit or part.seconds > NEAR * limit:
            continue
        choice = _refined(part) if part.problem.compression is None else _choose(part.problem)
        on_all = choice[1].seconds if part is whole else on_all
        if choice[1].seconds < limit:
            best, used = choice, part.ranks
    if best is None:
        raise ArgumentError(f"{why_nothing_fits(problem)}; nor does anything fit on a part of the cluster")
    plan = make_training_plan(*best, bound, is_of_parts=True)
    return _on_ranks(plan, problem.cluster, used, on_all) if used else plan


def _refined(part: _Part) -> _Choice:
    found = refine(part.problem, part.found)
    return part.problem, found[0], found[1:]


def _search_parts(problem: SearchProblem) -> list[_Part]:
    """Candidates on all devices, the first entry, and on each part that may be faster, most promising first."""
    whole = _Part((), problem)
    speeds = {name: 1 / (_model_seconds(problem, profile) or 1.0) for name, profile in problem.profiles.items()}
    parts = [
        _Part(ranks, problem.changed(cluster=problem.cluster.select(ranks))) for ranks in problem.cluster.parts(speeds)
    ]
    limit, searched = math.inf, []
    for part in [whole, *sorted(parts, key=lambda part: work_bound(part.problem))]:
        try:
            if part is not whole and (work_bound(part.problem) >= limit or step_bound_of_any(part.problem) >= limit):
                continue
            part.bound_seconds = step_bound_of_any(part.problem)
            searched.append(part)
            part.found = evaluate_all(part.problem, auto(part.problem))
        except ArgumentError:  # nothing fits there
            continue
        limit = min(limit, part.seconds)
    return searched


def _model_seconds(problem: SearchProblem, profile: LayerProfile) -> float:
    """Seconds of all layers for one sample."""
    times = [profile.times(layer.key, 1)[0].at(1) for layer in problem.graph.layers]
    return sum(each.forward_seconds + each.backward_seconds for each in times)


def _on_ranks(found: TrainingPlan, cluster: Cluster, ranks: tuple[int, ...], on_all: float) -> TrainingPlan:
    """A training plan of a part of a cluster, or of its hosts in another order, as one of the whole cluster."""
    names = list(dict.fromkeys(cluster.host_of(rank) for rank in ranks))
    return replace(
        found,
        cluster_hash=cluster.hash,
        hosts=tuple((names[host], first, end) for host, first, end in found.hosts),
        ranks=ranks,
        num_cluster_ranks=cluster.num_ranks,
        on_all_seconds=on_all if math.isfinite(on_all) else 0.0,
    )


def warn_if_noisy(problem: SearchProblem) -> None:
    """Warn if the times of the profile vary by more than :data:`MAX_SPREAD`, as on a machine with other jobs."""
    spread, key, most = problem.spread()
    if spread > MAX_SPREAD:
        warnings.warn(
            f"the profile of {problem.graph.name!r} is noisy: the middle half of the measured times of its layers "
            f"spreads over {spread:.0%} of their median, and that of layer class {key!r} over {most:.0%}; above "
            f"{MAX_SPREAD:.0%}, the choice may be wrong: measure again while no other jobs run, or use tune()",
            stacklevel=3,
        )


def choose_training_plan(problem: SearchProblem, method: str | Method = "auto") -> TrainingPlan:
    """The fastest training plan of a problem that fits the memory. Arguments and errors: :func:`search`."""
    return make_training_plan(*_choose(problem, method), step_bound_of_any(problem))


def _choose(problem: SearchProblem, method: str | Method = "auto") -> _Choice:
    if problem.compression is None:
        found = _decide(problem, method)
        return problem, found[0], found[1:]
    return _choose_codecs(problem, problem.compression, method)


def _choose_codecs(problem: SearchProblem, policy: Policy, method: str | Method) -> _Choice:
    """The fastest candidate with a subset of the codecs of a policy, or with none if they gain too little.

    Two searches find stages: one without codecs, and one that uses a codec wherever it is faster. An engine compresses
    the traffic of all stages in the same way. So each subset of the policy is then simulated on the stages of both.
    """
    raw = problem.changed(compression=None)
    plain = _decide(raw, method)
    encoded = _decide(problem, method)
    best, best_problem = plain[0], raw
    for found in (plain[0], encoded[0]):
        for part in parts_of_policy(policy, found.candidate.stages, problem.graph):
            fixed = problem.changed(compression=part, compress_all=True)
            each = evaluate(fixed, found.candidate)
            if each is not None and not each.short_bytes and each.seconds < best.seconds:
                best, best_problem = each, fixed
    if best.seconds >= (1 - MIN_GAIN) * plain[0].seconds:
        return raw, plain[0], plain[1:]
    thorough = evaluate(best_problem, best.candidate, thorough=True)
    if thorough is not None and not thorough.short_bytes and thorough.seconds < best.seconds:
        best = thorough
    return best_problem, best, [plain[0], *encoded[1:]]


def _decide(problem: SearchProblem, method: str | Method) -> list[Evaluation]:
    """Evaluated candidates of a method, the fastest one that fits the memory first."""
    found = decide(problem, _find(method)(problem), moves=method == "auto")
    best = found[0]
    if best.short_bytes:
        raise ArgumentError(why_nothing_fits(problem))
    return found


def make_problem(
    graph: LayerGraph,
    cluster: Cluster,
    profile: LayerProfile | Mapping[str, LayerProfile],
    num_samples: int,
    keep: Mapping[str, Any],
    states: StateBytes,
    rules: ChoiceRules,
) -> SearchProblem:
    """The problem of a search.

    Raises:
        ArgumentError: ``keep`` names an unknown part, or the parts do not fit.
    """
    for what, value, kind in (("keep", keep, Mapping), ("states", states, StateBytes), ("rules", rules, ChoiceRules)):
        if not isinstance(value, kind):
            raise ArgumentError(f"{what} must be a {kind.__name__}, not {value!r:.100}")
    unknown = [name for name in keep if name not in KEPT]
    if unknown:
        raise ArgumentError(f"keep names {unknown[0]!r}; it can fix {', '.join(KEPT)}")
    if "zero" in keep:
        rules = replace(rules, zero=(keep["zero"],))
    if "recompute" in keep:
        if keep["recompute"] not in (False, True):
            raise ArgumentError(f"keep fixes recompute at {keep['recompute']!r}; it must be True or False")
        rules = replace(rules, recompute=(bool(keep["recompute"]),))
    if keep.get("idle", True) not in (False, True):
        raise ArgumentError(f"keep fixes idle at {keep['idle']!r}; it must be True or False")
    if "tp" in keep:
        tp = keep["tp"]
        if type(tp) is not int or tp < 1 or tp & (tp - 1):
            raise ArgumentError(f"keep fixes tp at {tp!r}; it must be a power of two")
        rules = replace(rules, min_tp=tp, max_tp=tp)
    if "grid" in keep:
        shape = _kept_grid(keep["grid"], keep, cluster)
        rules = replace(rules, grids=bool(shape), only_grid=shape)
    counts = (keep["num_microbatches"],) if "num_microbatches" in keep else ()
    return SearchProblem(graph, cluster, profile, num_samples, states, rules, counts)


def _kept_grid(grid: Any, keep: Mapping[str, Any], cluster: Cluster) -> GridShape:
    """The shape of the grid that ``keep`` fixes; empty: no grids."""
    if grid is None:
        return ()
    if not isinstance(grid, Sequence) or isinstance(grid, str):
        raise ArgumentError(f"keep fixes grid at {grid!r}; it must be (rows, cols, depth), or None for no grids")
    choice = Choice(grid=tuple(grid), tp=math.prod(grid[:2])) if grid else Choice()
    if keep.get("tp", choice.tp) != choice.tp:
        raise ArgumentError(
            f"keep fixes tp at {keep['tp']}, and {choice}, which divides each layer over rows * cols = {choice.tp} "
            "ranks; keep only one of them"
        )
    if keep.get("zero", 0) and choice.grid and choice.grid[2] == 1:
        raise ArgumentError(
            f"keep fixes zero at {keep['zero']}, and {choice}, whose depth of 1 has no replicas to share "
            "states; keep only one of them, or a grid with a depth of at least 2"
        )
    size = math.prod(choice.grid)
    if size < 2 or size not in cluster.mesh_sizes:
        raise ArgumentError(
            f"keep fixes {choice}, which has {size} ranks; a stage on a grid has one of "
            f"{', '.join(str(mesh_size) for mesh_size in cluster.mesh_sizes if mesh_size > 1)} ranks on this cluster"
        )
    return choice.grid


def _find(method: str | Method) -> Method:
    if callable(method):
        return method
    if isinstance(method, str) and method == "auto":
        return auto
    if not isinstance(method, str) or method not in METHODS:
        raise ArgumentError(f"no search method {brief(method)}; choose auto, {', '.join(METHODS)}, or pass a function")
    return METHODS[method]


def make_training_plan(
    problem: SearchProblem,
    best: Evaluation,
    others: Sequence[Evaluation],
    bound_seconds: float | None = None,
    *,
    is_of_parts: bool = False,
) -> TrainingPlan:
    """The training plan of an evaluation, with what it is compared to.

    Args:
        bound_seconds: no training plan is faster that uses all devices, or, with ``is_of_parts``, any part of them;
            default: the bound of all devices.
    """
    bound = step_bound_of_any(problem) if bound_seconds is None else bound_seconds
    candidate, count = best.candidate, best.candidate.num_microbatches
    edges = _edge_reports(problem, candidate)
    wider = problem.changed(cluster=problem.cluster.with_faster_links(1.1))
    costs, exchanges = wider.costs(candidate.stages, count)
    wider_seconds = evaluate_schedule(
        candidate, wider.pipeline(candidate.stages, count), costs, best.schedule, exchanges
    ).seconds
    layers = problem.graph.layers
    # several methods may find the same plan
    different = [other for other in others if (other.candidate.text, other.seconds) != (candidate.text, best.seconds)]
    ties = tuple(
        TieReport(
            tuple(layers[index].name for index in exchange.layers),
            exchange.stages,
            exchange.nbytes,
            exchange.seconds,
            exchange.codec,
        )
        for exchange in best.exchanges
    )
    return TrainingPlan(
        candidate.method,
        candidate.stages,
        tuple(tuple(layers[index].name for index in range(s.first_layer, s.end_layer)) for s in candidate.stages),
        count,
        problem.num_samples,
        format_schedule(best.schedule),
        best.seconds,
        min(bound, best.seconds),
        problem.is_guess,
        problem.graph.hash,
        problem.profile_hash,
        problem.cluster.hash,
        _stage_reports(best),
        edges,
        tuple(_alternative(item) for item in different[:NUM_ALTERNATIVES]),
        wider_seconds,
        problem.cluster.hosts,
        _grid_refusals(layers) if problem.rules.grids else (),
        _used_policy(problem, candidate.stages, edges),
        ties,
        is_bound_of_parts=is_of_parts,
    )


def _stage_reports(best: Evaluation) -> tuple[StageReport, ...]:
    """Where the time and the memory of each stage go."""
    busy = [best.timeline.busy_seconds(number) for number in range(len(best.costs))]
    exposed = [best.timeline.exposed_seconds(number) for number in range(len(best.costs))]
    return tuple(
        StageReport(
            cost.compute_seconds,
            cost.sum_seconds,
            cost.gather_seconds,
            cost.sync_seconds,
            busy[number],
            exposed[number],
            depth,
            states,
            depth * cost.activation_bytes,
            cost.working_bytes,
            buffers,
            cost.limit_bytes,
            cost.ending_bytes if cost.tie_bytes else 0.0,
        )
        for number, (cost, depth) in enumerate(zip(best.costs, best.schedule.in_flight, strict=True))
        for states, buffers in [cost.peak_parts(depth)]
    )


def _edge_reports(problem: SearchProblem, candidate: Candidate) -> tuple[EdgeReport, ...]:
    """The bytes and the seconds of each edge between stages."""
    edges = []
    for edge in problem.edges(candidate.stages, candidate.num_microbatches):
        port, seconds = max(edge.forward_loads, key=lambda load: (load[1], load[0]), default=("", 0.0))
        nbytes = sum(math.prod(spec.shape) * ITEMSIZE[spec.dtype] for spec in edge.tensors)
        found = (edge.src, edge.dst, nbytes, edge.forward_seconds, edge.backward_seconds, port, seconds)
        edges.append(EdgeReport(*found, edge.forward_codec, edge.backward_codec))
    return tuple(edges)


def _grid_refusals(layers: Sequence[Layer]) -> tuple[tuple[str, str], ...]:
    """The first layer of each class that cannot be on a grid, and why, in the order of the model.

    The reasons of two layers of a class differ only in the paths of their modules.
    """
    counts = Counter(layer.key for layer in layers if layer.grid_refusal)
    shown: set[str] = set()
    found = []
    for layer in layers:
        if layer.grid_refusal and not {layer.key, layer.grid_refusal} & shown:
            shown |= {layer.key, layer.grid_refusal}
            found.append((layer.name, layer.grid_refusal + _same_for(counts[layer.key] - 1)))
    return tuple(found)


def _same_for(others: int) -> str:
    return f"; the same holds for {count_of(others, 'other layer')} of its class" if others else ""


def _used_policy(problem: SearchProblem, stages: Sequence[StagePlan], edges: Sequence[EdgeReport]) -> str:
    """The text of the policy of a problem with those of its codecs that stages and edges use.

    If all edges use the same codecs, ``force_pp`` is set, so that the engine does not choose again by its own topology.
    """
    policy = problem.compression
    if policy is None:
        return ""
    ways = (any(edge.forward_codec for edge in edges), any(edge.backward_codec for edge in edges))
    pair = tuple(codec if is_used else None for codec, is_used in zip(policy.pair("pp"), ways, strict=True))
    most = next(parts_of_policy(policy, stages, problem.graph))
    used = with_codecs(most, most.dp, pair if any(pair) else None, most.tp, most.zero)
    forward = {edge.forward_codec for edge in edges}
    backward = {edge.backward_codec for edge in edges if edge.backward_seconds}
    if any(pair) and len(forward) == 1 and len(backward) <= 1:
        used = replace(used, force_pp=True)
    return str(used) if used.dimensions else ""


def _alternative(found: Evaluation) -> Alternative:
    return Alternative(
        found.candidate.method,
        found.candidate.text,
        found.seconds,
        *found.seconds_by_kind(),
        short_bytes=found.short_bytes,
    )
