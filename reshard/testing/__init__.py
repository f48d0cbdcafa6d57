"""Tools for tests and examples: run several ranks on one machine.

May import :mod:`reshard.api` and the packages below it.
"""

from reshard.testing.processes import LaunchError, run_processes

__all__ = ["LaunchError", "run_processes"]
