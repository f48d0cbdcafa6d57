"""The all-reduce of the gradients of a model on a grid, once per step."""

from __future__ import annotations

import hashlib

import torch

from reshard.arguments import check_arguments
from reshard.errors import DisagreementError
from reshard.gradients.declared_sums import CHECK_EVERY, axes_left, check_interval, declared_sums, sum_gradients
from reshard.runtime.torch_compat import local_of

from .grid.grid_axis import Axis
from .grid.sum_agreement import SumAgreement, SumCall


@check_arguments()
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
        DisagreementError: replicas differ, on all ranks of the grid; some ranks froze a parameter; or other ranks along
            depth enter :func:`sync_during_backward`, or pass another model.
        RemoteError: a rank failed, or did not call it within the time-out of the grid.
    """
    check_interval(check_every)
    for _, parameter, axes in declared_sums(model):
        depth = next((item for item in axes_left(parameter, axes) if item.name == "depth"), None)
        if isinstance(depth, Axis):
            SumAgreement.of(depth, parameter.device).agree(SumCall.SUM, hash_of_sums(model))
            break
    sync_gradients_of(model, check_every)


def hash_of_sums(model: torch.nn.Module) -> int:
    """A 63-bit hash of the names, shapes and dtypes of the gradients that are summed, equal along depth."""
    sums = [
        (name, tuple(local_of(declared_sum).shape), str(declared_sum.dtype))
        for name, declared_sum, _ in declared_sums(model)
    ]
    return int.from_bytes(hashlib.sha256(repr(sums).encode()).digest()[:8], "big") >> 1


def sync_gradients_of(model: torch.nn.Module, check_every: int) -> None:
    """:func:`sync_gradients`, where all ranks along depth are known to call it."""
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
