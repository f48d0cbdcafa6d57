"""Whole models: from a trainer to inference engines, without a layout written by hand.

A trainer has ``publisher``, ``sender``, ``dispatcher`` (which engines get which version) and ``snapshot``. An engine
has ``subscriber``, ``receiver``, ``install`` and ``recorded_loader``. ``state_dict`` moves a model inside one job.
Below them, ``routes`` moves versions, ``membership`` knows who is there, ``model`` what each rank holds, and
``mapping`` has the rules between names and shapes.

May import :mod:`reshard.api` and every package below it.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
