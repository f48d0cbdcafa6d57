"""Install a wheel into an environment without a compiler, and run the example of the README there.

``python tests/wheel_runs.py build/wheel`` makes a new environment with torch.
``python tests/wheel_runs.py build/wheel --beside ENVIRONMENT`` installs into one that exists, such as that of a serving
engine. There it must not change any package, and ``pip check`` must find nothing about ``reshard``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """0 if the example prints what the README says, and the environment is sound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="folder with one wheel of reshard")
    parser.add_argument("--beside", type=Path, metavar="ENVIRONMENT", help="virtual environment with torch")
    options = parser.parse_args()
    (wheel,) = options.wheels.glob("reshard-*.whl")
    with tempfile.TemporaryDirectory() as folder:
        if options.beside is None:
            venv.create(folder, with_pip=True)
            python = f"{folder}/bin/python"
            _pip(python, "install", "torch==2.13.0")
        else:
            python = str(options.beside.absolute() / "bin" / "python")
        before = _list_packages(python)
        _pip(python, "install", f"reshard[torch] @ file://{wheel.absolute()}")
        after = _list_packages(python)
        changed = [name for name in before if after.get(name) != before[name] and name != "reshard"]
        complaints = [line for line in _pip(python, "check", check=False).splitlines() if "reshard" in line]
        problems = [f"the installation changed {name}" for name in changed] + complaints
        found, expected, run = _run_example(python, folder)
    print(run.stdout, end="")
    if run.returncode or found != expected:
        problems.append(run.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{wheel.name} runs without a compiler, with torch {after['torch']} and NumPy {after['numpy']}")
    return 1 if problems else 0


def _run_example(python: str, folder: str) -> tuple[list[str], list[str], subprocess.CompletedProcess[str]]:
    """What the example prints, what the README says, and the run."""
    page = (ROOT / "README.md").read_text()
    Path(folder, "rows.py").write_text(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0])
    expected = re.findall(r"^rank \d has \[.*?\]$", page, flags=re.MULTILINE)
    environment = {"PATH": str(Path(python).parent), "HOME": folder, "LANG": os.environ.get("LANG", "C.UTF-8")}
    run = subprocess.run(
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "rows.py"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return sorted(re.findall(r"rank \d has \[.*?\]", run.stdout)), expected, run


def _pip(python: str, command: str, *arguments: str, check: bool = True) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "CC", "CXX")}
    environment["PATH"] = str(Path(python).parent)  # without a compiler
    quiet = [] if command == "check" else ["--quiet"]
    run = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", command, *quiet, *arguments],
        env=environment, stdout=subprocess.PIPE, text=True, check=check,
    )  # fmt: skip
    return run.stdout


def _list_packages(python: str) -> dict[str, str]:
    code = "import importlib.metadata as m; print(*(f'{d.name}={d.version}' for d in m.distributions()), sep='\\n')"
    lines = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {name.lower(): version for name, version in (line.split("=", 1) for line in lines)}


if __name__ == "__main__":
    sys.exit(main())
