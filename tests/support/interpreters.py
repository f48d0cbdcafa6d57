"""Ranks as interpreters of their own, which exit as those of users do, unlike forked ranks."""

import os
import socket
import subprocess
import sys


def find_free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def run_interpreters(script, num_ranks, timeout_seconds=90):
    """Run a script on each rank, with the variables of ``env://``; returns the outputs and errors of all ranks."""
    settings = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **settings, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    found = [process.communicate(timeout=timeout_seconds) for process in ranks]
    assert all(process.returncode == 0 for process in ranks), found
    return found
