"""Attention with whole heads on each column of a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.arguments import check_arguments, check_fields
from reshard.errors import ArgumentError
from reshard.public_api import not_compiled
from reshard.sharding import check_integer

from ..grid import Grid
from ..grid.cuts import Span, balanced_spans, chunk_spans, intersect, size_of
from .derivatives import once_differentiable
from .dropout import dropout_mask


@dataclass(frozen=True)
class Heads:
    """The heads that each column of a grid computes.

    Args:
        grid: the grid.
        num_heads: query heads.
        num_kv_heads: heads of keys and values; query heads share them in groups.
        head_size: features of one head.

    Raises:
        ArgumentError: there are fewer query heads than columns, groups are unequal, or a number is not positive.
    """

    grid: Grid
    num_heads: int
    num_kv_heads: int
    head_size: int

    def __post_init__(self) -> None:
        limits = (1, 2**31)
        check_fields(self, num_heads=limits, num_kv_heads=limits, head_size=limits)
        check_heads(self.num_heads, self.num_kv_heads, self.grid.cols)

    def query_heads(self, col: int) -> Span:
        """The query heads of a column; columns differ by at most one head."""
        col = check_integer(col, "col", 0, self.grid.cols - 1)
        return balanced_spans(self.num_heads, self.grid.cols)[col]

    def kv_heads(self, col: int) -> Span:
        """The key/value heads that the query heads of a column use. Columns may share one."""
        shared = self.num_heads // self.num_kv_heads
        lo, hi = self.query_heads(col)
        return lo // shared, -(-hi // shared)

    @not_compiled
    @check_arguments()
    def split(self, x: torch.Tensor, *, is_query: bool) -> torch.Tensor:
        """Cut projections ``[batch, sequence, features_j]`` by heads: ``[batch, heads_j, sequence, head_size]``.

        Raises:
            ArgumentError: ``x`` has another shape.
        """
        count, of_col = (self.num_heads, self.query_heads) if is_query else (self.num_kv_heads, self.kv_heads)
        need = [self._features(of_col(col)) for col in range(self.grid.cols)]
        have = chunk_spans(count * self.head_size, self.grid.cols)
        self._check_shape("x", x, (None, None, size_of(have[self.grid.col])))
        whole = select_features(x, have, need, self.grid)
        return whole.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    @not_compiled
    @check_arguments()
    def join(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`split` for the output of the query heads. Raises as :meth:`split`."""
        self._check_shape("x", x, (None, size_of(self.query_heads(self.grid.col)), None, self.head_size))
        have = [self._features(self.query_heads(col)) for col in range(self.grid.cols)]
        need = chunk_spans(self.num_heads * self.head_size, self.grid.cols)
        return select_features(x.transpose(1, 2).flatten(2), have, need, self.grid)

    @not_compiled
    @check_arguments(dropout=(0, 1))
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of this column's heads; arrays as :meth:`split` returns them.

        Args:
            mask: ``[batch, 1, sequence, keys]``, boolean or added to the scores; None: causal.
            dropout: probability that a weight is dropped. The mask is the same on every grid.
            scale: factor of the scores; default: 1 / sqrt(head_size).

        Raises:
            ArgumentError: an array has another shape, or the mask does not fit the scores.
        """
        heads, kv_heads = (size_of(spans(self.grid.col)) for spans in (self.query_heads, self.kv_heads))
        self._check_shape("q", q, (None, heads, None, self.head_size))
        self._check_shape("k", k, (q.shape[0], kv_heads, None, self.head_size))
        self._check_shape("v", v, (q.shape[0], kv_heads, k.shape[2], self.head_size))
        scores_shape = (q.shape[0], heads, q.shape[2], k.shape[2])
        is_mask = mask is None or mask.dtype == torch.bool or mask.is_floating_point()
        if mask is not None and not (is_mask and _broadcasts(mask.shape, scores_shape)):
            raise ArgumentError(
                f"the mask is {mask.dtype} of shape {list(mask.shape)}; it must be boolean or floating-point "
                f"values for scores of shape {list(scores_shape)}"
            )
        if self.num_kv_heads != self.num_heads:
            shared = self.num_heads // self.num_kv_heads
            lo, hi = self.query_heads(self.grid.col)
            index = torch.arange(lo, hi, device=q.device) // shared - self.kv_heads(self.grid.col)[0]
            k, v = k.index_select(1, index), v.index_select(1, index)
        if not dropout:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
            )
        scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(self.head_size) if scale is None else scale)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
        kept = dropout_mask(
            self.grid, weights, dropout, dim=1, span=self.query_heads(self.grid.col), size=self.num_heads
        )
        return (weights * kept) @ v

    def _check_shape(self, name: str, x: torch.Tensor, shape: Sequence[int | None]) -> None:
        """Raise ArgumentError unless an array has this shape; None: any size."""
        fits = x.dim() == len(shape) and all(want in (None, size) for want, size in zip(shape, x.shape, strict=True))
        if not fits or not x.is_floating_point():
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ArgumentError(
                f"{name} has shape {list(x.shape)} and {x.dtype}; {self.num_heads} heads of {self.head_size} features "
                f"need floating-point values of shape [{wanted}] on column {self.grid.col} of {self.grid}"
            )

    def _features(self, heads: Span) -> Span:
        return heads[0] * self.head_size, heads[1] * self.head_size


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether an array of a shape, of at least two dims, broadcasts to another shape."""
    return 2 <= len(shape) <= len(target) and all(
        size in (1, want) for size, want in zip(reversed(shape), reversed(target), strict=False)
    )


def check_heads(num_heads: int, num_kv_heads: int, cols: int) -> None:
    """Raise ArgumentError unless each of ``cols`` columns gets a whole head, and groups of query heads are equal."""
    if num_heads < cols:
        raise ArgumentError(
            f"attention with {num_heads} heads cannot be cut over {cols} columns; each column of a grid needs a whole "
            "head"
        )
    if num_heads % num_kv_heads:
        raise ArgumentError(f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly")


def select_features(x: torch.Tensor, have: Sequence[Span], need: Sequence[Span], grid: Grid) -> torch.Tensor:
    """Move features among the columns of a grid, from the intervals that they have to the intervals that they need.

    Args:
        x: ``[..., features]``, the features ``have[col]`` of this column.
        have: the interval of each column in ``x``; they do not overlap.
        need: the interval of each column in the result. They may overlap. The backward sums gradients of features that
            several columns need.
        grid: the grid.

    Returns:
        ``[..., features]``, the features ``need[col]`` of this column.
    """
    if tuple(have) == tuple(need):
        return x
    flat: torch.Tensor = _Select.apply(x.flatten(0, -2), tuple(have), tuple(need), grid)
    return flat.view(*x.shape[:-1], flat.shape[1])


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, have: Any, need: Any, grid: Grid) -> Any:
        ctx.have, ctx.need, ctx.grid = have, need, grid
        return _move(x, have, need, grid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _move(gradients[0], ctx.need, ctx.have, ctx.grid), None, None, None


def _move(x: torch.Tensor, have: Sequence[Span], need: Sequence[Span], grid: Grid) -> torch.Tensor:
    """Send each column the features that it needs. Features that several columns hold are summed in column order."""
    own, wanted = have[grid.col], need[grid.col]
    sent = []
    for span in need:
        lo, hi = intersect(own, span)
        sent.append(x[:, lo - own[0] : hi - own[0]].reshape(-1))
    overlaps = [intersect(span, wanted) for span in have]
    sizes = [len(x) * size_of(span) for span in overlaps]
    received = grid.along("col").exchange(torch.cat(sent), [part.numel() for part in sent], sizes)
    result = x.new_zeros((len(x), size_of(wanted)))
    for (lo, hi), part in zip(overlaps, received.split(sizes), strict=True):
        if part.numel():
            result[:, lo - wanted[0] : hi - wanted[0]] += part.view(len(x), -1)
    return result
