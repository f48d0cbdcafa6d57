"""A training plan from an evaluated candidate: where time and memory go, and other candidates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from reshard.dtypes import ITEMSIZE
from reshard.formatting import count_of

from ..ir.text import format_schedule
from ..simulation.replay import simulate_schedule
from .costs.codec_costs import parts_of_policy, with_codecs
from .costs.iteration import Evaluation, step_seconds
from .costs.search_problem import Candidate, SearchProblem
from .inputs.layer_graph import Layer
from .inputs.stages import StagePlan
from .methods.bounds import step_bound_of_any
from .result.reports import Alternative, EdgeReport, StageReport, TieReport
from .result.training_plan import TrainingPlan

#: Maximum number of alternatives that a training plan lists.
NUM_ALTERNATIVES = 8


def make_training_plan(
    problem: SearchProblem,
    best: Evaluation,
    others: Sequence[Evaluation],
    bound_seconds: float | None = None,
    *,
    is_of_parts: bool = False,
) -> TrainingPlan:
    """The training plan of an evaluation.

    Args:
        problem: the search.
        best: the evaluation.
        others: evaluations to which it is compared.
        bound_seconds: no training plan on all devices is faster; with ``is_of_parts``, no plan on any part of them.
            Default: the bound of all devices.
        is_of_parts: whether the bound holds for plans on parts of the devices too.
    """
    bound = step_bound_of_any(problem) if bound_seconds is None else bound_seconds
    candidate, count = best.candidate, best.candidate.num_microbatches
    edges = _edge_reports(problem, candidate)
    wider = problem.changed(cluster=problem.cluster.with_faster_links(1.1))
    costs, exchanges = wider.costs(candidate.stages, count)
    wider_timeline = simulate_schedule(best.schedule, wider.pipeline(candidate.stages, count))
    layers = problem.graph.layers
    # several methods may find the same plan
    different = [other for other in others if (other.candidate.text, other.seconds) != (candidate.text, best.seconds)]
    ties = tuple(
        TieReport(
            layer_names=tuple(layers[index].name for index in exchange.layers),
            stages=exchange.stages,
            nbytes=exchange.nbytes,
            seconds=exchange.seconds,
            codec=exchange.codec,
        )
        for exchange in best.exchanges
    )
    return TrainingPlan(
        method=candidate.method,
        stages=candidate.stages,
        layer_names=tuple(tuple(layer.name for layer in layers[s.first_layer : s.end_layer]) for s in candidate.stages),
        num_microbatches=count,
        num_samples=problem.num_samples,
        schedule_text=format_schedule(best.schedule),
        seconds=best.seconds,
        bound_seconds=min(bound, best.seconds),
        is_guess=problem.is_guess,
        graph_hash=problem.graph.hash,
        profile_hash=problem.profile_hash,
        cluster_hash=problem.cluster.hash,
        reports=_stage_reports(best),
        edges=edges,
        alternatives=tuple(_alternative(item) for item in different[:NUM_ALTERNATIVES]),
        wider_links_seconds=step_seconds(wider_timeline, costs, exchanges, candidate.pp_ranks),
        hosts=problem.cluster.hosts,
        grid_refusals=_grid_refusals(layers) if problem.rules.grids else (),
        compression_text=_used_policy(problem, candidate.stages, edges),
        ties=ties,
        is_bound_of_parts=is_of_parts,
    )


def _stage_reports(best: Evaluation) -> tuple[StageReport, ...]:
    """A report on the time and the memory of each stage. Stages on the same ranks have the same wait and memory."""
    busy = [0.0] * len(best.costs)
    for span in best.timeline.spans:
        busy[span.action.stage] += span.end - span.start
    exposed = [best.timeline.exposed_seconds(pp_rank) for pp_rank in range(max(best.pp_ranks) + 1)]
    return tuple(
        StageReport(
            compute_seconds=cost.compute_seconds,
            tp_collective_seconds=cost.tp_collective_seconds,
            all_gather_seconds=cost.all_gather_seconds,
            gradient_sync_seconds=best.sum_seconds[number],
            busy_seconds=busy[number],
            exposed_seconds=exposed[pp_rank],
            in_flight=best.in_flight[number],
            state_bytes=peak.state_bytes,
            activation_bytes=peak.activation_bytes,
            working_bytes=peak.working_bytes,
            buffer_bytes=peak.buffer_bytes,
            limit_bytes=peak.limit_bytes,
            ending_bytes=peak.ending_bytes if cost.tie_bytes else 0.0,
        )
        for number, (cost, pp_rank) in enumerate(zip(best.costs, best.pp_ranks, strict=True))
        for peak in [best.peaks[pp_rank]]
    )


def _edge_reports(problem: SearchProblem, candidate: Candidate) -> tuple[EdgeReport, ...]:
    """The bytes and the seconds of each edge between stages."""
    edges = []
    for edge in problem.edges(candidate.stages, candidate.num_microbatches):
        port, seconds = max(edge.forward_loads, key=lambda load: (load[1], load[0]), default=("", 0.0))
        nbytes = sum(math.prod(spec.shape) * ITEMSIZE[spec.dtype] for spec in edge.tensors)
        fields = (edge.src, edge.dst, nbytes, edge.forward_seconds, edge.backward_seconds, port, seconds)
        edges.append(EdgeReport(*fields, edge.forward_codec, edge.backward_codec))
    return tuple(edges)


def _grid_refusals(layers: Sequence[Layer]) -> tuple[tuple[str, str], ...]:
    """The first layer of each class that cannot be on a grid, and why, in the order of the model.

    The reasons of two layers of a class differ only in the paths of their modules.
    """
    counts = Counter(layer.key for layer in layers if layer.grid_refusal)
    shown: set[str] = set()
    refusals = []
    for layer in layers:
        if layer.grid_refusal and not {layer.key, layer.grid_refusal} & shown:
            shown |= {layer.key, layer.grid_refusal}
            refusals.append((layer.name, layer.grid_refusal + _same_for(counts[layer.key] - 1)))
    return tuple(refusals)


def _same_for(others: int) -> str:
    return f"; the same holds for {count_of(others, 'other layer')} of its class" if others else ""


def _used_policy(problem: SearchProblem, stages: Sequence[StagePlan], edges: Sequence[EdgeReport]) -> str:
    """The text of the policy of a problem, with only the codecs that stages and edges use.

    If all edges use the same codecs, ``force_pp`` is set, so that the engine does not choose again by its own topology.
    """
    policy = problem.compression
    if policy is None:
        return ""
    ways = (any(edge.forward_codec for edge in edges), any(edge.backward_codec for edge in edges))
    pair = tuple(codec if is_used else None for codec, is_used in zip(policy.pair("pp"), ways, strict=True))
    applicable = next(parts_of_policy(policy, stages, problem.graph))
    used = with_codecs(applicable, applicable.dp, pair if any(pair) else None, applicable.tp, applicable.zero)
    forward = {edge.forward_codec for edge in edges}
    backward = {edge.backward_codec for edge in edges if edge.backward_seconds}
    if any(pair) and len(forward) == 1 and len(backward) <= 1:
        used = replace(used, force_pp=True)
    return str(used) if used.dimensions else ""


def _alternative(evaluation: Evaluation) -> Alternative:
    return Alternative(
        evaluation.candidate.method,
        evaluation.candidate.text,
        evaluation.seconds,
        *evaluation.seconds_by_kind(),
        short_bytes=evaluation.short_bytes,
    )
