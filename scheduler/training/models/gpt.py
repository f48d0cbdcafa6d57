"""GPT-2 and GPT-3: pre-norm transformer layers with learned positions and a head tied to the embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .model_presets import GPTConfig

#: Standard deviation of the first weights.
INITIAL_STD = 0.02


class GPT(nn.Module):
    """A language model. ``forward(tokens, targets)`` returns the mean cross-entropy of the next tokens.

    Cut it before any of ``blocks``. Under autocast, hidden states have the dtype of autocast, as the edges then do.
    """

    #: Attention heads and hidden units are sharded over tensor-parallel ranks.
    _tp_plan = {  # noqa: RUF012 read by Pipe, under the name that transformers uses
        **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")},
        **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = GPTEmbedding(config)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.is_tied:
            self.head.weight = self.embed.tokens.weight
        self.loss = NextTokenLoss(config.vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss for tokens and targets of shape ``(num_samples, sequence)``."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.loss(self.head(self.norm(x)), targets)
        return loss

    def to_grid(self, conversion: Any, path: str) -> nn.Module:
        """The model on a grid of :mod:`reshard.parallel`, in place."""
        result: nn.Module = conversion.convert_children(self, path)
        return result

    @staticmethod
    def initialize(module: nn.Module) -> None:
        """Set the values that a module holds itself, as GPT-2 does; for ``model.apply`` and ``Pipe(init=)``."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0.0, INITIAL_STD * getattr(module, "residual_scale", 1.0))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()


class GPTEmbedding(nn.Module):
    """The sum of the embeddings of tokens and positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ``(num_samples, sequence)`` to ``(num_samples, sequence, hidden)``."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        kind = x.device.type
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return x.to(torch.get_autocast_dtype(kind)) if is_cast else x

    def to_grid(self, conversion: Any, path: str) -> nn.Module:
        """The embedding on a grid, in place."""
        from .gpt_on_grid import convert_embedding

        return convert_embedding(self, conversion, path)


class GPTBlock(nn.Module):
    """A pre-norm transformer layer. Projections into the residual stream begin with smaller weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.head_size = config.head_size
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        projections: tuple[Any, ...] = (self.out, self.down)
        for projection in projections:
            projection.residual_scale = 1 / math.sqrt(2 * config.num_layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(num_samples, sequence, hidden)`` to the same shape."""
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def to_grid(self, conversion: Any, path: str) -> nn.Module:
        """The layer on a grid."""
        from .gpt_on_grid import GPTBlockOnGrid

        return GPTBlockOnGrid(self, conversion, path)


class NextTokenLoss(nn.Module):
    """The mean cross-entropy, in float32 if the logits have a shorter dtype."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over logits ``(num_samples, sequence, vocabulary)`` and targets ``(num_samples, sequence)``."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return nn.functional.cross_entropy(logits.flatten(0, 1).to(dtype), targets.flatten())

    def to_grid(self, conversion: Any, path: str) -> nn.Module:
        """The loss on a grid."""
        from reshard.parallel import CrossEntropy

        return CrossEntropy(conversion.grid, self.vocabulary)
