"""A U-Net with attention as pipeline stages, in the configurations of the 2023 study and in small ones.

There are thirteen layers: one down layer per resolution (four), a middle layer, and two up layers per resolution. Skip
connections lead from the first convolution, from each down layer and from each downsampling to an up layer, past the
stages in between. All tensors are sharded by images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from reshard.sharding import Layout, Mesh, TensorSpec

from .. import Edge, StageOutput

LEVELS = 4
NUM_LAYERS = 3 * LEVELS + 1
#: Channels of each level relative to the first.
_WIDTHS = (1, 2, 4, 4)


@dataclass(frozen=True)
class UTransformerConfig:
    """Sizes of a model, the number of layers of each stage (``split``) and the mesh of each stage."""

    channels: int
    batch: int
    num_microbatches: int
    split: tuple[int, ...]
    mesh: tuple[int, int]
    image: int = 32
    num_heads: int = 8
    groups: int = 32

    @property
    def pp(self) -> int:
        """Number of stages."""
        return len(self.split)

    @property
    def microbatch(self) -> int:
        """Images of one microbatch on all devices of a stage."""
        return self.batch // self.num_microbatches

    def meshes(self) -> list[Mesh]:
        """Meshes of the stages, on consecutive ranks."""
        size = self.mesh[0] * self.mesh[1]
        axes = dict(zip(("a", "b"), self.mesh, strict=True))
        return [Mesh(range(stage * size, (stage + 1) * size), axes) for stage in range(self.pp)]

    def stage_of_layer(self) -> list[int]:
        """The stage of each layer."""
        return [stage for stage, count in enumerate(self.split) for _ in range(count)]

    def transfers(self) -> dict[tuple[int, int], dict[str, tuple[int, int]]]:
        """``{(src, dst): {tensor name: (channels, side)}}`` for all edges."""
        stages = self.stage_of_layer()
        found: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
        for layer in range(NUM_LAYERS - 1):
            if stages[layer] != stages[layer + 1]:
                found.setdefault((stages[layer], stages[layer + 1]), {})["x"] = self.output_of(layer)
        for name, (producer, consumer, size) in self.skips().items():
            if stages[producer] != stages[consumer]:
                found.setdefault((stages[producer], stages[consumer]), {})[name] = size
        return found

    def skips(self) -> dict[str, tuple[int, int, tuple[int, int]]]:
        """Skip connections: ``{name: (producing layer, consuming layer, (channels, side))}``."""
        outputs = [("in", 0, (self.width(0), self.side(0)))]
        for level in range(LEVELS):
            outputs.append((f"down{level}", level, (self.width(level), self.side(level))))
            if level < LEVELS - 1:
                outputs.append((f"half{level}", level, (self.width(level), self.side(level + 1))))
        return {name: (layer, NUM_LAYERS - 1 - nth, size) for nth, (name, layer, size) in enumerate(outputs)}

    def width(self, level: int) -> int:
        """Channels of a level."""
        return self.channels * _WIDTHS[level]

    def side(self, level: int) -> int:
        """Image side of a level."""
        return self.image >> level

    def level_of(self, layer: int) -> int:
        """Level of a layer: 0 to 3 going down, 3 in the middle, 3 to 0 in pairs going up."""
        if layer <= LEVELS:
            return min(layer, LEVELS - 1)
        return LEVELS - 1 - (layer - LEVELS - 1) // 2

    def output_of(self, layer: int) -> tuple[int, int]:
        """Channels and side of the output of a layer."""
        level = self.level_of(layer)
        if layer < LEVELS - 1:  # downsampled
            return self.width(level), self.side(level + 1)
        if layer > LEVELS and (layer - LEVELS) % 2 == 0 and level:  # upsampled
            return self.width(level), self.side(level - 1)
        return self.width(level), self.side(level)

    def edges(self, meshes: list[Mesh]) -> list[Edge]:
        """Edges without costs, including those that skip stages."""
        edges = []
        for (src, dst), tensors in sorted(self.transfers().items()):
            at, to = (Layout(meshes[stage], (("a", "b"), None, None, None)) for stage in (src, dst))
            specs = [
                TensorSpec((self.microbatch, width, side, side), "float32", at, to, name)
                for name, (width, side) in tensors.items()
            ]
            edges.append(Edge(src, dst, tensors=tuple(specs)))
        return edges

    def make_stage(self, stage: int) -> UTransformerStage:
        """The module of a stage."""
        return UTransformerStage(self, stage)

    def feed(self, step: int, seed: int = 0) -> dict[int, list[dict[str, torch.Tensor]]]:
        """Noisy images for the first stage and clean ones for the last, as whole microbatches."""
        clean, noisy = _pictures(step, self.batch, self.image, seed)
        first = [{"pictures": each} for each in noisy.split(self.microbatch)]
        last = [{"clean": each} for each in clean.split(self.microbatch)]
        if self.pp == 1:
            return {0: [a | b for a, b in zip(first, last, strict=True)]}
        return {0: first, self.pp - 1: last}


#: Configurations of the study, and small ones with the same edges.
#: Channels, batch, microbatches, layers of each stage, mesh of each stage.
U_TRANSFORMER_CONFIGS: Mapping[str, UTransformerConfig] = {
    "470M": UTransformerConfig(320, 256, 4, (7, 6), (1, 1)),
    "1B": UTransformerConfig(480, 2048, 32, (8, 5), (1, 2)),
    "2B": UTransformerConfig(672, 2048, 32, (9, 4), (1, 4)),
    "small": UTransformerConfig(8, 32, 8, (7, 6), (1, 1), image=16, num_heads=2, groups=4),
}
U_TRANSFORMER_CONFIGS = {
    **U_TRANSFORMER_CONFIGS,
    "small, 4 stages": replace(U_TRANSFORMER_CONFIGS["small"], split=(3, 3, 4, 3)),
}


class _Residual(nn.Module):
    """A residual block of two convolutions with normalization before each."""

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, in_channels), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        silu = nn.functional.silu
        y = self.conv2(silu(self.norm2(self.conv1(silu(self.norm1(x))))))
        return self.shortcut(x) + y


class _Attention(nn.Module):
    """A transformer layer over the positions of an image."""

    def __init__(self, width: int, num_heads: int, groups: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm0, self.proj_in, self.proj_out = (
            nn.GroupNorm(groups, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj_in(self.norm0(x).flatten(2).transpose(1, 2))
        q, k, v = self.qkv(self.norm1(y)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = y + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = y + self.down(nn.functional.gelu(self.up(self.norm2(y))))
        return x + self.proj_out(y).transpose(1, 2).unflatten(2, x.shape[2:])


class _Layer(nn.Module):
    """One of the thirteen layers."""

    def __init__(self, config: UTransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer, level = layer, config.level_of(layer)
        width = config.width(level)
        in_channels = width
        self.skip_inputs = [name for name, (_, consumer, _) in config.skips().items() if consumer == layer]
        if layer == 0:
            self.first = nn.Conv2d(3, width, 3, padding=1)
        elif layer != LEVELS:
            in_channels = config.output_of(layer - 1)[0]
            in_channels += sum(size[0] for _, consumer, size in config.skips().values() if consumer == layer)
        self.residual = _Residual(in_channels, width, config.groups)
        self.attention = (
            _Attention(width, config.num_heads, config.groups)
            if level < LEVELS - 1 or layer == LEVELS
            else nn.Identity()
        )
        if layer == LEVELS:
            self.second = _Residual(width, width, config.groups)
        self.downsamples, self.upsamples = layer < LEVELS - 1, config.output_of(layer)[1] > config.side(level)
        if self.downsamples:
            self.resize = nn.Conv2d(width, width, 3, stride=2, padding=1)
        if self.upsamples:
            self.resize = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor, skips: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.layer == 0:
            x = skips["in"] = self.first(x)
        for name in self.skip_inputs:
            x = torch.cat([x, skips.pop(name)], 1)
        x = self.attention(self.residual(x))
        if self.layer == LEVELS:
            x = self.second(x)
        if self.layer < LEVELS:
            skips[f"down{self.layer}"] = x
        if self.downsamples:
            x = skips[f"half{self.layer}"] = self.resize(x)
        if self.upsamples:
            x = self.resize(nn.functional.interpolate(x, scale_factor=2.0))
        return x


class UTransformerStage(nn.Module):
    """Consecutive layers. The last stage also has the loss."""

    def __init__(self, config: UTransformerConfig, stage: int) -> None:
        super().__init__()
        stages = config.stage_of_layer()
        mine = [layer for layer, its in enumerate(stages) if its == stage]
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in mine)
        self.is_last = stage == config.pp - 1
        if self.is_last:
            width = config.output_of(NUM_LAYERS - 1)[0]
            self.norm, self.out = nn.GroupNorm(config.groups, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Any = None, pictures: Any = None, clean: Any = None, **skips: torch.Tensor) -> Any:
        """Return features ``x`` and skips for later stages, or the loss. The first stage takes ``pictures`` only."""
        x = pictures if x is None else x
        for layer in self.layers:
            x = layer(x, skips)
        if not self.is_last:
            return {"x": x, **skips}
        denoised = self.out(nn.functional.silu(self.norm(x)))
        return StageOutput(loss=nn.functional.mse_loss(denoised.float(), clean))


def _pictures(step: int, count: int, side: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(count, 3, side, side)`` images of discs on colour gradients, and the same images with noise."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(count, *shape, 1, 1, generator=generator)

    ys, xs = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    disc = ((xs - uniform(1)) ** 2 + (ys - uniform(1)) ** 2 < (0.1 + 0.3 * uniform(1)) ** 2).float()
    clean = disc * uniform(3) + (1 - disc) * (uniform(3) * xs + uniform(3) * ys) / 2
    return clean, clean + 0.3 * torch.randn(clean.shape, generator=generator)
