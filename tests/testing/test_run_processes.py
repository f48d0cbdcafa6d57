"""Ranks that are not forked from this process, because it has used a GPU or autograd's threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from reshard.testing import run_processes, starting

#: Without a guard for the main module. On builds of torch for CUDA, the first lines make autograd's threads.
SCRIPT = r"""
import os
import torch
from reshard.testing import LaunchError, run_processes, starting

adds_devices = torch.backends.cuda.is_built() and hasattr(torch._C, "_ensureCUDADeviceGuardSet")  # as fake tensors do
torch._C._ensureCUDADeviceGuardSet() if adds_devices else None
weight = torch.ones(3, requires_grad=True)
(2 * weight).sum().backward()
assert starting.can_fork() is not adds_devices
starting.can_fork = lambda: False
os.environ["FACTOR"] = "3"
os.chdir("/")

class Result:
    def __init__(self, value):
        self.value = value

class Failure(Exception):
    pass

def run(rank, offset):
    (2 * weight).sum().backward()
    os.write(1, f"rank {rank} in {os.getcwd()}\n".encode())
    return Result(rank * int(os.environ["FACTOR"]) + offset + weight.grad[0].item())

def fail(rank):
    if rank == 1:
        raise Failure("of rank 1")
    os.kill(os.getpid(), 9)

results = run_processes(run, 2, 10)
assert [type(each) for each in results] == [Result, Result]
print([each.value for each in results])
try:
    run_processes(fail, 2)
except LaunchError as error:
    print(error.failures[0].text, type(error.failures[1].error) is Failure)
"""


@pytest.mark.nightly
def test_ranks_of_a_script_that_has_used_autograds_threads(tmp_path):
    pytest.importorskip("cloudpickle")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("rank 0 in /\n") == run.stdout.count("rank 1 in /\n") == 1
    assert "[12.0, 15.0]" in run.stdout  # without the gradient of the script, which does not pickle with the tensor
    assert "ended with exit code -9 (Killed) True" in run.stdout


def test_a_function_that_does_not_pickle_is_forked(monkeypatch):
    monkeypatch.setattr(starting, "can_fork", lambda: False)
    lock, parent = threading.Lock(), os.getpid()
    assert run_processes(lambda rank: (lock.locked(), os.getppid() == parent), 2) == [(False, True)] * 2


#: The ranks write their numbers and wait. The launcher forks them, or starts them from a server.
WAITING = r"""
import os, sys, time
from reshard.testing import run_processes, starting

if sys.argv[1] == "server":
    starting.can_fork = lambda: False

def run(rank):
    os.write(1, f"{os.getpid()}\n".encode())
    time.sleep(100)

run_processes(run, 3)
"""


@pytest.mark.integration
@pytest.mark.parametrize("start", ["fork", pytest.param("server", marks=pytest.mark.nightly)])
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path, start):
    pytest.importorskip("cloudpickle")
    path = tmp_path / "script.py"
    path.write_text(WAITING)
    with subprocess.Popen([sys.executable, str(path), start], stdout=subprocess.PIPE, text=True) as launcher:
        numbers = [int(launcher.stdout.readline()) for _ in range(3)]
        launcher.kill()
        # Each rank holds the other end of the pipe: it ends when all ranks have ended, and the store with them.
        assert launcher.communicate(timeout=60)[0] == ""
    deadline = time.monotonic() + 10  # a process closes its files a little before it ends
    while (running := [number for number in numbers if is_running(number)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running


def is_running(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
