"""Cross-entropy of logits that are cut over the columns of a grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.public_api import not_compiled

from ..grid import Grid
from ..grid.cuts import chunk_spans, size_of
from .derivatives import once_differentiable
from .parameters import check_integers


class CrossEntropy(nn.Module):
    """The mean cross-entropy over all tokens of a batch, the same on every rank of a grid.

    The backward computes gradients of this rank's tokens alone, so gradients must be summed, not averaged, over the
    grid.

    Args:
        grid: the grid.
        num_classes: global size of the last dim of the logits.
        ignore_index: targets with this value do not count.
    """

    @check_arguments(num_classes=(1, 2**40))
    def __init__(self, grid: Grid, num_classes: int, ignore_index: int = -100) -> None:
        super().__init__()
        self.grid, self.num_classes, self.ignore_index = grid, num_classes, ignore_index

    @not_compiled
    @check_arguments(count=(0, 2**53))
    def forward(
        self, logits: torch.Tensor, targets: torch.Tensor, count: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean loss; NaN if all targets are ``ignore_index``, as in torch.

        Args:
            logits: ``[batch, ..., classes_j]``.
            targets: ``[batch, ...]``, of this rank's rows.
            count: divisor of the summed losses; default: the number of targets other than ``ignore_index``.

        Raises:
            ArgumentError: the shapes do not fit, or a target of any rank is not a class.
        """
        span = chunk_spans(self.num_classes, self.grid.cols)[self.grid.col]
        check_integers(targets, "a CrossEntropy got targets")
        if not logits.dim() or logits.shape[-1] != size_of(span) or logits.shape[:-1] != targets.shape:
            raise ArgumentError(
                f"logits of shape {list(logits.shape)} and targets of shape {list(targets.shape)} do not fit; column "
                f"{self.grid.col} holds {size_of(span)} of {self.num_classes} classes"
            )
        flat = targets.reshape(-1)
        counted = flat != self.ignore_index
        bad = counted & ((flat < 0) | (flat >= self.num_classes))
        losses = _TokenLosses.apply(logits.flatten(0, -2), flat, counted, span, self.grid)
        own = losses.sum()
        counts = (item.sum().to(own.dtype) for item in (counted, bad))
        total, num_counted, num_bad = _SumOverRows.apply(torch.stack([own, *counts]), self.grid)
        if num_bad:
            which = f"target {int(flat[bad][0])}" if bool(bad.any()) else "a target of another rank"
            raise ArgumentError(f"{which} is not one of the {self.num_classes} classes")
        return total / (num_counted if count is None else count)

    def sum_over_batch(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a scalar over the ranks that hold different rows of the batch."""
        return _sum_over_rows(value, self.grid)


def _sum_over_rows(value: torch.Tensor, grid: Grid) -> torch.Tensor:
    return grid.along("depth").sum(grid.along("row").sum(value))


class _SumOverRows(torch.autograd.Function):
    """The sum over (depth, row). The backward passes the gradient on to this rank's values unchanged."""

    @staticmethod
    def forward(ctx: Any, value: Any, grid: Grid) -> Any:
        return _sum_over_rows(value, grid)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _TokenLosses(torch.autograd.Function):
    """The loss of each token of this rank's rows; 0 for targets that do not count."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any, counted: Any, span: Any, grid: Grid) -> Any:
        columns = grid.along("col")
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        local_max = values.amax(1) if values.shape[1] else values.new_full((len(values),), -torch.inf)
        shifted = values - columns.max(local_max)[:, None]
        held = counted & (targets >= span[0]) & (targets < span[1])
        index = (targets - span[0]).where(held, 0)[:, None]
        chosen = shifted.gather(1, index)[:, 0].where(held, 0) if values.shape[1] else torch.zeros_like(local_max)
        exponents = shifted.exp()
        total, target = columns.sum(torch.stack([exponents.sum(1), chosen]))
        ctx.save_for_backward(exponents / total[:, None], index, held, counted)
        ctx.dtype = logits.dtype
        return (total.log() - target).where(counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, index, held, counted = ctx.saved_tensors
        if not probabilities.shape[1]:
            return probabilities.to(ctx.dtype), None, None, None, None
        result = probabilities.scatter_add(1, index, -held.to(probabilities.dtype)[:, None])
        scale = gradients[0].where(counted, 0)
        return (result * scale[:, None]).to(ctx.dtype), None, None, None, None
