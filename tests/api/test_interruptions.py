"""Calls of signal handlers, and calls that a signal handler interrupts, never exchange data with other calls."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest
import torch

import reshard
import reshard.api.mover
from reshard import Layout, Mesh
from reshard.testing.processes import run_processes
from tests.api.test_wrong_data import COLS, ROWS, WHOLE
from tests.support.tensors import result_or_error, same_bytes, take_shard

PAIR = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")


class _Alarm(Exception):
    pass


def _interrupted(rank, who, kind):
    """A signal handler raises while one rank waits in a call for the other; both then call again."""

    def ring(*_):
        raise kind("step took too long")

    signal.signal(signal.SIGALRM, ring)
    mesh, results = Mesh.of("2"), []
    for step in range(4):
        if step == 1:
            if rank == who:
                signal.setitimer(signal.ITIMER_REAL, 0.4)
            else:
                time.sleep(1.0)
        try:
            source = torch.full((2, 4), float(step))
            out = reshard.reshard(source, Layout(mesh, "S0 R"), Layout(mesh, "R S0"), timeout_seconds=10)
            results.append(bool((out == step).all()))
        except (kind, reshard.ReshardError) as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


@pytest.mark.integration
@pytest.mark.parametrize("kind", [_Alarm, TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("who", [0, 1])
def test_call_interrupted_by_a_signal_is_never_paired_with_a_later_call(who, kind):
    by_rank = run_processes(_interrupted, 2, who, kind)
    assert by_rank[who][1] == f"{kind.__name__}: step took too long"
    for steps in by_rank:
        assert steps[0] is True
        assert all(
            "out of sync" in text or "left a call" in text or "step took too long" in text for text in steps[1:]
        ), by_rank


def _call_in_handler(rank, what):
    """On rank 1, a signal handler calls on the group while its thread waits in another call."""
    mesh, inner = Mesh.of("4"), []
    rows, columns = Layout(mesh, "S0 R"), Layout(mesh, "R S0")

    def move(value):
        return reshard.reshard(torch.full((2, 4), value), rows, columns, timeout_seconds=10)

    handlers = {
        "reshard": lambda: move(9.0),
        "mover": lambda: reshard.Mover(reshard.make_plan(rows, columns, (8, 4), "float32"), timeout_seconds=10),
        "topology": lambda: reshard.find_topology(timeout_seconds=10),
    }
    signal.signal(signal.SIGALRM, lambda *_: inner.append(result_or_error(handlers[what])))
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(0.8)
    outer = [result_or_error(lambda value=value: move(float(value))) for value in range(2)]
    return inner, [out if isinstance(out, str) else bool((out == value).all()) for value, out in enumerate(outer)]


@pytest.mark.parametrize("what", ["reshard", "mover", "topology"])
def test_call_of_a_signal_handler_inside_another_call_is_refused_on_every_rank(what):
    for rank, (inner, outer) in enumerate(run_processes(_call_in_handler, 4, what)):
        assert len(inner) == (rank == 1)
        assert all(result is True or "inside another call of its thread" in str(result) for result in outer), outer
        assert all("inside another call of its thread" in str(result) for result in (*inner, outer[-1]))


def _start_in_handler(rank, monkeypatch):
    """On rank 1, a signal handler starts a transfer of a Mover while its thread starts another one."""
    plan, inner, results = reshard.make_plan(ROWS, COLS, (8, 6), "float32"), [], []
    with reshard.Mover(plan, timeout_seconds=10) as mover:
        check = reshard.api.mover.check_no_aliasing

        def ring(*arguments):
            if not inner and rank == 1:
                signal.raise_signal(signal.SIGUSR1)
            check(*arguments)

        monkeypatch.setattr("reshard.api.mover.check_no_aliasing", ring)
        signal.signal(
            signal.SIGUSR1,
            lambda *_: inner.append(result_or_error(lambda: mover.start(take_shard(ROWS, rank, WHOLE) + 100))),
        )
        for step in range(3):
            source = take_shard(ROWS, rank, WHOLE)
            out = result_or_error(lambda source=source, step=step: mover(None if source is None else source + step))
            results.append(
                out if isinstance(out, str) else out is None or same_bytes(out, take_shard(COLS, rank, WHOLE) + step)
            )
    return inner + results


def test_start_of_a_signal_handler_inside_another_start_is_refused_on_every_rank(monkeypatch):
    for results in run_processes(_start_in_handler, 4, monkeypatch):
        assert all(result is True or "inside the start of another one" in str(result) for result in results), results
        assert "inside the start of another one" in str(results[-1]), results


def _interrupted_mover(rank, monkeypatch):
    """KeyboardInterrupt is raised while a Mover checks its arrays."""
    plan, results = reshard.make_plan(ROWS, COLS, (8, 6), "float32"), []
    with reshard.Mover(plan, timeout_seconds=10) as mover:
        for step in range(3):
            if rank == 1 and step == 1:
                with monkeypatch.context() as patched:
                    patched.setattr("reshard.api.mover.check_no_aliasing", _interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        mover(take_shard(ROWS, rank, WHOLE) + step)
                continue
            source = take_shard(ROWS, rank, WHOLE)
            out = result_or_error(lambda source=source, step=step: mover(None if source is None else source + step))
            results.append(
                out if isinstance(out, str) else out is None or same_bytes(out, take_shard(COLS, rank, WHOLE) + step)
            )
    return results


def _interrupt(*_):
    raise KeyboardInterrupt


def test_interrupted_start_ends_the_movers_transfers_on_every_rank(monkeypatch):
    for results in run_processes(_interrupted_mover, 4, monkeypatch):
        assert results[0] is True
        assert all(
            "KeyboardInterrupt" in str(text) or "closed the connections" in str(text) or text is True
            for text in results[1:]
        ), results
        assert "KeyboardInterrupt" in str(results[-1]) or "closed the connections" in str(results[-1]), results


def _interrupted_before_connecting(rank, place, monkeypatch):
    """KeyboardInterrupt is raised on rank 1 while it makes a Mover; then both make one again."""
    plan = reshard.make_plan(*PAIR, (8, 6), "float32")

    def move(step):
        source = torch.arange(24.0).view(4, 6) + 24 * rank + 100 * step
        with reshard.Mover(plan, timeout_seconds=20) as mover:
            return mover(source)

    results, begun = [], time.monotonic()
    for step in range(2):
        with monkeypatch.context() as patched:
            if rank == 1 and step == 0:
                patched.setattr(place, _interrupt)
            try:
                out = move(step)
                wanted = torch.arange(48.0).view(8, 6)[:, 3 * rank : 3 * rank + 3] + 100 * step
                results.append("right" if torch.equal(out, wanted) else "wrong")
            except (reshard.ReshardError, KeyboardInterrupt) as error:
                results.append(f"{type(error).__name__}: {error}")
        if rank == 1 and step == 0:
            time.sleep(4.0)  # so that no later call of this rank ends that of the other one
    return results, time.monotonic() - begun


@pytest.mark.integration
@pytest.mark.parametrize(
    "place",
    [
        "reshard.coordination.hub_and_spokes.Spoke.take_answer",
        "reshard.api.transfers.opened_plan.build_program",
        "reshard.api.mover.ArrayReader",
    ],
)
def test_interrupt_before_ranks_connect_is_named_at_once_and_no_later_call_matches(place, monkeypatch):
    (first, seconds), (other, _) = run_processes(_interrupted_before_connecting, 2, place, monkeypatch)
    assert other[0] == "KeyboardInterrupt: "
    assert "rank 1 left a call: KeyboardInterrupt" in first[0], first
    assert "wrong" not in first + other
    assert seconds < 12, first  # neither call waits until its timeout


def _leave_small_call(rank, how, monkeypatch):
    """Ranks call in turns as a pair and all together. On rank 0, an exception ends the second call of the pair."""
    pair, everyone = Mesh([0, 1], {"x": 2}), Mesh.of("3")
    results = []

    def move(mesh, step, **options):
        if rank < mesh.size:
            source = torch.full((2, 6), float(step))
            moved = lambda: reshard.reshard(source, mesh, mesh, src_spec="S0", dst_spec="R S0", **options)  # noqa: E731
            out = result_or_error(moved)
            results.append(out if isinstance(out, str) else bool((out == step).all()))

    for mesh in (pair, everyone):
        move(mesh, 0, timeout_seconds=10)
    if rank == 0 and how == "interrupted":
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("reshard.api.arguments.inputs.refuse_capture", _interrupt)
            move(pair, 1, timeout_seconds=10)
    elif rank == 0:
        move(pair, 1, timeout_seconds=10, group="typo")
    else:
        move(pair, 1, timeout_seconds=10)
    for step in (2, 3):
        for mesh in (everyone, pair):
            move(mesh, step, timeout_seconds=10)
    return results


@pytest.mark.parametrize("how", ["interrupted", "wrong group"])
def test_call_that_one_rank_leaves_early_ends_no_later_call_of_more_ranks(how, monkeypatch):
    first, second, third = run_processes(_leave_small_call, 3, how, monkeypatch)
    assert first[-4:] == [True] * 4 and second[:2] == [True] * 2
    assert "rank 0" in second[2] and second[3:] == [True] * 4
    assert third == [True] * 3


def _interrupt_the_start_of_a_thread(rank):
    """Names of the threads that are left after an interrupt in ``start()`` of the thread that moves tensors."""
    start = threading.Thread.start

    def start_and_interrupt(thread):
        start(thread)
        if thread.name == "reshard-progress":
            raise KeyboardInterrupt

    rows, columns = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
    threading.Thread.start = start_and_interrupt if rank == 0 else start
    with pytest.raises((KeyboardInterrupt, reshard.ReshardError)):
        reshard.reshard(torch.ones(2, 4), rows, columns, timeout_seconds=20)
    threading.Thread.start = start
    reshard.close_group()
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("reshard") for thread in threading.enumerate()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reshard")]


def test_an_interrupt_while_a_thread_starts_leaves_no_thread():
    assert run_processes(_interrupt_the_start_of_a_thread, 2) == [[], []]
