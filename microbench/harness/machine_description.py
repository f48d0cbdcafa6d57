"""The machine and the versions that a measurement belongs to."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard.cli.progress_bars import print_line


def describe_machine(words: Sequence[str]) -> dict[str, Any]:
    """The first record of a file: command (its words after ``microbench``), date, machine, load and versions."""
    shown = [Path(word).name if word.startswith("/") else word for word in words]  # a folder may name its user
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "scipy", "reshard", "awex"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "kind": "run",
        "command": shlex.join(["python", "-m", "microbench", *shown]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{os.cpu_count()} cores, {_processor()}, Linux {platform.release().split('-')[0]}",
        "load": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def format_machine(run: dict[str, Any]) -> str:
    """One sentence from a record of :func:`describe_machine`."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"`{run['command']}` on {run['date']}: {run['machine']}; {versions}; load {run['load']} at the start."


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def stderr(text: str) -> None:
    """Print one line to stderr."""
    print_line(text, sys.stderr)
