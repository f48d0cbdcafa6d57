"""Small messages between the first rank and the others: who is waited for, who hurries, who left and who is lost."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
import torch.distributed as dist

from reshard.coordination.control_channel import Hub, Spoke
from reshard.coordination.store import Store


@pytest.fixture
def ends(monkeypatch):
    """The first rank's end, and rank 1's."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = Store(dist.HashStore())
    hub = Hub(store, (1, 2), 5.0)
    spoke = Spoke.connect(store, 1, 0, 5.0)
    yield hub, spoke
    hub.close()
    spoke.close()
    store.close()


def _pump(hub, until):
    deadline = time.monotonic() + 5
    while not until() and time.monotonic() < deadline:
        hub.pump(0.1)
    assert until()


def test_a_goodbye_that_comes_with_the_answer_is_no_death(ends):
    hub, spoke = ends
    spoke.say({"value": 1}, 5.0)
    _pump(hub, lambda: 1 in hub.pending)
    hub.answer({"value": 2})
    hub.close()
    time.sleep(0.1)
    assert not spoke.is_lost()  # the answer is not read yet
    spoke.pump(1.0)
    assert spoke.take_answer() == {"value": 2}
    assert not spoke.is_lost()


def test_an_end_without_a_goodbye_is_a_death_on_either_side(ends):
    hub, spoke = ends
    spoke.say({}, 5.0)
    _pump(hub, lambda: 1 in hub.pending)
    assert hub.lost() is None
    spoke._peer.connection.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    assert hub.lost() == 1
    hub._peers[1].connection.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    assert spoke.is_lost()


def test_a_hurry_counts_while_its_record_waits(ends):
    hub, spoke = ends
    spoke.say({}, 5.0)
    spoke.hurry()
    _pump(hub, lambda: hub.hurried == {1})
    hub.answer({})
    assert not hub.hurried
    spoke.say({}, 5.0)
    spoke.hurry()
    spoke.leave(None)
    spoke.say({"again": True}, 5.0)
    _pump(hub, lambda: hub.pending.get(1, (0, {}))[1] == {"again": True})
    assert not hub.hurried


def test_strangers_are_shut_out(ends):
    hub, _ = ends
    place = hub._listener.getsockname()[:2]
    closed = []

    def come(hello):
        with socket.create_connection(place, timeout=5) as stranger:
            body = json.dumps(hello).encode()
            stranger.sendall(len(body).to_bytes(4, "big") + body)
            closed.append(stranger.recv(1))

    threads = [threading.Thread(target=come, args=(hello,)) for hello in (["wrong", 2], [hub._secret, 7], {"a": 1})]
    for thread in threads:
        thread.start()
    _pump(hub, lambda: len(closed) == 3)
    for thread in threads:
        thread.join()
    assert closed == [b""] * 3 and not hub.has(2) and not hub.has(7)
