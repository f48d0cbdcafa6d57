"""Messages between the hub and the spokes: pending requests, reported timeouts, goodbyes and lost connections."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.coordination.control_connections import ControlConnections
from reshard.coordination.groups.store import Store
from reshard.coordination.hub_and_spokes import MAX_STRANGERS, Hub, Spoke
from reshard.testing.processes import run_processes

ROWS, COLUMNS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")


@pytest.fixture
def ends(monkeypatch):
    """The hub on rank 0 and the spoke of rank 1."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = Store(dist.HashStore())
    hub = Hub(store, (1, 2), 5.0)
    spoke = Spoke.connect(store, 1, 0, 5.0)
    yield hub, spoke
    hub.close()
    spoke.close()
    store.close()


def _pump(hub, condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        hub.pump(0.1)
    assert condition()


def test_goodbye_after_an_answer_is_not_a_loss(ends):
    hub, spoke = ends
    spoke.send_request({"value": 1}, 5.0)
    _pump(hub, lambda: 1 in hub.pending)
    hub.answer({"value": 2})
    hub.close()
    time.sleep(0.1)
    assert not spoke.is_lost()  # the answer has not been read yet
    spoke.pump(1.0)
    assert spoke.take_answer() == {"value": 2}
    assert not spoke.is_lost()


def test_hub_closes_at_the_end_of_a_process_while_its_thread_accepts_a_rank(ends, monkeypatch):
    hub, spoke = ends
    spoke.send_request({}, 5.0)
    _pump(hub, lambda: 1 in hub.pending)
    peer = hub._peers[1]
    say_goodbye = type(peer).say_goodbye

    def accept_too(self, reason):
        hub._peers[2] = peer
        say_goodbye(self, reason)

    monkeypatch.setattr(type(peer), "say_goodbye", accept_too)
    hub.close()
    time.sleep(0.1)
    assert not spoke.is_lost()


def test_close_without_a_goodbye_is_a_loss_on_both_sides(ends):
    hub, spoke = ends
    spoke.send_request({}, 5.0)
    _pump(hub, lambda: 1 in hub.pending)
    assert hub.find_lost() is None
    spoke._peer.connection.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    assert hub.find_lost() == 1
    hub._peers[1].connection.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    assert spoke.is_lost()


def test_own_close_is_no_loss_of_the_other_side(ends):
    # a process that ends closes its connections, while its monitor may still ask for lost ranks
    hub, spoke = ends
    spoke.send_request({}, 5.0)
    _pump(hub, lambda: 1 in hub.pending)
    spoke.close()
    assert not spoke.is_lost()
    hub.close()
    assert hub.find_lost() is None


def test_reported_timeout_is_dropped_with_its_request(ends):
    hub, spoke = ends
    spoke.send_request({}, 5.0)
    spoke.report_timeout()
    _pump(hub, lambda: hub.timed_out == {1})
    hub.answer({})
    assert not hub.timed_out
    spoke.send_request({}, 5.0)
    spoke.report_timeout()
    spoke.withdraw(None)
    spoke.send_request({"again": True}, 5.0)
    _pump(hub, lambda: hub.pending.get(1, (0, {}))[1] == {"again": True})
    assert not hub.timed_out


def test_connections_without_secret_or_known_rank_are_closed(ends):
    hub, _ = ends
    address = hub._listener.getsockname()[:2]
    closed = []

    def connect(hello):
        with socket.create_connection(address, timeout=5) as connection:
            body = json.dumps(hello).encode()
            connection.sendall(len(body).to_bytes(4, "big") + body)
            closed.append(connection.recv(1))

    strange = (
        ["\ud800", 1],
        [None, 2],
        [hub._proof, [2]],
        [hub._proof, {}],
        [hub._proof, True],
        [[], []],
        None,
        "",
        1e999,
    )
    hellos = (["wrong", 2], [hub._proof, 7], {"a": 1}, *strange)
    threads = [threading.Thread(target=connect, args=(hello,)) for hello in hellos]
    for thread in threads:
        thread.start()
    _pump(hub, lambda: len(closed) == len(hellos))
    for thread in threads:
        thread.join()
    assert closed == [b""] * len(hellos) and not hub.is_connected(2) and not hub.is_connected(7)


def test_secret_of_the_job_keeps_out_who_only_reads_the_store(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("RESHARD_SECRET", "of the job")
    store = Store(dist.HashStore())
    hub = Hub(store, (1, 2), 5.0)
    address, port, *entries = json.loads(store.get("hub", 5.0))
    closed = []

    def connect(guess):
        with socket.create_connection((address, port), timeout=5) as connection:
            body = json.dumps([guess, 2]).encode()
            connection.sendall(len(body).to_bytes(4, "big") + body)
            closed.append(connection.recv(1))

    threads = [threading.Thread(target=connect, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    _pump(hub, lambda: len(closed) == len(entries))
    for thread in threads:
        thread.join()
    assert closed == [b"", b""] and not hub.is_connected(2)
    spoke = Spoke.connect(store, 1, 0, 5.0)
    _pump(hub, lambda: hub.is_connected(1))
    hub.close()
    spoke.close()
    store.close()


def _move_with_secret(rank, secrets):
    if secrets[rank] is not None:
        os.environ["RESHARD_SECRET"] = secrets[rank]
    try:
        out = reshard.reshard(
            torch.full((1, 2), float(rank)), ROWS, COLUMNS, shape=(2, 2), dtype="float32", timeout_seconds=20
        )
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"
    return out.flatten().tolist()


@pytest.mark.parametrize("secrets", [("a", "a"), ("a", "b"), ("a", None), (None, "b")])
def test_all_ranks_name_the_rank_with_another_secret(secrets):
    found = run_processes(_move_with_secret, 2, secrets)
    if secrets == ("a", "a"):
        assert found == [[0.0, 1.0], [0.0, 1.0]]
    else:
        assert found[1].startswith("ArgumentError: RESHARD_SECRET of rank 1 differs from that of rank 0")
        assert "RESHARD_SECRET of rank 1 differs from that of rank 0" in found[0]


def test_an_end_that_another_thread_has_closed_reads_nothing(ends):
    hub, spoke = ends
    links = ControlConnections((0, 1))
    links.hub, links.spoke = hub, None
    hub.close()
    assert links.find_left() is None
    spoke.close()
    with pytest.raises(EOFError, match="this side has closed the connection"):
        spoke.pump(0.0)
    links.hub, links.spoke = None, spoke
    assert links.find_left() is None


def test_silent_strangers_do_not_use_up_descriptors(ends):
    hub, _ = ends
    address = hub._listener.getsockname()[:2]
    strangers = []
    for _ in range(MAX_STRANGERS + 20):
        strangers.append(socket.create_connection(address, timeout=5))
        hub.drain()
    assert len(hub._unverified) <= MAX_STRANGERS + 3 and strangers[0].recv(1) == b""
    for stranger in strangers:
        stranger.close()
