"""The known schedules: the placements and the order of computations of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..ir.actions import Action
from ..ir.schedule import Schedule
from ..pipeline import Pipeline
from .classic import (
    eager_1f1b,
    eager_warmups,
    gpipe,
    one_f_one_b,
    warmup_order,
    zb_h1,
    zb_h2,
)
from .looped import interleaved_order, interleaved_zero_bubble_order, looped_bfs_order
from .v_shaped import dualpipe_v_order, v_placement, zb_v_order


@dataclass(frozen=True)
class KnownSchedule:
    """A schedule whose order depends on no costs.

    Attributes:
        name: name of the schedule, which is that of its function, except ``1f1b`` of ``one_f_one_b``.
        order: function from the numbers of pp ranks, of stages per pp rank and of microbatches to the computations of
            each pp rank.
        placement: function from the first two of these numbers to the pp rank of each stage; empty if there is none.
        splits: whether it splits backwards.
        build: function from a pipeline and a number of microbatches to the schedule; None unless each pp rank has one
            stage. ``reshard train --schedule`` takes the names of those with a function.
        warmups: function from the number of pp ranks, with one stage each, to the forwards before the first backward of
            each stage; None if ``order`` is not 1F1B with a fixed warm-up. From it, the strategy search finds the
            memory of the schedule without making its order. A schedule of one stage per pp rank is not tried without
            it.
        deferred: with ``warmups``, a function to the number of backwards after which a weight-gradient pass of each
            stage follows; None: backwards are whole.
    """

    name: str
    order: Callable[[int, int, int], list[list[Action]]]
    placement: Callable[[int, int], Sequence[int]]
    splits: bool = False
    build: Callable[[Pipeline, int], Schedule] | None = None
    warmups: Callable[[int], Sequence[int]] | None = None
    deferred: Callable[[int], Sequence[int]] | None = None


def _single(num_pp_ranks: int, stages_per_pp_rank: int) -> Sequence[int]:
    return range(num_pp_ranks) if stages_per_pp_rank == 1 else ()


def _looped(num_pp_ranks: int, stages_per_pp_rank: int) -> Sequence[int]:
    return [stage % num_pp_ranks for stage in range(num_pp_ranks * stages_per_pp_rank)]


def _v_shaped(num_pp_ranks: int, stages_per_pp_rank: int) -> Sequence[int]:
    return v_placement(num_pp_ranks) if stages_per_pp_rank == 2 else ()


def _one_stage_each(
    name: str,
    build: Callable[[Pipeline, int], Schedule],
    warmups: Callable[[int], Sequence[int]],
    deferred: Callable[[int], Sequence[int]] | None = None,
) -> KnownSchedule:
    """A schedule with one stage on each pp rank and a fixed warm-up. For the arguments, see :class:`KnownSchedule`."""

    def order(num_pp_ranks: int, _: int, num_microbatches: int) -> list[list[Action]]:
        return warmup_order(warmups(num_pp_ranks), num_microbatches, deferred(num_pp_ranks) if deferred else None)

    return KnownSchedule(name, order, _single, deferred is not None, build, warmups, deferred)


KNOWN_SCHEDULES = (
    KnownSchedule("gpipe", lambda n, _, m: warmup_order([m] * n, m), _single, build=gpipe),
    _one_stage_each("1f1b", one_f_one_b, lambda n: range(n, 0, -1)),
    _one_stage_each("eager_1f1b", eager_1f1b, eager_warmups),
    _one_stage_each("zb_h1", zb_h1, lambda n: range(n, 0, -1), range),
    _one_stage_each("zb_h2", zb_h2, eager_warmups, lambda n: range(0, 2 * n, 2)),
    KnownSchedule("looped_bfs", looped_bfs_order, _looped),
    KnownSchedule("interleaved_1f1b", interleaved_order, _looped),
    KnownSchedule("interleaved_zero_bubble", interleaved_zero_bubble_order, _looped, splits=True),
    KnownSchedule("zb_v", lambda n, _, m: zb_v_order(n, m), _v_shaped, splits=True),
    KnownSchedule("dualpipe_v", lambda n, _, m: dualpipe_v_order(n, m), _v_shaped, splits=True),
)


def known_orders(
    pp_rank_of_stage: Sequence[int], num_microbatches: int, *, can_split: bool = True
) -> Iterator[tuple[str, list[list[Action]]]]:
    """The known schedules of a placement, by name, with the computations of each pp rank.

    The pp ranks of the placement may be numbered in any order.
    """
    num_pp_ranks = len(set(pp_rank_of_stage))
    stages_per_pp_rank, rest = divmod(len(pp_rank_of_stage), num_pp_ranks)
    number = {pp_rank: nth for nth, pp_rank in enumerate(dict.fromkeys(pp_rank_of_stage))}  # by first stage
    placement = [number[pp_rank] for pp_rank in pp_rank_of_stage]
    for known in KNOWN_SCHEDULES:
        if known.splits and not can_split:
            continue
        if not rest and placement == list(known.placement(num_pp_ranks, stages_per_pp_rank)):
            order = known.order(num_pp_ranks, stages_per_pp_rank, num_microbatches)
            yield known.name, [order[number[pp_rank]] for pp_rank in range(num_pp_ranks)]
