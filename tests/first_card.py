"""Checks the GPU path on a bare machine with one GPU: ``python3 tests/first_card.py [--out FOLDER]``.

It needs Python 3.11 or later, torch, NumPy, SciPy, xxhash, pytest, hypothesis, scikit-build-core, nanobind, CMake and a
C++ compiler. It uses Triton, CuPy and compute-sanitizer if they are installed. It needs no network, virtual environment
or pip: it builds the package with its build backend and unpacks it next to copies of the tests.

The most informative checks per minute run first. Each check is a separate process with a time limit, and a failure does
not stop the others. With ``--standin`` the script runs without a GPU, on stand-ins for the device.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "--import-mode=importlib",
    "-o",
    "addopts=",
    "-o",
    "filterwarnings=",
]
BUILD_SECONDS = 180.0


@dataclass(frozen=True)
class Check:
    """One process.

    Attributes:
        what: describes it. arguments: for Python. standin: arguments for a run without a GPU; empty to skip it then.
        seconds: time limit. tool: a command to run Python under.
    """

    what: str
    arguments: tuple[str, ...]
    standin: tuple[str, ...]
    seconds: float
    tool: str = ""


def tests(file: str, *names: str) -> tuple[str, ...]:
    """Arguments that run the tests of a file whose names contain one of ``names``."""
    return (*PYTEST, f"tests/{file}", *(("-k", " or ".join(names)) if names else ()))


CHECKS = [
    Check("the NCCL binding: library, version, calls", tests("runtime/test_nccl.py"), tests("runtime/test_nccl.py"), 60),
    Check(
        "the packing kernel against its Python reference, every unit", tests("runtime/test_gpu.py", "kernel_matches"),
        tests("runtime/test_strided_regions.py"), 90,
    ),
    Check(
        "the same under compute-sanitizer", tests("runtime/test_gpu.py", "kernel_matches"), (), 120,
        "compute-sanitizer --error-exitcode 9 --target-processes all",
    ),
    Check("packing rates compared with torch.copy_", ("-m", "microbench.kernels.packing", "--repeats", "10"), (), 60),
    Check(
        "all ranks of a plan in one process, every strategy", tests("runtime/test_gpu.py", "in_one_process"),
        tests("runtime/test_rounds.py"), 90,
    ),
    Check("two ranks on one GPU over NCCL", tests("runtime/test_gpu.py", "share_one_gpu"), tests("runtime/test_stream.py", "element"), 60),
    Check("calls between four ranks", tests("runtime/test_gpu.py", "calls_move", "blocks_the_stream"), tests("runtime/test_stream.py", "repeatedly"), 90),
    Check("casts", tests("runtime/test_gpu.py", "cast"), tests("runtime/test_stream.py", "cast"), 60),
    Check("CuPy arrays", tests("runtime/test_gpu.py", "cupy"), tests("cupy/test_cupy.py"), 60),
    Check("capture, replay, other arrays, replay", tests("runtime/test_gpu.py", "captured"), (), 60),
    Check("a rank that dies", tests("runtime/test_gpu.py", "dies"), tests("runtime/test_stream.py", "fails_or_hangs"), 170),
    Check("the pipeline engine", tests("runtime/test_gpu.py", "engine"), tests("runtime/test_stream.py", "engine", "two_rows"), 90),
]  # fmt: skip


def build(folder: Path) -> None:
    """Build the package from a copy of the sources, and install it with the tests in ``folder``."""
    sources = folder / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "reshard", "scheduler", "native"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, sources / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(path, sources / name)
    code = f"from scikit_build_core.build import build_wheel; print(build_wheel({str(folder)!r}))"
    subprocess.run(
        [sys.executable, "-c", code], cwd=sources, check=True, timeout=BUILD_SECONDS, stdout=subprocess.DEVNULL
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "installed")
    for name in ("tests", "microbench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def describe(python: str) -> str:
    """Versions of Python, the libraries and the device."""
    code = (
        "import torch, numpy, sys; print('python', sys.version.split()[0], 'torch', torch.__version__, 'numpy', "
        "numpy.__version__); print('device', torch.cuda.get_device_name() if torch.cuda.is_available() else 'none', "
        "'cuda', torch.version.cuda)\n"
        "for name in ('triton', 'cupy'):\n"
        "    try: print(name, __import__(name).__version__)\n"
        "    except Exception as error: print(name, 'is not available:', error)\n"
        "from reshard.runtime.cuda.nccl import find_library\n"
        "try: library = find_library(); print('nccl', library.version, library.path)\n"
        "except Exception as error: print('nccl is not available:', error)\n"
    )
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    return f"{platform.platform()}, {os.cpu_count()} processors\n{run.stdout}{run.stderr[-2000:]}"


def main() -> int:
    """Run all checks; returns 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python3 tests/first_card.py", description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder for the output of each check")
    parser.add_argument("--standin", action="store_true", help="run without a GPU, on stand-ins")
    options = parser.parse_args()
    begun, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="reshard-first-card-") as name:
        folder = Path(name)
        build(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (folder / "installed", folder, folder / "tests")))
        os.environ.update(CUDA_MODULE_LOADING="EAGER", PYTHONDONTWRITEBYTECODE="1", PYTHONUNBUFFERED="1")
        machine = f"built in {time.monotonic() - begun:.0f} s\n{describe(sys.executable)}"
        print(machine, flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "machine.txt").write_text(machine)
        for number, check in enumerate(CHECKS):
            arguments = check.standin if options.standin else check.arguments
            tool = check.tool.split()
            missing = not arguments or (tool and shutil.which(tool[0]) is None)
            if missing:
                print(f"not run   {check.what}", flush=True)
                continue
            started = time.monotonic()
            command = [*tool, sys.executable, *arguments]
            try:
                run = subprocess.run(
                    command, cwd=folder, timeout=check.seconds, check=False, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                code, output = run.returncode, run.stdout
            except subprocess.TimeoutExpired as error:
                code, output = 124, (error.stdout or b"").decode(errors="replace")
            if "skipped" in output and " passed" not in output:
                code = code or 5
            decision = "passed" if code == 0 else f"FAILED ({code})"
            print(f"{decision:9} {check.what}, {time.monotonic() - started:.0f} s", flush=True)
            if code:
                failed.append(check.what)
                print("\n".join(f"    {line}" for line in output.splitlines()[-25:]), flush=True)
            elif "packing" in " ".join(arguments):
                print(output)
            if options.out is not None:
                (options.out / f"{number}.txt").write_text(f"{' '.join(command)}\n\n{output}")
    print(f"{len(failed)} failed, in {time.monotonic() - begun:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
