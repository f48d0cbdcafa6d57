"""The intervals that the rows and the columns of a grid hold of a dim, and the panels of a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from reshard.sharding.dim_cuts import chunk_rule

Span = tuple[int, int]
#: Axes of a grid, in the order of its mesh.
AXES = ("depth", "row", "col")


@lru_cache(maxsize=4096)
def chunk_spans(size: int, parts: int) -> tuple[Span, ...]:
    """Half-open intervals of a dim cut by the rule of ``torch.chunk``, the one of DTensor's ``Shard``."""
    start, stop = chunk_rule(np.array(size), parts)
    return tuple(zip(start.tolist(), stop.tolist(), strict=True))


@lru_cache(maxsize=4096)
def balanced_spans(size: int, parts: int) -> tuple[Span, ...]:
    """Half-open intervals whose sizes differ by at most one; the first ones are the larger ones."""
    short, longer = divmod(size, parts)
    ends = list(accumulate((short + (part < longer) for part in range(parts)), initial=0))
    return tuple(pairwise(ends))


def batch_spans(rows: int, depth: int, grid_rows: int) -> tuple[tuple[Span, ...], ...]:
    """The batch rows of each (depth, row) position: cut over depth first, then over the rows of the grid."""
    return tuple(
        tuple((lo + first, lo + last) for first, last in chunk_spans(hi - lo, grid_rows))
        for lo, hi in chunk_spans(rows, depth)
    )


def size_of(span: Span) -> int:
    """Number of elements of an interval."""
    return span[1] - span[0]


def intersect(a: Span, b: Span) -> Span:
    """The common part of two intervals; empty at its start if they are disjoint."""
    lo = max(a[0], b[0])
    return lo, max(lo, min(a[1], b[1]))


@dataclass(frozen=True)
class Panels:
    """The panels of a dim that one matrix cuts over grid rows and another matrix cuts over grid columns.

    The bounds of both cuts divide the dim into segments. Panel ``s`` has slice ``s`` of each segment, in ascending
    order. So each rank holds about the same part of every panel, and all links are busy in every step.

    Attributes:
        by_row, by_col: ``[piece][panel]`` intervals of a panel that the piece holds, relative to the piece.
    """

    by_row: tuple[tuple[tuple[Span, ...], ...], ...]
    by_col: tuple[tuple[tuple[Span, ...], ...], ...]

    @property
    def num_panels(self) -> int:
        """Number of panels."""
        return len(self.by_row[0])

    def row_sizes(self, panel: int) -> list[int]:
        """Number of elements of the panel that each row of the grid holds."""
        return [sum(map(size_of, piece[panel])) for piece in self.by_row]

    def col_sizes(self, panel: int) -> list[int]:
        """Number of elements of the panel that each column of the grid holds."""
        return [sum(map(size_of, piece[panel])) for piece in self.by_col]


@lru_cache(maxsize=1024)
def cut_panels(row_spans: tuple[Span, ...], col_spans: tuple[Span, ...], width: int) -> Panels:
    """Panels of at most about ``width`` elements. Both cuts must cover the dim from 0 to the same end."""
    size = row_spans[-1][1]
    bounds = sorted({bound for span in (*row_spans, *col_spans) for bound in span})
    count = max(1, min(-(-size // width), size))

    def slices(span: Span, panel: int) -> tuple[Span, ...]:
        panels: list[Span] = []
        for lo, hi in pairwise(bounds):
            if lo < span[0] or hi > span[1]:
                continue
            length = hi - lo
            first, last = lo + length * panel // count - span[0], lo + length * (panel + 1) // count - span[0]
            if panels and panels[-1][1] == first:
                panels[-1] = (panels[-1][0], last)
            elif last > first:
                panels.append((first, last))
        return tuple(panels)

    return Panels(
        tuple(tuple(slices(span, panel) for panel in range(count)) for span in row_spans),
        tuple(tuple(slices(span, panel) for panel in range(count)) for span in col_spans),
    )


def total(sizes: Sequence[Span]) -> int:
    """Number of elements of several intervals."""
    return sum(map(size_of, sizes))
