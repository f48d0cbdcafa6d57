"""LayerNorm and RMSNorm of features that are sharded over the columns of a grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.gradients.declared_sums import declare_sums
from reshard.public_api import not_compiled

from ..grid import Grid
from ..grid.cuts import chunk_spans, size_of
from .derivatives import once_differentiable
from .parameters import OnGrid, gradient_axes, local_of, shard_parameter


class _Norm(OnGrid):
    """Base of LayerNorm and RMSNorm.

    Args:
        weight, bias: whole parameters ``[features]``, or None.
        eps: added to the variance; None: the machine epsilon of the dtype of the input.

    Attributes:
        centers: whether the norm subtracts the mean.
    """

    centers = True

    def __init__(self, weight: Any, bias: Any, features: int, eps: float | None, grid: Grid) -> None:
        super().__init__()
        self.grid, self.features, self.eps = grid, features, eps
        self.weight = None if weight is None else shard_parameter(weight, grid, None, 0)
        self.bias = None if bias is None else shard_parameter(bias, grid, None, 0)
        self.declare()

    def declare(self, prefix: str = "") -> None:
        """Declare over which axes to sum gradients. Call this again after replacing parameters.

        Args:
            prefix: path of this module, for errors.
        """
        axes = gradient_axes(self.grid, is_replicated_over_rows=True)
        declare_sums(self, {"weight": axes, "bias": axes}, prefix)

    @not_compiled
    @check_arguments()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize ``[batch, ..., features of this column]`` over all features, at least in float32.

        Raises:
            ArgumentError: the last dim has another size than the features of this column.
        """
        span = chunk_spans(self.features, self.grid.cols)[self.grid.col]
        if not x.dim() or x.shape[-1] != size_of(span) or not x.is_floating_point():
            raise ArgumentError(
                f"a norm of {self.features} features got {x.dtype} of shape {list(x.shape)} on column {self.grid.col} "
                f"of {self.grid}, not floating-point values with {size_of(span)} features"
            )
        weight, bias = (None if item is None else local_of(item) for item in (self.weight, self.bias))
        y = _Normalize.apply(x, weight, bias, self)
        return y.to(x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype))

    def extra_repr(self) -> str:
        """Sizes and the grid."""
        return f"{self.features}, eps={self.eps}, grid={self.grid}"


class LayerNorm(_Norm):
    """``nn.LayerNorm`` over the last dim. It subtracts the mean before it sums squares, to keep precision."""

    @check_arguments()
    def __init__(self, norm: nn.LayerNorm, grid: Grid) -> None:
        super().__init__(norm.weight, norm.bias, norm.normalized_shape[-1], norm.eps, grid)


class RMSNorm(_Norm):
    """``nn.RMSNorm`` over the last dim, or ``LlamaRMSNorm`` of ``transformers``."""

    centers = False

    @check_arguments()
    def __init__(self, norm: nn.Module, grid: Grid) -> None:
        if not isinstance(getattr(norm, "weight", ()), (torch.Tensor, type(None))):
            raise ArgumentError(f"norm is a {type(norm).__name__}; an RMSNorm has a weight, or None")
        eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
        features = norm.normalized_shape[-1] if norm.weight is None else norm.weight.shape[-1]
        super().__init__(norm.weight, None, features, eps, grid)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, norm: _Norm) -> Any:
        columns = norm.grid.along("col")
        centered = x.to(torch.promote_types(x.dtype, torch.float32))
        if norm.centers:
            centered = centered - columns.sum(centered.sum(-1, keepdim=True)) / norm.features
        variance = columns.sum(centered.square().sum(-1, keepdim=True)) / norm.features
        scale = torch.rsqrt(variance + (torch.finfo(x.dtype).eps if norm.eps is None else norm.eps))
        normalized = centered * scale
        ctx.save_for_backward(normalized, scale, weight)
        ctx.norm, ctx.has_bias, ctx.dtype = norm, bias is not None, x.dtype
        y = normalized if weight is None else normalized * weight
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        normalized, scale, weight = ctx.saved_tensors
        norm: _Norm = ctx.norm
        dims = tuple(range(gradient.dim() - 1))
        weight_gradient = None if weight is None else (gradient * normalized).sum(dims).to(weight.dtype)
        bias_gradient = gradient.sum(dims).to(weight.dtype) if ctx.has_bias else None
        scaled = gradient if weight is None else gradient * weight
        sums = torch.stack([(scaled * normalized).sum(-1, keepdim=True), scaled.sum(-1, keepdim=True)])
        product_sum, plain_sum = norm.grid.along("col").sum(sums) / norm.features
        x_gradient = scaled - normalized * product_sum
        if norm.centers:
            x_gradient = x_gradient - plain_sum
        return (x_gradient * scale).to(ctx.dtype), weight_gradient, bias_gradient, None
