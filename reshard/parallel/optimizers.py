"""Refuse optimizers that fail on DTensors, the parameters of a grid, and optimizer state that cannot change grids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from reshard.errors import ArgumentError

#: State in which an update is linear. By contrast, an update divides by the root of second moments.
_LINEAR_STATE = ("exp_avg", "momentum_buffer")
#: Optimizers that torch cannot run on DTensors.
_WITHOUT_DTENSORS = ("Adafactor", "Rprop")
#: Optimizers whose fused kernels torch cannot run on DTensors.
_WITHOUT_FUSED = ("Adagrad", "SGD")
_is_hooked = False


def watch_optimizers() -> None:
    """From now on, refuse the step of an optimizer that torch cannot run on parameters of a grid."""
    global _is_hooked  # noqa: PLW0603 the hook of torch is global as well
    if not _is_hooked:
        register_optimizer_step_pre_hook(lambda optimizer, *_: check_optimizer(optimizer))
        _is_hooked = True


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError if torch cannot run an optimizer on its parameters because they are DTensors of a grid."""
    for group in optimizer.param_groups:
        problem = _find_problem(optimizer, group)
        if problem is not None and any(map(is_on_grid, group["params"])):
            raise ArgumentError(
                f"{problem} does not work on DTensors, and the parameters of a model on a grid are DTensors; use "
                "another optimizer, such as AdamW"
            )


def _find_problem(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim"):
            if kind.__name__ in _WITHOUT_DTENSORS:
                return f"torch.optim.{kind.__name__}"
            if kind.__name__ in _WITHOUT_FUSED and group.get("fused"):
                return f"torch.optim.{kind.__name__} with fused=True"
    return None


def check_state(optimizer: torch.optim.Optimizer, names: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ArgumentError if the state of an optimizer has a value that cannot move to another grid.

    A DTensor on (row, col) moves. A scalar stays as it is.

    Args:
        names: name and value of each parameter of the model.
    """
    check_optimizer(optimizer)
    for name, parameter in names:
        for key, value in optimizer.state.get(parameter, {}).items():
            if not (_is_scalar(value, parameter) or is_on_grid(value)):
                shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
                raise ArgumentError(
                    f"relayout cannot move the state {key!r} of {type(optimizer).__name__} for {name!r}, a "
                    f"{type(value).__name__}{shape}; it moves DTensors on (row, col), and keeps scalars"
                )


def is_linear(name: str) -> bool:
    """Whether an update is linear in the state named ``NUMBER.KEY``. Such an update does not amplify errors of it."""
    return name.rpartition(".")[2] in _LINEAR_STATE


def without_low_bits(values: torch.Tensor) -> torch.Tensor:
    """Floating-point values as bf16 if they are wider; other values unchanged.

    A move with compression sends state in this form if an update is not linear in it. The rounding error is at most
    0.4 %. A block codec could round small second moments to 0, and an update divides by their root.
    """
    return values.bfloat16() if values.is_floating_point() and values.itemsize > 2 else values


def is_on_grid(value: Any) -> bool:
    """Whether a value is a DTensor on the rows and columns of a grid, as parameters are."""
    mesh = getattr(value, "device_mesh", None)
    return mesh is not None and tuple(mesh.mesh_dim_names or ()) == ("row", "col")


def _is_scalar(value: Any, parameter: torch.Tensor) -> bool:
    if isinstance(value, torch.Tensor):
        is_single = value.dim() == 0 or (value.numel() == 1 and parameter.numel() > 1)
        return is_single and not hasattr(value, "placements")
    return value is None or isinstance(value, (bool, int, float, str))
