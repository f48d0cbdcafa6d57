"""Bytes that each dataflow of a matrix product moves, and the choice of the cheapest.

A weight is cut into ``rows`` x ``cols`` blocks ``W[P_i, Q_j]``. Activations are cut by tokens over (depth, row) and by
features over col. A layer needs three products. Each moves two of its three matrices:

- ``X W``, contracts P: output-stationary; panels of X along grid rows and of W along grid columns.
- ``X Wᵀ``, contracts Q: input-stationary; panels of W along grid columns, partial sums along grid rows.
- ``Xᵀ Z``, the gradient of W: Z stays; panels of X along grid rows, partial sums along grid columns.

Each product can instead keep W where it is (weight-stationary) and move both activations. This moves less if a depth
layer of the grid has fewer tokens than W has rows. Products that read the same activation in the same dataflow share
its all-gather, so the dataflows of the three products are chosen together. Source: SUMMA (van de Geijn, Watts, 1997)
for the products, and MeshSlice (2025) for the choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..grid.cuts import Panels, Span, chunk_spans, cut_panels, intersect, size_of

#: Default width of a panel: contracted elements per step.
PANEL_WIDTH = 1024


class ProductKind(Enum):
    """The three products, named for the dim that each contracts."""

    CONTRACT_P = "X W"
    CONTRACT_Q = "X Wᵀ"
    CONTRACT_TOKENS = "Xᵀ Z"


@dataclass(frozen=True)
class ProductShape:
    """The matrices of a product on one layer of a grid.

    Attributes:
        p: size of the dim of W that is cut over rows.
        q: number of elements of W's other dim in each column.
        rows: number of rows of the grid.
        panel: width of a panel, in elements of P.
    """

    p: int
    q: tuple[int, ...]
    rows: int
    panel: int = PANEL_WIDTH

    @property
    def cols(self) -> int:
        """Number of columns of the grid."""
        return len(self.q)

    @property
    def p_rows(self) -> tuple[Span, ...]:
        """P cut over the rows of the grid, as W is."""
        return chunk_spans(self.p, self.rows)

    @property
    def p_cols(self) -> tuple[Span, ...]:
        """P cut over the columns of the grid, as activations are."""
        return chunk_spans(self.p, self.cols)

    @property
    def panels(self) -> Panels:
        """The panels of P."""
        return cut_panels(self.p_rows, self.p_cols, self.panel)


class Dataflows(NamedTuple):
    """Whether each of the three products of a layer is weight-stationary."""

    forward: bool
    input_gradient: bool
    weight_gradient: bool


@dataclass(frozen=True)
class LayerProducts:
    """The three products of a layer, and what its ranks receive.

    An all-gather that two products need is made once. Both products of a backward need the gradient of the output. With
    ``keeps_input``, the weight gradient needs the input that the forward has gathered.

    Args:
        shape: sizes of the weight.
        tokens: number of tokens of each row of the grid.
        rows_shard_input: whether P is the input dim of the layer.
        keeps_input: whether the forward keeps what it gathers.
    """

    shape: ProductShape
    tokens: tuple[int, ...]
    rows_shard_input: bool
    keeps_input: bool = False

    @property
    def kinds(self) -> tuple[ProductKind, ProductKind, ProductKind]:
        """The kinds of the products, in the order of :class:`Dataflows`."""
        ahead, back = ProductKind.CONTRACT_P, ProductKind.CONTRACT_Q
        return (*((ahead, back) if self.rows_shard_input else (back, ahead)), ProductKind.CONTRACT_TOKENS)

    def shares_input(self, flows: Dataflows) -> bool:
        """Whether the weight gradient uses the all-gather of the forward."""
        return self.keeps_input and flows.forward == flows.weight_gradient

    def shares_gradient(self, flows: Dataflows) -> bool:
        """Whether the two products of a backward share an all-gather."""
        return flows.input_gradient == flows.weight_gradient

    def gathers_first(self, flows: Dataflows) -> tuple[bool, bool]:
        """Whether another product has gathered X, and Z, when the weight gradient is computed."""
        of_input, of_gradient = self.shares_input(flows), self.shares_gradient(flows)
        return (of_input, of_gradient) if self.rows_shard_input else (of_gradient, of_input)

    def received(self, flows: Dataflows) -> list[np.ndarray]:
        """Elements that each rank receives in each product, ``[row, col]``."""
        sizes = _Sizes(self.shape, self.tokens)
        result = [
            received_elements(kind, self.shape, self.tokens, keeps_weight=keeps)
            for kind, keeps in zip(self.kinds, flows, strict=True)
        ]
        for is_x, is_gathered in zip((True, False), self.gathers_first(flows), strict=True):
            if is_gathered:
                result[-1] = result[-1] - sizes.gathered(flows.weight_gradient, is_x=is_x)
        return result

    def kept(self, flows: Dataflows) -> int:
        """Elements that the busiest rank gathers of the input, and keeps until the backward."""
        if not self.shares_input(flows):
            return 0
        return int(_Sizes(self.shape, self.tokens).gathered(flows.forward, is_x=self.rows_shard_input).max())

    @property
    def dataflows(self) -> Dataflows:
        """The dataflows with which the busiest rank receives least. Without a gain, no product is weight-stationary."""
        return _choose(self)


class _Sizes:
    """Sizes of the blocks of each rank as ``[row, col]`` arrays, for formulas."""

    def __init__(self, shape: ProductShape, tokens: Sequence[int]) -> None:
        self.p, self.rows, self.cols, self.all_tokens = shape.p, shape.rows, shape.cols, sum(tokens)
        self.p_row = np.array([[size_of(span)] for span in shape.p_rows], dtype=np.int64)
        self.p_col = np.array([[size_of(span) for span in shape.p_cols]], dtype=np.int64)
        self.m, self.q = np.array(tokens, dtype=np.int64)[:, None], np.array(shape.q, dtype=np.int64)[None]
        #: Features that a rank needs for its rows of W, and holds itself.
        self.overlap = np.array(
            [[size_of(intersect(row, col)) for col in shape.p_cols] for row in shape.p_rows], dtype=np.int64
        )

    def gathered(self, keeps_weight: bool, *, is_x: bool) -> np.ndarray:
        """Elements of X, or of Z, that a product which reads it gathers."""
        if is_x and not keeps_weight:
            return (self.p - self.p_col) * self.m
        if is_x:
            return self.p_row * self.all_tokens - self.overlap * self.m
        return (self.all_tokens - self.m) * self.q * int(keeps_weight)


def received_elements(
    kind: ProductKind, shape: ProductShape, tokens: Sequence[int], *, keeps_weight: bool
) -> np.ndarray:
    """Elements that each rank receives in one product, ``[row, col]``.

    Args:
        tokens: number of tokens of each row of the grid.
        keeps_weight: whether the dataflow is weight-stationary.
    """
    sizes = _Sizes(shape, tokens)
    w = (sizes.p - sizes.p_row) * sizes.q
    if kind is ProductKind.CONTRACT_P:
        sums = (sizes.rows - 1) * sizes.m * sizes.q if keeps_weight else w
        return sizes.gathered(keeps_weight, is_x=True) + sums
    if kind is ProductKind.CONTRACT_Q:
        to_columns = (sizes.cols * sizes.p_col - sizes.overlap) * sizes.m
        sums = to_columns if keeps_weight else w + (sizes.cols - 1) * sizes.p_col * sizes.m
        return sizes.gathered(keeps_weight, is_x=False) + sums
    both = sizes.gathered(keeps_weight, is_x=True) + sizes.gathered(keeps_weight, is_x=False)
    return both if keeps_weight else both + (sizes.rows - 1) * sizes.p_row * sizes.q


def busiest_elements(kind: ProductKind, shape: ProductShape, tokens: Sequence[int], *, keeps_weight: bool) -> int:
    """The most elements that a rank of the layer receives in one product. Arguments: :func:`received_elements`."""
    return int(received_elements(kind, shape, tokens, keeps_weight=keeps_weight).max())


@lru_cache(maxsize=4096)
def _choose(products: LayerProducts) -> Dataflows:
    if products.shape.rows == 1:
        return Dataflows(False, False, False)  # no weight moves in any dataflow
    every = [Dataflows(*flows) for flows in itertools.product((False, True), repeat=3)]
    return min(every, key=lambda flows: (int(np.sum(products.received(flows), axis=0).max()), sum(flows)))
