"""Parameters as DTensors over (row, col), and the sums that their gradients need."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..grid import Grid
from ..grid.cuts import chunk_spans

#: Decorates functions that torch.compile must call instead of trace: they exchange messages with other ranks. It is
#: ``torch.compiler.disable``, which would import the compiler at once.
not_compiled = torch._disable_dynamo


def shard_parameter(value: torch.Tensor, grid: Grid, row_dim: int | None, col_dim: int | None) -> nn.Parameter:
    """A parameter that this rank holds a part of.

    Args:
        value: the whole value, the same on all ranks; on the meta device, the result is there too.
        row_dim, col_dim: dims that are cut over the rows and the columns of the grid, by the rule of ``torch.chunk``;
            None: each row, or column, holds a replica.

    Returns:
        A DTensor on ``grid.weight_mesh`` with the shape of ``value``.
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


def local_of(parameter: Any) -> torch.Tensor:
    """The part of a parameter that this rank holds. Autograd passes its gradient on to the parameter."""
    local: torch.Tensor = parameter.to_local()
    return local


def gradient_axes(grid: Grid, *, is_vector: bool) -> tuple[Any, ...]:
    """The axes over which a gradient is summed.

    Args:
        is_vector: the parameter is replicated over the rows of the grid too, as biases and norms are.
    """
    return (grid.along("row"), grid.along("depth")) if is_vector else (grid.along("depth"),)
