"""What keeps ranks from reaching each other is said with the rank and what to do."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

import pytest

from reshard.cli.doctor import examine, find_problems
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
    }
    return facts | changed


def test_problems_name_the_rank_and_the_remedy():
    assert not find_problems([_facts(), _facts(host="b", address="10.0.0.2")], [])
    cases = [
        (_facts(interface="ib0"), "rank 1: GLOO_SOCKET_IFNAME names 'ib0', but a has eth0, lo"),
        (_facts(host="b", address="127.0.1.1"), "rank 1: b would be reached at 127.0.1.1, which is itself"),
        (_facts(files=16), "rank 1: may open 16 files, 2 ranks need about 32; raise it with ulimit -n"),
        (
            _facts(versions={"torch": "2.13.0", "NCCL": "2.30.1"}),
            "NCCL is not of one version: ranks 0 2.29.7; ranks 1 2.30.1",
        ),
        (_facts(gpus=0), "ranks 1 see no GPU, the others do"),
    ]
    for facts, said in cases:
        problems = find_problems([_facts(), facts], [])
        assert len(problems) == 1
        assert problems[0].startswith(said)
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


def test_ranks_find_each_other():
    said = run_processes(_examine, 3, 3, (), init_group=False)
    assert said[0] == said[1] == said[2]
    lines, problems = said[0]
    assert len(lines) == 1
    assert "ranks 0-2 at 127.0.0.1" in lines[0]
    assert not problems


def test_missing_ranks_are_named():
    said = run_processes(_examine, 3, 3, (1,), init_group=False)
    assert said[0] == said[2] == "rank 1 did not say anything in 3 s"


def _alone(rank, port, number):
    """Without an agent rank 0 serves the store itself."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(number))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if rank:
        time.sleep(0.2)
    try:
        lines, problems = examine(timeout_seconds=20.0)
        return len(lines), problems
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"


def test_rank_0_serves_where_there_is_no_agent():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        said = run_processes(_alone, 1, number, init_group=False)
        assert said[0].startswith(f"ArgumentError: rank 0 cannot serve a store at 127.0.0.1 port {number}: "), said
    assert run_processes(_alone, 2, number, init_group=False) == [(1, [])] * 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "x", "RANK is 'x'; it must be a whole number from 0 on"),
        ("RANK", "5", "RANK is 5 of a WORLD_SIZE of 2"),
        ("MASTER_PORT", "70000", "MASTER_PORT 70000; that cannot be"),
        ("MASTER_ADDR", "nowhere.invalid", "MASTER_ADDR is 'nowhere.invalid', which this host cannot look up"),
    ],
)
def test_wrong_settings_are_named(monkeypatch, name, value, said):
    for key, usual in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29999")):
        monkeypatch.setenv(key, usual)
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=re.escape(said)):
        examine()


def test_without_torchrun_it_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match=r"RANK.*torchrun --nnodes"):
        examine()
    run = subprocess.run([sys.executable, "-m", "reshard", "doctor"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "start it as torchrun" in run.stderr
