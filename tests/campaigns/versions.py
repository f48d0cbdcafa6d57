"""Run the fast tests with several versions of torch, each in an environment of its own.

``python -m tests.campaigns.versions 2.9.1 2.15.0 --python python3.12``. Builds for CUDA take 3 GB to download each.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = ("2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0")
BUILD_TOOLS = ("scikit-build-core>=1.1.2", "nanobind>=3.1.0", "cmake", "ninja")
VERSIONS = """
import importlib.metadata, platform
import torch
print(platform.python_version(), torch.__version__, *(
    f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "scipy", "networkx", "xxhash", "transformers")
), sep=" | ")
"""


def run_tests(folder: Path, python: str, torch: str, tests: list[str]) -> tuple[str, str]:
    """Install one version of torch and run tests. Returns the versions, and the last line of the tests."""
    dropped = ("PIP_CONSTRAINT", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # the last as in the Makefile
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    if not folder.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = str(folder / "bin" / "python")
    install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"torch=={torch}", *BUILD_TOOLS], check=True, env=environment)
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    options = ["--no-build-isolation", "--config-settings", f"build-dir={folder / 'native'}"]
    subprocess.run(
        [*install, *options, "--editable", f"{ROOT}[torch,test]", f"torch=={torch}"], check=True, env=environment
    )
    versions = subprocess.run([own, "-c", VERSIONS], check=True, capture_output=True, text=True, env=environment).stdout
    log = folder / "tests.log"
    with log.open("w") as output:
        command = [own, "-m", "pytest", "-q", "-n", "3", "--dist", "worksteal", *tests]
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
    return versions.strip(), log.read_text().strip().splitlines()[-1]


def main() -> int:
    """0 if all tests passed with each version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="*", default=TORCH, help=f"versions; default: {' '.join(TORCH)}")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compatibility", help="of the environments")
    parser.add_argument("--tests", default="", help="arguments of pytest, as one text; default: the fast tests")
    options = parser.parse_args()
    results = []
    for torch in options.torch:
        folder = options.folder.absolute() / f"{Path(options.python).name}-torch-{torch}"
        try:
            versions, result = run_tests(folder, options.python, torch, shlex.split(options.tests))
        except subprocess.CalledProcessError as error:
            versions, result = f"torch {torch}", f"not installed: {error}"
        results.append(result)
        print(f"| {versions} | {result} |", flush=True)
    return 0 if all("passed" in item and "failed" not in item and "error" not in item for item in results) else 1


if __name__ == "__main__":
    sys.exit(main())
