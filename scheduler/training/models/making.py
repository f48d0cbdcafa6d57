"""Make the model of a configuration as a whole module, which ``Pipe`` cuts at its layers."""

from __future__ import annotations

from typing import Any

import torch

from .gpt import GPT
from .model_presets import GPTConfig, UTransformerConfig
from .u_transformer import UTransformer


def make_model(config: GPTConfig | UTransformerConfig, device: str = "meta") -> Any:
    """The model of a configuration. On the meta device it has no values; elsewhere it is initialized.

    Only the initialization draws random numbers, so that ``Pipe`` gives the same values to the model.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):
        model: Any = GPT(config) if isinstance(config, GPTConfig) else UTransformer(config)
    return model if device == "meta" else model.apply(type(model).initialize)


def find_cuts(config: GPTConfig | UTransformerConfig, layers: tuple[int, ...]) -> list[str]:
    """Paths of the layers that begin the second and each further stage, for the number of layers of each stage."""
    name = "blocks" if isinstance(config, GPTConfig) else "layers"
    return [f"{name}.{sum(layers[:stage])}" for stage in range(1, len(layers))]


def layer_paths(config: GPTConfig | UTransformerConfig) -> list[str]:
    """Paths of all modules before which a training plan may cut, in the order of the forward."""
    if isinstance(config, GPTConfig):
        return [*(f"blocks.{layer}" for layer in range(config.num_layers)), "norm"]
    return [f"layers.{layer}" for layer in range(config.num_layers)]
