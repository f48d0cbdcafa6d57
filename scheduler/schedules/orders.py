"""Orders of the computations of a pipeline, as numbers, for the native loops that make and time many of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from reshard import _native

from ..ir.actions import Action, Kind, compute_seconds
from ..ir.communication import RECVS_AHEAD
from ..pipeline import Pipeline
from .list_scheduling import DispatchRule
from .phases import alternate

#: Kinds of computations by number.
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
#: For each pp rank, its computations in order: (microbatch * number of stages + stage) * 4 + kind.
RankOrders = list[list[int]]


class OrderModel:
    """A pipeline, the pp rank of each of its stages and a number of microbatches."""

    def __init__(self, pipeline: Pipeline, pp_rank_of_stage: Sequence[int], num_microbatches: int) -> None:
        self.pipeline, self.pp_rank_of_stage, self.num = pipeline, tuple(pp_rank_of_stage), num_microbatches
        stages, edges = pipeline.stages, pipeline.edges
        loads = [loads for edge in edges for loads in (edge.forward_loads, edge.backward_loads)]
        links = {link: number for number, link in enumerate(dict.fromkeys(link for item in loads for link, _ in item))}
        self._native = _native.PipelineModel(
            seconds=np.array([[compute_seconds(kind, stage) for kind in KINDS] for stage in stages], dtype=np.float64),
            bytes=np.array([stage.activation_bytes for stage in stages], dtype=np.float64),
            pp_rank=np.array(self.pp_rank_of_stage, dtype=np.int64),
            src=np.array([edge.src for edge in edges], dtype=np.int64),
            dst=np.array([edge.dst for edge in edges], dtype=np.int64),
            channel_seconds=np.array(
                [seconds for edge in edges for seconds in (edge.forward_seconds, edge.backward_seconds)],
                dtype=np.float64,
            ),
            load_offsets=np.cumsum([0, *map(len, loads)], dtype=np.int64),
            load_link=np.array([links[link] for item in loads for link, _ in item], dtype=np.int64),
            load_seconds=np.array([seconds for item in loads for _, seconds in item], dtype=np.float64),
            num_microbatches=num_microbatches,
        )

    def order(self, policy: DispatchRule) -> RankOrders | None:
        """The computations of each pp rank, by list scheduling; None if the policy deadlocks.

        A stage computes its microbatches in order.
        """
        order: RankOrders = self._native.order(
            np.array(policy.max_in_flight, dtype=np.int64),
            np.array(policy.max_bytes, dtype=np.float64),
            np.array(policy.splits, dtype=np.int64),
            policy.forward_first,
            policy.weights_first,
            policy.patience,
            policy.group,
        )
        num_computations = sum(3 if split else 2 for split in policy.splits) * self.num
        return order if sum(map(len, order)) == num_computations else None

    def makespan_seconds(self, order: RankOrders) -> float:
        """The simulated makespan of all computations in an order, with transfers added; infinite if it deadlocks."""
        return max(self.end_seconds(order), default=math.inf)

    def end_seconds(self, order: RankOrders) -> list[float]:
        """The simulated end of the last computation of each stage, in an order of all; empty if it deadlocks."""
        seconds: list[float] = self._native.ends(order, RECVS_AHEAD)
        return seconds

    def peak_bytes(self, order: RankOrders) -> list[float]:
        """The most bytes that each pp rank keeps at once."""
        peaks: list[float] = self._native.peak_bytes(order)
        return peaks

    def numbers(self, rank_actions: Sequence[Sequence[Action]]) -> RankOrders:
        """The computations of each pp rank as numbers."""
        num, kinds = len(self.pp_rank_of_stage), {kind: number for number, kind in enumerate(KINDS)}
        return [[(a.microbatch * num + a.stage) * 4 + kinds[a.kind] for a in actions] for actions in rank_actions]

    def actions(self, order: RankOrders) -> list[list[Action]]:
        """The computations of each pp rank, from their numbers."""
        num = len(self.pp_rank_of_stage)
        return [[Action(KINDS[c & 3], (c >> 2) % num, (c >> 2) // num) for c in codes] for codes in order]


def order_of_warmups(
    warmups: Sequence[int], num_microbatches: int, deferred: Sequence[int] | None = None
) -> RankOrders:
    """One stage per pp rank: each runs its warm-up forwards, then alternates backwards and forwards.

    Args:
        warmups: for each stage, the number of forwards before its first backward, at least one.
        num_microbatches: microbatches of a step.
        deferred: for each stage, the number of backwards after which a weight-gradient pass follows; default: backwards
            are whole.
    """
    num, order = len(warmups), []
    for stage, warmup in enumerate(warmups):
        forwards = [(nth * num + stage) * 4 for nth in range(num_microbatches)]
        if deferred is None:
            order.append(alternate(forwards, [code + 1 for code in forwards], warmup - 1))
        else:
            passes = [[code + kind for code in forwards] for kind in (2, 3)]
            order.append(alternate(forwards, passes[0], warmup - 1, passes[1], deferred[stage]))
    return order
