"""Sizes of the models of the GPT-3 paper and of the 2023 study (arXiv 2211.05322). Does not import torch.

The GPT-3 paper's Table 2.1 (arXiv 2005.14165) contradicts itself in two rows:

- 1.3B: 24 heads of 128 are 3072 wide, but the model is 2048 wide. Here it has 16 heads of 128.
- 13B: the model is 5140 wide, but 40 heads of 128 are 5120 wide. Here it is 5120 wide.

The parameter counts of all GPTs are within 2 % of their names. The table gives batches in tokens; here they are rounded
to rows of 2048 tokens.

The sizes of the study's models (GPT 1.3B and 2.6B; U-Transformer 470M, 1B and 2B) are those of its text. The study does
not say what a layer of the U-Transformer contains. Here the layers are those of a common U-Net with attention, so the
models have 6 %, 12 % and 10 % more parameters than their names say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.errors import ArgumentError
from reshard.formatting import count_of, did_you_mean

#: Number of resolutions and of layers of a U-Transformer.
LEVELS = 4
NUM_U_LAYERS = 3 * LEVELS + 1
#: Channels of each resolution relative to the first.
_WIDTHS = (1, 2, 4, 4)
#: Least vocabulary of a shrunk model: text is read as bytes.
_MIN_VOCABULARY = 256
_MIN_SEQUENCE, _MIN_SIDE = 16, 8
#: The learning rate of a shrunk model grows with the divisor, up to this.
_MAX_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT: ``hidden = num_heads * head_size``.

    Attributes:
        sequence: tokens of a sample.
        vocabulary: number of different tokens.
        is_tied: whether the head shares the weight of the token embedding.
    """

    num_layers: int
    num_heads: int
    head_size: int
    sequence: int = 2048
    vocabulary: int = 50257
    is_tied: bool = True

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.num_heads * self.head_size

    @property
    def num_parameters(self) -> int:
        """Embeddings, 12 h^2 + 13 h for each layer, the last normalization, and the head unless it is tied."""
        h, embeddings = self.hidden, self.vocabulary + self.sequence
        return (
            h * (embeddings + (0 if self.is_tied else self.vocabulary))
            + self.num_layers * (12 * h * h + 13 * h)
            + 2 * h
        )

    def shrink_factor(self, divisor: int) -> int:
        """Factor by which :meth:`shrunk` raises the bytes on an edge per floating-point operation of its stages."""
        return divisor**2

    def shrunk(self, divisor: int, num_stages: int = 1) -> GPTConfig:
        """Divide width, depth and sequence by ``divisor``, and the vocabulary by its square.

        Each edge then carries ``divisor**2`` times as many bytes per operation of its stages, so the ratios between
        edges stay the same. The number of heads stays too, so that the same layouts fit. Sizes are rounded: the head
        size to at least 1, depth to at least ``num_stages`` layers, the sequence to at least 16, and the vocabulary to
        at least 256.
        """
        return replace(
            self,
            num_layers=max(num_stages, round(self.num_layers / divisor)),
            head_size=max(1, round(self.head_size / divisor)),
            sequence=max(_MIN_SEQUENCE, self.sequence // divisor),
            vocabulary=max(_MIN_VOCABULARY, self.vocabulary // divisor**2),
        )


@dataclass(frozen=True)
class UTransformerConfig:
    """Sizes of a U-Transformer for images of ``side`` x ``side`` pixels.

    Attributes:
        channels: number of channels at the first resolution.
        groups: number of groups of each group normalization.
    """

    channels: int
    side: int = 32
    num_heads: int = 8
    groups: int = 32
    num_layers: int = NUM_U_LAYERS

    def width(self, level: int) -> int:
        """Channels at a resolution: 0 is the first, full resolution."""
        return self.channels * _WIDTHS[level]

    def level_of(self, layer: int) -> int:
        """The resolution of a layer: 0 to 3 going down, 3 in the middle, 3 to 0 in pairs going up."""
        if layer <= LEVELS:
            return min(layer, LEVELS - 1)
        return LEVELS - 1 - (layer - LEVELS - 1) // 2

    def upsamples(self, layer: int) -> bool:
        """Whether a layer doubles the resolution."""
        return layer > LEVELS and (layer - LEVELS) % 2 == 0 and self.level_of(layer) > 0

    def inputs_of(self, layer: int) -> int:
        """Input channels of a layer, including those of its skip connection."""
        own = self.width(self.level_of(max(layer - 1, 0)))
        if layer <= LEVELS:
            return own
        skips = [nth // 2 for nth in (0, *range(2 * LEVELS - 1))]  # the first convolution, then two for each level
        return own + self.width(skips[NUM_U_LAYERS - 1 - layer])

    def shrink_factor(self, divisor: int) -> int:
        """Factor by which :meth:`shrunk` raises the bytes on an edge per floating-point operation of its stages."""
        return divisor

    def shrunk(self, divisor: int, num_stages: int = 1) -> UTransformerConfig:
        """Divide the channels by ``divisor``, and the side of the images by its square root.

        Each edge then carries ``divisor`` times as many bytes per operation of its stages, so the ratios between edges
        stay the same. The thirteen layers stay, because the skip connections need them. Sizes are rounded: the channels
        to a multiple of 8, the number of heads to a power of two, and the divisor of the side to a power of two. The
        side is at least 8, and there are at most 8 groups.

        Raises:
            ArgumentError: there are more stages than layers.
        """
        if num_stages > self.num_layers:
            raise ArgumentError(f"U-Transformer has {self.num_layers} layers, too few for {num_stages} stages")
        channels = max(8, round(self.channels / divisor / 8) * 8)
        heads = max(1, 2 ** round(math.log2(max(1.0, self.num_heads / divisor))))
        side = max(_MIN_SIDE, self.side // 2 ** round(math.log(divisor, 4)))
        return replace(self, channels=channels, side=side, num_heads=heads, groups=min(8, self.groups))


@dataclass(frozen=True)
class Preset:
    """A model and how it is trained.

    Attributes:
        config: sizes.
        num_samples: number of samples of a global batch.
        learning_rate: learning rate at the end of the warm-up.
        autocast: dtype of the computations; empty: float32, the dtype of the parameters.
        num_microbatches: number of microbatches of a step.
        stages: dp x tp of each stage.
        layers: number of layers of each stage; empty for equal shares.
    """

    config: GPTConfig | UTransformerConfig
    num_samples: int
    learning_rate: float
    autocast: str = ""
    num_microbatches: int = 8
    stages: str = "1x1,1x1"
    layers: tuple[int, ...] = ()

    def shrunk(self, divisor: int, num_stages: int) -> Preset:
        """Shrink the model, raise the learning rate, and use at most four samples per microbatch.

        Raises:
            ArgumentError: the divisor is not positive, or the model has too few layers.
        """
        if divisor == 1:
            return self
        if divisor < 1:
            raise ArgumentError(f"the divisor of a model is {divisor}; it must be positive")
        rate = min(_MAX_LEARNING_RATE, self.learning_rate * divisor)
        num_samples = min(self.num_samples, 4 * self.num_microbatches)
        return replace(
            self, config=self.config.shrunk(divisor, num_stages), num_samples=num_samples, learning_rate=rate
        )

    def check_layers(self, layers: Sequence[int], num_stages: int, name: str) -> None:
        """Raise ArgumentError unless each stage of the model ``name`` has a layer, and all have those of the model."""
        if sum(layers) != self.config.num_layers or min(layers) < 1 or len(layers) != num_stages:
            raise ArgumentError(
                f"--layers {','.join(map(str, layers))} has {count_of(len(layers), 'stage')} and "
                f"{count_of(sum(layers), 'layer')}, but {name} has {count_of(num_stages, 'stage')} and "
                f"{count_of(self.config.num_layers, 'layer')}; pass layers of each stage, at least 1, with this sum"
            )

    def divide_layers(self, num_stages: int) -> tuple[int, ...]:
        """Layers per stage: ``layers`` if it has ``num_stages`` entries, else equal shares, the first ones one larger.

        Raises:
            ArgumentError: there are more stages than layers.
        """
        if len(self.layers) == num_stages:
            return self.layers
        share, extra = divmod(self.config.num_layers, num_stages)
        if not share:
            raise ArgumentError(
                f"the model has {count_of(self.config.num_layers, 'layer')}, too few for {num_stages} stages; use "
                "fewer stages"
            )
        return tuple(share + (stage < extra) for stage in range(num_stages))


def _gpt3(layers: int, heads: int, head_size: int, num_samples: int, rate: float) -> Preset:
    return Preset(GPTConfig(layers, heads, head_size), num_samples, rate, "float16")


def _study_gpt(layers: int, head_size: int, num_samples: int, stages: str) -> Preset:
    config = GPTConfig(layers, 32, head_size, sequence=1024, vocabulary=51200)
    return Preset(config, num_samples, 2e-4, "float16", 4, stages)


def _u_transformer(
    channels: int, num_samples: int, num_microbatches: int, stages: str, layers: tuple[int, ...]
) -> Preset:
    return Preset(UTransformerConfig(channels), num_samples, 1e-4, "", num_microbatches, stages, layers)


#: Presets by name. For GPT-3: layers, heads, head size, samples of 2048 tokens per batch, and learning rate.
PRESETS: Mapping[str, Preset] = {
    "gpt3-125m": _gpt3(12, 12, 64, 256, 6.0e-4),
    "gpt3-350m": _gpt3(24, 16, 64, 256, 3.0e-4),
    "gpt3-760m": _gpt3(24, 16, 96, 256, 2.5e-4),
    "gpt3-1.3b": _gpt3(24, 16, 128, 512, 2.0e-4),
    "gpt3-2.7b": _gpt3(32, 32, 80, 512, 1.6e-4),
    "gpt3-6.7b": _gpt3(32, 32, 128, 1024, 1.2e-4),
    "gpt3-13b": _gpt3(40, 40, 128, 1024, 1.0e-4),
    "gpt3-175b": _gpt3(96, 96, 128, 1600, 0.6e-4),
    "study-gpt-1.3b": _study_gpt(24, 64, 64, "1x2,1x2"),
    "study-gpt-2.6b": _study_gpt(32, 80, 32, "2x2,2x2"),
    "u-transformer-470m": _u_transformer(320, 256, 4, "1x1,1x1", (7, 6)),
    "u-transformer-1b": _u_transformer(480, 2048, 32, "2x1,2x1", (8, 5)),
    "u-transformer-2b": _u_transformer(672, 2048, 32, "4x1,4x1", (9, 4)),
}


def find_preset(name: str) -> Preset:
    """Find a preset by its name.

    Raises:
        ArgumentError: there is no such preset.
    """
    if name not in PRESETS:
        raise ArgumentError(
            f"there is no preset {name!r}; presets are {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}"
        )
    return PRESETS[name]
