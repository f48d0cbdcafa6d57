"""Pipeline stages that sleep instead of computing and return tensors of the right shape."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from reshard.gradients.weight_grad_store import later_tasks
from reshard.scheduler import Pipeline, StageOutput

#: Largest oversleep of ``time.sleep``; usual values are 0.1 to 0.3 ms.
_OVERSLEEP_SECONDS = 3e-4


class TimedStage(torch.nn.Module):
    """A stage that sleeps for the costs given by its pipeline. The values of its tensors are meaningless.

    The devices of a stage wait for each other before each forward and backward, as in the collectives of tensor or
    sharded data parallelism.

    Args:
        pipeline: the pipeline, with tensors on its edges.
        stage: index of this stage.
        rank: the rank whose shards the stage returns.
        group: process group of the stage's ranks.
    """

    def __init__(self, pipeline: Pipeline, stage: int, rank: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.costs = pipeline.stages[stage]
        self.weight = torch.nn.Parameter(torch.zeros(()))
        outgoing = [edge for edge in pipeline.edges if edge.src == stage]
        self.outputs = {
            str(spec.name): torch.zeros(spec.src_tiles.local_shape(rank), dtype=getattr(torch, spec.dtype))
            for edge in outgoing
            for spec in edge.tensors
        }
        self.returns_loss = not outgoing
        if self.returns_loss:
            self.outputs["loss"] = torch.zeros(())

    def forward(self, **inputs: torch.Tensor) -> Mapping[str, torch.Tensor] | StageOutput:
        """Sleep for ``forward_seconds`` and return the outputs, or the loss."""
        made = _Timed.apply(self, self.weight, *inputs.values())
        return StageOutput(loss=made[0]) if self.returns_loss else dict(zip(self.outputs, made, strict=True))

    def synchronize(self) -> None:
        """Wait for the other devices of the stage."""
        dist.all_reduce(torch.zeros(1), group=self.group)


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stage: TimedStage, weight: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.stage, ctx.tasks = stage, later_tasks()
        stage.synchronize()
        ctx.inputs = [torch.empty_like(array, device="meta") for array in inputs]
        sleep_exactly(stage.costs.forward_seconds)
        return tuple(array.detach() for array in stage.outputs.values())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        costs = ctx.stage.costs
        ctx.stage.synchronize()
        sleep_exactly(costs.input_grad_seconds)
        if ctx.tasks is None:
            sleep_exactly(costs.weight_grad_seconds)
        else:
            ctx.tasks.append(lambda: sleep_exactly(costs.weight_grad_seconds))
        # empty, not zeros: filling megabytes would take time that is not part of the stage's costs
        return None, None, *(torch.empty(array.shape, dtype=array.dtype) for array in ctx.inputs)


def sleep_exactly(seconds: float) -> None:
    """Sleep until shortly before the deadline, then poll the clock, because ``time.sleep`` returns late."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(max(0.0, left - _OVERSLEEP_SECONDS))
