"""The loss and the metrics of a step over all microbatches, replicas and stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import ArgumentError

from ..runtime.step_executor import StageTotals
from ..simulation.replay import PipelineTimeline


@dataclass(frozen=True)
class StepResult:
    """The result of a step or an evaluation, the same on every rank.

    Attributes:
        loss: mean over all samples of the batch; weighted if a stage returns weights, and NaN if their sum is 0.
        metrics: ``{name: mean}``, weighted as the loss is.
        finite: whether the loss and all gradients are finite.
        timeline: measured times; None unless asked for.
    """

    loss: float
    metrics: Mapping[str, float]
    finite: bool = True
    timeline: PipelineTimeline | None = None


@dataclass(frozen=True)
class Totals:
    """The sums of a step over all ranks, the same on every rank.

    Attributes:
        loss: sum over stages of the weighted mean of their losses.
        metrics: ``{name: sum of weighted means}``.
        finite: whether the loss and all gradients are finite.
        gradients_finite: whether all gradients are.
        gradient_factor: factor that turns the gradients of the step into gradients of ``loss``.
    """

    loss: float
    metrics: Mapping[str, float]
    finite: bool
    gradients_finite: bool
    gradient_factor: float


def combine_totals(by_stage: Mapping[int, Sequence[StageTotals]], num_samples: int, finite: bool) -> Totals:
    """Add the totals of all ranks and parts.

    Args:
        by_stage: ``{stage: totals of each replica and part}``.
        num_samples: samples of the batch; each loss was weighted by its weight over ``num_samples`` in the backward.
        finite: whether all gradients are finite.

    Raises:
        ArgumentError: several stages have a loss, and their weights differ.
    """
    losses: dict[int, float] = {}
    factors: dict[int, float] = {}
    metrics: dict[str, float] = {}
    for stage, parts in sorted(by_stage.items()):
        weight = _sum(part.weight for part in parts)
        if any(part.loss is not None for part in parts):
            losses[stage] = _divide(_sum(part.loss for part in parts if part.loss is not None), weight)
            factors[stage] = num_samples / weight if weight else 0.0
        for name in {name for part in parts for name in part.metrics}:
            mean = _divide(_sum(part.metrics.get(name, 0.0) for part in parts), weight)
            metrics[name] = metrics.get(name, 0.0) + mean
    loss = _sum(losses.values())
    (first, factor), *others = sorted(factors.items())
    for stage, other in others:
        if other != factor:
            weights = [num_samples / item if item else 0 for item in (factor, other)]
            raise ArgumentError(
                f"stages {first} and {stage} have a loss, and their weights sum to {weights[0]:g} and "
                f"{weights[1]:g}; if several stages have a loss, give no weights, or weights with the same sum"
            )
    return Totals(loss, dict(sorted(metrics.items())), finite and math.isfinite(loss), finite, factor)


def _divide(value: float, weight: float) -> float:
    """The quotient; NaN if the weight is 0, as for a mean over no values."""
    return value / weight if weight else math.nan


def _sum(values: Iterable[float]) -> float:
    """The sum, also of values that are not finite."""
    numbers = list(values)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
