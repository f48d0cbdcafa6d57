"""Weights of a trainer in vLLM: a backend of its weight transfer, registered as the plugin ``reshard``.

May import :mod:`reshard.weights` and the packages below it. vLLM imports the modules of this package.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
