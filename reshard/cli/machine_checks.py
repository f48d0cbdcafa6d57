"""``reshard doctor`` without torchrun: find problems of this machine."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import resource
import shutil
import socket
import sys
from pathlib import Path

#: No test has run with this version of Python: docs/compatibility.md lists what has run.
FIRST_UNTRIED_PYTHON = (3, 16)
#: Open files that a job of a few ranks needs.
MIN_OPEN_FILES = 1024
#: NCCL allocates about 10 MB for each connection between ranks of a host without a direct path between their GPUs.
SHM_BYTES = 1 << 30


def can_run_jobs() -> bool:
    """Whether processes of this machine can import torch and reach each other. The other checks of a job need both."""
    return why_torch_fails() is None and not _examine_loopback()


def examine_machine() -> tuple[list[str], list[str]]:
    """``(lines, problems)``: a description of this machine, and its problems, each with a remedy."""
    lines, problems = examine_installation()
    return lines, [*problems, *_examine_loopback(), *_examine_open_files()]


def examine_installation() -> tuple[list[str], list[str]]:
    """``(lines, problems)`` of Python, the packages and the GPUs of this machine."""
    lines, problems = [], []
    needed = _find_needed()
    versions = {name: _version(name) for name in ("reshard", *needed)}
    listed = [f"{name} {version or '(not installed)'}" for name, version in versions.items()]
    lines.append(f"python {platform.python_version()}, {', '.join(listed)}")
    has_gpu = bool([*Path("/dev").glob("nvidia[0-9]*")])
    absent = [name for name in needed if versions[name] is None]
    if absent:
        verb, what = ("is", "it") if len(absent) == 1 else ("are", "them")
        remedy = " ".join(f"'{name}>={needed[name]}'" for name in absent)
        problems.append(
            f"{', '.join(absent)} {verb} not installed, and reshard[torch] needs {what}: pip install {remedy}"
        )
    for name, lowest in needed.items():
        version = versions[name]
        if version is not None and _numbers(version) < _numbers(lowest):
            problems.append(
                f"{name} {version} is older than {lowest}, the oldest that was tried: pip install '{name}>={lowest}'"
            )
    torch = versions.get("torch")
    if torch is not None and (reason := why_torch_fails()) is not None:
        problems.append(f"torch {torch} cannot be imported: {reason}; install it again")
        torch = None
    if sys.version_info >= FIRST_UNTRIED_PYTHON:
        lines.append(f"Python {'.'.join(map(str, FIRST_UNTRIED_PYTHON))} and later have not been tried")
    if not has_gpu:
        lines.append("no NVIDIA GPU")
    elif torch is not None:
        gpu_lines, gpu_problems = _examine_gpus(torch)
        lines += gpu_lines
        problems += gpu_problems
    if has_gpu:
        problems += _examine_shared_memory()
    return lines, problems


def _find_needed() -> dict[str, str]:
    """The packages that transfers between processes need, with the lowest version that this package allows."""
    requirements = importlib.metadata.requires("reshard") if _version("reshard") else None
    matches = (re.fullmatch(r"([\w.-]+)>=([\d.]+)(; extra == .torch.)?", text) for text in requirements or ())
    return {match[1]: match[2] for match in matches if match}


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_torch_fails() -> str | None:
    """The reason why torch cannot be imported; None if it can."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # for example, the dynamic linker does not find a library
        return str(error)
    return None


def _examine_gpus(version: str) -> tuple[list[str], list[str]]:
    import torch

    if torch.version.cuda is None:
        return [], [f"this machine has NVIDIA GPUs, but torch {version} is a build for the CPU: install one for CUDA"]
    if not torch.cuda.is_available():
        return [], [
            f"torch {version} is built for CUDA {torch.version.cuda} and finds no GPU: compare that with the CUDA "
            "version that nvidia-smi shows; it must not be newer"
        ]
    from reshard.runtime.cuda.nccl_library import find_library

    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    try:
        find_library()
    except Exception as error:  # for example, the file is there but does not load
        return [], [f"NCCL cannot be used: {error}; pip install nvidia-nccl-cu13, or nvidia-nccl-cu12 for CUDA 12"]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [f"{torch.cuda.device_count()} GPUs ({', '.join(names)}), CUDA {torch.version.cuda}, NCCL {nccl}"], []


def _examine_loopback() -> list[str]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3.0).close()
    except OSError as error:
        return [f"a process cannot connect to another one at 127.0.0.1: {error}; run `ip link set lo up`"]
    return []


def _examine_open_files() -> list[str]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY or files >= MIN_OPEN_FILES:
        return []
    return [
        f"the limit of open files is {files}, and a job of a few ranks needs {MIN_OPEN_FILES}: ulimit -n 65536 "
        "(as root, if the hard limit is lower)"
    ]


def _examine_shared_memory() -> list[str]:
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.is_dir() else 0
    if free >= SHM_BYTES:
        return []
    return [
        f"/dev/shm has {free >> 20} MiB free, and NCCL needs about 10 MiB for each pair of ranks: start a container "
        "with --shm-size=1g"
    ]
