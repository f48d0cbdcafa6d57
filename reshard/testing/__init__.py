"""Tools for tests and examples: run several ranks on one machine."""

from reshard.testing.processes import LaunchError, run_processes

__all__ = ["LaunchError", "run_processes"]
