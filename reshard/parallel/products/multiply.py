"""The three products of a linear module on one depth layer of a grid, with the cheapest dataflow for each.

The notation is that of :mod:`~reshard.parallel.products.dataflow`. All arrays are local. The rank in row i and column j
holds ``x`` as ``[m, P_j]``, ``w`` as ``[P_i, Q_j]`` and ``z`` as ``[m, Q_j]``, where m is the number of tokens of its
row. M is the number of tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

import torch

from reshard.errors import ArgumentError

from ..grid import Grid
from ..grid.cuts import Span, intersect, size_of, total
from ..grid.pending import SHORT_DTYPES, PendingResult, ordered_sum
from .dataflow import ProductShape

#: A product as a generator. The generator yields after it has started collectives. Another product can then start its
#: own.
Steps = Generator[None, None, torch.Tensor]


class Activation:
    """An activation of this rank, and what products have gathered of it.

    Args:
        local: ``[m, P_j]`` or ``[m, Q_j]``.
        readers: number of products that read it in the same dataflow. An all-gather starts once, and its result is
            released after its last reader.
        gathered: results of all-gathers that one product has yet to read.

    Attributes:
        gathered: results that have not been released: of panels by number, and of other all-gathers by name.
    """

    def __init__(
        self, local: torch.Tensor, readers: int = 1, gathered: Mapping[int | str, torch.Tensor] | None = None
    ) -> None:
        self.local, self._readers = local, readers
        self.gathered = dict(gathered or {})
        self._pending: dict[int | str, PendingResult] = {}
        self._reads = dict.fromkeys(self.gathered, readers - 1)

    def start(self, key: int | str, gather: Callable[[], PendingResult]) -> None:
        """Start an all-gather unless it has started."""
        if key not in self._reads:
            self._pending[key], self._reads[key] = gather(), 0

    def read(self, key: int | str) -> torch.Tensor:
        """The result of an all-gather that has started."""
        if key in self._pending:
            self.gathered[key] = self._pending.pop(key).wait()
        self._reads[key] += 1
        return self.gathered.pop(key) if self._reads[key] == self._readers else self.gathered[key]


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
        self._mesh = grid.device_mesh
        # the ranks of this column differ in their rows
        self._ranks_of_col, self._ranks_of_row, self._layer = map(grid.encoded, ("row", "col", "layer"))

    def check_grid(self) -> None:
        """Raise ArgumentError, on all ranks alike, if the model has moved to another grid."""
        if self.grid.device_mesh is not self._mesh:
            raise ArgumentError(
                f"a backward of a forward that ran before the model moved to {self.grid} cannot run; call relayout "
                "after the last backward of a step"
            )

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The local product. Benchmarks replace it to time communication alone."""
        return a @ b

    def add_product(self, total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The local product, added to ``total`` in place if there is one, which may be float32 for bf16 and fp16."""
        if total is None:
            return self.multiply(a, b)
        return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(self.multiply(a, b))

    def contract_p(self, x: Activation, w: torch.Tensor, tokens: Sequence[int], *, keeps_weight: bool) -> Steps:
        """``X W``: ``[m, P_j]`` to ``[m, Q_j]``.

        Args:
            tokens: number of tokens of each row of the grid.
            keeps_weight: whether the dataflow is weight-stationary.
        """
        if keeps_weight:
            self._start_features(x, tokens)
            yield
            summed = self._ranks_of_col.reduce_scatter(self.multiply(x.read("features").t(), w), tokens)
            yield
            return summed.wait()
        num_panels = self.shape.panels.num_panels
        self._start_panel(0, x)
        gathered = self._gather_weight(0, w)
        yield
        y: torch.Tensor | None = None
        for panel in range(num_panels):
            x_panel, w_panel = x.read(panel), gathered.wait()
            if panel + 1 < num_panels:
                self._start_panel(panel + 1, x)
                gathered = self._gather_weight(panel + 1, w)
            y = self.add_product(y, x_panel.t(), w_panel)
            if panel + 1 < num_panels:
                y = y.float() if y.dtype in SHORT_DTYPES else y  # rounding after each panel would add up
                yield
        assert y is not None
        return y.to(w.dtype)

    def contract_q(self, z: Activation, w: torch.Tensor, tokens: Sequence[int], *, keeps_weight: bool) -> Steps:
        """``Z Wᵀ``: ``[m, Q_j]`` to ``[m, P_j]``."""
        if keeps_weight:
            self._start_tokens(z, tokens)
            yield
            return self._sum_to_columns(self.multiply(w, z.read("tokens").t()), tokens)
        panels, y = self.shape.panels, z.local.new_empty((len(z.local), size_of(self.shape.p_cols[self.grid.col])))
        gathered, sums = self._gather_weight(0, w), []
        yield
        for panel in range(panels.num_panels):
            w_panel = gathered.wait()
            if panel + 1 < panels.num_panels:
                gathered = self._gather_weight(panel + 1, w)
            sums.append(self._ranks_of_row.reduce_scatter(self.multiply(w_panel, z.local.t()), panels.col_sizes(panel)))
            if panel:
                _put(y.t(), panels.by_col[self.grid.col][panel - 1], sums[panel - 1])
            yield
        _put(y.t(), panels.by_col[self.grid.col][-1], sums[-1])
        return y

    def contract_tokens(self, x: Activation, z: Activation, tokens: Sequence[int], *, keeps_weight: bool) -> Steps:
        """``Xᵀ Z``: ``[m, P_j]`` and ``[m, Q_j]`` to ``[P_i, Q_j]``. Not summed over depth."""
        if keeps_weight:
            self._start_tokens(z, tokens)
            self._start_features(x, tokens)
            yield
            return self.multiply(x.read("features"), z.read("tokens"))
        panels, sums = self.shape.panels, []
        gradient = z.local.new_empty((size_of(self.shape.p_rows[self.grid.row]), z.local.shape[1]))
        self._start_panel(0, x)
        yield
        for panel in range(panels.num_panels):
            x_panel = x.read(panel)
            if panel + 1 < panels.num_panels:
                self._start_panel(panel + 1, x)
            sums.append(self._ranks_of_col.reduce_scatter(self.multiply(x_panel, z.local), panels.row_sizes(panel)))
            if panel:
                _put(gradient, panels.by_row[self.grid.row][panel - 1], sums[panel - 1])
            yield
        _put(gradient, panels.by_row[self.grid.row][-1], sums[-1])
        return gradient

    # Panels

    def _start_panel(self, panel: int, x: Activation) -> None:
        """Start to gather a panel of X of this grid row, transposed: ``[panel, m]``."""
        panels = self.shape.panels
        own = panels.by_col[self.grid.col][panel]
        x.start(panel, lambda: self._ranks_of_row.all_gather(_take(x.local.t(), own), panels.col_sizes(panel)))

    def _gather_weight(self, panel: int, w: torch.Tensor) -> PendingResult:
        """A panel of W of this grid column: ``[panel, Q_j]``."""
        panels = self.shape.panels
        return self._ranks_of_col.all_gather(_take(w, panels.by_row[self.grid.row][panel]), panels.row_sizes(panel))

    # Weight-stationary

    def _start_tokens(self, z: Activation, tokens: Sequence[int]) -> None:
        """Start to gather the tokens of all rows: ``[M, Q_j]``."""
        z.start("tokens", lambda: self._ranks_of_col.all_gather(z.local.contiguous(), tokens))

    def _start_features(self, x: Activation, tokens: Sequence[int]) -> None:
        """Start to gather the features P_i of all tokens of this depth layer: ``[P_i, M]``."""
        x.start("features", lambda: self._gather_features(x.local, tokens))

    def _gather_features(self, x: torch.Tensor, tokens: Sequence[int]) -> PendingResult:
        shape, grid = self.shape, self.grid
        have, need = shape.p_cols[grid.col], shape.p_rows[grid.row]
        sent = [x[:, _relative(intersect(have, shape.p_rows[i]), have)].t().reshape(-1) for i in range(shape.rows)]
        overlaps = [intersect(p_col, need) for p_col in shape.p_cols]
        exchange = self._layer.start_exchange(
            torch.cat([part for part in sent for _ in range(shape.cols)]),
            [part.numel() for part in sent for _ in range(shape.cols)],
            [size_of(overlap) * m for m in tokens for overlap in overlaps],
        )

        def finish() -> torch.Tensor:
            received, result = exchange.wait(), x.new_empty((size_of(need), sum(tokens)))
            at = first = 0
            for m in tokens:
                for overlap in overlaps:
                    count = size_of(overlap) * m
                    block = received[at : at + count].view(size_of(overlap), m)
                    result[_relative(overlap, need), first : first + m] = block
                    at += count
                first += m
            return result

        return PendingResult(None, finish)

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
        overlaps = [intersect(p_row, need) for p_row in shape.p_rows]
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


def _put(array: torch.Tensor, spans: Sequence[Span], pending: PendingResult) -> None:
    """Wait for a sum, and write its rows to the rows of a matrix in ``spans``."""
    rows = pending.wait()
    assert len(rows) == total(spans)
    at = 0
    for lo, hi in spans:
        array[lo:hi] = rows[at : at + hi - lo]
        at += hi - lo
