"""Bytes that each dataflow of a matrix product moves, and the choice of the cheapest.

A weight is cut into ``rows`` x ``cols`` blocks ``W[P_i, Q_j]``. Activations are cut by tokens over (depth, row) and by
features over col. A layer needs three products. Each moves two of its three matrices:

- ``X W``, contracts P: output-stationary; panels of X along grid rows and of W along grid columns.
- ``X Wᵀ``, contracts Q: input-stationary; panels of W along grid columns, partial sums along grid rows.
- ``Xᵀ Z``, the gradient of W: Z stays; panels of X along grid rows, partial sums along grid columns.

Each product can instead keep W where it is (weight-stationary) and move both activations. This moves less if a depth
layer of the grid has fewer tokens than W has rows. Source: SUMMA (van de Geijn, Watts, 1997) for the products, and
MeshSlice (2025) for the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

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


def received_elements(
    kind: ProductKind, shape: ProductShape, tokens: Sequence[int], row: int, col: int, *, keeps_weight: bool
) -> int:
    """Elements that the rank at (row, col) receives in one product.

    Args:
        tokens: number of tokens of each row of the grid.
        keeps_weight: whether the dataflow is weight-stationary.
    """
    own_p_row, own_p_col = size_of(shape.p_rows[row]), size_of(shape.p_cols[col])
    m, q = tokens[row], shape.q[col]
    if not keeps_weight:
        x = (shape.p - own_p_col) * m
        w = (shape.p - own_p_row) * q
        if kind is ProductKind.CONTRACT_P:
            return x + w
        if kind is ProductKind.CONTRACT_Q:
            return w + (shape.cols - 1) * own_p_col * m
        return x + (shape.rows - 1) * own_p_row * q
    overlap = size_of(intersect(shape.p_rows[row], shape.p_cols[col]))  # needed features that the rank itself holds
    if kind is ProductKind.CONTRACT_Q:
        return (sum(tokens) - m) * q + (shape.cols * own_p_col - overlap) * m
    x = own_p_row * sum(tokens) - overlap * m
    if kind is ProductKind.CONTRACT_P:
        return x + (shape.rows - 1) * m * q
    return x + (sum(tokens) - m) * q


def busiest_elements(kind: ProductKind, shape: ProductShape, tokens: Sequence[int], *, keeps_weight: bool) -> int:
    """The most elements that a rank of the layer receives in one product. Arguments: :func:`received_elements`."""
    return max(
        received_elements(kind, shape, tokens, row, col, keeps_weight=keeps_weight)
        for row in range(shape.rows)
        for col in range(shape.cols)
    )


@lru_cache(maxsize=4096)
def is_weight_stationary(kind: ProductKind, shape: ProductShape, tokens: tuple[int, ...]) -> bool:
    """Whether the weight-stationary dataflow moves less. The other one overlaps with computation, so it wins ties."""
    if shape.rows == 1:
        return False  # no weight moves in any dataflow
    return busiest_elements(kind, shape, tokens, keeps_weight=True) < busiest_elements(
        kind, shape, tokens, keeps_weight=False
    )
