"""Pipeline schedules that account for the cost of resharding. Installed as ``reshard.scheduler``.

Nothing in ``reshard`` imports this package.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
