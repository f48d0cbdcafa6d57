"""Builders of well-known schedules."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import ArgumentError
from reshard.formatting import brief

from ..graph import Pipeline, check_pipeline
from ..ir.actions import Action, Kind
from ..ir.communication import add_transfers
from ..ir.schedule import MAX_ACTIONS, Schedule


def gpipe(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Peak in flight: all microbatches. Source: GPipe (Huang et al., 2019).
    """
    check_microbatches(pipeline, num_microbatches)
    return from_warmups("gpipe", pipeline, num_microbatches, [num_microbatches] * len(pipeline.stages))


def one_f_one_b(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """1F1B: stage i of n starts with n - i forwards, then alternates backwards and forwards.

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
    num = len(pipeline.stages)
    return from_warmups("eager-1f1b", pipeline, num_microbatches, [2 * (num - i) - 1 for i in range(num)])


def interleaved_1f1b(pipeline: Pipeline, num_microbatches: int, num_pp_ranks: int) -> Schedule:
    """Interleaved 1F1B: pp rank r computes stages r, r + num_pp_ranks, r + 2 * num_pp_ranks, ...

    Source: Megatron-LM (Narayanan et al., 2021).

    Raises:
        ArgumentError: ``num_pp_ranks`` does not divide the number of stages and the number of microbatches.
    """
    check_microbatches(pipeline, num_microbatches)
    num_stages = len(pipeline.stages)
    if isinstance(num_pp_ranks, bool) or not isinstance(num_pp_ranks, int):
        raise ArgumentError(f"num_pp_ranks is {brief(num_pp_ranks)}; it must be an integer")
    if num_pp_ranks < 1 or num_stages % num_pp_ranks or num_microbatches % num_pp_ranks:
        raise ArgumentError(
            f"interleaved 1F1B: {num_pp_ranks} pp ranks must divide {num_stages} stages and {num_microbatches} "
            "microbatches"
        )
    num_chunks = num_stages // num_pp_ranks  # model chunks per pp rank, one stage each
    total = num_chunks * num_microbatches

    def forward(pp_rank: int, nth: int) -> Action:
        group, within = divmod(nth, num_pp_ranks * num_chunks)
        return Action(
            Kind.F, within // num_pp_ranks * num_pp_ranks + pp_rank, group * num_pp_ranks + within % num_pp_ranks
        )

    def backward(pp_rank: int, nth: int) -> Action:
        group, within = divmod(nth, num_pp_ranks * num_chunks)
        chunk = num_chunks - 1 - within // num_pp_ranks
        return Action(Kind.B, chunk * num_pp_ranks + pp_rank, group * num_pp_ranks + within % num_pp_ranks)

    rank_actions = []
    for pp_rank in range(num_pp_ranks):
        num_warmup = min(total, 2 * (num_pp_ranks - 1 - pp_rank) + (num_chunks - 1) * num_pp_ranks + 1)
        actions = [forward(pp_rank, nth) for nth in range(num_warmup)]
        for nth in range(total):
            actions.append(backward(pp_rank, nth))
            if num_warmup + nth < total:
                actions.append(forward(pp_rank, num_warmup + nth))
        rank_actions.append(actions)
    pp_rank_of_stage = [stage % num_pp_ranks for stage in range(num_stages)]
    return add_transfers("interleaved-1f1b", rank_actions, pipeline, pp_rank_of_stage, num_microbatches)


def zb_h1(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """1F1B with split backwards: stage i defers weight-gradient passes by i microbatches, which fills its bubbles.

    Peak in flight on each of n stages, of m microbatches: ``min(m, n)``. Source: ZB-H1 in "Zero Bubble Pipeline
    Parallelism" (Qi et al., 2023).
    """
    check_microbatches(pipeline, num_microbatches)
    num = len(pipeline.stages)
    rank_actions = []
    for stage in range(num):
        actions: list[Action] = []
        num_warmup = min(num_microbatches, num - stage)
        actions += [Action(Kind.F, stage, nth) for nth in range(num_warmup)]
        for nth in range(num_microbatches):
            actions.append(Action(Kind.I, stage, nth))
            if nth >= stage:
                actions.append(Action(Kind.W, stage, nth - stage))
            if num_warmup + nth < num_microbatches:
                actions.append(Action(Kind.F, stage, num_warmup + nth))
        actions += [Action(Kind.W, stage, nth) for nth in range(max(0, num_microbatches - stage), num_microbatches)]
        rank_actions.append(actions)
    return add_transfers("zero-bubble", rank_actions, pipeline, range(num), num_microbatches)


def from_warmups(name: str, pipeline: Pipeline, num_microbatches: int, warmups: Sequence[int]) -> Schedule:
    """One stage per pp rank: each stage starts with some forwards, then alternates backwards and forwards.

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
    rank_actions = []
    for stage, warmup in enumerate(warmups):
        num_warmup = min(num_microbatches, warmup)
        actions = [Action(Kind.F, stage, nth) for nth in range(num_warmup)]
        for nth in range(num_microbatches):
            actions.append(Action(Kind.B, stage, nth))
            if num_warmup + nth < num_microbatches:
                actions.append(Action(Kind.F, stage, num_warmup + nth))
        rank_actions.append(actions)
    return add_transfers(name, rank_actions, pipeline, range(len(warmups)), num_microbatches)


def check_microbatches(pipeline: Pipeline, num_microbatches: int) -> None:
    """Raise ArgumentError if the pipeline or the number of microbatches is invalid."""
    check_pipeline(pipeline)
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ArgumentError(f"num_microbatches is {brief(num_microbatches)}; it must be an integer of at least 1")
    most = MAX_ACTIONS // len(pipeline.stages)
    if num_microbatches > most:
        raise ArgumentError(
            f"num_microbatches is {brief(num_microbatches)}; at most {most:,} microbatches fit "
            f"{len(pipeline.stages)} stages"
        )
