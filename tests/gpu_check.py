"""Checks the GPU path on a bare machine with one GPU: ``python3 tests/gpu_check.py [--out FOLDER]``.

It needs Python 3.11 or later, torch, NumPy, SciPy, xxhash, pytest, hypothesis, scikit-build-core, nanobind, CMake and a
C++ compiler. It uses Triton, CuPy and compute-sanitizer if they are installed. It needs no network, virtual environment
or pip: it builds the package with its build backend and unpacks it next to copies of the tests.

The check that the pipeline engine does not hang runs first. Each check is a separate process with a time limit, and a
failure does not stop the others. Some run at the same time; those that measure times run alone, at the end. At its
limit a check is aborted, so that Python prints where each of its ranks was. The whole run ends within five minutes;
checks for which no time is left are not run. The page of results is written after each check. ``--only NAME`` runs the
checks whose names contain NAME. With ``--standin`` the script runs without a GPU, on stand-ins for the device.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import functools
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
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
#: Limit of the build and all checks together, less the time to end the checks that still run.
TOTAL_SECONDS = 280.0
#: Checks that run at the same time. Each starts up to five ranks.
LANES = max(2, min(6, (os.cpu_count() or 1) // 2))
#: How long a process may take to end after each signal: to print where it was, and to leave the GPU.
END_SECONDS = 3.0
#: How long children may print where they are.
CHILD_SECONDS = 2.0
#: Lines of the output of a failed check that are printed.
TAIL_LINES = 40


@dataclass(frozen=True)
class Check:
    """One process.

    Attributes:
        what: describes it. arguments: for Python. standin: arguments for a run without a GPU; empty to skip it then.
        seconds: time limit. tool: a command to run Python under. variables: environment variables for this check.
        is_timed: it measures times, so it runs alone, after all others.
    """

    what: str
    arguments: tuple[str, ...]
    standin: tuple[str, ...]
    seconds: float
    tool: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    is_timed: bool = False


def tests(file: str, *names: str) -> tuple[str, ...]:
    """Arguments that run the tests of a file whose names contain one of ``names``."""
    return (*PYTEST, f"tests/{file}", *(("-k", " or ".join(names)) if names else ()))


BLOCKING = "scheduler/runtime/test_blocking_hosts.py"
CHECKS = [
    Check("the engine does not hang", tests("gpu/test_training.py", "engine_does_not_hang"), tests(BLOCKING), 90),
    Check("Pipe: stages, bf16", tests("gpu/test_training.py", "two_stages", "four_stages", "bf16"), (), 150),
    Check("Pipe: DDP, tensor parallelism, grids", tests("gpu/test_training.py", "DDP", "tensor_parallelism", "grids"), (), 150),
    Check("a rank that dies", tests("gpu/test_transfers.py", "dies"), tests("runtime/test_lost_ranks.py"), 150),
    Check("reshard train and reshard demo on shared GPUs", tests("gpu/test_training.py", "command", "demo"), tests("cli/test_cli.py", "demo", "share"), 150),
    Check("replicas sum their gradients", tests("gpu/test_training.py", "replicas"), tests("runtime/test_stream.py", "replicas"), 60),
    Check("the NCCL binding: library, version, calls", tests("runtime/test_nccl.py"), tests("runtime/test_nccl.py"), 60),
    Check("calls between four ranks", tests("gpu/test_transfers.py", "calls_move", "blocks_the_stream", "share_one_gpu", "broadcast", "large_groups"), tests("runtime/test_stream.py", "repeatedly", "move_every"), 90),
    Check("graphs: capture, replay, refusals", tests("gpu/test_transfers.py", "captured"), tests("runtime/test_stream.py", "captures"), 60),
    Check("layouts, DTensors, named tensors, codecs", tests("gpu/test_tensors.py"), (*tests("codecs/test_codec_kernels.py", "interpreted"), "-m", "not slow"), 120),
    Check("casts", tests("gpu/test_transfers.py", "are_cast"), tests("runtime/test_stream.py", "cast"), 60),
    Check("whole models: FSDP trainer to engines", tests("gpu/test_weights.py"), tests("weights/test_state_dict.py"), 90),
    Check("CuPy arrays", tests("gpu/test_transfers.py", "cupy"), tests("cupy/test_cupy.py"), 60),
    Check(
        "the packing kernel against its reference implementation, every unit", tests("gpu/test_transfers.py", "kernel_matches"),
        tests("runtime/test_strided_regions.py"), 60,
    ),
    Check(  # in one process
        "the same under compute-sanitizer",
        ("-c", "from tests.gpu import test_transfers; print(test_transfers.compare_kernel(0))"), (), 90,
        "compute-sanitizer --error-exitcode 9",
    ),
    Check(
        "the kernels of the block codecs against the native ones", tests("codecs/test_codec_kernels.py", "on_a_gpu"),
        (*tests("codecs/test_codec_kernels.py", "interpreted"), "-m", "not slow"), 90,
    ),
    Check(
        "all ranks of a plan in one process, every strategy", tests("gpu/test_transfers.py", "in_one_process"),
        tests("runtime/test_rounds.py"), 90,
    ),
    Check("times of the engine and a plain loop", ("-m", "microbench", "gpu_engine"), (), 90, is_timed=True),
    Check("times of Movers and torch.distributed", ("-m", "microbench", "gpu_transfers"), (), 90, is_timed=True),
    Check("rates of packing and torch.copy_", ("-m", "microbench", "gpu_packing"), (), 40, is_timed=True),
    Check("rates of the block codecs and torch.copy_", ("-m", "microbench", "gpu_codecs"), (), 40, is_timed=True),
]  # fmt: skip


def check_loopback() -> None:
    """Exit if processes of this machine cannot connect, as in a network namespace whose loopback interface is down."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2.0).close()
    except OSError as error:
        sys.exit(f"127.0.0.1 cannot be reached ({error}): run `ip link set lo up`")


def build(folder: Path) -> None:
    """Build the package from a copy of the sources, and install it with the tests in ``folder``.

    Raises:
        RuntimeError: it cannot be built, or not in time.
    """
    sources = folder / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "reshard", "scheduler", "native"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, sources / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(path, sources / name)
    code = f"from scikit_build_core.build import build_wheel; print(build_wheel({str(folder)!r}))"
    status, output = run_python(code, BUILD_SECONDS, sources)
    if status:
        why = f"was not built within {BUILD_SECONDS:g} s" if status == 124 else "cannot be built"
        raise RuntimeError("\n".join([*output.splitlines()[-TAIL_LINES:], f"the package {why}"]))
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "installed")
    for name in ("tests", "microbench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def describe() -> str:
    """The machine, and versions of Python, the libraries and the device."""
    code = (
        "import torch, numpy, sys; print('python', sys.version.split()[0], 'torch', torch.__version__, 'numpy', "
        "numpy.__version__); print('device', torch.cuda.get_device_name() if torch.cuda.is_available() else 'none', "
        "'cuda', torch.version.cuda)\n"
        "for name in ('triton', 'cupy'):\n"
        "    try: print(name, __import__(name).__version__)\n"
        "    except Exception as error: print(name, 'is not available:', error)\n"
        "from reshard.runtime.cuda.nccl_library import find_library\n"
        "try: library = find_library(); print('nccl', library.version, library.path)\n"
        "except Exception as error: print('nccl is not available:', error)\n"
    )
    folder = "/dev/shm"  # NCCL allocates there, and a container may have little
    shared = shutil.disk_usage(folder).free // 2**20 if os.path.isdir(folder) else 0
    machine = f"{platform.platform()}, {os.cpu_count()} processors, {shared} MiB of shared memory"
    return f"{machine}\n{run_python(code, 60.0)[1]}"


def run_python(code: str, seconds: float, folder: Path | None = None) -> tuple[int, str]:
    """Run code in a new process; returns its exit status, or 124 after ``seconds``, and its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        status = end_process(process, time.monotonic() + seconds)
        file.seek(0)
        return status, file.read()


def end_process(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Wait for a process, and abort it at its deadline. What it has left running is killed.

    Returns:
        Its exit status; 124 at the deadline, 137 if it could not even be killed, as inside a driver that hangs.
    """
    status = 124
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(max(deadline - time.monotonic(), 0.0))
    if process.returncode is None:
        # faulthandler prints where the process is, and then where its children are.
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        end_group(process, signal.SIGABRT)
        children_end = time.monotonic() + CHILD_SECONDS
        while time.monotonic() < children_end and has_group(process.pid):
            time.sleep(0.02)
    end_group(process, signal.SIGKILL)
    return status if process.returncode is not None else 137


def has_group(number: int) -> bool:
    """Whether a process of a group still exists. A dead one exists until its parent has waited for it."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def end_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and its children, and wait a little for the process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


class Run:
    """A check under way, or its result.

    Attributes:
        decision: ``"passed"``, ``"FAILED (exit code)"`` or ``"not run"`` with the reason. output: of the process.
    """

    def __init__(self, check: Check, folder: Path, standin: bool, deadline: float) -> None:
        arguments = check.standin if standin else check.arguments
        tool = check.tool.split()
        self.check, self.begun, self.output, self.seconds = check, time.monotonic(), "", 0.0
        self.decision = ""
        if not arguments:
            self.decision = "not run (it needs a GPU)"
        elif tool and shutil.which(tool[0]) is None:
            self.decision = f"not run ({tool[0]} is not installed)"
        elif self.begun >= deadline:
            self.decision = f"not run (no time left of {TOTAL_SECONDS:g} s)"
        if not self.decision:
            self.command = [*tool, sys.executable, *arguments]
            self._deadline = min(self.begun + check.seconds, deadline)
            self._path = folder / f"output of {check.what}.txt".replace("/", " ")
            with self._path.open("w") as file:
                self._process = subprocess.Popen(
                    self.command,
                    cwd=folder,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=os.environ | dict(check.variables),
                )

    def end(self) -> None:
        """Wait for the process, and end it with its children at its time limit."""
        if self.decision:
            return
        code = end_process(self._process, self._deadline)
        self.seconds = time.monotonic() - self.begun
        self.output = self._path.read_text(errors="replace")
        if "skipped" in self.output and " passed" not in self.output:
            code = code or 5
        self.decision = "passed" if code == 0 else f"FAILED ({code})"

    def report(self) -> None:
        """Print the result, with the end of the output of a failed check, and all of a measurement."""
        print(f"{self.decision:9} {self.check.what}, {self.seconds:.0f} s", flush=True)
        if self.decision.startswith("FAILED"):
            print("\n".join(f"    {line}" for line in self.tail), flush=True)
        elif self.is_measurement:
            print(self.output, flush=True)

    @property
    def tail(self) -> list[str]:
        """The last lines of the output, without the frames of pytest."""
        frames = ("/_pytest/", "/pluggy/", "<frozen runpy>", "Extension modules:")
        lines = [line for line in self.output.splitlines() if not any(frame in line for frame in frames)]
        return lines[-TAIL_LINES:]

    @property
    def is_measurement(self) -> bool:
        """Whether the output is a result."""
        return self.decision == "passed" and self.check.is_timed


def run_checks(
    folder: Path, standin: bool, deadline: float, save: Callable[[list[Run]], None], only: str = ""
) -> list[Run]:
    """Run and report all checks whose names contain ``only``, and save the results after each.

    Several run at the same time, and those that measure times afterwards, one by one.
    """
    checks = [check for check in CHECKS if only.lower() in check.what.lower()]
    runs: dict[str, Run] = {}
    lock = threading.Lock()

    def in_order() -> list[Run]:
        return [runs[check.what] for check in checks if check.what in runs]

    def run_one(check: Check) -> None:
        run = Run(check, folder, standin, deadline)
        with lock:
            runs[check.what] = run
        run.end()
        with lock:
            run.report()
            save(in_order())

    with concurrent.futures.ThreadPoolExecutor(LANES) as pool:
        list(pool.map(run_one, [check for check in checks if not check.is_timed]))
    for check in checks:
        if check.is_timed:
            run_one(check)
    return in_order()


def write_results(out: Path | None, machine: str, runs: list[Run]) -> None:
    """Write the output of each check to a file, and all results as a page for ``docs/benchmarks``."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"# Checks on a GPU, {datetime.date.today()}", "", "```text", machine.strip(), "```", ""]
    lines += ["| check | result | seconds |", "|---|---|---|"]
    for number, run in enumerate(runs):
        lines.append(f"| {run.check.what} | {run.decision or 'under way'} | {run.seconds:.0f} |")
        if run.output:
            (out / f"{number}.txt").write_text(f"{' '.join(run.command)}\n\n{run.output}")
    for run in runs:
        if run.is_measurement:
            lines += ["", f"## {run.check.what}", "", "```text", run.output.strip(), "```"]
        elif run.decision.startswith("FAILED"):
            lines += ["", f"## {run.check.what}: {run.decision}", "", "```text", *run.tail, "```"]
    (out / "first-card.md").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Run all checks; returns 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python3 tests/gpu_check.py", description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder for a page of the results and the output of each check")
    parser.add_argument("--standin", action="store_true", help="run without a GPU, on stand-ins")
    parser.add_argument("--only", default="", metavar="NAME", help="run only checks whose names contain this")
    options = parser.parse_args()
    if not any(options.only.lower() in check.what.lower() for check in CHECKS):
        parser.error(f"no check is called {options.only!r}; checks are: {', '.join(check.what for check in CHECKS)}")
    begun = time.monotonic()
    check_loopback()
    with tempfile.TemporaryDirectory(prefix="reshard-first-card-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            build(folder)
        except RuntimeError as error:
            write_results(options.out, str(error), [])
            sys.exit(str(error))
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (folder / "installed", folder)))
        # Torch finds GPUs without initializing CUDA, which forked ranks could not use any more.
        os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONUNBUFFERED="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
        # Compiled kernels go into the folder of this run: the home directory may be read-only.
        os.environ.update(PYTHONFAULTHANDLER="1", TRITON_CACHE_DIR=str(folder / "triton"))
        machine = f"built in {time.monotonic() - begun:.0f} s\n{describe()}"
        print(machine, flush=True)
        save = functools.partial(write_results, options.out, machine)
        runs = run_checks(folder, options.standin, begun + TOTAL_SECONDS, save, options.only)
    num_failed = sum(run.decision.startswith("FAILED") for run in runs)
    num_late = sum("no time left" in run.decision for run in runs)
    print(f"{num_failed} failed, {num_late} not run for lack of time, in {time.monotonic() - begun:.0f} s")
    return bool(num_failed or num_late)


if __name__ == "__main__":
    sys.exit(main())
