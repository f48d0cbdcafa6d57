"""Move sharded tensors from one device mesh and layout to another.

>>> import reshard
>>> out = reshard.reshard(tensor, src_mesh, dst_mesh, src_spec="S0 R", dst_spec="R S0")  # doctest: +SKIP

``__init__.pyi`` lists the public names; the code below reads it. Each name is imported on first use, so importing this
package imports neither torch nor scipy.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from reshard import forks as _forks  # noqa: F401  # registers the fork handler before any fork

_MODULE_OF = {
    alias.name: f"reshard.{node.module}"
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
