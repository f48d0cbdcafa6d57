"""Tensor parallelism in 1, 2 and 2.5 dimensions: layers and whole models on a grid of ranks.

Start with :func:`parallelize`. Its sums of gradients need :func:`sync_gradients`, or the pipeline engine. Costs and
choices of grids work without torch.

May import :mod:`reshard.compression` and the packages below it.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
