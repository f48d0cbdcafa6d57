"""Stages that take a given time: they sleep in place of computing, and give tensors of the right shape."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from reshard.runtime.cpu.weight_grad_store import later_tasks
from reshard.scheduler import Pipeline

_LATE_SECONDS = 3e-4


class TimedStage(torch.nn.Module):
    """A stage that sleeps for what its pipeline says it computes; what its tensors hold means nothing.

    The devices of a stage wait for each other before each forward and backward, as the collectives of tensor
    parallelism or of sharded data parallelism make them.

    Args:
        pipeline: with tensors on its edges. stage: which. rank: whose shards it gives. group: the ranks of the stage.
    """

    def __init__(self, pipeline: Pipeline, stage: int, rank: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.costs = pipeline.stages[stage]
        self.weight = torch.nn.Parameter(torch.zeros(()))
        outgoing = [edge for edge in pipeline.edges if edge.src == stage]
        self.outputs = {
            str(spec.name): torch.zeros(spec.src_shards.local_shape(rank), dtype=getattr(torch, spec.dtype))
            for edge in outgoing
            for spec in edge.tensors
        }
        if not outgoing:
            self.outputs = {"loss": torch.zeros(())}

    def forward(self, **inputs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Sleep for the forward's seconds."""
        made = _Timed.apply(self, self.weight, *inputs.values())
        return dict(zip(self.outputs, made, strict=True))

    def meet(self) -> None:
        """Wait for the other devices of the stage."""
        dist.all_reduce(torch.zeros(1), group=self.group)


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stage: TimedStage, weight: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.stage, ctx.tasks = stage, later_tasks()
        stage.meet()
        ctx.inputs = [torch.empty_like(array, device="meta") for array in inputs]
        sleep_exactly(stage.costs.forward_seconds)
        return tuple(array.detach() for array in stage.outputs.values())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        costs = ctx.stage.costs
        ctx.stage.meet()
        sleep_exactly(costs.input_grad_seconds)
        if ctx.tasks is None:
            sleep_exactly(costs.weight_grad_seconds)
        else:
            ctx.tasks.append(lambda: sleep_exactly(costs.weight_grad_seconds))
        # not zeros: filling megabytes takes time that no computation of this stage accounts for
        return None, None, *(torch.empty(array.shape, dtype=array.dtype) for array in ctx.inputs)


def sleep_exactly(seconds: float) -> None:
    """Sleep, and wake in time: a sleep is late by 0.1 to 0.3 ms, so the last of it is spent looking at the clock."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(max(0.0, left - _LATE_SECONDS))
