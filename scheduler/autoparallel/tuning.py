"""The loop of search and measurement: the steps of a training plan correct the profile that it was chosen by.

Source of the idea: Hosoki et al., "An optimization pass for training speed-up and strategy search in 3D parallelism"
(2024): with transfers after their producers, a span of a measured step is computation only, so the profile is true.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.formatting import brief

from ..ir.actions import Kind
from ..simulation.replay import PipelineTimeline
from .costs.grid_costs import compute_share
from .costs.search_problem import SearchProblem
from .inputs.layer_choices import shard_1d
from .inputs.layer_profile import LayerProfile, LayerTimes
from .inputs.stages import StagePlan
from .result.training_plan import TrainingPlan

#: A layer class, and the degree of tensor parallelism of its times; the degree is 1 on a grid.
_Entry = tuple[str, int]
#: Groups of kinds of actions.
_Kinds = Sequence[Sequence[Kind]]
#: Maximum number of rounds of measurement and search.
MAX_ROUNDS = 2
#: Steps of the multiplicative fit of layer times to stage times.
FIT_STEPS = 60
#: Limits on the factor by which a correction changes the profiled time of a layer class.
MIN_FACTOR, MAX_FACTOR = 0.05, 20.0


@dataclass(frozen=True)
class Measurement:
    """Measured steps of a training plan: the seconds of each, with the sums of gradients, and timelines."""

    step_seconds: tuple[float, ...]
    timelines: tuple[PipelineTimeline, ...]

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step_seconds)


@dataclass(frozen=True)
class TuningRound:
    """A training plan and its measurement."""

    training_plan: TrainingPlan
    measurement: Measurement


@dataclass(frozen=True)
class Tuned:
    """The result of the loop.

    Attributes:
        rounds: the measured training plans, in order; the first is the choice with the profile alone.
        training_plan: the training plan with the fewest measured seconds.
        profile: profile with the times of all rounds.
        is_settled: whether the last search chose a training plan that had been measured.
    """

    rounds: tuple[TuningRound, ...]
    training_plan: TrainingPlan
    profile: LayerProfile
    is_settled: bool

    @property
    def gain(self) -> float:
        """The measured speedup of the training plan over the first choice."""
        return self.rounds[0].measurement.seconds / min(item.measurement.seconds for item in self.rounds)

    def __str__(self) -> str:
        lines = [
            f"round {number}: predicted {item.training_plan.seconds:.4g} s, measured {item.measurement.seconds:.4g} s "
            f"({item.training_plan.seconds / item.measurement.seconds:.3f}): {item.training_plan}"
            for number, item in enumerate(self.rounds, 1)
        ]
        again = "the last search chose a measured training plan again"
        end = again if self.is_settled else f"stopped after {len(self.rounds)} rounds"
        return "\n".join([*lines, f"{end}; {self.gain:.3f} times as fast as the first choice"])


@check_arguments()
def tune(
    problem: SearchProblem,
    choose: Callable[[SearchProblem], TrainingPlan],
    measure: Callable[[TrainingPlan], Measurement],
) -> Tuned:
    """Search, measure the choice, correct the profile, and search again, until the choice stays; at most two rounds.

    Args:
        problem: the search, with its first profile.
        choose: a search.
        measure: runs some steps of a training plan.

    Returns:
        The training plan with the fewest measured seconds, so the loop never ends with a slower one than the first
        choice.
    """
    rounds: list[TuningRound] = []
    training_plan = choose(problem)
    is_settled = False
    while len(rounds) < MAX_ROUNDS and not is_settled:
        measurement = measure(training_plan)
        if not isinstance(measurement, Measurement):
            raise ArgumentError(f"measure returns {brief(measurement)}; it must return a Measurement")
        rounds.append(TuningRound(training_plan, measurement))
        encoded = problem.changed(compression=training_plan.compression, compress_all=True)
        problem = problem.changed(profile=correct_profile(encoded, training_plan, measurement.timelines))
        training_plan = choose(problem)
        is_settled = any(is_same(training_plan, item.training_plan) for item in rounds)
    best = min(rounds, key=lambda tuning_round: tuning_round.measurement.seconds)
    return Tuned(tuple(rounds), best.training_plan, problem.profile, is_settled)


def is_same(one: TrainingPlan, other: TrainingPlan) -> bool:
    """Whether two training plans train alike, whatever is predicted of them."""
    return (one.stages, one.schedule_text) == (other.stages, other.schedule_text)


def correct_profile(
    problem: SearchProblem, training_plan: TrainingPlan, timelines: Sequence[PipelineTimeline]
) -> LayerProfile:
    """The profile with times that explain measured steps.

    Each layer class gets three factors: for its forward, its backward and its weight gradients. With these factors, the
    sums over the layers of each stage equal the measured times. Classes that the training plan does not run keep their
    times.

    Args:
        problem: the search that chose the training plan.
        timelines: timelines of steps of the training plan, whose transfers do not block.
    """
    profile = problem.profile
    if len(problem.profiles) > 1:
        raise ArgumentError(
            f"measured steps correct the profile of one type of device, but the cluster has {list(problem.profiles)}; "
            "measure each type with profile_layers()"
        )
    forward = _fit(problem, training_plan, timelines, _FORWARD)
    backward = _fit(problem, training_plan, timelines, _BACKWARD, forward)
    weight = _fit(problem, training_plan, timelines, _WEIGHT) or backward
    classes = {key: dict(degrees) for key, degrees in profile.classes.items()}
    for entry in forward | backward:
        key, tp = entry
        times, is_measured = profile.times(key, tp)
        layer = next(layer for layer in problem.graph.layers if layer.key == key)
        share = 1.0 if is_measured else shard_1d(layer, tp).compute
        changes = [share * item.get(entry, 1.0) for item in (forward, backward, weight)]
        measured = tuple(_scaled(layer_times, *changes) for layer_times in times.measured)
        classes[key][tp] = replace(times, measured=measured)
    return replace(profile, classes=classes, message_seconds=_message_seconds(problem, training_plan, timelines))


def _scaled(layer_times: LayerTimes, forward: float, backward: float, weight: float) -> LayerTimes:
    whole = layer_times.backward_seconds * backward
    deferred = min(whole, layer_times.weight_grad_seconds * weight)
    return replace(
        layer_times,
        forward_seconds=layer_times.forward_seconds * forward,
        input_grad_seconds=whole - deferred,
        weight_grad_seconds=deferred,
        backward_seconds=whole,
    )


#: Groups of kinds of actions. A factor is fitted to the seconds of the first group that occurs in a step.
_FORWARD, _BACKWARD, _WEIGHT = ((Kind.F,),), ((Kind.B,), (Kind.I, Kind.W)), ((Kind.W,),)


def _fit(
    problem: SearchProblem,
    training_plan: TrainingPlan,
    timelines: Sequence[PipelineTimeline],
    kinds: _Kinds,
    forward: Mapping[_Entry, float] | None = None,
) -> dict[_Entry, float]:
    """Factor of each class for computations of some kinds; empty if no step has them.

    The factors are those of a multiplicative fit, which keeps them positive (Shepp and Vardi, 1982). ``forward``: the
    factors of forwards, which backwards of recomputed layers contain.
    """
    parts: list[tuple[dict[_Entry, float], float]] = []
    for number, stage in enumerate(training_plan.stages):
        measured = next((sum(item) for item in _measured(timelines, number, kinds) if all(item)), 0.0)
        work, other = _work(problem, stage, training_plan.num_microbatches, kinds, forward or {})
        if measured and sum(work.values()):
            parts.append((work, max(measured - other, MIN_FACTOR * measured)))
    factors = dict.fromkeys((entry for work, _ in parts for entry in work), 1.0)
    for _ in range(FIT_STEPS):
        up, down = dict.fromkeys(factors, 0.0), dict.fromkeys(factors, 0.0)
        for work, measured in parts:
            ratio = measured / sum(factors[entry] * seconds for entry, seconds in work.items())
            for entry, seconds in work.items():
                up[entry] += seconds * ratio
                down[entry] += seconds
        for entry in factors:
            if down[entry]:
                factors[entry] = min(MAX_FACTOR, max(MIN_FACTOR, factors[entry] * up[entry] / down[entry]))
    return factors


def _measured(timelines: Sequence[PipelineTimeline], stage: int, kinds: _Kinds) -> list[list[float]]:
    """Median seconds of the actions of each group, 0 for one that no step has."""
    return [[_median_seconds(timelines, stage, kind) for kind in group] for group in kinds]


def _median_seconds(timelines: Sequence[PipelineTimeline], stage: int, kind: Kind) -> float:
    spans = [
        span.end - span.start
        for timeline in timelines
        for span in timeline.spans
        if span.action.stage == stage and span.action.kind is kind
    ]
    return statistics.median(spans) if spans else 0.0


def _work(
    problem: SearchProblem, stage: StagePlan, count: int, kinds: _Kinds, forward: Mapping[_Entry, float]
) -> tuple[dict[_Entry, float], float]:
    """Predicted seconds of computation of each class of a stage for one microbatch, and of all else in the actions."""
    place, num_samples = problem.place(stage.first_rank, stage.end_rank), problem.num_samples // count
    work: dict[_Entry, float] = {}
    whole = 0.0
    for index, choice in enumerate(stage.choices, stage.first_layer):
        layer, cost = problem.graph.layers[index], problem.layer_cost(index, choice, place, count)
        degree = 1 if choice.grid else choice.tp
        entry = (layer.key, degree)
        times, is_measured = problem.profile.times(layer.key, degree)
        layer_times = times.at(num_samples / choice.sample_shards(place.num_ranks))
        share = 1.0 if is_measured else shard_1d(layer, choice.tp).compute
        if choice.grid:
            share = compute_share(layer, choice.grid)
        if kinds is _FORWARD:
            seconds, total = layer_times.forward_seconds, cost.forward_seconds
        elif kinds is _BACKWARD:
            seconds, total = layer_times.backward_seconds, cost.backward_seconds
            if choice.recompute:
                total += (forward.get(entry, 1.0) - 1.0) * share * layer_times.forward_seconds
        else:
            total = cost.weight_grad_seconds
            seconds = total and layer_times.weight_grad_seconds
        work[entry] = work.get(entry, 0.0) + seconds * share
        whole += total
    return work, max(0.0, whole - sum(work.values()))


def _message_seconds(
    problem: SearchProblem, training_plan: TrainingPlan, timelines: Sequence[PipelineTimeline]
) -> float:
    """Fixed time of a message: the median, over all channels, of the measured time minus the predicted time without it.

    For each channel, the faster half of its transfers counts: the others share links.
    """
    now, extra = problem.profile.message_seconds, []
    for edge in training_plan.edges:
        for ends, seconds in (
            ((edge.src, edge.dst), edge.forward_seconds),
            ((edge.dst, edge.src), edge.backward_seconds),
        ):
            taken = sorted(
                transfer.end - max(transfer.start, transfer.ready)
                for timeline in timelines
                for transfer in timeline.transfers
                if (transfer.channel.sender, transfer.channel.receiver) == ends
            )
            if taken and seconds:
                extra.append(taken[len(taken) // 4] - (seconds - now))
    return max(0.0, statistics.median(extra)) if extra else now
