"""Linear layers on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.formatting import brief
from reshard.gradients.declared_sums import declare_sums
from reshard.gradients.weight_grad_store import WeightGradStore, weight_grad_store
from reshard.public_api import not_compiled

from ..grid import Grid
from ..grid.cuts import chunk_spans, size_of
from ..products.dataflow import PANEL_WIDTH, LayerProducts, ProductShape
from ..products.multiply import Activation, Product, Steps, run_together
from .derivatives import once_differentiable
from .parameters import OnGrid, gradient_axes, local_of, shard_parameter


class Linear(OnGrid):
    """``y = x Wᵀ + b`` with the tokens of x and y sharded over (depth, row), and their features over col.

    ``forward`` maps ``[batch, ..., in_j]`` to ``[batch, ..., out_j]``, where ``in_j`` is column j's part of
    ``in_features`` by the rule of ``torch.chunk``. If ``x`` needs no gradient, it may also have all ``in_features``.

    Args:
        linear: the layer with the whole weight, ``[out_features, in_features]``.
        grid: the grid.
        cut_rows: dim of the weight that is cut over the rows of the grid, "in" or "out"; default: the smaller dim. If
            both are equal: "out", because both products of the backward then share an all-gather. The other dim is cut
            over columns. The activation that has the dim ``cut_rows``, x or y, moves along grid rows.
        panel: largest number of elements of the dim ``cut_rows`` that move at a time; bounds the memory of a product.
        keep_inputs: keep what the forward gathers of the input until the backward, which then does not gather it again.
            With ``cut_rows="in"``, this takes the memory of the whole input of a grid row.
    """

    @check_arguments(panel=(1, 2**40))
    def __init__(
        self,
        linear: nn.Linear,
        grid: Grid,
        cut_rows: str | None = None,
        panel: int = PANEL_WIDTH,
        keep_inputs: bool = False,
    ) -> None:
        super().__init__()
        if cut_rows not in (None, "in", "out"):
            raise ArgumentError(f'cut_rows is {brief(cut_rows)}; it must be "in" or "out"')
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.grid, self.panel, self.keep_inputs = grid, panel, keep_inputs
        smaller = "in" if self.in_features < self.out_features else "out"
        self.rows_shard_input = (cut_rows or smaller) == "in"
        row_dim = 1 if self.rows_shard_input else 0
        self.weight = shard_parameter(linear.weight, grid, row_dim, 1 - row_dim)
        self.bias = None if linear.bias is None else shard_parameter(linear.bias, grid, None, 0)
        self.declare()

    def declare(self, prefix: str = "") -> None:
        """Declare the sums of gradients; again after parameters were replaced. ``prefix``: path, for errors."""
        declare_sums(
            self,
            {
                "weight": gradient_axes(self.grid, is_replicated_over_rows=False),
                "bias": gradient_axes(self.grid, is_replicated_over_rows=True),
            },
            prefix,
        )

    @check_arguments()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, ..., in_j]`` to ``[batch, ..., out_j]``."""
        return multiply([self], x)[0]

    def extra_repr(self) -> str:
        """Sizes and the grid."""
        return f"in_features={self.in_features}, out_features={self.out_features}, grid={self.grid}"


@not_compiled
def multiply(layers: Sequence[Linear], x: torch.Tensor) -> list[torch.Tensor]:
    """Apply several layers to the same input, which moves only once. Several layers must all have ``cut_rows="in"``.

    An input that needs no gradient, such as a batch, may have the features of all columns.

    Raises:
        ArgumentError: the input does not fit, or the layers cut different dims.
    """
    first = layers[0]
    grid = first.grid
    if x.dim() < 2 or not x.is_floating_point():
        raise ArgumentError(
            f"a Linear on a grid got an input of shape {list(x.shape)} and {x.dtype}; it must be "
            "[batch, ..., features] of a floating-point dtype"
        )
    cols = chunk_spans(first.in_features, grid.cols)
    start, stop = cols[grid.col]
    if not x.requires_grad and x.shape[-1] == first.in_features:  # a batch, which is the same on all columns
        x = x[..., start:stop]
    if x.shape[-1] != stop - start:
        raise ArgumentError(
            f"the input of a Linear of {first.in_features} features has {x.shape[-1]} on column {grid.col} of {grid}, "
            f"not {stop - start}; pass only those of grid.local_features({first.in_features})"
        )
    if len(layers) > 1 and not all(
        layer.rows_shard_input and layer.in_features == first.in_features for layer in layers
    ):
        raise ArgumentError('layers that share their input need the same in_features and cut_rows="in"')
    outs = [[size_of(span) for span in chunk_spans(layer.out_features, grid.cols)] for layer in layers]
    if first.rows_shard_input:
        shape = ProductShape(first.in_features, tuple(map(sum, zip(*outs, strict=True))), grid.rows, first.panel)
    else:
        shape = ProductShape(first.out_features, tuple(map(size_of, cols)), grid.rows, first.panel)
    dtype = _autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    products = LayerProducts(shape, grid.tokens_of(x), first.rows_shard_input, first.keep_inputs)
    call = _Call(Product(grid, shape), products, layers, weight_grad_store())
    locals_ = [local_of(layer.weight) for layer in layers]
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in locals_)
    if call.store is not None and is_trained:
        anchor = None if x.requires_grad else torch.empty(0, requires_grad=True)
        locals_ = [tensor.detach() for tensor in locals_]
    else:
        anchor, call.store = None, None
    weights = [tensor.to(x.dtype) for tensor in locals_]
    flat = _Multiply.apply(x.flatten(0, -2), anchor, call, *weights)
    results = flat.split([out[grid.col] for out in outs], dim=1)
    return [
        _add_bias(layer, result).view(*x.shape[:-1], result.shape[1])
        for layer, result in zip(layers, results, strict=True)
    ]


def _add_bias(layer: Linear, y: torch.Tensor) -> torch.Tensor:
    return y if layer.bias is None else y + local_of(layer.bias).to(y.dtype)


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


@dataclass(eq=False)
class _Call:
    """One forward of layers that share an input.

    Attributes:
        store: collects deferred weight-gradient passes; None: the backward computes weight gradients.
    """

    product: Product
    products: LayerProducts
    layers: Sequence[Linear]
    store: WeightGradStore | None

    @property
    def rows_shard_input(self) -> bool:
        """Whether P is the input dim."""
        return self.products.rows_shard_input

    def matrix(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """``W[P_i, Q_j]`` of all layers."""
        if not self.rows_shard_input:
            return weights[0]
        return (weights[0] if len(weights) == 1 else torch.cat(list(weights))).t()

    def output(self, x: Activation, weights: Sequence[torch.Tensor]) -> Steps:
        """The output."""
        multiply_forward = self.product.contract_p if self.rows_shard_input else self.product.contract_q
        keeps_weight = self.products.dataflows.forward
        return multiply_forward(x, self.matrix(weights), self.products.tokens, keeps_weight=keeps_weight)

    def input_gradient(self, gradient: Activation, weights: Sequence[torch.Tensor]) -> Steps:
        """The gradient of the input."""
        multiply_back = self.product.contract_q if self.rows_shard_input else self.product.contract_p
        keeps_weight = self.products.dataflows.input_gradient
        return multiply_back(gradient, self.matrix(weights), self.products.tokens, keeps_weight=keeps_weight)

    def weight_gradient(self, x: Activation, gradient: Activation) -> Steps:
        """The gradient of the local weights, not summed over depth, for :meth:`split`."""
        first, second = (x, gradient) if self.rows_shard_input else (gradient, x)
        keeps_weight = self.products.dataflows.weight_gradient
        return self.product.contract_tokens(first, second, self.products.tokens, keeps_weight=keeps_weight)

    def split(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Split a gradient of all layers into the gradient of each layer's local weight."""
        if not self.rows_shard_input:
            return [gradient]
        return list(gradient.t().split([local_of(layer.weight).shape[0] for layer in self.layers]))


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, anchor: Any, call: _Call, *weights: Any) -> Any:
        has_weight_pass = call.store is not None or any(ctx.needs_input_grad[3:])
        is_kept = has_weight_pass and call.products.shares_input(call.products.dataflows)
        given = Activation(x, readers=1 + is_kept)
        result = run_together(call.output(given, weights))[0]
        ctx.call, ctx.kept = call, tuple(given.gathered)
        ctx.save_for_backward(x, *weights, *given.gathered.values())
        call.layers[0].grid.open_calls.add(call)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        call: _Call = ctx.call
        call.product.check_grid()
        x, *saved = ctx.saved_tensors
        weights, kept = saved[: len(call.layers)], saved[len(call.layers) :]
        given = Activation(x.detach(), gathered=dict(zip(ctx.kept, kept, strict=True)))
        has_weight_pass = call.store is None and any(ctx.needs_input_grad[3:])
        shares = has_weight_pass and ctx.needs_input_grad[0] and call.products.shares_gradient(call.products.dataflows)
        local = gradients[0].contiguous()
        gradient = Activation(local, readers=1 + shares)
        products = [call.input_gradient(gradient, weights)] if ctx.needs_input_grad[0] else []
        if has_weight_pass:
            products.append(call.weight_gradient(given, gradient))
        results = run_together(*products)
        x_gradient = results.pop(0) if ctx.needs_input_grad[0] else None
        weight_gradients = call.split(results[0]) if results else [None] * len(weights)
        if call.store is not None:
            call.store.add(lambda: _accumulate(call, given, local), (given.local, local))
        call.layers[0].grid.open_calls.discard(call)
        return x_gradient, None, None, *weight_gradients


def _accumulate(call: _Call, x: Activation, gradient: torch.Tensor) -> None:
    """Compute the deferred weight gradient. Autograd adds it to that of other uses of the parameter."""
    call.product.check_grid()
    (whole,) = run_together(call.weight_gradient(x, Activation(gradient)))
    for layer, weight_gradient in zip(call.layers, call.split(whole), strict=True):
        if layer.weight.requires_grad:
            with torch.enable_grad():
                local = local_of(layer.weight)
            torch.autograd.backward([local], [weight_gradient.to(local.dtype)])
