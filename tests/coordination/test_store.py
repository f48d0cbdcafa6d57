"""Calls of a store that is slow, silent or lost."""

import json
import threading
import time

import pytest
import torch.distributed as dist

import reshard
from reshard.coordination.call_group import find_call_group
from reshard.coordination.groups import store as stores
from reshard.coordination.groups.store import Store, StoreSilentError


class _Raw:
    """A store whose calls block until ``answers`` is set."""

    def __init__(self):
        self.answers = threading.Event()
        self.kept = {}

    def set(self, key, value):
        self.answers.wait()
        self.kept[key] = value.encode()

    def get(self, key):
        self.answers.wait()
        return self.kept[key]

    def check(self, keys):
        self.answers.wait()
        return all(key in self.kept for key in keys)


@pytest.fixture
def raw(monkeypatch):
    monkeypatch.setattr(stores, "STORE_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(stores, "LOST_STORE_SECONDS", 0.6)
    raw = _Raw()
    yield raw
    raw.answers.set()


def test_silent_store_is_not_lost_at_once(raw):
    store = Store(raw)
    with pytest.raises(StoreSilentError):
        store.check(["a"])
    start = time.monotonic()
    for _ in range(50):  # read-only calls do not wait again
        assert not store.has_key("a")
    assert time.monotonic() - start < 4.0  # 50 waits take 5 s
    raw.answers.set()
    store.set("a", "1", seconds=10)
    assert store.get("a", seconds=10) == b"1"
    store.close()


def test_call_with_its_own_timeout_waits_for_an_earlier_call(raw):
    store = Store(raw)
    with pytest.raises(StoreSilentError):
        store.check(["a"])
    threading.Timer(0.2, raw.answers.set).start()
    store.set("a", "1", seconds=10)
    assert store.get("a", seconds=10) == b"1"
    store.close()


def test_call_with_its_own_timeout_waits_for_the_calls_of_all_threads(raw):
    """Two threads give up in turn, and the store answers the first call long before the second."""
    store = Store(raw)
    answered = threading.Semaphore(0)
    raw.answers.wait = answered.acquire
    done = []

    def give_up(key):
        with pytest.raises(StoreSilentError):
            store.check([key])
        done.append(key)

    other = threading.Thread(target=give_up, args=["b"])
    threading.Timer(0.05, other.start).start()
    give_up("a")
    for seconds in (0.2, 0.5):  # by then the other thread has given up too
        threading.Timer(seconds, answered.release, [1 if seconds < 0.5 else 9]).start()
    store.set("a", "1", seconds=10)
    assert store.get("a", seconds=10) == b"1"
    other.join()
    assert sorted(done) == ["a", "b"]  # a busy machine may wake them in the other order
    answered.release(9)
    store.close()


def test_store_that_stays_silent_is_lost(raw):
    store = Store(raw)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="did not answer within") as raised:
        while time.monotonic() - start < 30:
            try:
                store.check(["a"])
            except StoreSilentError:
                time.sleep(0.01)
    assert type(raised.value) is RuntimeError
    assert 0.6 <= time.monotonic() - start < 20
    raw.answers.set()
    store.close()


class _Closed(_Raw):
    """A store whose connection has ended; it counts calls."""

    num_calls = 0

    def check(self, keys):
        self.num_calls += 1
        raise dist.DistNetworkError("Broken pipe")


def test_store_whose_connection_ended_is_not_called_again():
    raw = _Closed()
    store = Store(raw)
    for other in (store, store, store.under("prefix")):
        with pytest.raises(dist.DistNetworkError, match=r"^Broken pipe$"):
            other.check(["a"])
    assert raw.num_calls == 1
    store.close()


def test_ranks_that_connect_ask_a_silent_store_again(monkeypatch):
    with reshard.join(dist.HashStore(), 0, 1) as group:
        call_group = find_call_group(group, (0,))
        reported = []

        def check(store, keys, seconds=None):
            if not reported:
                raise StoreSilentError("the store did not answer within 3.0 s")
            return keys == [f"error/{call_group.generation}"]

        monkeypatch.setattr(Store, "check", check)
        monkeypatch.setattr(Store, "get", lambda store, key, seconds=None: reported[0])
        call_group.check_reported(call_group.generation)
        reported.append(json.dumps(["TransferTimeoutError", "rank 1: too late"]).encode())
        with pytest.raises(reshard.errors.TransferTimeoutError, match="rank 1: too late"):
            call_group.check_reported(call_group.generation)
