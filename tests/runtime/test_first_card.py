"""The script for a machine with a GPU names tests that exist, and ends in time."""

from __future__ import annotations

import ast
import socket
import sys
import time
from pathlib import Path

import pytest

from tests import first_card

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("check", first_card.CHECKS, ids=lambda check: check.what)
@pytest.mark.parametrize("side", ["arguments", "standin"])
def test_every_check_selects_tests(check, side):
    arguments = getattr(check, side)
    assert arguments or side == "standin"
    if "pytest" not in arguments:
        return
    path = next(one for one in arguments if one.startswith("tests/"))
    tree = ast.parse((ROOT / path).read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    words = arguments[arguments.index("-k") + 1].split(" or ") if "-k" in arguments else [""]
    for word in words:
        assert any(word in name for name in functions), word


def _checks(*codes, **options):
    return [first_card.Check(code, ("-c", code), (), 30.0, **options) for code in codes]


def test_checks_report_failures_and_end_at_their_limits(tmp_path, monkeypatch, capsys):
    """A failure stops nothing, an idle check runs beside the next, and a check is killed with its children."""
    forks = "import os, time; os.fork(); time.sleep(60)"
    idle, fails, passes = _checks(forks, "raise SystemExit(3)", "print('done')")
    late = first_card.Check("late", ("-c", ""), (), 30.0)
    idle = first_card.Check(idle.what, idle.arguments, (), 1.5, is_idle=True)
    tool = first_card.Check("tool", ("-c", ""), (), 30.0, "no-such-tool --flag")
    monkeypatch.setattr(first_card, "CHECKS", [idle, fails, passes, tool])
    begun = time.monotonic()
    runs = first_card.run_checks(tmp_path, False, begun + 60)
    assert [run.decision for run in runs] == [
        "FAILED (124)", "FAILED (3)", "passed", "not run (no-such-tool is not installed)"
    ]  # fmt: skip
    assert time.monotonic() - begun < 10
    assert first_card.Run(late, tmp_path, False, begun).decision == "not run (no time left of 480 s)"
    first_card.write_results(tmp_path / "out", "a machine", runs)
    page = (tmp_path / "out" / "first-card.md").read_text()
    assert "| raise SystemExit(3) | FAILED (3) |" in page
    assert (tmp_path / "out" / "2.txt").read_text().startswith(sys.executable)
    assert "FAILED (3)" in capsys.readouterr().out


def test_unreachable_loopback_is_named(monkeypatch):
    first_card.check_loopback()

    def refuse(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(SystemExit, match="ip link set lo up"):
        first_card.check_loopback()
