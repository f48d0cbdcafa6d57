"""Simulate whole training steps of a candidate under several schedules, and keep the best schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from reshard.errors import ScheduleError

from ...graph import Pipeline
from ...ir.communication import add_transfers, computations
from ...ir.schedule import Schedule
from ...schedules.auto import auto_schedule
from ...schedules.classic import eager_warmups
from ...schedules.orders import Order, OrderModel, order_of_warmups
from ...simulation.replay import PipelineTimeline, simulate_schedule
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
        candidate: what is evaluated.
        schedule_name, order, in_flight: name of the schedule, its computations by number, and the maximum number of
            microbatches in flight of each stage.
        pipeline: stages and edges of the candidate, with their costs.
        costs: ``(stages,)`` costs of each stage.
        exchanges: sums over stages of the gradients of parameters that they share.
        ends: ``(stages,)`` seconds from the start of a step to the end of the last computation of each stage.
        seconds: time of a step, until the last stage has summed its gradients.
        short_bytes: bytes that the device with the least room lacks at its peak; 0 if every stage fits.
    """

    candidate: Candidate
    schedule_name: str
    order: Order
    in_flight: tuple[int, ...]
    pipeline: Pipeline
    costs: tuple[StageCost, ...]
    exchanges: tuple[TieExchange, ...]
    ends: tuple[float, ...]
    seconds: float
    short_bytes: float

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, with transfers."""
        model = OrderModel(self.pipeline, range(len(self.costs)), self.candidate.num_microbatches)
        rank_actions = model.actions(self.order)
        return add_transfers(self.schedule_name, rank_actions, self.pipeline, range(len(self.costs)), model.num)

    @cached_property
    def timeline(self) -> PipelineTimeline:
        """Simulated times of one step, without gradient sums."""
        return simulate_schedule(self.schedule, self.pipeline)

    @property
    def rank_key(self) -> tuple[float, tuple[int, int, int], float, str]:
        """Sort key: seconds, then :attr:`Candidate.complexity`, then peak bytes of a device, then the text."""
        peak = max(cost.peak_bytes(depth) for cost, depth in zip(self.costs, self.in_flight, strict=True))
        return (float(f"{self.seconds:.9g}"), self.candidate.complexity, round(peak), self.candidate.text)

    def seconds_by_kind(self) -> tuple[float, float, float, float]:
        """Where the time of the pp rank that ends last goes: ``(compute, exposed transfers, other idle, gradient
        sum)``.

        All in seconds. A stage that waits for others before a sum over stages is idle.
        """
        done = _end_seconds(self.ends, self.costs, self.exchanges)
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
    model = OrderModel(pipeline, range(len(stages)), count)
    for trial in _trials(model, costs, problem.can_split(stages, count), thorough, only):
        short = _short_bytes(costs, trial.in_flight)
        if short > max_short:
            has_room = False
            continue
        order = trial.make_order()
        ends = tuple(model.end_seconds(order))
        seconds = max(_end_seconds(ends, costs, exchanges))
        evaluation = Evaluation(
            candidate, trial.name, order, trial.in_flight, pipeline, costs, exchanges, ends, seconds, short
        )
        if best is None or _preference(evaluation) < _preference(best):
            best, max_short = evaluation, short
    if best is None and only is not None and not has_room:  # another schedule may fit the memory
        return evaluate(problem, candidate, below_seconds=below_seconds)
    return None if best is None or best.seconds >= below_seconds else best


def step_seconds(
    timeline: PipelineTimeline, costs: Sequence[StageCost], exchanges: Sequence[TieExchange] = ()
) -> float:
    """Seconds of a step whose computations are simulated, until the last stage has summed its gradients."""
    ends = [0.0] * len(costs)
    for span in timeline.spans:
        ends[span.pp_rank] = max(ends[span.pp_rank], span.end)
    return max(_end_seconds(ends, costs, exchanges))


def _end_seconds(ends: Sequence[float], costs: Sequence[StageCost], exchanges: Sequence[TieExchange]) -> list[float]:
    """When each stage is done with its sums: those over replicas, then those over stages, which wait for each other.

    Args:
        ends: end of the last computation of each stage.
    """
    done = [end + cost.sync_seconds for end, cost in zip(ends, costs, strict=True)]
    for exchange in exchanges:
        end = max(done[stage] for stage in exchange.stages) + exchange.seconds
        for stage in exchange.stages:
            done[stage] = end
    return done


def _short_bytes(costs: Sequence[StageCost], in_flight: Sequence[int]) -> float:
    """Bytes that the stage with the least room lacks with some microbatches in flight; 0 if all fit."""
    return max(0.0, *(cost.peak_bytes(depth) - cost.limit_bytes for cost, depth in zip(costs, in_flight, strict=True)))


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


def _preference(evaluation: Evaluation) -> tuple[float, float, int]:
    """Sort key of the schedules of one candidate: missing bytes, then seconds, then microbatches in flight."""
    return (evaluation.short_bytes, float(f"{evaluation.seconds:.9g}"), sum(evaluation.in_flight))


@dataclass(frozen=True)
class _Trial:
    """A schedule to try: its name, the microbatches in flight of each stage, and a function that makes its order."""

    name: str
    in_flight: tuple[int, ...]
    make_order: Callable[[], Order]


def _trials(
    model: OrderModel, costs: Sequence[StageCost], can_split: bool, thorough: bool, only: str | None
) -> Iterator[_Trial]:
    """Schedules to try: the classic ones, 1F1B with depths that hide the transfers, and ``auto_schedule``.

    ``overlapping_1f1b`` has just these depths, and ``overlapping_1f1b_plus_1`` one microbatch more in each stage.
    ``only``: make just the schedule of this name; make all if no schedule of several stages has this name.
    """
    num, count = len(costs), model.num
    known: dict[str, tuple[Sequence[int], Sequence[int] | None]] = {"1f1b": (range(num, 0, -1), None)}
    if num > 1:
        known["eager-1f1b"] = (eager_warmups(num), None)
    if num > 1 and can_split:
        known |= {"zero-bubble": (known["1f1b"][0], range(num)), "zb-h2": (eager_warmups(num), range(0, 2 * num, 2))}
    if num == 1 or (only not in OVERLAPPING and only not in known):
        only = None
    seen = set()
    for name, (warmups, deferred) in known.items():
        if only is not None and name != only:
            continue
        in_flight = tuple(min(sum(depths), count) for depths in zip(warmups, deferred or [0] * num, strict=True))
        yield _Trial(name, in_flight, partial(order_of_warmups, warmups, count, deferred))
        if deferred is None:
            seen.add(in_flight)
    if num == 1:
        return
    for more, name in enumerate(OVERLAPPING):
        if only is not None and name != only:
            continue
        depths = _depths(model.pipeline, costs, count, more)
        if depths is not None and tuple(depths) not in seen:
            seen.add(tuple(depths))
            yield _Trial(name, tuple(depths), partial(order_of_warmups, depths, count))
    if thorough and 3 * count * num <= MAX_ACTIONS:
        try:
            schedule = auto_schedule(model.pipeline, count, memory_limit_bytes=SCALED_LIMIT, can_split=can_split)
        except ScheduleError:
            return
        yield _Trial(schedule.name, schedule.in_flight, partial(model.numbers, computations(schedule)))


def _depths(pipeline: Pipeline, costs: Sequence[StageCost], count: int, more: int) -> list[int] | None:
    """Microbatches in flight of each stage: round trip over pace (Little's law), limited by memory.

    The pace is the time per microbatch of the slowest stage or edge.

    Args:
        more: number added to each depth before it is limited.

    Returns:
        ``(stages,)`` depths; None if a stage has no memory for one microbatch.
    """
    bottleneck_seconds = max(cost.seconds for cost in costs)
    for edge in pipeline.edges:
        bottleneck_seconds = max(bottleneck_seconds, edge.forward_seconds, edge.backward_seconds)
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
        depth = min(
            count, -int(-trips[stage] // bottleneck_seconds) + more if bottleneck_seconds else 1, cost.max_in_flight
        )
        depths.append(depth)
    for stage in range(1, len(depths)):  # a stage must not have more microbatches in flight than a stage before it
        depths[stage] = min(depths[stage], *(depths[other] for other in pipeline.inputs[stage]), depths[stage - 1])
    return depths if min(depths) >= 1 else None
