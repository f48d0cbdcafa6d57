"""Swaps of versions: in place, and with ranks that are slow or interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from reshard.coordination.groups.store import StoreSilentError
from reshard.errors import ArgumentError, RemoteError, ReshardError, TransferTimeoutError
from reshard.runtime.torch_compat import store_of
from reshard.testing.processes import LaunchError, run_processes
from reshard.weights import Publisher, Subscriber, receiver
from reshard.weights.membership import team
from reshard.weights.model import verify
from reshard.weights.receiver import Receiver
from reshard.weights.sender import Sender
from tests.support.pausable_store import PausableStore
from tests.support.versioned_models import connect, is_version, make_model, set_version, wait_for_key

pytestmark = pytest.mark.integration


def _in_place(rank, _, store):
    """Ranks 1 and 2 are an engine without memory for a shadow. Version 2 is damaged at each try."""
    if rank == 0:
        raw = connect(store, (), rank, 1)
        model = make_model(1)
        with Publisher(model, raw, timeout_seconds=60) as publisher:
            wait_for_key(raw, "ready1"), wait_for_key(raw, "ready2")
            results = []
            for version in (1, 2, 3):
                set_version(model, version)
                results += publisher.publish(version).wait(120).engines.values()
                if version == 2:
                    wait_for_key(raw, "failed1"), wait_for_key(raw, "failed2")
            return results
    raw = connect(store, ("engine", rank - 1), rank, 2)
    model = make_model(2)
    first = model[0].weight.data_ptr()
    digest = verify.Checker.digest_target

    def corrupt(self, arrays, of_rank):
        if subscriber._receiver._arrived == 2 and of_rank == 1:
            arrays["0.bias"][1] += 1
        return digest(self, arrays, of_rank)

    verify.Checker.digest_target = corrupt
    with pytest.raises(ArgumentError, match="mode is 'other'"):
        Subscriber(model, raw, mode="other")
    with Subscriber(model, raw, mode="in_place", timeout_seconds=60) as subscriber:
        raw.set(f"ready{rank}", "")
        assert subscriber.update(60) == 1 and is_version(model, 1)
        with pytest.raises(TransferTimeoutError, match=r"'0.bias' .* on rank 1"):
            subscriber.update(8)
        assert subscriber.version is None
        raw.set(f"failed{rank}", "")
        assert subscriber.update(60) == 3 and is_version(model, 3)
    assert model[0].weight.data_ptr() == first
    return None


def test_version_in_place_is_whole_or_leaves_no_version():
    with PausableStore(3) as store:
        results = run_processes(_in_place, 3, store, init_group=False)[0]
    assert (results[0], results[2]) == ("", "") and "failed 3 times: '0.bias'" in results[1]


def _publish(store, keys_before):
    """Publish a version after each of these lists of keys, as a trainer of one rank."""
    raw = connect(store, (), 0, 1)
    model = make_model(1)
    with Publisher(model, raw) as publisher:
        for version, keys in enumerate(keys_before, 1):
            for key in keys:
                wait_for_key(raw, key)
            set_version(model, version)
            publisher.publish(version).wait(60)
        wait_for_key(raw, "ended1"), wait_for_key(raw, "ended2")


class _SlowReturn(threading.Condition):
    """A condition whose main thread sleeps, without the lock, after each wait for a swap."""

    def wait_for(self, predicate, timeout=None):
        result = super().wait_for(predicate, timeout)
        if threading.current_thread() is threading.main_thread():
            self.release()
            time.sleep(1.0)
            self.acquire()
        return result


def _slow_return_in_place(rank, _, store):
    """Ranks 1 and 2 are an engine. Rank 2 returns late from ``update``, when rank 1 waits for the next version."""
    if rank == 0:
        _publish(store, [["ready1", "ready2"], []])
        return
    raw = connect(store, ("engine", rank - 1), rank, 2)
    model = make_model(2)
    with Subscriber(model, raw, mode="in_place") as subscriber:
        if rank == 2:
            subscriber._receiver._changed = _SlowReturn(subscriber._receiver._lock)
        raw.set(f"ready{rank}", "")
        for version in (1, 2):
            assert subscriber.update(60) == version and is_version(model, version)
        raw.set(f"ended{rank}", "")


def test_next_version_does_not_arrive_in_place_before_update_has_returned():
    with PausableStore(3) as store:
        run_processes(_slow_return_in_place, 3, store, init_group=False, timeout_seconds=90)


def _interrupt(_):
    raise KeyboardInterrupt


def _interrupted_after_swap(rank, _, store):
    """Ranks 1 and 2 are an engine. An interrupt ends the first ``update`` of rank 2 when the version is in its model."""
    if rank == 0:
        _publish(store, [["ready11", "ready12"], ["ready21", "ready22"]])
        return
    raw = connect(store, ("engine", rank - 1), rank, 2)
    model = make_model(2)
    with Subscriber(model, raw) as subscriber, pytest.MonkeyPatch.context() as monkeypatch:
        raw.set(f"ready1{rank}", "")
        if rank == 2:
            monkeypatch.setattr(Receiver, "swap_error", property(_interrupt, lambda *_: None), raising=False)
            with pytest.raises(KeyboardInterrupt):
                subscriber.update(60)
            monkeypatch.undo()
            subscriber._receiver.swap_error = None
        else:
            assert subscriber.update(60) == 1
        assert subscriber.version == 1 and is_version(model, 1)
        raw.set(f"ready2{rank}", "")
        assert subscriber.update(60) == 2 and is_version(model, 2)
        raw.set(f"ended{rank}", "")


def test_interrupt_after_a_swap_leaves_the_next_update_alone():
    with PausableStore(3) as store:
        run_processes(_interrupted_after_swap, 3, store, init_group=False, timeout_seconds=90)


start = Sender._start


def _absent_rank(rank, _, store):
    """Ranks 1 and 2 are an engine. A version waits to arrive in its model, and at first rank 2 does not call."""
    if rank == 0:
        _publish(store, [["ready1", "ready2"]])
        return
    raw, model = connect(store, ("engine", rank - 1), rank, 2), make_model(2)
    with Subscriber(model, raw, mode="in_place", join_seconds=30.0) as subscriber:
        raw.set(f"ready{rank}", "")
        for _ in range(3 if rank == 1 else 0):
            began = time.monotonic()
            with pytest.raises(TransferTimeoutError, match="rank 0 of the engine: no newer version was complete"):
                subscriber.update(1.0)
            assert time.monotonic() - began < 5.0
        if rank == 1:
            raw.set("left", "")
        wait_for_key(raw, "left")
        assert subscriber.update(60) == 1 and is_version(model, 1)
        raw.set(f"ended{rank}", "")


def test_update_in_place_keeps_its_time_limit_while_another_rank_is_absent():
    with PausableStore(3) as store:
        run_processes(_absent_rank, 3, store, init_group=False, timeout_seconds=90)


def _dying_trainer(rank, _, store):
    """Ranks 1 and 2 are an engine without memory for a shadow. The trainer is killed while version 2 is on its way."""
    if rank == 0:
        Sender._start = lambda self, route, message: (
            os.kill(os.getpid(), signal.SIGKILL) if message["version"] == 2 else start(self, route, message)
        )
        _publish(store, [["ready1", "ready2"], ["updated1", "updated2"]])
        return None
    raw = connect(store, ("engine", rank - 1), rank, 2)
    model = make_model(2)
    with Subscriber(model, raw, mode="in_place", timeout_seconds=20) as subscriber:
        raw.set(f"ready{rank}", "")
        assert subscriber.update(60) == 1 and is_version(model, 1)
        raw.set(f"updated{rank}", "")
        begun = time.monotonic()
        with pytest.raises(ReshardError):
            subscriber.update(3)
        assert subscriber.version is None
        return time.monotonic() - begun


def test_update_in_place_ends_if_the_trainer_is_killed_while_a_version_arrives():
    with PausableStore(3) as store, pytest.raises(LaunchError) as caught:
        run_processes(_dying_trainer, 3, store, init_group=False, timeout_seconds=90, grace_seconds=60)
    assert sorted(caught.value.results) == [1, 2] and max(caught.value.results.values()) < 30


def _update_or_name(subscriber, seconds):
    try:
        return subscriber.update(seconds)
    except (ReshardError, KeyboardInterrupt) as error:
        return type(error).__name__


def _disturbed(rank, _, store, disturb):
    """Ranks 1 and 2 are an engine. The first ``update`` for version 2 is disturbed on rank 2."""
    if rank == 0:
        _publish(store, [["ready1", "ready2"], ["updated1", "updated2"]])
        return None
    raw = connect(store, ("engine", rank - 1), rank, 2)
    model = make_model(2)
    with Subscriber(model, raw) as subscriber:
        raw.set(f"ready{rank}", "")
        assert subscriber.update(60) == 1 and is_version(model, 1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == 2:
                disturb(monkeypatch, subscriber)
            raw.set(f"updated{rank}", "")
            results = [_update_or_name(subscriber, 5)]
        if results != [2]:
            results.append(subscriber.update(60))
        assert is_version(model, 2)
        raw.set(f"ended{rank}", "")
    return results


def _interrupt_the_swap(monkeypatch, subscriber):
    def install(*arguments):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subscriber._receiver._installer, "install", install)


def _silence_the_store(monkeypatch, subscriber):
    """The store answers no more after this rank has posted that it waits."""
    begin = subscriber._attempts.begin

    def silent(seconds):
        monkeypatch.undo()
        begin(seconds)
        raise StoreSilentError("the store did not answer")

    monkeypatch.setattr(subscriber._attempts, "begin", silent)


def _interrupt_twice(monkeypatch, subscriber):
    """A second interrupt comes when this rank has just ended the attempt because of the first."""
    begin, leave = subscriber._attempts.begin, subscriber._attempts.leave

    def interrupt(*arguments):
        begin(*arguments)
        raise KeyboardInterrupt

    def interrupt_again(*arguments):
        leave(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subscriber._attempts, "begin", interrupt)
    monkeypatch.setattr(subscriber._attempts, "leave", interrupt_again)


@pytest.mark.parametrize("disturb", [_interrupt_the_swap, _silence_the_store, _interrupt_twice])
def test_update_works_after_a_call_that_was_disturbed_on_one_rank(disturb):
    with PausableStore(3) as store:
        _, first, second = run_processes(_disturbed, 3, store, disturb, init_group=False, timeout_seconds=90)
    assert first[-1] == second[-1] == 2


def _dying_in_renewal(rank, _, store):
    """Ranks 1 and 2 are an engine, 3 is another. Rank 2 fails once, and is killed as ranks 1 and 2 begin anew."""
    if rank == 0:
        raw = connect(store, (), 0, 1)
        with Publisher(make_model(1), raw) as publisher:
            for other in (1, 2, 3):
                wait_for_key(raw, f"ready{other}")
            begun = time.monotonic()
            report = publisher.publish(1).wait(60)
            return sorted(report.engines.values()), time.monotonic() - begun
    raw = connect(store, ("engine", rank - 1), rank, 1 if rank == 3 else 2)
    with Subscriber(make_model(1 if rank == 3 else 2), raw) as subscriber:
        if rank == 2:
            subscriber._team.renew_inner_group = _kill_at_renewal
            receiver._HANDLERS["receive"] = _receive_wrongly
        raw.set(f"ready{rank}", "")
        try:
            return subscriber.update(20)
        except ReshardError as error:
            return str(error)


def _kill_at_renewal(number):
    if number:
        os.kill(os.getpid(), signal.SIGKILL)


def _receive_wrongly(self, message):
    receiver.Receiver._receive_version(self, message)
    next(iter(self._shadow.values())).view(-1)[0] += 1  # the digests differ, so the version is sent again
    self._landed = self._checker.digest_target(self._shadow, self._team.rank)


def test_rank_that_dies_before_it_joins_a_group_is_named_at_once():
    with PausableStore(4) as store, pytest.raises(LaunchError) as caught:
        run_processes(_dying_in_renewal, 4, store, init_group=False, timeout_seconds=90, grace_seconds=60)
    (reports, seconds), own, other = (caught.value.results[rank] for rank in (0, 1, 3))
    assert reports == ["", "dropped: rank 1 of the engine has ended"] and seconds < 15 and other == 1
    assert "rank 1 of the engine has ended" in own


def _out_of_sync(rank, _, store, mode, purpose):
    """Ranks 1 and 2 are an engine. In one step of version 2, rank 2 does not take part."""
    if rank == 0:
        raw, model = connect(store, (), 0, 1), make_model(1)
        with Publisher(model, raw) as publisher:
            reports = []
            for version in (1, 2):
                wait_for_key(raw, f"ready{version}1"), wait_for_key(raw, f"ready{version}2")
                set_version(model, version)
                reports += publisher.publish(version).wait(60).engines.values()
            wait_for_key(raw, "ended1"), wait_for_key(raw, "ended2")
        return reports
    raw, model = connect(store, ("engine", rank - 1), rank, 2), make_model(2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(receiver, "AGREE_SECONDS", 1.0)
        left = [1]

        def fail_once(function):
            def call(*args):
                if rank == 2 and purpose in args and is_version(model, 1) and left:
                    left.clear()
                    raise TransferTimeoutError("this rank stood still")
                return function(*args)

            return call

        for name in ("exchange", "run_collectively"):
            monkeypatch.setattr(receiver, name, fail_once(getattr(receiver, name)))
        with Subscriber(model, raw, mode=mode, timeout_seconds=2, join_seconds=2) as subscriber:
            raw.set(f"ready1{rank}", "")
            assert subscriber.update(60) == 1
            raw.set(f"ready2{rank}", "")
            while subscriber.version != 2:
                _update_or_name(subscriber, 10)
            assert is_version(model, 2) and not (rank == 2 and left)
            raw.set(f"ended{rank}", "")
    return None


@pytest.mark.parametrize(
    ("mode", "purpose"),
    [
        ("shadow", "verifies a version"),
        ("shadow", "swaps a version in"),
        ("in_place", "receives a version in place"),
    ],
)
def test_an_engine_whose_ranks_were_out_of_sync_gets_the_version_all_the_same(mode, purpose):
    with PausableStore(3) as store:
        reports = run_processes(_out_of_sync, 3, store, mode, purpose, init_group=False, timeout_seconds=60)[0]
    assert reports == ["", ""]


def test_close_after_an_interrupted_close_ends_the_thread(monkeypatch):
    model = make_model(1)
    subscriber = Subscriber(model, dist.HashStore())
    thread = subscriber._team._thread

    def join(seconds):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        subscriber.close()
    subscriber.close()
    assert not thread.is_alive()


def _interrupted_constructor(rank):
    """An interrupt ends the constructor of rank 1 before that rank has answered the other one."""
    raw, seconds = store_of(dist.group.WORLD), []
    for make in (Publisher, Subscriber):
        group = dist.new_group([0, 1])
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == 1:
                monkeypatch.setattr(team, "Outbox", _interrupt)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt if rank == 1 else RemoteError, match=None if rank else "rank 1 left"):
                make(make_model(1), raw, make.__name__, group)
            seconds.append(time.monotonic() - began)
    return seconds


def test_interrupted_constructor_ends_that_of_other_ranks_at_once():
    assert max(run_processes(_interrupted_constructor, 2)[0]) < 10  # not AGREE_SECONDS


def test_update_with_a_silent_store_does_not_return_the_version_before(monkeypatch):
    def raise_silent(*_):
        raise StoreSilentError("the store did not answer within 1 s")

    store, trained, served = dist.HashStore(), make_model(1), make_model(2)
    with Publisher(trained, store) as publisher, Subscriber(served, store) as subscriber:
        publisher.publish(1).wait(60)
        assert subscriber.update(60) == 1
        for name in ("check", "compare_set"):
            monkeypatch.setattr(subscriber._team.store, name, raise_silent)
        with pytest.raises(TransferTimeoutError, match="the store that trainer and engines share did not answer"):
            subscriber.update(1.0)
        monkeypatch.undo()
        publisher.publish(2).wait(60)
        assert subscriber.update(60) == 2


def _different_names(rank):
    raw = store_of(dist.group.WORLD)
    for names, text in ((("ok", "a/b"), "rank 1: name is 'a/b'"), (("x", "y"), "pass different names: 'x', 'y'")):
        with pytest.raises(ArgumentError, match=text):
            Subscriber(make_model(1), raw, names[rank])
    Subscriber(make_model(1), raw, "ok").close()


def test_a_name_that_is_wrong_or_different_on_one_rank_is_an_error_on_all():
    run_processes(_different_names, 2)
