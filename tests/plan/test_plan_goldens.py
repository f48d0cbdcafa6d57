"""Plans, lower bounds and simulated times of fixed cases against golden files, line by line."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__ as instruction_sets

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


@pytest.mark.slow
@pytest.mark.skipif(not instruction_sets, reason="NumPy has one instruction set for this CPU")
def test_goldens_do_not_depend_on_the_instruction_sets_of_numpy():
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-m", "", "-k", "fixed_cases", __file__]
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(instruction_sets)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "3 passed" in run.stdout, run.stdout[-2000:] + run.stderr[-2000:]
