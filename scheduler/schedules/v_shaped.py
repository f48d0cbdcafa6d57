"""Builders for placements in a V: of 2 n stages, pp rank r of n computes stages r and 2 n - 1 - r."""

from __future__ import annotations

from reshard.errors import ArgumentError

from ..ir.actions import Action
from ..ir.communication import add_transfers
from ..ir.schedule import Schedule
from ..pipeline import Pipeline
from .classic import check_microbatches
from .phases import RowActions, first_microbatches


def zb_v(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """ZB-V: no bubble in the steady state if a forward and both passes of a backward take equally long on all stages.

    Each of n pp ranks keeps at most 2 n microbatches in flight, over both stages together. Source: ZB-V in "Zero Bubble
    Pipeline Parallelism" (Qi et al., 2023).

    Raises:
        ArgumentError: the number of stages is odd.
    """
    return _schedule("zb_v", zb_v_order(_num_pp_ranks(pipeline, num_microbatches), num_microbatches), pipeline)


def dualpipe_v(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """DualPipeV: in the steady state, a forward of one stage overlaps a backward of the other stage of its pp rank.

    The engine of this package and the simulation compute the two one after the other. Each of n pp ranks keeps at most
    2 n + 1 microbatches in flight, over both stages together. Source: DualPipe of DeepSeek-V3 (2024), cut in half.

    Raises:
        ArgumentError: the number of stages is odd.
    """
    order = dualpipe_v_order(_num_pp_ranks(pipeline, num_microbatches), num_microbatches)
    return _schedule("dualpipe_v", order, pipeline)


def zb_v_order(num_pp_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """The computations of each pp rank under :func:`zb_v`. Too few microbatches for the pipeline leave gaps."""
    num = max(num_microbatches, 2 * num_pp_ranks - 1)
    order = []
    for pp_rank in range(num_pp_ranks):
        actions, after = RowActions(v_stages(pp_rank, num_pp_ranks)), num_pp_ranks - pp_rank
        actions.add("F0", 2 * after - 1)
        actions.add("F1 F0", pp_rank)
        actions.add("F1 I1 W1", after)
        while actions.num_forwards(1) < num:
            actions.add(f"{'F0 ' if actions.num_forwards(0) < num else ''}I0 W0 F1 I1 W1")
        actions.add("I0 I1", pp_rank)
        actions.add("I0 W0", after)
        actions.finish(1, 0)
        order.append(first_microbatches(actions.actions, num_microbatches))
    return order


def dualpipe_v_order(num_pp_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """The computations of each pp rank under :func:`dualpipe_v`. Fewer microbatches than stages leave gaps."""
    num = max(num_microbatches, 2 * num_pp_ranks)
    order = []
    for pp_rank in range(num_pp_ranks):
        actions, after, through = RowActions(v_stages(pp_rank, num_pp_ranks)), num_pp_ranks - pp_rank - 1, pp_rank + 1
        actions.add("F0", 2 * after)
        actions.add("F0 F1", through)
        actions.add("I1 W F1", after)
        main = num - 2 * num_pp_ranks + through
        if after == 0:  # the last pp rank needs its first backward at once
            actions.add("F0 B1 F1&B0")
            main -= 1
        actions.add("F0&B1 F1&B0", main)
        actions.add("B1 F1&B0", after)
        # The last backwards are split, so that earlier pp ranks get their gradients sooner.
        whole, is_split = through // 2, False
        for nth in range(through):
            if nth == whole and pp_rank % 2 == 1:
                is_split = True
            actions.add("I1" if is_split else "B1")
            if nth == whole and pp_rank % 2 == 0:
                is_split = True
            actions.add("I0" if is_split else "B0")
        actions.add("W I0", after)
        actions.add("W", through)
        order.append(first_microbatches(actions.actions, num_microbatches))
    return order


def v_stages(pp_rank: int, num_pp_ranks: int) -> tuple[int, int]:
    """The two stages of a pp rank."""
    return pp_rank, 2 * num_pp_ranks - 1 - pp_rank


def v_placement(num_pp_ranks: int) -> tuple[int, ...]:
    """The pp rank of each stage."""
    return (*range(num_pp_ranks), *reversed(range(num_pp_ranks)))


def _num_pp_ranks(pipeline: Pipeline, num_microbatches: int) -> int:
    check_microbatches(pipeline, num_microbatches)
    num_stages = len(pipeline.stages)
    if num_stages % 2:
        raise ArgumentError(f"a placement in a V needs two stages per pp rank, but there are {num_stages} stages")
    return num_stages // 2


def _schedule(name: str, order: list[list[Action]], pipeline: Pipeline) -> Schedule:
    num_microbatches = 1 + max(action.microbatch for action in order[0])
    return add_transfers(name, order, pipeline, v_placement(len(order)), num_microbatches)
