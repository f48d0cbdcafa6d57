"""Compressed communication of training: all-reduces of gradients, and hooks for DDP and FSDP2.

May import :mod:`reshard.api` and every package below it.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
