"""Weights of a trainer in SGLang: a weight loader that its workers call, and the trainer that orders updates.

May import :mod:`reshard.weights` and the packages below it. SGLang imports this package by the name of the loader.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
