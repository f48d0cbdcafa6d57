"""Plans, lower bounds and simulated times of fixed cases against golden files, line by line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.mark.integration
@pytest.mark.parametrize("name", ["bounds", "parts", "plans"])
def test_fixed_cases_match_the_goldens(name):
    """To update the files after an intended change: python -m tests.goldens.make_plans (or make_bounds, make_parts)."""
    spec = importlib.util.spec_from_file_location(f"make_{name}", GOLDENS / f"make_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kept = (GOLDENS / f"{name}.txt").read_text().splitlines()
    for made, line in zip(module.make_lines(), kept, strict=True):
        assert made == line
