"""Forked workers run every test once, and report failures and crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import os, pytest

@pytest.mark.parametrize("number", range(9))
def test_number(number, tmp_path):
    with open("ran", "a") as file:
        file.write(f"{number}\\n")
    assert tmp_path.exists() and number != 3
    if number == 2:
        os._exit(7)
"""


def test_each_test_runs_once_and_a_crash_is_a_failure(tmp_path):
    (tmp_path / "test_numbers.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.forked_workers", "--workers", "3", "test_numbers.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 1
    assert sorted((tmp_path / "ran").read_text().split()) == [*"012345678"]
    assert "2 failed, 7 passed" in run.stdout, run.stdout
    assert "FAILED test_numbers.py::test_number[3]" in run.stdout and "number = 3" in run.stdout
    assert "FAILED test_numbers.py::test_number[2] - the process ended with status 7" in run.stdout
