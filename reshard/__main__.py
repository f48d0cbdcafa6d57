"""``python -m reshard`` runs the console script ``reshard``, which ``pyproject.toml`` declares.

It imports nothing of the package itself, so that no module at the top depends on ``reshard.cli``.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution

[script] = distribution("reshard").entry_points.select(group="console_scripts", name="reshard")
sys.exit(script.load()())
