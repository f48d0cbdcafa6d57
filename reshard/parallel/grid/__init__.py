"""A grid of ranks: its axes, their collectives, and how sizes are cut over it. The rest of the package uses it.

Only the cuts work without torch; ``Grid`` is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cuts import AXES

if TYPE_CHECKING:
    from .grid import Grid

__all__ = ["AXES", "Grid"]


def __getattr__(name: str) -> Any:
    if name != "Grid":
        raise AttributeError(f"module 'reshard.parallel.grid' has no attribute {name!r}")
    from .grid import Grid

    return Grid
