"""Ranks as interpreters of their own, which exit as those of users do, unlike forked ranks."""

import os
import random
import socket
import subprocess
import sys


def find_free_port():
    """Find a port below those that the system gives to connections, so that none takes it before a rank listens."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = min(int(file.read().split()[0]), 32768)
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


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
    try:
        interpreters = [process.communicate(timeout=timeout_seconds) for process in ranks]
    finally:
        for process in ranks:
            with process:  # closes its pipes and waits for it
                process.kill()
    failed = {rank: interpreters[rank][1][-1500:] for rank, process in enumerate(ranks) if process.returncode != 0}
    assert not failed, f"ranks {list(failed)} of {script.name} failed: {failed}"
    return interpreters
