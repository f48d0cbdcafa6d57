"""The doctor names each problem with its rank and a remedy."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from reshard.cli import job_checks, machine_checks, main
from reshard.cli.job_checks import examine, find_problems
from reshard.errors import ArgumentError, ReshardError, TransferTimeoutError
from reshard.testing.processes import run_processes


def _facts(**changed):
    facts = {
        "host": "a",
        "versions": {"torch": "2.13.0", "NCCL": "2.29.7"},
        "gpus": 8,
        "interface": "",
        "interfaces": ["eth0", "lo"],
        "address": "10.0.0.1",
        "files": 2**20,
        "port": 1,
        "installation": [],
    }
    return facts | changed


def test_problems_name_the_rank_and_the_remedy():
    assert not find_problems([_facts(), _facts(host="b", address="10.0.0.2")], [])
    cases = [
        (_facts(interface="ib0"), "rank 1 (a): GLOO_SOCKET_IFNAME names 'ib0', but the host has eth0, lo"),
        (
            _facts(host="b", address="127.0.1.1"),
            "rank 1 (b): the address of the host is 127.0.1.1, which other hosts cannot reach",
        ),
        (
            _facts(files=16),
            "rank 1 (a): the limit of open files is 16, and a job of this size needs about 1024; raise it with ulimit",
        ),
        (
            _facts(versions={"torch": "2.13.0", "NCCL": "2.30.1"}),
            "NCCL has different versions: ranks 0 2.29.7; ranks 1 2.30.1",
        ),
        (_facts(gpus=0), "ranks 1 have no GPU, but the others have: run `reshard doctor` without torchrun on a"),
    ]
    for facts, text in cases:
        problems = find_problems([_facts(), facts], [])
        assert len(problems) == 1
        assert problems[0].startswith(text)
    full = _facts(installation=["/dev/shm has 64 MiB free"])
    assert find_problems([full, full, _facts(), full | {"host": "b", "address": "10.0.0.2"}], []) == [
        "ranks 0-1,3 (a, b): /dev/shm has 64 MiB free"
    ]
    (refused,) = find_problems([_facts(), _facts(host="b", address="10.0.0.2")], [(0, 1, "timed out")])
    assert refused.startswith("rank 0 (a) cannot reach b at 10.0.0.2: timed out")


def _examine(rank, port, size, absent):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if rank in absent:
        return None
    try:
        return examine(timeout_seconds=3.0 if absent else 30.0)
    except TransferTimeoutError as error:
        return str(error)


def test_healthy_ranks_have_no_problems():
    results = run_processes(_examine, 3, 3, (), init_group=False)
    assert results[0] == results[1] == results[2]
    lines, problems = results[0]
    assert len(lines) == 1
    assert "ranks 0-2 at 127.0.0.1" in lines[0]
    assert not problems


@pytest.mark.integration
def test_missing_ranks_are_named():
    results = run_processes(_examine, 3, 3, (1,), init_group=False)
    assert results[0] == results[2] == "rank 1 did not respond within 3 s"


def _alone(rank, port, number):
    """Without a torchrun agent, rank 0 serves the store."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(number))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if rank:
        time.sleep(0.2)
    try:
        lines, problems = examine(timeout_seconds=20.0)
        return len(lines), problems
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"


def test_rank_0_serves_the_store_without_an_agent():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        (error,) = run_processes(_alone, 1, number, init_group=False)
        assert error.startswith(f"ArgumentError: rank 0 cannot serve a store at 127.0.0.1 port {number}: "), error
    assert run_processes(_alone, 2, number, init_group=False) == [(1, [])] * 2


def test_no_rank_fails_before_rank_0_has_printed(monkeypatch, capsys):
    """Torchrun ends all ranks once one fails."""
    monkeypatch.setattr(job_checks, "examine", lambda _: (["a: ranks 0-1"], ["rank 1: no route"]))
    status = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        status[rank] = main.main(["doctor"])
    assert status == {"0": 1, "1": 0}
    assert capsys.readouterr().out == "a: ranks 0-1\nPROBLEM rank 1: no route\n"


def test_a_rank_that_cannot_run_learns_what_to_do(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(machine_checks, "why_torch_fails", lambda: "libnccl.so.2: cannot open shared object file")
    assert main.main(["doctor"]) == 1
    assert "cannot be imported: libnccl.so.2: cannot open" in capsys.readouterr().out
    assert main.main(["info"]) == 0
    assert "none of torch, which cannot be imported: libnccl.so.2: cannot open" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setenv("RANK", "0")

    def refuse(*_):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(machine_checks.socket, "create_server", refuse)
    assert main.main(["doctor"]) == 1
    assert "127.0.0.1: Network is unreachable; run `ip link set lo up`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RANK", "x", "RANK is 'x'; it must be an integer of at least 0"),
        ("RANK", "5", "RANK is 5; it must be less than WORLD_SIZE, which is 2"),
        ("MASTER_PORT", "70000", "MASTER_PORT is 70000; it must be at most 65535"),
        ("MASTER_ADDR", "nowhere.invalid", "MASTER_ADDR is 'nowhere.invalid', which this host cannot resolve"),
    ],
)
def test_wrong_environment_variables_are_named(monkeypatch, name, value, text):
    for key, usual in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29999")):
        monkeypatch.setenv(key, usual)
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=re.escape(text)):
        examine()


def test_error_without_torchrun_shows_the_command(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match=r"RANK.*torchrun --nnodes"):
        examine()


@pytest.mark.integration
def test_a_machine_is_examined_without_torchrun():
    run = subprocess.run([sys.executable, "-m", "reshard", "doctor"], capture_output=True, text=True, check=False)
    assert run.returncode == ("PROBLEM" in run.stdout)
    assert f"torch {importlib.metadata.version('torch')}" in run.stdout and not run.stderr


def test_problems_of_a_machine_have_remedies(monkeypatch):
    versions = dict.fromkeys(("reshard", "networkx", "scipy", "xxhash", "cloudpickle", "safetensors", "tqdm"), "99")
    versions |= {"torch": None, "numpy": "1.26.3"}
    monkeypatch.setattr(machine_checks, "_version", versions.get)
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(machine_checks.Path, "glob", lambda self, pattern: [self / "nvidia0"])
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))

    def refuse(*_):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(machine_checks.socket, "create_server", refuse)
    absent, old, shm, loopback, files = machine_checks.examine_machine()[1]
    assert old.startswith("numpy 1.26.3 is older than 1.26.4") and old.endswith("pip install 'numpy>=1.26.4'")
    assert absent.startswith("torch is not installed") and absent.endswith("pip install 'torch>=2.9.1'")
    assert "127.0.0.1: Network is unreachable; run `ip link set lo up`" in loopback
    assert "the limit of open files is 256" in files and "ulimit -n" in files
    assert "/dev/shm has 64 MiB" in shm and "--shm-size=1g" in shm
    versions["torch"] = "2.6.0+cu124"
    monkeypatch.setattr(machine_checks, "why_torch_fails", lambda: "libnccl.so.2: cannot open shared object file")
    assert "torch 2.6.0+cu124 cannot be imported: libnccl.so.2" in machine_checks.examine_machine()[1][2]
    monkeypatch.setattr(machine_checks, "why_torch_fails", lambda: None)
    assert "torch 2.6.0+cu124 is older than 2.9.1" in machine_checks.examine_machine()[1][1]
    versions |= {"torch": torch.__version__, "numpy": "2.10"}
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build for the CPU: install one for CUDA" in machine_checks.examine_machine()[1][0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "is built for CUDA 13.0 and finds no GPU" in machine_checks.examine_machine()[1][0]
