"""Builders for looped placements: pp rank r computes stages r, r + num_pp_ranks, r + 2 * num_pp_ranks, ..."""

from __future__ import annotations

from dataclasses import replace

from reshard.errors import ArgumentError
from reshard.formatting import brief

from ..ir.actions import Action, Kind
from ..ir.communication import add_transfers
from ..ir.schedule import Schedule
from ..pipeline import Pipeline
from .classic import check_microbatches
from .phases import alternate


def interleaved_1f1b(pipeline: Pipeline, num_microbatches: int, num_pp_ranks: int) -> Schedule:
    """Interleaved 1F1B: each pp rank computes a group of microbatches on its first stage, then the group on the next.

    There are ``num_microbatches // num_pp_ranks`` groups, at least one. Their sizes differ by at most one microbatch.
    Source: Megatron-LM (Narayanan et al., 2021).

    Raises:
        ArgumentError: ``num_pp_ranks`` does not divide the number of stages.
    """
    stages_per_pp_rank = _check_placement(pipeline, num_microbatches, num_pp_ranks)
    order = interleaved_order(num_pp_ranks, stages_per_pp_rank, num_microbatches)
    return _schedule("interleaved_1f1b", order, pipeline, num_microbatches, num_pp_ranks)


def interleaved_zero_bubble(pipeline: Pipeline, num_microbatches: int, num_pp_ranks: int) -> Schedule:
    """Interleaved 1F1B with split backwards: on pp rank r, a weight-gradient pass runs r backwards later.

    Warm-up has fewer forwards than in :func:`interleaved_1f1b`. Source: ZB1P in "Zero Bubble Pipeline
    Parallelism" (Qi et al., 2023), with several stages per pp rank as in torch.distributed.pipelining.

    Raises:
        ArgumentError: ``num_pp_ranks`` does not divide the number of stages.
    """
    stages_per_pp_rank = _check_placement(pipeline, num_microbatches, num_pp_ranks)
    order = interleaved_zero_bubble_order(num_pp_ranks, stages_per_pp_rank, num_microbatches)
    return _schedule("interleaved_zero_bubble", order, pipeline, num_microbatches, num_pp_ranks)


def looped_bfs(pipeline: Pipeline, num_microbatches: int, num_pp_ranks: int) -> Schedule:
    """Breadth-first: each pp rank runs all microbatches through its first stage, then all through the next one.

    Backwards follow in the opposite order. All microbatches are in flight at the peak. Source:
    "Breadth-First Pipeline Parallelism" (Lamy-Poirier, 2023).

    Raises:
        ArgumentError: ``num_pp_ranks`` does not divide the number of stages.
    """
    stages_per_pp_rank = _check_placement(pipeline, num_microbatches, num_pp_ranks)
    order = looped_bfs_order(num_pp_ranks, stages_per_pp_rank, num_microbatches)
    return _schedule("looped_bfs", order, pipeline, num_microbatches, num_pp_ranks)


def interleaved_order(num_pp_ranks: int, stages_per_pp_rank: int, num_microbatches: int) -> list[list[Action]]:
    """The computations of each pp rank under :func:`interleaved_1f1b`."""
    return [
        alternate(*_passes(pp_rank, num_pp_ranks, stages_per_pp_rank, num_microbatches), num_warmup)
        for pp_rank, num_warmup in enumerate(_warmups(num_pp_ranks, stages_per_pp_rank, num_microbatches, 2))
    ]


def interleaved_zero_bubble_order(
    num_pp_ranks: int, stages_per_pp_rank: int, num_microbatches: int
) -> list[list[Action]]:
    """The computations of each pp rank under :func:`interleaved_zero_bubble`."""
    order = []
    for pp_rank, num_warmup in enumerate(_warmups(num_pp_ranks, stages_per_pp_rank, num_microbatches, 1)):
        forwards, backwards = _passes(pp_rank, num_pp_ranks, stages_per_pp_rank, num_microbatches)
        inputs, weights = ([replace(backward, kind=kind) for backward in backwards] for kind in (Kind.I, Kind.W))
        order.append(alternate(forwards, inputs, num_warmup, weights, pp_rank))
    return order


def looped_bfs_order(num_pp_ranks: int, stages_per_pp_rank: int, num_microbatches: int) -> list[list[Action]]:
    """The computations of each pp rank under :func:`looped_bfs`. Backwards begin with the last microbatch."""
    order = []
    for pp_rank in range(num_pp_ranks):
        stages = range(pp_rank, num_pp_ranks * stages_per_pp_rank, num_pp_ranks)
        actions = [Action(Kind.F, stage, nth) for stage in stages for nth in range(num_microbatches)]
        actions += [
            Action(Kind.B, stage, nth) for stage in reversed(stages) for nth in reversed(range(num_microbatches))
        ]
        order.append(actions)
    return order


def group_sizes(num_microbatches: int, num_pp_ranks: int) -> list[int]:
    """Sizes of the groups of microbatches, the larger ones first."""
    num_groups = max(1, num_microbatches // num_pp_ranks)
    size, larger = divmod(num_microbatches, num_groups)
    return [size + (group < larger) for group in range(num_groups)]


def _passes(
    pp_rank: int, num_pp_ranks: int, stages_per_pp_rank: int, num_microbatches: int
) -> tuple[list[Action], list[Action]]:
    """The forwards and the whole backwards of a pp rank, group by group."""
    stages = range(pp_rank, num_pp_ranks * stages_per_pp_rank, num_pp_ranks)
    forwards, backwards, begin = [], [], 0
    for size in group_sizes(num_microbatches, num_pp_ranks):
        microbatches = range(begin, begin + size)
        forwards += [Action(Kind.F, stage, nth) for stage in stages for nth in microbatches]
        backwards += [Action(Kind.B, stage, nth) for stage in reversed(stages) for nth in microbatches]
        begin += size
    return forwards, backwards


def _warmups(num_pp_ranks: int, stages_per_pp_rank: int, num_microbatches: int, per_hop: int) -> list[int]:
    """The number of warm-up forwards of each pp rank: those before its first pair of a forward and a backward."""
    largest = group_sizes(num_microbatches, num_pp_ranks)[0]
    return [
        (stages_per_pp_rank - 1) * largest + per_hop * (num_pp_ranks - 1 - pp_rank) for pp_rank in range(num_pp_ranks)
    ]


def _check_placement(pipeline: Pipeline, num_microbatches: int, num_pp_ranks: int) -> int:
    """The number of stages per pp rank. Raises ArgumentError if an argument is wrong."""
    check_microbatches(pipeline, num_microbatches)
    num_stages = len(pipeline.stages)
    if isinstance(num_pp_ranks, bool) or not isinstance(num_pp_ranks, int):
        raise ArgumentError(f"num_pp_ranks is {brief(num_pp_ranks)}; it must be an integer")
    if num_pp_ranks < 1 or num_stages % num_pp_ranks:
        raise ArgumentError(f"{num_pp_ranks} pp ranks must divide {num_stages} stages")
    return num_stages // num_pp_ranks


def _schedule(
    name: str, order: list[list[Action]], pipeline: Pipeline, num_microbatches: int, num_pp_ranks: int
) -> Schedule:
    pp_rank_of_stage = [stage % num_pp_ranks for stage in range(len(pipeline.stages))]
    return add_transfers(name, order, pipeline, pp_rank_of_stage, num_microbatches)
