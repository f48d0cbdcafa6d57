"""Sum the gradients of a model on a grid, once per step."""

from __future__ import annotations

import torch

from reshard.errors import DisagreementError
from reshard.runtime.gradient_sums import CHECK_EVERY, check_interval, sum_gradients


def sync_gradients(model: torch.nn.Module, *, check_every: int = CHECK_EVERY) -> None:
    """Sum each gradient over the ranks that hold parts of it. All ranks call it, after the last backward of a step.

    Weights are summed over depth; biases, norms and positions over depth and row. The loss is that of the whole batch,
    so gradients add up and are not averaged. A gradient that only some ranks have counts as zero on the others. An
    optimizer that reads a gradient before its sum raises an error. Where
    ``fully_shard(model, mesh=grid.device_mesh["depth"])`` sums over depth, only the sums over row are left.

    Args:
        model: a model, or a stage, that :func:`parallelize` has cut.
        check_every: compare replicas of gradients and parameters in the first step, and then once in this many steps;
            0: never.

    Raises:
        ArgumentError: a gradient was summed before in this step, on this rank or another.
        DisagreementError: replicas differ, on all ranks of the grid; or some ranks froze a parameter.
    """
    check_interval(check_every)
    step = getattr(model, "_reshard_steps", 0)
    object.__setattr__(model, "_reshard_steps", step + 1)
    is_checked = check_every > 0 and step % check_every == 0
    error: DisagreementError | None = None
    try:
        sum_gradients(model, check_replicas=is_checked)
    except DisagreementError as found:
        error = found
    grid = getattr(model, "reshard_grid", None)
    if is_checked and grid is not None:  # so that all ranks raise
        failed = torch.tensor([error is not None], device=grid.device_mesh.device_type).int()
        if bool(grid.along("depth").max(grid.along("layer").max(failed))) and error is None:
            error = DisagreementError(f"replicas of a gradient or a value differ on other ranks of {grid}")
    if error is not None:
        raise error
