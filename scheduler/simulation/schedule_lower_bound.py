"""A lower bound on the makespan of every schedule of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.arguments import check_arguments

from ..pipeline import MAX_COUNT, Pipeline, check_limits, check_placement


@dataclass(frozen=True)
class LowerBound:
    """Lower bounds on the makespan of every schedule of a placement.

    Attributes:
        critical_path_seconds: one microbatch passes through all stages and back.
        busiest_pp_rank_seconds: a pp rank computes all microbatches of its stages, or of its later stages.
        busiest_link_seconds: a channel or a shared link carries all microbatches.
        memory_seconds: a pp rank keeps each microbatch at least until its backward has come back, within a limit.
    """

    critical_path_seconds: float
    busiest_pp_rank_seconds: float
    busiest_link_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The largest of the four."""
        return max(
            self.critical_path_seconds, self.busiest_pp_rank_seconds, self.busiest_link_seconds, self.memory_seconds
        )

    def __str__(self) -> str:
        return (
            f"{self.seconds:.6g} s (seconds by the critical path {self.critical_path_seconds:.6g}, by the busiest pp "
            f"rank {self.busiest_pp_rank_seconds:.6g}, by the busiest link {self.busiest_link_seconds:.6g}, by limits "
            f"of memory {self.memory_seconds:.6g})"
        )


@check_arguments(num_microbatches=(1, MAX_COUNT))
def find_lower_bound(
    pipeline: Pipeline,
    num_microbatches: int,
    *,
    activation_limit_bytes: float | Sequence[float] | None = None,
    pp_rank_of_stage: Sequence[int] | None = None,
    can_split: bool = True,
) -> LowerBound:
    """Lower bounds on the makespan of every schedule. ``docs/algorithms.md`` has the proof.

    Args:
        pipeline, num_microbatches: what to schedule.
        activation_limit_bytes: limit of the activations that a device keeps at once, or one limit for each pp rank;
            default: no limit.
        pp_rank_of_stage: pp rank that computes each stage; default: one stage per pp rank.
        can_split: whether a backward may be split into an input-gradient pass and a weight-gradient pass.

    Raises:
        ArgumentError: an argument is out of range, or pp ranks are not numbered from 0.
    """
    pp_ranks = check_placement(pipeline, pp_rank_of_stage)
    stages_of = [
        [stage for stage, pp_rank in enumerate(pp_ranks) if pp_rank == number] for number in range(max(pp_ranks) + 1)
    ]
    limits = check_limits(math.inf if activation_limit_bytes is None else activation_limit_bytes, len(stages_of))
    times = _Times(pipeline, pp_ranks, can_split)
    return LowerBound(
        max(h + t + a for h, t, a in zip(times.head, times.trip, times.after, strict=True)),
        max(times.busy_seconds(stages, num_microbatches) for stages in stages_of),
        times.link_seconds(num_microbatches),
        max(times.kept_seconds(*item, num_microbatches) for item in zip(stages_of, limits, strict=True)),
    )


class _Times:
    """Least times of one microbatch, in seconds, for each stage.

    Attributes:
        work: computation of a microbatch.
        head: time from the start of the step to the first forward.
        trip: time from the start of a forward to the end of its input-gradient pass, or of its whole backward.
        hold: time from the start of a forward until its activations are freed.
        after: time from the end of an input-gradient pass to the end of the step.
    """

    def __init__(self, pipeline: Pipeline, pp_rank_of_stage: Sequence[int], can_split: bool) -> None:
        self.pipeline, self.pp_rank_of_stage, self.can_split = pipeline, pp_rank_of_stage, can_split
        stages, num = pipeline.stages, len(pipeline.stages)
        back = [s.backward_seconds for s in stages]
        whole = list(back)
        if can_split:
            back = [min(b, s.input_grad_seconds) for b, s in zip(back, stages, strict=True)]
            both = [s.input_grad_seconds + s.weight_grad_seconds for s in stages]
            whole = [min(pair) for pair in zip(whole, both, strict=True)]
        self.back = back
        self.work = [s.forward_seconds + seconds for s, seconds in zip(stages, whole, strict=True)]
        self.head, self.trip, self.hold, self.after = ([0.0] * num for _ in range(4))
        for s in range(num):
            for o in pipeline.inputs[s]:
                there, back_again = self.transfer_seconds(o, s)
                self.head[s] = max(self.head[s], self.head[o] + stages[o].forward_seconds + there)
                self.after[s] = max(self.after[s], back_again + back[o] + self.after[o])
        for s in reversed(range(num)):
            beyond = max((sum(self.transfer_seconds(s, d)) + self.trip[d] for d in pipeline.outputs[s]), default=0.0)
            self.trip[s] = stages[s].forward_seconds + beyond + back[s]
            self.hold[s] = stages[s].forward_seconds + beyond + whole[s]

    def transfer_seconds(self, src: int, dst: int) -> tuple[float, float]:
        """Seconds of a transfer there and of one back; 0 on one pp rank."""
        if self.pp_rank_of_stage[src] == self.pp_rank_of_stage[dst]:
            return 0.0, 0.0
        edge = self.pipeline.edge_between[src, dst]
        return edge.forward_seconds, edge.backward_seconds

    def rest(self, stages: Sequence[int]) -> float:
        """Least seconds from the end of the last computation of some stages to the end of the step."""
        return 0.0 if self.can_split else min(self.after[stage] for stage in stages)

    def busy_seconds(self, stages: Sequence[int], num_microbatches: int) -> float:
        """The bound by the work of a pp rank, or of its stages that begin latest."""
        by_head = sorted(stages, key=lambda stage: self.head[stage])
        return max(
            self.head[by_head[first]]
            + num_microbatches * sum(self.work[stage] for stage in by_head[first:])
            + self.rest(by_head[first:])
            for first in range(len(by_head))
        )

    def kept_seconds(self, stages: Sequence[int], limit: float, num_microbatches: int) -> float:
        """The bound by the bytes of a pp rank times the seconds for which it keeps them."""
        kept = sum(self.pipeline.stages[stage].activation_bytes * self.hold[stage] for stage in stages)
        if not kept:
            return 0.0
        if not limit:
            return math.inf
        return min(self.head[stage] for stage in stages) + num_microbatches * kept / limit + self.rest(stages)

    def link_seconds(self, num_microbatches: int) -> float:
        """The bound by the channels and the shared links."""
        best, links = 0.0, dict[str, tuple[float, float, float]]()  # before, busy, after
        for edge in self.pipeline.edges:
            if self.pp_rank_of_stage[edge.src] == self.pp_rank_of_stage[edge.dst]:
                continue
            forward = self.pipeline.stages[edge.src].forward_seconds
            there = self.head[edge.src] + forward, self.trip[edge.dst] + self.after[edge.dst]
            back = self.head[edge.dst] + self.trip[edge.dst], self.back[edge.src] + self.after[edge.src]
            for (before, after), seconds, loads in (
                (there, edge.forward_seconds, edge.forward_loads),
                (back, edge.backward_seconds, edge.backward_loads),
            ):
                best = max(best, before + num_microbatches * seconds + after)
                for link, busy in loads:
                    if busy:
                        first, total, last = links.get(link, (before, 0.0, after))
                        links[link] = min(first, before), total + busy, min(last, after)
        return max([best, *(first + num_microbatches * total + last for first, total, last in links.values())])
