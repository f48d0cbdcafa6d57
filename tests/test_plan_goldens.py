"""What strategies plan for fixed cases, the bound, and what the simulator says of each, line by line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

GOLDENS = Path(__file__).parent / "goldens"


def test_plans_of_fixed_cases_are_the_golden_ones():
    """After a change that should change them: PYTHONPATH=tests python tests/goldens/make_plans.py."""
    spec = importlib.util.spec_from_file_location("make_plans", GOLDENS / "make_plans.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kept = (GOLDENS / "plans.txt").read_text().splitlines()
    for made, line in zip(module.make_lines(), kept, strict=True):
        assert made == line
