"""The three products of a linear module on one depth layer of a grid, with the cheapest dataflow for each.

The notation is that of :mod:`~reshard.parallel.products.dataflow`. All arrays are local. The rank in row i and column j
holds ``x`` as ``[m, P_j]``, ``w`` as ``[P_i, Q_j]`` and ``z`` as ``[m, Q_j]``, where m is the number of tokens of its
row. M is the number of tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from ..grid import Grid
from ..grid.collectives import Pending, ordered_sum
from ..grid.cuts import Span, intersect, size_of, total
from .dataflow import ProductKind, ProductShape, is_weight_stationary

#: A product as a generator. It yields after it starts collectives, so that another product can start its own.
Steps = Generator[None, None, torch.Tensor]


def run_together(*products: Steps) -> list[torch.Tensor]:
    """Run products so that their collectives overlap, and return the results. All ranks need the same order."""
    results: dict[int, torch.Tensor] = {}
    while len(results) < len(products):
        for number, product in enumerate(products):
            if number not in results:
                try:
                    next(product)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(products))]


class Product:
    """The products with one weight on a grid, to pass to :func:`run_together`.

    Args:
        grid: the grid.
        shape: sizes of the weight and of its panels.
    """

    def __init__(self, grid: Grid, shape: ProductShape) -> None:
        self.grid, self.shape = grid, shape
        self._row_axis, self._col_axis, self._layer = map(grid.coded, ("row", "col", "layer"))

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The local product. Benchmarks replace it to time communication alone."""
        return a @ b

    def add_product(self, total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The local product, added to ``total`` in place if there is one."""
        return self.multiply(a, b) if total is None else total.addmm_(a, b)

    def _keeps_weight(self, kind: ProductKind, tokens: Sequence[int]) -> bool:
        return is_weight_stationary(kind, self.shape, tuple(tokens))

    def contract_p(self, x: torch.Tensor, w: torch.Tensor, tokens: Sequence[int]) -> Steps:
        """``X W``: ``[m, P_j]`` to ``[m, Q_j]``. ``tokens``: number of tokens of each row of the grid."""
        if self._keeps_weight(ProductKind.CONTRACT_P, tokens):
            partial = self.multiply(self._features_of_row(x, tokens).t(), w)
            summed = self._row_axis.reduce_scatter(partial, tokens)
            yield
            return summed.wait()
        gathers = self._start_gathers(0, x, w)
        yield
        y: torch.Tensor | None = None
        for panel in range(self.shape.panels.num_panels):
            x_panel, w_panel = (each.wait() for each in gathers)
            if panel + 1 < self.shape.panels.num_panels:
                gathers = self._start_gathers(panel + 1, x, w)
            y = self.add_product(y, x_panel.t(), w_panel)
        assert y is not None
        return y

    def contract_q(self, x: torch.Tensor, w: torch.Tensor, tokens: Sequence[int]) -> Steps:
        """``X Wᵀ``: ``[m, Q_j]`` to ``[m, P_j]``."""
        if self._keeps_weight(ProductKind.CONTRACT_Q, tokens):
            every_token = self._row_axis.gather(x.contiguous(), tokens)
            yield
            return self._sum_to_columns(self.multiply(w, every_token.wait().t()), tokens)
        panels, y = self.shape.panels, x.new_empty((len(x), size_of(self.shape.p_cols[self.grid.col])))
        gathered, sums = self._gather_weight(0, w), []
        yield
        for panel in range(panels.num_panels):
            w_panel = gathered.wait()
            if panel + 1 < panels.num_panels:
                gathered = self._gather_weight(panel + 1, w)
            sums.append(self._col_axis.reduce_scatter(self.multiply(w_panel, x.t()), panels.col_sizes(panel)))
            if panel:
                _put(y.t(), panels.by_col[self.grid.col][panel - 1], sums[panel - 1])
        yield
        _put(y.t(), panels.by_col[self.grid.col][-1], sums[-1])
        return y

    def contract_tokens(self, x: torch.Tensor, z: torch.Tensor, tokens: Sequence[int]) -> Steps:
        """``Xᵀ Z``: ``[m, P_j]`` and ``[m, Q_j]`` to ``[P_i, Q_j]``. Not summed over depth."""
        if self._keeps_weight(ProductKind.CONTRACT_TOKENS, tokens):
            every_token = self._row_axis.gather(z.contiguous(), tokens)
            yield
            return self.multiply(self._features_of_row(x, tokens), every_token.wait())
        panels, gradient = self.shape.panels, z.new_empty((size_of(self.shape.p_rows[self.grid.row]), z.shape[1]))
        gathered, sums = self._gather_features(0, x), []
        yield
        for panel in range(panels.num_panels):
            x_panel = gathered.wait()
            if panel + 1 < panels.num_panels:
                gathered = self._gather_features(panel + 1, x)
            sums.append(self._row_axis.reduce_scatter(self.multiply(x_panel, z), panels.row_sizes(panel)))
            if panel:
                _put(gradient, panels.by_row[self.grid.row][panel - 1], sums[panel - 1])
        yield
        _put(gradient, panels.by_row[self.grid.row][-1], sums[-1])
        return gradient

    # Panels

    def _start_gathers(self, panel: int, x: torch.Tensor, w: torch.Tensor) -> tuple[Pending, Pending]:
        return self._gather_features(panel, x), self._gather_weight(panel, w)

    def _gather_features(self, panel: int, x: torch.Tensor) -> Pending:
        """A panel of X of this grid row, transposed: ``[panel, m]``."""
        panels = self.shape.panels
        return self._col_axis.gather(_take(x.t(), panels.by_col[self.grid.col][panel]), panels.col_sizes(panel))

    def _gather_weight(self, panel: int, w: torch.Tensor) -> Pending:
        """A panel of W of this grid column: ``[panel, Q_j]``."""
        panels = self.shape.panels
        return self._row_axis.gather(_take(w, panels.by_row[self.grid.row][panel]), panels.row_sizes(panel))

    # Weight-stationary

    def _features_of_row(self, x: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Gather the features P_i of all tokens of this depth layer: ``[P_i, M]`` from ``[m, P_j]`` of each rank."""
        shape, grid = self.shape, self.grid
        have, need = shape.p_cols[grid.col], shape.p_rows[grid.row]
        sent = [x[:, _relative(intersect(have, shape.p_rows[i]), have)].t().reshape(-1) for i in range(shape.rows)]
        overlaps = [intersect(each, need) for each in shape.p_cols]
        received = self._layer.exchange(
            torch.cat([part for part in sent for _ in range(shape.cols)]),
            [part.numel() for part in sent for _ in range(shape.cols)],
            [size_of(overlap) * m for m in tokens for overlap in overlaps],
        )
        result = x.new_empty((size_of(need), sum(tokens)))
        at = first = 0
        for m in tokens:
            for overlap in overlaps:
                count = size_of(overlap) * m
                result[_relative(overlap, need), first : first + m] = received[at : at + count].view(
                    size_of(overlap), m
                )
                at += count
            first += m
        return result

    def _sum_to_columns(self, partial: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Sum over the columns of the grid, and shard the sum as an activation: ``[m, P_j]`` from ``[P_i, M]``."""
        shape, grid = self.shape, self.grid
        have, need = shape.p_rows[grid.row], shape.p_cols[grid.col]
        sent = [
            rows[_relative(intersect(have, need_j), have)].reshape(-1)
            for rows in partial.split(list(tokens), dim=1)
            for need_j in shape.p_cols
        ]
        m = tokens[grid.row]
        overlaps = [intersect(each, need) for each in shape.p_rows]
        received = self._layer.exchange(
            torch.cat(sent),
            [part.numel() for part in sent],
            [size_of(overlap) * m for overlap in overlaps for _ in range(shape.cols)],
        )
        result = partial.new_empty((m, size_of(need)))
        at = 0
        for overlap in overlaps:
            count = size_of(overlap) * m * shape.cols
            summed = ordered_sum(received[at : at + count].view(shape.cols, size_of(overlap), m))
            result[:, _relative(overlap, need)] = summed.t()
            at += count
        return result


def _relative(span: Span, base: Span) -> slice:
    return slice(span[0] - base[0], span[1] - base[0])


def _take(array: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """The rows of a matrix in ``spans``, as one contiguous matrix."""
    if len(spans) == 1:
        return array[spans[0][0] : spans[0][1]].contiguous()
    if not spans:
        return array[:0].contiguous()
    return torch.cat([array[lo:hi] for lo, hi in spans])


def _put(array: torch.Tensor, spans: Sequence[Span], pending: Pending) -> None:
    """Wait for a sum, and write its rows to the rows of a matrix in ``spans``."""
    rows = pending.wait()
    assert len(rows) == total(spans)
    at = 0
    for lo, hi in spans:
        array[lo:hi] = rows[at : at + hi - lo]
        at += hi - lo
