"""Tensor parallelism in 1, 2 and 2.5 dimensions: layers and whole models on a grid of ranks.

Start with :func:`parallelize`. Its sums of gradients need :func:`sync_gradients`, or the pipeline engine. Prices and
choices of grids work without torch.

May import :mod:`reshard.compression` and the packages below it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .choice import GridChoice, GridPrice, choose_grid
from .transformer import TransformerSizes

if TYPE_CHECKING:
    from .conversion import Conversion, parallelize, register
    from .gradients import sync_gradients
    from .grid import Grid
    from .grid_change import relayout
    from .layers.attention import Heads
    from .layers.dropout import Dropout
    from .layers.embedding import Embedding, PositionEmbedding
    from .layers.linear import Linear, multiply
    from .layers.loss import CrossEntropy
    from .layers.norms import LayerNorm, RMSNorm
    from .overlap import sync_during_backward
    from .state import plain_state_dict

#: Public names whose modules import torch. These modules are imported on first use.
_WITH_TORCH = {
    "Conversion": "conversion",
    "CrossEntropy": "layers.loss",
    "Dropout": "layers.dropout",
    "Embedding": "layers.embedding",
    "Grid": "grid",
    "Heads": "layers.attention",
    "LayerNorm": "layers.norms",
    "Linear": "layers.linear",
    "PositionEmbedding": "layers.embedding",
    "RMSNorm": "layers.norms",
    "multiply": "layers.linear",
    "parallelize": "conversion",
    "plain_state_dict": "state",
    "register": "conversion",
    "relayout": "grid_change",
    "sync_during_backward": "overlap",
    "sync_gradients": "gradients",
}

__all__ = [
    "Conversion",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "Grid",
    "GridChoice",
    "GridPrice",
    "Heads",
    "LayerNorm",
    "Linear",
    "PositionEmbedding",
    "RMSNorm",
    "TransformerSizes",
    "choose_grid",
    "multiply",
    "parallelize",
    "plain_state_dict",
    "register",
    "relayout",
    "sync_during_backward",
    "sync_gradients",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'reshard.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"reshard.parallel.{_WITH_TORCH[name]}"), name)
