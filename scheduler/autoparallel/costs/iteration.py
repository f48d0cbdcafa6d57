"""Simulate whole training steps of a candidate under several schedules, and keep the best schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from reshard.errors import ScheduleError

from ...ir.communication import add_transfers, computations
from ...ir.schedule import Schedule
from ...pipeline import Pipeline
from ...schedules.known_schedules import KNOWN_SCHEDULES, known_orders
from ...schedules.orders import OrderModel, RankOrders, order_of_warmups
from ...schedules.schedule_search import auto_schedule, in_flight
from ...simulation.replay import PipelineTimeline, simulate_schedule
from .device_peaks import DevicePeak, peak_of_stage, peak_of_stages
from .layer_costs import StageCost
from .search_problem import SCALED_LIMIT, Candidate, SearchProblem
from .step_bounds import may_be_faster
from .tied_costs import TiedSum

#: Largest number of actions of a schedule for which ``auto_schedule`` is tried.
MAX_ACTIONS = 1500
#: Names of two variants of 1F1B: with depths that hide the transfers, and with one more microbatch in each stage.
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
        peaks: ``(pp ranks,)`` memory of the fullest device of each pp rank.
        seconds: time of a step, until the last stage has summed its gradients.
    """

    candidate: Candidate
    schedule_name: str
    order: RankOrders
    in_flight: tuple[int, ...]
    pipeline: Pipeline
    costs: tuple[StageCost, ...]
    exchanges: tuple[TiedSum, ...]
    ends: tuple[float, ...]
    peaks: tuple[DevicePeak, ...]
    seconds: float

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """``(stages,)`` the pp rank of each stage."""
        return self.candidate.pp_ranks

    @property
    def short_bytes(self) -> float:
        """Bytes that the device with the least room lacks at its peak; 0 if every stage fits."""
        return _short_bytes(self.peaks)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, with transfers."""
        model = OrderModel(self.pipeline, self.pp_ranks, self.candidate.num_microbatches)
        rank_actions = model.actions(self.order)
        return add_transfers(self.schedule_name, rank_actions, self.pipeline, self.pp_ranks, model.num)

    @cached_property
    def timeline(self) -> PipelineTimeline:
        """Simulated times of one step, without gradient sums."""
        return simulate_schedule(self.schedule, self.pipeline)

    @property
    def rank_key(self) -> tuple[float, tuple[int, int, int], float, str]:
        """Sort key: seconds, then :attr:`Candidate.complexity`, then peak bytes of a device, then the text."""
        peak = max(peak.memory_bytes for peak in self.peaks)
        return (float(f"{self.seconds:.9g}"), self.candidate.complexity, round(peak), self.candidate.text)

    @cached_property
    def sum_seconds(self) -> tuple[float, ...]:
        """``(stages,)`` seconds in which each stage sums gradients over replicas after the last computation of its pp
        rank.
        """
        return tuple(exposed_sums(self.ends, self.costs, self.pp_ranks))

    def seconds_by_kind(self) -> tuple[float, float, float, float]:
        """Where the time of the pp rank that ends last goes: ``(compute, exposed transfers, other idle, gradient
        sum)``.

        All in seconds. A stage that waits for others before a sum over stages is idle.
        """
        done = _end_seconds(self.ends, self.costs, self.exchanges, self.pp_ranks)
        pp_rank = max(range(len(done)), key=lambda r: (done[r], -r))
        busy, exposed = self.timeline.busy_seconds(pp_rank), self.timeline.exposed_seconds(pp_rank)
        own = [stage for stage, number in enumerate(self.pp_ranks) if number == pp_rank]
        summed = sum(self.sum_seconds[stage] + self.costs[stage].tie_seconds for stage in own)
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
    if below_seconds < math.inf and not may_be_faster(problem, candidate, below_seconds):
        return None
    costs, exchanges = problem.costs(stages, count)
    pipeline = problem.pipeline(stages, count)
    max_short = 0.0 if below_seconds < math.inf else math.inf
    best: Evaluation | None = None
    has_room = True
    model = OrderModel(pipeline, candidate.pp_ranks, count)
    for trial in _trials(model, costs, problem.can_split(stages, count), thorough, only):
        short = _short_bytes(trial.peaks)
        if short > max_short:
            has_room = False
            continue
        order = trial.make_order()
        ends = tuple(model.end_seconds(order))
        if not ends:  # a deadlock
            continue
        seconds = max(_end_seconds(ends, costs, exchanges, candidate.pp_ranks))
        evaluation = Evaluation(
            candidate, trial.name, order, trial.in_flight, pipeline, costs, exchanges, ends, trial.peaks, seconds
        )
        if best is None or _preference(evaluation) < _preference(best):
            best, max_short = evaluation, short
    if best is None and only is not None and not has_room:  # another schedule may fit the memory
        return evaluate(problem, candidate, below_seconds=below_seconds)
    return None if best is None or best.seconds >= below_seconds else best


def step_seconds(
    timeline: PipelineTimeline,
    costs: Sequence[StageCost],
    exchanges: Sequence[TiedSum] = (),
    pp_ranks: Sequence[int] | None = None,
) -> float:
    """Seconds of a step whose computations are simulated, until the last stage has summed its gradients.

    Args:
        pp_ranks: the pp rank of each stage; default: one stage on each.
    """
    pp_ranks = range(len(costs)) if pp_ranks is None else pp_ranks
    ends = [0.0] * len(costs)
    for span in timeline.spans:
        if not span.action.kind.is_transfer:
            ends[span.action.stage] = max(ends[span.action.stage], span.end)
    return max(_end_seconds(ends, costs, exchanges, pp_ranks))


def _end_seconds(
    ends: Sequence[float], costs: Sequence[StageCost], exchanges: Sequence[TiedSum], pp_ranks: Sequence[int]
) -> list[float]:
    """The end of the gradient sums of each pp rank: first those over replicas, then those over stages.

    The sums over stages wait for each other.

    Args:
        ends: end of the last computation of each stage.
        pp_ranks: pp ranks of each stage.
    """
    done = [0.0] * (max(pp_ranks) + 1)
    for pp_rank, end in zip(pp_ranks, ends, strict=True):
        done[pp_rank] = max(done[pp_rank], end)
    for pp_rank, seconds in zip(pp_ranks, exposed_sums(ends, costs, pp_ranks), strict=True):
        done[pp_rank] += seconds
    for exchange in exchanges:
        having = {pp_ranks[stage] for stage in exchange.stages}
        end = max(done[pp_rank] for pp_rank in having) + exchange.seconds
        for pp_rank in having:
            done[pp_rank] = end
    return done


def exposed_sums(ends: Sequence[float], costs: Sequence[StageCost], pp_ranks: Sequence[int]) -> list[float]:
    """Seconds in which each stage sums gradients over replicas after the last computation of its pp rank.

    An early sum starts when its stage ends and the pp rank has made its earlier sums. It takes as long as without the
    computations during it. All other sums follow after the last computation.

    Args:
        ends: end of the last computation of each stage.
        pp_ranks: of each stage.
    """
    exposed = [cost.sync_seconds for cost in costs]
    started: dict[int, tuple[float, list[int]]] = {}  # of each pp rank: the last end so far, and the stages until then
    for stage in sorted(range(len(costs)), key=lambda stage: (ends[stage], -stage)):
        before, stages = started.get(pp_ranks[stage], (0.0, []))
        free = ends[stage] - before
        for other in stages:
            hidden = min(free, exposed[other] - costs[other].late_sync_seconds)
            exposed[other] -= hidden
            free -= hidden
        started[pp_ranks[stage]] = ends[stage], [*stages, stage]
    return exposed


def _short_bytes(peaks: Sequence[DevicePeak]) -> float:
    """Bytes that the device with the least room lacks at its peak; 0 if all fit."""
    return max(0.0, *(peak.memory_bytes - peak.limit_bytes for peak in peaks))


def _preference(evaluation: Evaluation) -> tuple[float, float, int]:
    """Sort key of the schedules of one candidate: missing bytes, then seconds, then microbatches in flight."""
    return (evaluation.short_bytes, float(f"{evaluation.seconds:.9g}"), sum(evaluation.in_flight))


@dataclass(frozen=True)
class _Trial:
    """A schedule to try.

    Attributes:
        name, in_flight: its name, and the microbatches in flight of each stage.
        peaks: memory of the fullest device of each pp rank.
        make_order: makes its order.
    """

    name: str
    in_flight: tuple[int, ...]
    peaks: tuple[DevicePeak, ...]
    make_order: Callable[[], RankOrders]


def _trials(
    model: OrderModel, costs: Sequence[StageCost], can_split: bool, thorough: bool, only: str | None
) -> Iterator[_Trial]:
    """Schedules to try: known ones, and ``auto_schedule`` if ``thorough``.

    ``only``: make just the schedule of this name; make all if no schedule of the placement has this name.
    """
    num, count, pp_ranks = len(costs), model.num, model.pp_rank_of_stage
    if len(set(pp_ranks)) < num:
        yield from _several_stage_trials(model, costs, can_split, only)
    else:
        for name, depths, make_order in _one_stage_trials(model, costs, can_split, only):
            yield _Trial(name, depths, tuple(map(peak_of_stage, costs, depths)), make_order)
    if num > 1 and thorough and 3 * count * num <= MAX_ACTIONS:
        auto = partial(auto_schedule, pp_rank_of_stage=pp_ranks, can_split=can_split)
        try:
            schedule = auto(model.pipeline, count, activation_limit_bytes=SCALED_LIMIT)
        except ScheduleError:
            return
        yield _trial_of(schedule.name, model.numbers(computations(schedule)), costs, pp_ranks)


def _trial_of(name: str, order: RankOrders, costs: Sequence[StageCost], pp_ranks: Sequence[int]) -> _Trial:
    """A schedule whose order is known."""
    depths = in_flight(order, len(costs))
    peaks = []
    for pp_rank, codes in enumerate(order):
        own = [stage for stage, number in enumerate(pp_ranks) if number == pp_rank]
        is_one = len(own) == 1
        peaks.append(peak_of_stage(costs[own[0]], depths[own[0]]) if is_one else peak_of_stages(costs, own, codes))
    return _Trial(name, depths, tuple(peaks), lambda: order)


def _several_stage_trials(
    model: OrderModel, costs: Sequence[StageCost], can_split: bool, only: str | None
) -> Iterator[_Trial]:
    """The known schedules of a placement with several stages on a pp rank."""
    known = dict(known_orders(model.pp_rank_of_stage, model.num, can_split=can_split))
    for name, rank_actions in known.items():
        if only in (None, name) or only not in known:
            yield _trial_of(name, model.numbers(rank_actions), costs, model.pp_rank_of_stage)


def _one_stage_trials(
    model: OrderModel, costs: Sequence[StageCost], can_split: bool, only: str | None
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], RankOrders]]]:
    """The known schedules of one stage on each pp rank that have a fixed warm-up, and 1F1B with depths that hide the
    transfers.

    Each has its name, its microbatches in flight of each stage, and a function that makes its order.
    ``overlapping_1f1b`` has just these depths, and ``overlapping_1f1b_plus_1`` one microbatch more in each stage.
    """
    num, count = len(costs), model.num
    known = {  # on one pp rank, all are 1F1B
        schedule.name: (schedule.warmups(num), schedule.deferred(num) if schedule.deferred else None)
        for schedule in KNOWN_SCHEDULES
        if schedule.warmups and (can_split or not schedule.splits) and (num > 1 or schedule.name == "1f1b")
    }
    if num == 1 or (only not in OVERLAPPING and only not in known):
        only = None
    seen = set()
    for name, (warmups, deferred) in known.items():
        if only is not None and name != only:
            continue
        held = tuple(min(sum(depths), count) for depths in zip(warmups, deferred or [0] * num, strict=True))
        yield name, held, partial(order_of_warmups, warmups, count, deferred)
        if deferred is None:
            seen.add(held)
    if num == 1:
        return
    for more, name in enumerate(OVERLAPPING):
        if only is not None and name != only:
            continue
        depths = _depths(model.pipeline, costs, count, more)
        if depths is not None and tuple(depths) not in seen:
            seen.add(tuple(depths))
            yield name, tuple(depths), partial(order_of_warmups, depths, count)


def _depths(pipeline: Pipeline, costs: Sequence[StageCost], count: int, more: int) -> list[int] | None:
    """Microbatches in flight of each stage: round trip over bottleneck time (Little's law), limited by memory.

    The bottleneck time is the time per microbatch of the slowest stage or edge.

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
