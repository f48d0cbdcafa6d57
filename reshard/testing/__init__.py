"""Tools for tests and examples: run several ranks on one machine.

May import :mod:`reshard.api` and the packages below it.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
