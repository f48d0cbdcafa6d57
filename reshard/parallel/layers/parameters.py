"""Parameters as DTensors over (row, col), and the axes over which their gradients are summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reshard.errors import ArgumentError

from ..grid import Grid
from ..grid.cuts import chunk_spans


class OnGrid(nn.Module):
    """A module with parameters on a grid."""

    def declare(self, prefix: str = "") -> None:
        """Declare the sums of gradients; again after parameters were replaced. ``prefix``: path, for errors."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copy the module. Copies of parameters have no hooks, so sums are declared again."""
        super().__setstate__(state)
        self.declare()


def shard_parameter(value: torch.Tensor, grid: Grid, row_dim: int | None, col_dim: int | None) -> nn.Parameter:
    """Shard a parameter over the rows and the columns of a grid.

    Args:
        value: the whole value, the same on all ranks. If it is on the meta device, so is the result.
        row_dim, col_dim: tensor dims that are sharded over the rows and over the columns of the grid, by the rule of
            ``torch.chunk``; None: replicated over them.

    Returns:
        A DTensor on ``grid.weight_mesh`` with the global shape of ``value``. This rank copies only its own shard.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local = value.detach()
    placements: list[Any] = []
    for dim, parts, index in ((row_dim, grid.rows, grid.row), (col_dim, grid.cols, grid.col)):
        if dim is None:
            placements.append(Replicate())
            continue
        lo, hi = chunk_spans(value.shape[dim], parts)[index]
        local = local.narrow(dim, lo, hi - lo)
        placements.append(Shard(dim))
    made = DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format),
        grid.weight_mesh,
        placements,
        run_check=False,
        shape=value.shape,
        stride=torch.empty(value.shape, device="meta").stride(),
    )
    return nn.Parameter(made, requires_grad=getattr(value, "requires_grad", True))


def check_integers(values: torch.Tensor, what: str) -> None:
    """Raise ArgumentError unless values that name entries or classes are integers. ``what``: begins the text."""
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ArgumentError(f"{what} of {values.dtype}; they must be integers")


def local_of(parameter: Any) -> torch.Tensor:
    """The local shard of a parameter. Autograd passes the gradient of the shard on to the parameter."""
    local: torch.Tensor = parameter.to_local()
    if local.requires_grad:
        # From a transposed gradient of an uneven shard, autograd of torch 2.11 makes one of the whole parameter.
        local.register_hook(_order_strides)
    return local


def _order_strides(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.numel():
        return gradient.contiguous()
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)  # contiguous() keeps the strides


def gradient_axes(grid: Grid, *, is_replicated_over_rows: bool) -> tuple[Any, ...]:
    """The axes over which the gradient of a parameter is summed: those over which the parameter is replicated.

    Args:
        is_replicated_over_rows: whether the parameter is replicated over the rows of the grid, as biases and norms are,
            and not only over its depth.
    """
    return (grid.along("row"), grid.along("depth")) if is_replicated_over_rows else (grid.along("depth"),)
