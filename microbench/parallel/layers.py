"""The linear layers that the benchmarks run, and what a rank receives in one step of them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import nn

from reshard.parallel import Grid, Linear, sync_during_backward, sync_gradients
from reshard.parallel.grid.cuts import batch_spans, chunk_spans, size_of
from reshard.parallel.products.dataflow import PANEL_WIDTH, LayerProducts, ProductShape


@dataclass(frozen=True)
class GridShape:
    """A grid of ``rows`` x ``cols`` x ``depth`` ranks."""

    rows: int
    cols: int
    depth: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rows * self.cols * self.depth

    @classmethod
    def parse(cls, text: str) -> GridShape:
        """A shape from ``rows,cols,depth``."""
        rows, cols, depth = map(int, text.split(","))
        return cls(rows, cols, depth)

    def __str__(self) -> str:
        return f"[{self.rows},{self.cols},{self.depth}]"


def transformer_linears(hidden: int) -> list[tuple[int, int]]:
    """``(in, out)`` of the products of a transformer layer: fused projections, output, both of the MLP."""
    return [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]


class LinearStack(nn.Module):
    """Linear layers on a grid that each get an input of their own; a step is forward, backward and depth sums."""

    def __init__(
        self,
        grid: Grid,
        sizes: list[tuple[int, int]],
        tokens: int,
        panel: int = PANEL_WIDTH,
        keep_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Linear(nn.Linear(*size, bias=False), grid, panel=panel, keep_inputs=keep_inputs) for size in sizes
        )
        lo, hi = grid.local_rows(tokens)
        self.inputs = [
            torch.randn(hi - lo, size_of(grid.local_features(size)), requires_grad=True) for size, _ in sizes
        ]

    def run_step(self, sums_early: bool = False) -> None:
        """Forward of each layer, backward in reverse, and the sums over depth.

        Args:
            sums_early: whether gradients are summed during the backward, and not after it.
        """
        outputs = [layer(x) for layer, x in zip(self.layers, self.inputs, strict=True)]
        with sync_during_backward(self, check_every=0) if sums_early else contextlib.nullcontext():
            for x, y in zip(reversed(self.inputs), reversed(outputs), strict=True):
                y.backward(torch.ones_like(y))
                x.grad = None
        if not sums_early:
            sync_gradients(self, check_every=0)
        self.zero_grad()


def received_per_rank(shape: GridShape, sizes: list[tuple[int, int]], tokens: int) -> list[int]:
    """Elements that each rank receives in a step by the formulas, ranks in the order (depth, row, col)."""
    result = []
    for layer_spans in batch_spans(tokens, shape.depth, shape.rows):
        per_row = tuple(map(size_of, layer_spans))
        for row in range(shape.rows):
            for col in range(shape.cols):
                result.append(sum(_received(shape, size, per_row, row, col) for size in sizes))
    return result


def layer_products(
    shape: GridShape, size: tuple[int, int], tokens: tuple[int, ...], keep_inputs: bool = False
) -> LayerProducts:
    """The products of a layer of ``(in, out)`` features, with the tokens of each row of the grid."""
    large = tuple(map(size_of, chunk_spans(max(size), shape.cols)))
    return LayerProducts(ProductShape(min(size), large, shape.rows), tokens, size[0] < size[1], keep_inputs)


def _received(shape: GridShape, size: tuple[int, int], tokens: tuple[int, ...], row: int, col: int) -> int:
    products = layer_products(shape, size, tokens)
    total = sum(int(received[row, col]) for received in products.received(products.dataflows))
    gradient = size_of(products.shape.p_rows[row]) * products.shape.q[col]
    return total + 2 * (shape.depth - 1) * gradient // shape.depth
