"""GPT-3 as pipeline stages, in the configurations of the 2023 study and in small ones that run on any machine.

Stages are ordinary modules. Inside a stage, the rows of a microbatch are sharded over mesh axis "dp", and attention
heads and hidden units over "tp" with DTensor. Edges carry tensors of shape ``(microbatch, sequence, hidden)``, sharded
by rows over "dp" and replicated over "tp".
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reshard.sharding import Layout, Mesh, TensorSpec

from .. import Edge, StageOutput


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model and of its mesh: ``batch`` rows in ``num_microbatches``, on dp x tp devices per stage."""

    hidden: int
    num_layers: int
    num_heads: int
    batch: int
    num_microbatches: int
    dp: int
    tp: int
    pp: int
    sequence: int = 1024
    vocabulary: int = 51200
    dtype: str = "float16"

    @property
    def microbatch(self) -> int:
        """Rows of one microbatch on all devices of a stage."""
        return self.batch // self.num_microbatches

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Sizes of the mesh axes of every stage."""
        return {"dp": self.dp, "tp": self.tp}

    def meshes(self) -> list[Mesh]:
        """Meshes of the stages, on consecutive ranks."""
        size = self.dp * self.tp
        return [Mesh(range(stage * size, (stage + 1) * size), self.mesh_shape) for stage in range(self.pp)]

    def edges(self, meshes: list[Mesh]) -> list[Edge]:
        """Edges between neighbouring stages, without costs."""
        shape = (self.microbatch, self.sequence, self.hidden)
        edges = []
        for stage in range(self.pp - 1):
            src, dst = (Layout(mesh, ("dp", None, None)) for mesh in meshes[stage : stage + 2])
            edges.append(Edge(stage, stage + 1, tensors=(TensorSpec(shape, self.dtype, src, dst, "x"),)))
        return edges

    def layers_of(self, stage: int) -> range:
        """Layers of a stage: an equal share, and one more on the first stages if they do not divide evenly."""
        share, extra = divmod(self.num_layers, self.pp)
        first = stage * share + min(stage, extra)
        return range(first, first + share + (stage < extra))

    def make_stage(self, stage: int) -> GPTStage:
        """The module of a stage, not parallelized."""
        return GPTStage(self, stage)

    def feed(self, step: int, seed: int = 0) -> dict[int, list[dict[str, torch.Tensor]]]:
        """Tokens for the first stage and targets for the last, as whole microbatches."""
        rows = _text(step, self.batch, self.sequence, seed) % self.vocabulary
        tokens = rows[:, :-1].split(self.microbatch)
        targets = rows[:, 1:].split(self.microbatch)
        first = [{"tokens": each.contiguous()} for each in tokens]
        last = [{"targets": each.contiguous()} for each in targets]
        if self.pp == 1:
            return {0: [a | b for a, b in zip(first, last, strict=True)]}
        return {0: first, self.pp - 1: last}


#: Configurations of the study (fp16, sequence 1024, vocabulary 51200) and small ones.
#: Hidden size, layers, heads, batch, microbatches, dp, tp, pp.
GPT_CONFIGS: Mapping[str, GPTConfig] = {
    "1.3B": GPTConfig(2048, 24, 32, 64, 4, 1, 2, 2),
    "2.6B": GPTConfig(2560, 32, 32, 32, 4, 2, 2, 2),
    "2.6B, 64 microbatches": GPTConfig(2560, 32, 32, 1024, 64, 2, 2, 2),
    "2.6B, 4 stages": GPTConfig(2560, 32, 32, 1024, 128, 2, 1, 4),
    "small": GPTConfig(64, 4, 4, 32, 8, 1, 1, 2, sequence=64, vocabulary=256, dtype="float32"),
    "small, 2 x 2": GPTConfig(64, 4, 4, 32, 8, 2, 2, 2, sequence=64, vocabulary=256, dtype="float32"),
}


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.head_size = hidden // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, sequence, hidden)`` to the same shape."""
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPTStage(nn.Module):
    """Consecutive layers. The first stage also has the embeddings, the last one the output layer and the loss."""

    def __init__(self, config: GPTConfig, stage: int) -> None:
        super().__init__()
        hidden = config.hidden
        self.is_first, self.is_last = stage == 0, stage == config.pp - 1
        if self.is_first:
            self.embed, self.position = nn.Embedding(config.vocabulary, hidden), nn.Embedding(config.sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, config.num_heads) for _ in config.layers_of(stage))
        if self.is_last:
            self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, config.vocabulary, bias=False)

    def forward(
        self, x: Any = None, tokens: torch.Tensor | None = None, targets: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor] | StageOutput:
        """Return hidden states ``x``, or the loss on the last stage. The first stage takes ``tokens``, not ``x``."""
        if self.is_first:
            assert tokens is not None
            x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        if not self.is_last:
            return {"x": x}
        assert targets is not None
        logits = self.head(self.norm(x))
        return StageOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()))


def parallelize(stage: GPTStage, tp_mesh: Any) -> GPTStage:
    """Shard the layers of a stage over a one-dimensional DeviceMesh with torch's tensor parallelism."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in stage.blocks:
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        rows = {name: RowwiseParallel() for name in ("out", "down")}
        parallelize_module(block, tp_mesh, {**columns, **rows})
    return stage


_corpus: torch.Tensor | None = None


def _text(step: int, num_rows: int, sequence: int, seed: int) -> torch.Tensor:
    """``(num_rows, sequence + 1)`` bytes at random offsets of the language reference that Python ships."""
    global _corpus  # noqa: PLW0603 the text is read once per process
    if _corpus is None:
        text = "\n".join(pydoc_data.topics.topics.values())
        _corpus = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(_corpus) - sequence - 1, (num_rows,), generator=generator)
    return torch.stack([_corpus[start : start + sequence + 1] for start in starts.tolist()]).long()
