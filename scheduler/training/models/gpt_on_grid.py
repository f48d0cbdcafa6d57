"""The embedding and the layer of :mod:`.gpt` on a grid of :mod:`reshard.parallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reshard.parallel import Heads, Linear, PositionEmbedding
from reshard.parallel.layers.linear import multiply


def convert_embedding(embedding: Any, conversion: Any, path: str) -> nn.Module:
    """Shard the tables of tokens and positions in place, and return the embedding."""
    embedding.tokens = conversion.convert(embedding.tokens, f"{path}.tokens")
    embedding.positions = PositionEmbedding(embedding.positions, conversion.grid)
    result: nn.Module = embedding
    return result


class GPTBlockOnGrid(nn.Module):
    """A pre-norm transformer layer on a grid. Its parameters have the names of those of :class:`GPTBlock`."""

    def __init__(self, block: Any, conversion: Any, path: str) -> None:
        super().__init__()
        num_heads = block.q.out_features // block.head_size
        # Keys and values have as many heads as queries, so forward splits all three as queries.
        self.heads = Heads(conversion.grid, num_heads, num_heads, block.head_size)
        for name, child in block.named_children():
            if name in ("q", "k", "v"):
                setattr(self, name, Linear(child, conversion.grid, "in", conversion.panel))
            else:
                setattr(self, name, conversion.convert(child, f"{path}.{name}"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map this rank's part of ``(num_samples, sequence, hidden)`` to the same part of the output."""
        projected = multiply([self.q, self.k, self.v], self.norm1(x))
        q, k, v = (self.heads.split(item, is_query=True) for item in projected)
        x = x + self.out(self.heads.join(self.heads.attend(q, k, v)))
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return result
