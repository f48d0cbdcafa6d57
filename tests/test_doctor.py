"""What keeps ranks from reaching each other is said with the rank and what to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from reshard.doctor import examine, find_problems
from reshard.errors import ArgumentError, TransferTimeoutError
from reshard.launch import run_processes


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
    assert said[0] == said[2] == "ranks 1 did not say anything in 3 s"


def test_without_torchrun_it_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match=r"RANK.*torchrun --nnodes"):
        examine()
    run = subprocess.run([sys.executable, "-m", "reshard", "doctor"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "start it as torchrun" in run.stderr
