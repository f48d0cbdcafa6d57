"""Tensor parallelism in 1, 2 and 2.5 dimensions: layers and whole models on a grid of ranks.

Start with :func:`parallelize`. Its sums of gradients need :func:`sync_gradients`, or the pipeline engine.
"""

from reshard.parallel.choice import GridChoice, GridPrice, choose_grid
from reshard.parallel.conversion import Conversion, parallelize, register
from reshard.parallel.gradients import sync_gradients
from reshard.parallel.grid import Grid
from reshard.parallel.layers.attention import Heads
from reshard.parallel.layers.dropout import Dropout
from reshard.parallel.layers.embedding import Embedding, PositionEmbedding
from reshard.parallel.layers.linear import Linear, multiply
from reshard.parallel.layers.loss import CrossEntropy
from reshard.parallel.layers.norms import LayerNorm, RMSNorm
from reshard.parallel.relayout import relayout
from reshard.parallel.state import plain_state_dict
from reshard.parallel.transformer import TransformerSizes

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
    "sync_gradients",
]
