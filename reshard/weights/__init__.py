"""Whole models: from a trainer to inference engines, without a layout written by hand.

May import :mod:`reshard.api` and every package below it.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
