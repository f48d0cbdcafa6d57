"""Strangers who connect to every port of a rank cost it no descriptors, and change nothing."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.runtime.transport import gloo_listeners
from reshard.testing import run_processes

ROWS, COLUMNS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
NUM_PROBES = 300


def _listening():
    """Addresses at which this process listens."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as one:
                    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.append(one.getsockname())
    return found


def _move(rank, group, step):
    moved = reshard.reshard(torch.full((2, 4), float(rank + step)), ROWS, COLUMNS, group=group, timeout_seconds=20)
    return moved[:, 0].tolist() == [step, step, step + 1, step + 1]


def _probe(rank, port):
    """How many Gloo ports are open after a transfer in both directions, and what probes of all other ports cost."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    before, inherited = len(os.listdir("/proc/self/fd")), _listening()
    with reshard.join(store, rank, 2) as group:
        right = [_move(rank, group, 0)]
        opened, strangers = len(os.listdir("/proc/self/fd")), []
        ports = [address for address in _listening() if address not in inherited]
        for number in range(NUM_PROBES):
            for address in ports:
                with contextlib.suppress(ConnectionError, TimeoutError):  # few wait while the rank is in no call
                    strangers.append(socket.create_connection(address, timeout=0.01))
                    strangers[-1].sendall(os.urandom(number))
            right += [_move(rank, group, number)] if number % 50 == 0 else []
        for each in strangers:
            each.close()
        right += [_move(rank, group, 1) for _ in range(3)]
        time.sleep(0.5)
        cost = len(os.listdir("/proc/self/fd")) - opened
    return all(right), len(ports), cost, len(os.listdir("/proc/self/fd")) - before


def test_probes_of_all_ports_cost_no_descriptors_and_no_gloo_port_stays_open():
    for rank, (is_right, num_ports, cost, left) in enumerate(run_processes(_probe, 2, init_group=False)):
        assert is_right
        assert num_ports == 2 - rank  # presence of each process, and the control connections of rank 0
        assert cost < 8
        assert left <= 0


def _move_beside_a_unix_socket(rank, port, folder):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with socket.socket(socket.AF_UNIX) as other, reshard.join(store, rank, 2) as group:
        other.bind(f"{folder}/{rank}")
        other.listen()
        return _move(rank, group, 0)


def test_ranks_connect_while_their_process_listens_at_a_unix_socket(tmp_path):
    assert run_processes(_move_beside_a_unix_socket, 2, tmp_path, init_group=False) == [True, True]


def test_descriptor_that_another_thread_has_used_again_is_not_kept(monkeypatch):
    file = os.eventfd(0)
    monkeypatch.setattr(gloo_listeners, "_read_links", lambda: iter([(file, "socket:[1]"), (2**20, "socket:[2]")]))
    before = len(os.listdir("/proc/self/fd"))
    assert gloo_listeners.close_listeners([b"address"]) == 0
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(file)


def test_epoll_instance_that_lists_the_same_number_of_another_file_does_not_watch_it():
    """As after a fork: the instance watches a file of the parent, and here the number stands for another file."""
    watched = os.eventfd(0)
    kept = os.dup(watched)  # the instance forgets a file that nobody has open
    with select.epoll() as poller, socket.socket() as own:
        poller.register(watched, 0)
        assert gloo_listeners._watches(poller.fileno(), watched)
        os.dup2(own.fileno(), watched)
        assert not gloo_listeners._watches(poller.fileno(), watched)
    for descriptor in (watched, kept):
        os.close(descriptor)
