"""Embeddings of tokens and of positions on a grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.gradients.declared_sums import declare_sums
from reshard.public_api import not_compiled

from ..grid import Grid
from ..grid.cuts import Span, chunk_spans, intersect, size_of
from .derivatives import once_differentiable
from .parameters import OnGrid, check_integers, gradient_axes, local_of, shard_parameter


class Embedding(OnGrid):
    """``nn.Embedding`` with its table sharded over (row, col).

    The ranks of a depth layer exchange their tokens. Then each rank sends the entries of its table that the tokens
    name. So a rank receives each element of its output once, and the table itself does not move.

    Args:
        embedding: the layer with the whole table, ``[num_embeddings, embedding_dim]``.
        grid: the grid.
        cut_rows: dim that is cut over the rows of the grid: 0 for the entries, 1 for the features. An output layer that
            shares the table and has more entries than features needs 1.
    """

    @check_arguments(cut_rows=(0, 1))
    def __init__(self, embedding: nn.Embedding, grid: Grid, cut_rows: int = 0) -> None:
        super().__init__()
        if embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
            raise ArgumentError("an Embedding with max_norm, sparse or scale_grad_by_freq cannot be cut over a grid")
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.grid, self.cut_rows = grid, cut_rows
        self.weight = shard_parameter(embedding.weight, grid, cut_rows, 1 - cut_rows)
        self.declare()

    def declare(self, prefix: str = "") -> None:
        """Declare the sums of gradients; again after parameters were replaced. ``prefix``: path, for errors."""
        declare_sums(self, {"weight": gradient_axes(self.grid, is_replicated_over_rows=False)}, prefix)

    @not_compiled
    @check_arguments()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map this rank's tokens ``[batch, ...]`` to ``[batch, ..., embedding_dim_j]``.

        Raises:
            ArgumentError: the tokens are not integers, or a token of any rank is out of range.
        """
        check_integers(tokens, "an Embedding got tokens")
        counts = self.grid.tokens_of(tokens.unsqueeze(-1))
        every = self.grid.along("row").all_gather(tokens.reshape(-1).contiguous(), counts).wait()
        bounds = torch.stack([-every.min(), every.max()]) if every.numel() else every.new_zeros(2)
        negative, last = self.grid.along("depth").max(bounds).tolist()  # so that all layers raise
        if negative > 0 or last >= self.num_embeddings:
            raise ArgumentError(
                f"tokens from {-negative} to {last} do not fit an Embedding of {self.num_embeddings} entries"
            )
        flat = _Lookup.apply(local_of(self.weight), self, every.split(list(counts)))
        return flat.view(*tokens.shape, flat.shape[1])

    def spans(self, row: int, col: int) -> tuple[Span, Span]:
        """The entries and the features that the rank at (row, col) holds."""
        at, parts = (row, col), (self.grid.rows, self.grid.cols)
        by_entry, by_feature = (0, 1) if self.cut_rows == 0 else (1, 0)
        return (
            chunk_spans(self.num_embeddings, parts[by_entry])[at[by_entry]],
            chunk_spans(self.embedding_dim, parts[by_feature])[at[by_feature]],
        )

    def extra_repr(self) -> str:
        """Sizes and the grid."""
        return f"{self.num_embeddings}, {self.embedding_dim}, grid={self.grid}"


class _Lookup(torch.autograd.Function):
    """Each rank sends entries to the ranks whose tokens name them. The backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, table: Any, layer: Embedding, tokens_of_row: Any) -> Any:
        ctx.layer, ctx.table_shape, ctx.dtype = layer, table.shape, table.dtype
        ctx.routes = routes = _Routes(layer, tokens_of_row)
        sent = [table[entries][:, features].reshape(-1) for entries, features in routes.sends]
        received = layer.grid.along("layer").exchange(
            torch.cat(sent), [item.numel() for item in sent], routes.receive_sizes
        )
        result = table.new_empty(routes.result_shape)
        for (positions, features), part in zip(routes.receives, received.split(routes.receive_sizes), strict=True):
            if part.numel():
                result[positions, features] = part.view(len(positions), -1)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        layer, routes = ctx.layer, ctx.routes
        sent = [gradient[positions, features].reshape(-1) for positions, features in routes.receives]
        sizes = [len(entries) * (features.stop - features.start) for entries, features in routes.sends]
        received = layer.grid.along("layer").exchange(torch.cat(sent), routes.receive_sizes, sizes)
        table = gradient.new_zeros(ctx.table_shape, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for (entries, features), part in zip(routes.sends, received.split(sizes), strict=True):
            if part.numel():
                table[:, features].index_add_(0, entries, part.view(len(entries), -1).to(table.dtype))
        if layer.padding_idx is not None:
            first, last = layer.spans(layer.grid.row, layer.grid.col)[0]
            if first <= layer.padding_idx < last:
                table[layer.padding_idx - first] = 0
        return table.to(ctx.dtype), None, None


class _Routes:
    """The data that this rank exchanges with each rank of its layer of the grid.

    Attributes:
        sends: for each rank, the entries and the features of the local table to send.
        receives: for each rank, the positions among this rank's tokens, and the local features, to receive.
        receive_sizes: number of elements to receive from each rank.
    """

    def __init__(self, layer: Embedding, tokens_of_row: Any) -> None:
        grid = layer.grid
        entries, features = layer.spans(grid.row, grid.col)
        outputs = chunk_spans(layer.embedding_dim, grid.cols)
        self.sends, self.receives = [], []
        for tokens in tokens_of_row:
            held = tokens[(tokens >= entries[0]) & (tokens < entries[1])] - entries[0]
            for output in outputs:
                common = intersect(features, output)
                self.sends.append((held, slice(common[0] - features[0], common[1] - features[0])))
        own, wanted = tokens_of_row[grid.row], outputs[grid.col]
        for row in range(grid.rows):
            for col in range(grid.cols):
                theirs, offered = layer.spans(row, col)
                common = intersect(offered, wanted)
                positions = ((own >= theirs[0]) & (own < theirs[1])).nonzero().flatten()
                self.receives.append((positions, slice(common[0] - wanted[0], common[1] - wanted[0])))
        self.receive_sizes = [len(positions) * (receive.stop - receive.start) for positions, receive in self.receives]
        self.result_shape = (len(own), size_of(wanted))


class PositionEmbedding(OnGrid):
    """An embedding of positions, with features sharded over the columns of the grid and replicated over its rows.

    ``forward(positions)`` is a lookup in the local shard. The module has the attributes of ``nn.Embedding``.
    """

    @check_arguments()
    def __init__(self, embedding: nn.Embedding, grid: Grid) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.grid = grid
        self.weight = shard_parameter(embedding.weight, grid, None, 1)
        self.declare()

    def declare(self, prefix: str = "") -> None:
        """Declare the sums of gradients; again after parameters were replaced. ``prefix``: path, for errors."""
        declare_sums(self, {"weight": gradient_axes(self.grid, is_replicated_over_rows=True)}, prefix)

    @not_compiled
    @check_arguments()
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Map positions ``[...]`` to ``[..., embedding_dim_j]``.

        Raises:
            ArgumentError: the positions are not integers or, on the CPU, a position is out of range.
        """
        check_integers(positions, "a PositionEmbedding got positions")
        try:
            return nn.functional.embedding(positions.long(), local_of(self.weight))
        except IndexError:  # a check before would wait for a GPU
            raise ArgumentError(
                f"positions from {positions.min()} to {positions.max()} do not fit a PositionEmbedding of "
                f"{self.num_embeddings} entries"
            ) from None

    def extra_repr(self) -> str:
        """Sizes and the grid."""
        return f"{self.num_embeddings}, {self.embedding_dim}, grid={self.grid}"
