"""The script for a machine with a GPU names tests that exist, and ends in time."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests import gpu_check

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("check", gpu_check.CHECKS, ids=lambda check: check.what)
@pytest.mark.parametrize("side", ["arguments", "standin"])
def test_every_check_selects_tests(check, side):
    arguments = getattr(check, side)
    assert arguments or side == "standin"
    if "pytest" not in arguments:
        called = re.findall(r"test_transfers\.(\w+)", " ".join(arguments))
        assert all(f"def {name}(" in (ROOT / "tests/gpu/test_transfers.py").read_text() for name in called)
        return
    path = next(argument for argument in arguments if argument.startswith("tests/"))
    tree = ast.parse((ROOT / path).read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    functions += [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    words = arguments[arguments.index("-k") + 1].split(" or ") if "-k" in arguments else [""]
    for word in words:
        assert any(word in name for name in functions), word


def _checks(*codes, **options):
    return [gpu_check.Check(code, ("-c", code), (), 30.0, **options) for code in codes]


def _is_running(pid):
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.integration
def test_checks_report_failures_and_end_at_their_limits(tmp_path, monkeypatch, capsys):
    """A failure stops nothing, a check that hangs runs beside others, and no check leaves a process behind."""
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    # one write for each line, because two processes write to the same pipe
    hangs = "import os, time\ndef stuck():\n    time.sleep(60)\nos.fork()\nos.write(1, b'%d\\n' % os.getpid())\nstuck()"
    leaves = "import os, time\nchild = os.fork()\nif not child: time.sleep(60)\nprint(child)\nraise SystemExit(3)"
    crash, run = "import ctypes; ctypes.string_at(0)", "import os; print(os.environ['RESHARD_CHECKED'])"
    idle, fails, crashes, passes = _checks(hangs, leaves, crash, run, variables=(("RESHARD_CHECKED", "yes"),))
    passes = dataclasses.replace(passes, is_timed=True)
    late = gpu_check.Check("late", ("-c", ""), (), 30.0)
    idle = gpu_check.Check("hangs", idle.arguments, (), 1.5)
    tool = gpu_check.Check("tool", ("-c", ""), (), 30.0, "no-such-tool --flag")
    monkeypatch.setattr(gpu_check, "CHECKS", [idle, fails, crashes, passes, tool])
    begun = time.monotonic()
    pages = []

    def save(runs):
        gpu_check.write_results(tmp_path / "out", "a machine", runs)
        pages.append((tmp_path / "out" / "first-card.md").read_text())

    runs = gpu_check.run_checks(tmp_path, False, begun + 60, save)
    assert [run.decision for run in runs] == [
        "FAILED (124)", "FAILED (3)", "FAILED (-11)", "passed", "not run (no-such-tool is not installed)"
    ]  # fmt: skip
    assert time.monotonic() - begun < 12
    assert runs[0].output.count("in stuck") == 2  # both processes say where they were
    left = [int(line) for run in runs[:2] for line in run.output.splitlines() if line.isdigit()]
    assert len(left) == 3 and not any(map(_is_running, left))
    assert gpu_check.Run(late, tmp_path, False, begun).decision == "not run (no time left of 280 s)"
    assert len(pages) == 5 and "| hangs | under way |" in pages[0]
    only = gpu_check.run_checks(tmp_path, False, time.monotonic() + 60, lambda runs: None, "TOOL")
    assert [run.check.what for run in only] == ["tool"]
    assert "| FAILED (-11) |" in pages[-1] and "## hangs: FAILED (124)" in pages[-1]
    assert (tmp_path / "out" / "3.txt").read_text().startswith(sys.executable)
    assert "FAILED (3)" in capsys.readouterr().out


def test_process_that_cannot_be_killed_is_left_behind(monkeypatch):
    for name in ("END_SECONDS", "CHILD_SECONDS"):
        monkeypatch.setattr(gpu_check, name, 0.1)
    process = Mock(pid=-1, returncode=None)
    process.wait.side_effect = subprocess.TimeoutExpired("check", 1.0)
    signals = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: signals.append(number))
    assert gpu_check.end_process(process, time.monotonic()) == 137
    assert [number for number in signals if number] == [signal.SIGABRT, signal.SIGKILL]


def test_code_that_hangs_is_ended():
    status, output = gpu_check.run_python("print('begun', flush=True); import time; time.sleep(60)", 0.5)
    assert status == 124 and output.startswith("begun")


def test_unreachable_loopback_is_named(monkeypatch):
    gpu_check.check_loopback()

    def refuse(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(SystemExit, match="ip link set lo up"):
        gpu_check.check_loopback()
