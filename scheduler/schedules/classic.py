"""Builders for one stage per pp rank, in the order of the stages."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import ArgumentError
from reshard.formatting import brief

from ..ir.actions import Action, Kind
from ..ir.communication import add_transfers
from ..ir.schedule import MAX_ACTIONS, Schedule
from ..pipeline import Pipeline, check_pipeline
from .phases import alternate


def gpipe(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Peak in flight: all microbatches. Source: GPipe (Huang et al., 2019).
    """
    check_microbatches(pipeline, num_microbatches)
    return from_warmups("gpipe", pipeline, num_microbatches, [num_microbatches] * len(pipeline.stages))


def one_f_one_b(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """1F1B: stage i of n runs n - i forwards, then alternates backwards and forwards.

    Peak in flight on stage i, of m microbatches: ``min(m, n - i)``. Source: PipeDream-Flush (Narayanan et al., 2021).
    """
    check_microbatches(pipeline, num_microbatches)
    num = len(pipeline.stages)
    return from_warmups("1f1b", pipeline, num_microbatches, [num - i for i in range(num)])


def eager_1f1b(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """1F1B with more warm-up: stage i of n starts with ``2 * (n - i) - 1`` forwards. Ignores communication costs.

    Peak in flight on stage i, of m microbatches: ``min(m, 2 * (n - i) - 1)``. Source: "On Optimizing the Communication
    of Model Parallelism" (Zhuang et al., 2023).
    """
    check_microbatches(pipeline, num_microbatches)
    return from_warmups("eager_1f1b", pipeline, num_microbatches, eager_warmups(len(pipeline.stages)))


def zb_h1(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """1F1B with split backwards: stage i defers weight-gradient passes by i microbatches, which fills its bubbles.

    Peak in flight on each of n stages, of m microbatches: ``min(m, n)``. Source: ZB-H1 in "Zero Bubble Pipeline
    Parallelism" (Qi et al., 2023).
    """
    check_microbatches(pipeline, num_microbatches)
    num = len(pipeline.stages)
    order = warmup_order(range(num, 0, -1), num_microbatches, range(num))
    return add_transfers("zb_h1", order, pipeline, range(num), num_microbatches)


def zb_h2(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """Split backwards and the warm-up of eager 1F1B: stage i defers weight-gradient passes by 2 i microbatches.

    It has no bubble in the steady state if a forward and both passes of a backward take equally long on all stages.
    Peak in flight on each of n stages, of m microbatches: ``min(m, 2 * n - 1)``. Source: ZB-H2 in "Zero Bubble Pipeline
    Parallelism" (Qi et al., 2023).
    """
    check_microbatches(pipeline, num_microbatches)
    num = len(pipeline.stages)
    order = warmup_order(eager_warmups(num), num_microbatches, range(0, 2 * num, 2))
    return add_transfers("zb_h2", order, pipeline, range(num), num_microbatches)


def eager_warmups(num_stages: int) -> list[int]:
    """Forwards before the first backward of each stage under :func:`eager_1f1b`."""
    return [2 * (num_stages - stage) - 1 for stage in range(num_stages)]


def warmup_order(
    warmups: Sequence[int], num_microbatches: int, deferred: Sequence[int] | None = None
) -> list[list[Action]]:
    """The computations of each stage: its warm-up forwards, then backwards and forwards in alternation.

    Args:
        warmups: for each stage, the number of forwards before its first backward.
        num_microbatches: microbatches of a step.
        deferred: for each stage, the number of backwards after which a weight-gradient pass follows; None: backwards
            are whole.
    """
    return [
        _stage_order(stage, warmup, None if deferred is None else deferred[stage], num_microbatches)
        for stage, warmup in enumerate(warmups)
    ]


def _stage_order(stage: int, num_warmup: int, deferred: int | None, num_microbatches: int) -> list[Action]:
    is_whole = deferred is None
    kinds = (Kind.F, Kind.B if is_whole else Kind.I, Kind.W)
    forwards, backwards, weights = ([Action(kind, stage, nth) for nth in range(num_microbatches)] for kind in kinds)
    return alternate(forwards, backwards, num_warmup - 1, () if is_whole else weights, deferred or 0)


def from_warmups(name: str, pipeline: Pipeline, num_microbatches: int, warmups: Sequence[int]) -> Schedule:
    """One stage per pp rank: each stage runs its warm-up forwards, then alternates backwards and forwards.

    Args:
        name: name of the schedule.
        pipeline, num_microbatches: what to schedule.
        warmups: for each stage, the number of forwards before its first backward, at least one. Larger numbers than
            ``num_microbatches`` stand for all microbatches.

    Raises:
        ArgumentError: an argument is out of range, or a stage has fewer warm-up forwards than a stage that receives its
            outputs, which would deadlock.
    """
    check_microbatches(pipeline, num_microbatches)
    if not isinstance(warmups, Sequence):
        raise ArgumentError(f"warmups must be a list with one number per stage, not {brief(warmups)}")
    if len(warmups) != len(pipeline.stages) or not all(type(depth) is int and depth > 0 for depth in warmups):
        raise ArgumentError(
            f"warmups {list(warmups)}: each of {len(pipeline.stages)} stages needs an integer of at least 1"
        )
    for edge in pipeline.edges:
        a, b = (min(num_microbatches, warmups[stage]) for stage in (edge.src, edge.dst))
        if a < b:
            raise ArgumentError(
                f"stage {edge.dst} needs {b} forwards of stage {edge.src} before its first backward, but stage "
                f"{edge.src} waits for that backward after {a}; give stage {edge.src} at least {b} warm-up forwards"
            )
    order = warmup_order(warmups, num_microbatches)
    return add_transfers(name, order, pipeline, range(len(warmups)), num_microbatches)


def check_microbatches(pipeline: Pipeline, num_microbatches: int) -> None:
    """Raise ArgumentError if the pipeline or the number of microbatches is invalid."""
    check_pipeline(pipeline)
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ArgumentError(f"num_microbatches is {brief(num_microbatches)}; it must be an integer of at least 1")
    max_microbatches = MAX_ACTIONS // len(pipeline.stages)
    if num_microbatches > max_microbatches:
        raise ArgumentError(
            f"num_microbatches is {brief(num_microbatches)}; at most {max_microbatches:,} microbatches fit "
            f"{len(pipeline.stages)} stages"
        )
