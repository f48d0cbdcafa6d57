"""A grid of ranks: its axes, their collectives, and how sizes are cut over it. The rest of the package uses it."""

from .grid import AXES, Grid

__all__ = ["AXES", "Grid"]
