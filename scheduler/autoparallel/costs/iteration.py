"""Simulate whole training steps of a candidate under several schedules, and keep the best schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from reshard.errors import ScheduleError

from ...graph import Pipeline
from ...ir.schedule import Schedule
from ...schedules.auto import auto_schedule
from ...schedules.classic import eager_1f1b, from_warmups, one_f_one_b, zb_h1
from ...simulation.replay import PipelineTimeline, simulate_within
from .layer_costs import StageCost
from .problem import SCALED_LIMIT, Candidate, SearchProblem
from .tie_prices import TieExchange

#: Largest number of actions of a schedule for which ``auto_schedule`` is tried.
MAX_ACTIONS = 1500
#: Relative tolerance of lower bounds, because the simulator adds numbers in another order.
BOUND_TOLERANCE = 1e-8
#: Names of 1F1B with depths that hide the transfers, and with one microbatch more in each stage.
OVERLAPPING = ("overlapping_1f1b", "overlapping_1f1b_plus_1")


@dataclass(frozen=True)
class Evaluation:
    """A candidate under one schedule, as simulated.

    Attributes:
        candidate, schedule: what is evaluated.
        pipeline: stages and edges of the candidate, with their costs.
        timeline: simulated times of one step, without gradient sums.
        costs: ``(stages,)`` costs of each stage.
        exchanges: sums over stages of the gradients of parameters that they share.
        seconds: time of a step, until the last stage has summed its gradients.
        short_bytes: bytes that the device with the least room lacks at its peak; 0 if every stage fits.
    """

    candidate: Candidate
    schedule: Schedule
    pipeline: Pipeline
    timeline: PipelineTimeline
    costs: tuple[StageCost, ...]
    exchanges: tuple[TieExchange, ...]
    seconds: float
    short_bytes: float

    @property
    def rank_key(self) -> tuple[float, tuple[int, int, int], float, str]:
        """Sort key: seconds, then :attr:`Candidate.complexity`, then peak bytes of a device, then the text."""
        peak = max(cost.peak_bytes(depth) for cost, depth in zip(self.costs, self.schedule.in_flight, strict=True))
        return (float(f"{self.seconds:.9g}"), self.candidate.complexity, round(peak), self.candidate.text)

    def seconds_by_kind(self) -> tuple[float, float, float, float]:
        """Where the time of the pp rank that ends last goes: ``(compute, exposed transfers, other idle, gradient
        sum)``.

        All in seconds. A stage that waits for others before a sum over stages is idle.
        """
        done = _end_seconds(self.timeline, self.costs, self.exchanges)
        pp_rank = max(range(len(done)), key=lambda r: (done[r], -r))
        busy, exposed = self.timeline.busy_seconds(pp_rank), self.timeline.exposed_seconds(pp_rank)
        summed = self.costs[pp_rank].ending_seconds
        idle = done[pp_rank] - busy - exposed - summed
        if idle < 1e-9 * done[pp_rank]:  # a rounding error
            idle = 0.0
        return busy, exposed, idle, summed


def evaluate(
    problem: SearchProblem,
    candidate: Candidate,
    *,
    thorough: bool = False,
    below_seconds: float = math.inf,
    only: str | None = None,
) -> Evaluation | None:
    """Simulate a candidate under each known schedule, and return the best.

    The best is the fastest schedule that fits the memory. If none fits, it is the one that exceeds the memory least.
    A simulation stops as soon as its schedule cannot be the best.

    Args:
        problem: the search.
        candidate: stages and number of microbatches.
        thorough: try :func:`reshard.scheduler.auto_schedule` too, which takes seconds.
        below_seconds: consider only schedules that fit the memory and are faster than this.
        only: name of the schedule to simulate if it fits the memory; default: all.

    Returns:
        The evaluation; None if there is no schedule, or none of interest.
    """
    stages, count = candidate.stages, candidate.num_microbatches
    pipeline = problem.pipeline(stages, count)
    costs, exchanges = problem.costs(stages, count)
    if below_seconds < math.inf:
        bound = _bound(costs, count, pipeline, is_sequential=problem.graph.is_sequential)
        if bound * (1 - BOUND_TOLERANCE) >= below_seconds:
            return None
    max_short = 0.0 if below_seconds < math.inf else math.inf
    best: Evaluation | None = None
    has_room = True
    for schedule in _schedules(pipeline, costs, count, problem.can_split(stages, count), thorough, only):
        short = _short_bytes(costs, schedule)
        if short > max_short:
            has_room = False
            continue
        limit = below_seconds if best is None or short < best.short_bytes else best.seconds
        found = _evaluate_within(limit, candidate, pipeline, costs, exchanges, schedule)
        if found is not None and (best is None or _preference(found) < _preference(best)):
            best, max_short = found, short
    if best is None and only is not None and not has_room:  # another schedule may fit the memory
        return evaluate(problem, candidate, below_seconds=below_seconds)
    return None if best is None or best.seconds >= below_seconds else best


def evaluate_schedule(
    candidate: Candidate,
    pipeline: Pipeline,
    costs: tuple[StageCost, ...],
    schedule: Schedule,
    exchanges: tuple[TieExchange, ...] = (),
) -> Evaluation:
    """Simulate a candidate under one schedule."""
    found = _evaluate_within(math.inf, candidate, pipeline, costs, exchanges, schedule)
    assert found is not None
    return found


def _evaluate_within(
    limit_seconds: float,
    candidate: Candidate,
    pipeline: Pipeline,
    costs: tuple[StageCost, ...],
    exchanges: tuple[TieExchange, ...],
    schedule: Schedule,
) -> Evaluation | None:
    """Simulate a candidate under one schedule. None if it is found to take longer than a limit."""
    timeline = simulate_within(schedule, pipeline, limit_seconds, [cost.ending_seconds for cost in costs])
    if timeline is None:
        return None
    seconds = max(_end_seconds(timeline, costs, exchanges))
    return Evaluation(candidate, schedule, pipeline, timeline, costs, exchanges, seconds, _short_bytes(costs, schedule))


def _end_seconds(
    timeline: PipelineTimeline, costs: Sequence[StageCost], exchanges: Sequence[TieExchange]
) -> list[float]:
    """When each stage is done with its sums: those over replicas, then those over stages, which wait for each other."""
    done = [end + cost.sync_seconds for end, cost in zip(_pp_rank_ends(timeline, len(costs)), costs, strict=True)]
    for exchange in exchanges:
        end = max(done[stage] for stage in exchange.stages) + exchange.seconds
        for stage in exchange.stages:
            done[stage] = end
    return done


def _short_bytes(costs: Sequence[StageCost], schedule: Schedule) -> float:
    """Bytes that the stage with the least room lacks under a schedule; 0 if all fit."""
    depths = schedule.in_flight
    return max(0.0, *(cost.peak_bytes(depth) - cost.limit_bytes for cost, depth in zip(costs, depths, strict=True)))


def step_bound(problem: SearchProblem, candidate: Candidate) -> float:
    """A lower bound, in seconds, on the step time of a candidate under any schedule.

    Each stage waits for one forward of every stage before it, computes all microbatches, and then sums its gradients.
    """
    costs, _ = problem.costs(candidate.stages, candidate.num_microbatches)
    return _bound(costs, candidate.num_microbatches, None, is_sequential=problem.graph.is_sequential)


def _bound(costs: Sequence[StageCost], count: int, pipeline: Pipeline | None, *, is_sequential: bool) -> float:
    """A lower bound, in seconds, on a step under any schedule; tighter with the edges of a pipeline.

    Before a stage computes its microbatches, each stage before it computes a forward. After it has computed them, it
    sums its gradients, and each stage before it computes a backward without its weight gradients. The same holds for
    the transfers of an edge.
    """
    there, back, best = 0.0, 0.0, 0.0
    for number, cost in enumerate(costs):
        worked = count * cost.seconds
        best = max(best, there + worked + cost.ending_seconds, there + back + worked - count * cost.weight_grad_seconds)
        if is_sequential:
            there += cost.forward_seconds
            back += cost.backward_seconds - cost.weight_grad_seconds
        if is_sequential and pipeline is not None and number + 1 < len(costs):
            edge = pipeline.edge_between[number, number + 1]
            best = max(best, there + back + count * max(edge.forward_seconds, edge.backward_seconds))
            there, back = there + edge.forward_seconds, back + edge.backward_seconds
    return best


def _preference(found: Evaluation) -> tuple[float, float, int]:
    """Sort key of the schedules of one candidate: missing bytes, then seconds, then microbatches in flight."""
    return (found.short_bytes, float(f"{found.seconds:.9g}"), sum(found.schedule.in_flight))


def _pp_rank_ends(timeline: PipelineTimeline, num_pp_ranks: int) -> list[float]:
    ends = [0.0] * num_pp_ranks
    for span in timeline.spans:
        ends[span.pp_rank] = max(ends[span.pp_rank], span.end)
    return ends


def _schedules(
    pipeline: Pipeline, costs: Sequence[StageCost], count: int, can_split: bool, thorough: bool, only: str | None
) -> Iterable[Schedule]:
    """Schedules to try: the classic ones, 1F1B with depths that hide the transfers, and ``auto_schedule``.

    ``overlapping_1f1b`` has just these depths, and ``overlapping_1f1b_plus_1`` one microbatch more in each stage.
    ``only``: make just the schedule of this name; make all if no schedule of several stages has this name.
    """
    made: dict[str, Callable[[Pipeline, int], Schedule]] = {"1f1b": one_f_one_b}
    if len(costs) > 1:
        made |= {"eager-1f1b": eager_1f1b, **({"zero-bubble": zb_h1} if can_split else {})}
    if len(costs) == 1 or (only not in OVERLAPPING and only not in made):
        only = None
    seen = set()
    for name, build in made.items():
        if only is not None and name != only:
            continue
        schedule = build(pipeline, count)
        seen.add(schedule.in_flight)
        yield schedule
    if len(costs) == 1:
        return
    for more, name in enumerate(OVERLAPPING):
        if only is not None and name != only:
            continue
        depths = _depths(pipeline, costs, count, more)
        if depths is not None:
            schedule = from_warmups(name, pipeline, count, depths)
            if schedule.in_flight not in seen:
                seen.add(schedule.in_flight)
                yield schedule
    if thorough and 3 * count * len(costs) <= MAX_ACTIONS:
        try:
            yield auto_schedule(pipeline, count, memory_limit_bytes=SCALED_LIMIT, can_split=can_split)
        except ScheduleError:
            return


def _depths(pipeline: Pipeline, costs: Sequence[StageCost], count: int, more: int) -> list[int] | None:
    """Microbatches in flight of each stage: round trip over pace (Little's law), limited by memory.

    The pace is the time per microbatch of the slowest stage or edge.

    Args:
        more: number added to each depth before it is limited.

    Returns:
        ``(stages,)`` depths; None if a stage has no memory for one microbatch.
    """
    pace = max(cost.seconds for cost in costs)
    for edge in pipeline.edges:
        pace = max(pace, edge.forward_seconds, edge.backward_seconds)
    trips = [0.0] * len(costs)
    for stage in reversed(range(len(costs))):
        beyond = max(
            (
                trips[other] + edge.forward_seconds + edge.backward_seconds
                for other in pipeline.outputs[stage]
                for edge in [pipeline.edge_between[stage, other]]
            ),
            default=0.0,
        )
        trips[stage] = beyond + costs[stage].seconds
    depths = []
    for stage, cost in enumerate(costs):
        depth = min(count, -int(-trips[stage] // pace) + more if pace else 1, cost.max_in_flight)
        depths.append(depth)
    for stage in range(1, len(depths)):  # a stage must not have more microbatches in flight than a stage before it
        depths[stage] = min(depths[stage], *(depths[other] for other in pipeline.inputs[stage]), depths[stage - 1])
    return depths if min(depths) >= 1 else None
