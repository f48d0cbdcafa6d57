"""U-Transformer: a U-Net with attention that removes noise from images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .model_presets import LEVELS, NUM_U_LAYERS, UTransformerConfig


class UTransformer(nn.Module):
    """A denoiser of images. ``forward(pictures, clean)`` returns the mean squared error of the denoised pictures.

    Cut it before any of ``layers``. There are thirteen: a down layer for each of four resolutions, a middle layer, and
    two up layers for each resolution. Each up layer reads one skip connection: the outputs of the first convolution,
    of the down layers and of the downsamplings, last one first.
    """

    def __init__(self, config: UTransformerConfig) -> None:
        super().__init__()
        width = config.width(0)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(ULayer(config, layer) for layer in range(NUM_U_LAYERS))
        self.halve = nn.ModuleList(
            nn.Conv2d(config.width(level), config.width(level), 3, stride=2, padding=1) for level in range(LEVELS - 1)
        )
        self.norm, self.last = nn.GroupNorm(config.groups, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, pictures: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        """Mean loss for noisy and clean pictures of shape ``(num_samples, 3, side, side)``."""
        x = self.first(pictures)
        skips = [x]
        for level in range(LEVELS):
            x = self.layers[level](x)
            skips.append(x)
            if level < LEVELS - 1:
                x = self.halve[level](x)
                skips.append(x)
        x = self.layers[LEVELS](x)
        for layer in range(LEVELS + 1, NUM_U_LAYERS):
            x = self.layers[layer](x, skips.pop())
        denoised = self.last(nn.functional.silu(self.norm(x)))
        return nn.functional.mse_loss(denoised.float(), clean)

    @staticmethod
    def initialize(module: nn.Module) -> None:
        """Set the values that a module holds itself, as torch does; for ``model.apply`` and ``Pipe(init=)``."""
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


class ULayer(nn.Module):
    """One of the thirteen layers: a residual block, and attention and upsampling in some layers.

    At the lowest resolution, only the middle layer has attention, and it has a second residual block.
    """

    def __init__(self, config: UTransformerConfig, layer: int) -> None:
        super().__init__()
        width = config.width(config.level_of(layer))
        attends = config.level_of(layer) < LEVELS - 1 or layer == LEVELS
        self.residual = Residual(config.inputs_of(layer), width, config.groups)
        self.attention = Attention(width, config.num_heads, config.groups) if attends else nn.Identity()
        self.second = Residual(width, width, config.groups) if layer == LEVELS else nn.Identity()
        self.upsamples = config.upsamples(layer)
        if self.upsamples:
            self.resize = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
        """Map ``(num_samples, channels, side, side)`` to the channels and the side of the layer."""
        if skip is not None:
            x = torch.cat([x, skip], 1)
        x = self.second(self.attention(self.residual(x)))
        if self.upsamples:
            x = self.resize(nn.functional.interpolate(x, scale_factor=2.0))
        return x


class Residual(nn.Module):
    """A residual block of two convolutions with normalization before each."""

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, in_channels), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(num_samples, in_channels, side, side)`` to ``out_channels``."""
        silu = nn.functional.silu
        y = self.conv2(silu(self.norm2(self.conv1(silu(self.norm1(x))))))
        return self.shortcut(x) + y


class Attention(nn.Module):
    """A transformer layer over the positions of an image."""

    def __init__(self, width: int, num_heads: int, groups: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm0 = nn.GroupNorm(groups, width)
        self.proj_in, self.proj_out = nn.Linear(width, width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(num_samples, width, side, side)`` to the same shape."""
        y = self.proj_in(self.norm0(x).flatten(2).transpose(1, 2))
        q, k, v = self.qkv(self.norm1(y)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = y + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = y + self.down(nn.functional.gelu(self.up(self.norm2(y))))
        return x + self.proj_out(y).transpose(1, 2).unflatten(2, x.shape[2:])
