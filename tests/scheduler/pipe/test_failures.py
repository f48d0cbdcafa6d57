"""A killed rank, also the one that serves the store of ``env://``, is named by one error on every survivor."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

WORKER = """
import json, time
import torch, torch.distributed as dist
import reshard.scheduler as rs
from reshard.errors import ReshardError
from tests.scheduler.pipe.test_pipe import make_batch, make_chain

torch.set_num_threads(1)
dist.init_process_group("gloo")
engine = rs.Pipe(make_chain(), ["layers.2"], stages="1x1,2x1").compile(make_batch(0), 4)
number = 0
try:
    while True:
        engine.step(make_batch(number))
        engine.clip_grad_norm_(1.0)
        number += 1
        if number == 3:
            print("ready", flush=True)
except ReshardError as error:
    print(json.dumps([time.time(), str(error)]), flush=True)
    raise SystemExit(1)
"""


@pytest.mark.parametrize(
    "victim", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_killed_rank_is_named_by_every_survivor(victim):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": os.getcwd()}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={**os.environ, **settings, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in ranks:
            assert process.stdout.readline() == "ready\n"
        killed_at = time.time()
        ranks[victim].send_signal(signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            output, _ = ranks[rank].communicate(timeout=60)
            failed_at, text = json.loads(output)
            assert f"rank {victim} is gone" in text
            assert failed_at - killed_at < 5
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
