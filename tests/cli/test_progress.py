"""Bars appear on a terminal only, work of unknown length prints lines elsewhere, and lines that commands print stay whole."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from reshard.cli import progress_bars
from reshard.cli.progress_bars import print_line, show_elapsed, show_progress, show_time, track

ROOT = Path(__file__).parents[2]
#: Commands that take over 5 s by default, with options that shorten them.
COMMANDS = {
    "plan": "reshard plan --shape 64,64 --src-mesh 2x2 --src S0 --dst-mesh 2x2 --dst S1 --strategy all",
    "demo": "reshard demo --divide 32",
    "quality": "microbench quality --set listed --strategy send_recv",
    "auto_quality": "microbench auto_quality --pairs 2 --most-ranks 8",
    "planning_time": "microbench planning_time --ranks 72 --networks dgx_h100 --repeats 1",
    "check_speed": "microbench check_speed --messages 100 --case tensors --repeats 1",
    "loopback": "microbench loopback --repeats 1 --calls 1 --mib 1 --case rows --quick",
    "faults": "tests.campaigns.faults --runs 1 --fault none",
    "fuzz": "tests.campaigns.fuzz --seconds 1",
    "soak": "tests.campaigns.soak --seconds 1 --groups 1",
}


def _run(command, stderr):
    return subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        check=False,
        timeout=300,
    )


def _run_on_terminal(command):
    """``(exit status, stdout, stderr)`` of a command whose stderr is a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with os.fdopen(theirs, "wb", buffering=0) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=terminal
        )
    parts = []
    with os.fdopen(ours, "rb", buffering=0) as terminal, process:
        try:
            while part := terminal.read(4096):
                parts.append(part)
        except OSError:  # the last process has closed the terminal
            pass
        text = process.stdout.read().decode()
    return process.returncode, text, b"".join(parts).decode()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_long_commands_show_a_bar_on_a_terminal_only(name):
    status, text, shown = _run_on_terminal(COMMANDS[name])
    assert status == 0, shown
    assert "%|" in shown
    assert "%|" not in text
    piped = _run(COMMANDS[name], subprocess.PIPE)
    assert piped.returncode == 0
    assert b"%|" not in piped.stderr + piped.stdout


def test_nothing_is_shown_in_a_pipe(capsys):
    assert list(track((i for i in range(3)), "numbers", 3)) == [0, 1, 2]
    assert list(track("ab", "letters", show=False)) == ["a", "b"]
    with show_progress(2, "steps") as advance, show_time(1.0) as tick:
        advance(text="first")
        tick("now")
        print_line("a line")
        print_line("an error", sys.stderr)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("a line\n", "an error\n")


def test_tqdm_may_be_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(track([1, 2], "numbers")) == [1, 2]
    with show_time(1.0) as tick:
        tick()
    print_line("a line")
    assert capsys.readouterr().out == "a line\n"


def test_long_work_prints_lines_in_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr(progress_bars, "FIRST_LINE_SECONDS", 0.01)
    with show_elapsed("searching") as report:
        report(0.5, "joint on 16 ranks")
        while not (text := capsys.readouterr().err):
            time.sleep(0.01)
    assert re.fullmatch(r"searching: \d+ s; joint on 16 ranks(; about \d+ s left)?\n", text)
    with show_elapsed("nothing", show=False):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_search_shows_its_time_on_a_terminal_and_in_a_pipe():
    search = "reshard search transformer:layers=24,hidden=1024,heads=16,sequence=1024,vocabulary=50257 --samples 64"
    command = f"{search} --topology dgx_a100 --devices 16 --memory 80GB --flops 1e14"
    status, text, shown = _run_on_terminal(command)
    assert status == 0, shown
    assert "searching: 00:0" in shown and "; joint on 16 ranks" in shown and " s left" in shown
    assert "searching" not in text
    piped = _run(command, subprocess.PIPE)
    assert re.match(rb"searching: [1-9]\d* s; \w+", piped.stderr)
    assert b"searching" not in piped.stdout
