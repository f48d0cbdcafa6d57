"""All ranks agree on who is lost, whatever stands still meanwhile, and a pause below the limits loses nobody."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.coordination.groups.agreement_messages import Decision
from reshard.coordination.groups.process_group import Group
from reshard.coordination.groups.store import Store
from reshard.coordination.hub_and_spokes import Hub
from reshard.coordination.liveness import status as statuses
from reshard.coordination.liveness.exclusions import propose_exclusion, read_exclusions
from reshard.coordination.liveness.status import HeartbeatReader, beat_key
from reshard.testing.processes import LaunchError, run_processes
from tests.support.pausable_store import PausableStore

SRC, DST = Layout(Mesh.of("2")), Layout(Mesh.of("2", first_rank=2), "S0")


def test_first_proposal_is_the_exclusion_of_all_ranks():
    store = dist.HashStore()
    groups = [Group(store, rank, 4) for rank in range(4)]
    decision = Decision(lost=[1], attempts={0: 5, 2: 7})
    assert propose_exclusion(groups[0], [1], decision, 5).attempts == decision.attempts
    assert propose_exclusion(groups[1], [0], None, 3) is None  # the first rank came first
    assert read_exclusions(groups[2], 7).lost == [1]  # though it got no answer
    assert read_exclusions(groups[3], 7) is None  # it is in another round
    assert propose_exclusion(groups[3], [2], None, 8) is None
    assert read_exclusions(groups[0]) is read_exclusions(groups[1]) is None
    assert [group.lost for group in groups] == [{1, 2}, {1, 2}, {1}, {1, 2}]
    assert groups[1].excluded_by == 0
    for group in groups:
        group.close()


def test_silence_is_not_measured_while_this_process_or_the_store_stands_still(monkeypatch):
    now, raw = [0.0], dist.HashStore()
    monkeypatch.setattr(statuses.time, "monotonic", lambda: now[0])
    store = Store(raw)
    reader = HeartbeatReader(store)
    raw.set(beat_key(1), "7")
    for now[0] in (0.0, 1.0, 2.0, 40.0):
        silence = reader.read(1)
    assert silence == (True, 0.0)
    for now[0] in (41.0, 43.0, 47.0):
        silence = reader.read(1)
    assert silence == (True, 7.0)
    store.close()


def _call(group, rank, step, timeout_seconds, on_loss="recover"):
    source = torch.full((4, 3), float(step)) if rank < 2 else None
    options = {"shape": (4, 3), "on_loss": on_loss, "timeout_seconds": timeout_seconds}
    try:
        out = reshard.reshard(source, SRC, DST, group=group, **options)
        return None if out is None else sorted(set(out.flatten().tolist()))
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"


def _stop_before_answering(rank, _, store):
    """Rank 3 misses a call. Rank 0 has decided to go on without it, and is stopped before it answers the others."""
    with reshard.join(dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False), rank, 4) as group:
        results = [_call(group, rank, 0, 20.0)]
        if rank == 3:
            time.sleep(12.0)
        if rank == 0:
            plain = Hub.answer

            def answer(self, decision):
                if decision["lost"]:
                    store.pause(os.getpid(), 3.0)
                    time.sleep(0.3)
                return plain(self, decision)

            Hub.answer = answer
        results += [_call(group, rank, step, 4.0) for step in (1, 2)]
        return results, sorted(group.lost)


@pytest.mark.integration
def test_exclusion_holds_if_the_first_rank_is_stopped_before_it_answers():
    with PausableStore(4) as store:
        found = run_processes(_stop_before_answering, 4, store, init_group=False)
    assert [lost for _, lost in found] == [[3]] * 4
    assert [results for results, _ in found[:3]] == [[None] * 3, [None] * 3, [[0.0], [1.0], [2.0]]]
    assert "without rank 3" in found[3][0][1]


def _stop_store_at_deadline(rank, _, store):
    """Rank 3 misses a call, and the store stands still when the others want to exclude it."""
    with reshard.join(dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False), rank, 4) as group:
        results = [_call(group, rank, 0, 20.0)]
        if rank == 0:
            store.pause(store.pid, 3.0, 0.5)
        if rank == 3:
            time.sleep(9.0)
        results += [_call(group, rank, step, 1.0) for step in (1, 2)]
        return results, sorted(group.lost)


@pytest.mark.integration
def test_healthy_ranks_do_not_exclude_each_other_while_the_store_stands_still():
    with PausableStore(4) as store:
        found = run_processes(_stop_store_at_deadline, 4, store, init_group=False)
    assert [lost for _, lost in found] == [[3]] * 4
    assert [results for results, _ in found[:3]] == [[None] * 3, [None] * 3, [[0.0], [1.0], [2.0]]]


def _stop_past_the_deadline(rank, _, store, stopped):
    with reshard.join(dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False), rank, 4) as group:
        results = [_call(group, rank, 0, 20.0)]
        if rank == stopped:
            store.pause(os.getpid(), 5.0)
            time.sleep(0.3)
        results += [_call(group, rank, step, 1.0) for step in (1, 2)]
        return results, sorted(group.lost)


@pytest.mark.integration
@pytest.mark.parametrize("stopped", [0, pytest.param(3, marks=pytest.mark.nightly)])
def test_resumed_rank_calls_no_other_rank_lost(stopped):
    with PausableStore(4) as store:
        found = run_processes(_stop_past_the_deadline, 4, store, stopped, init_group=False)
    for rank, (results, lost) in enumerate(found):
        assert lost == [stopped], found
        if rank == stopped:
            assert all(f"without rank {stopped}" in text for text in results[1:]), results
        else:
            assert results == [None if rank < 2 else [float(step)] for step in range(3)], found


def _pause_briefly(rank, _, store, on_loss):
    """Rank 3 is stopped before its first call, when no rank has a connection to it, and is not lost."""
    with reshard.join(dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False), rank, 4) as group:
        pair = Mesh([0, 3], {"x": 2})
        if rank in (0, 3):  # rank 3 sends heartbeats from now on
            reshard.reshard(torch.ones(2, 2), pair, pair, src_spec="S0", dst_spec="S0", group=group)
            group.call_groups.clear()
        if rank == 3:
            store.pause(os.getpid(), 6.0)
            time.sleep(0.3)
        return _call(group, rank, 1, 20.0, on_loss), sorted(group.lost)


@pytest.mark.integration
@pytest.mark.parametrize("on_loss", ["recover", pytest.param("raise", marks=pytest.mark.nightly)])
def test_stopped_rank_without_connections_is_not_lost(on_loss):
    with PausableStore(4) as store:
        assert run_processes(_pause_briefly, 4, store, on_loss, init_group=False) == [
            (None, []),
            (None, []),
            ([1.0], []),
            ([1.0], []),
        ]


def _die_before_the_call(rank, _, store, on_loss):
    """Rank 3 dies after a call with rank 0, to which the other ranks have no connections yet."""
    with reshard.join(dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False), rank, 4) as group:
        pair = Mesh([0, 3], {"x": 2})
        if rank in (0, 3):
            reshard.reshard(torch.ones(2, 2), pair, pair, src_spec="S0", dst_spec="S0", group=group)
            group.call_groups.clear()
        if rank == 3:
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        return _call(group, rank, 1, 60.0, on_loss), time.monotonic() - begun, sorted(group.lost)


@pytest.mark.integration
@pytest.mark.parametrize("on_loss", ["recover", pytest.param("raise", marks=pytest.mark.nightly)])
def test_dead_rank_without_connections_is_named(on_loss):
    with PausableStore(4) as store, pytest.raises(LaunchError) as caught:
        run_processes(_die_before_the_call, 4, store, on_loss, grace_seconds=30, init_group=False)
    for rank, (result, seconds, lost) in caught.value.results.items():
        assert seconds < 1.5 + 20.0  # a silent rank counts as lost after 30 s
        if on_loss == "recover":
            assert (result, lost) == (None if rank < 2 else [1.0], [3])
        else:
            assert "rank 3 is gone: its process has ended" in result


def _stop_store_in_first_call(rank, _, store, timeout_seconds):
    with reshard.join(dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False), rank, 4) as group:
        if rank == 0:
            store.pause(store.pid, 4.0)
        time.sleep(0.5)
        return _call(group, rank, 1, timeout_seconds, "raise")


@pytest.mark.nightly
def test_silent_store_delays_a_call_and_is_named_after_the_timeout():
    with PausableStore(4) as store:
        assert run_processes(_stop_store_in_first_call, 4, store, 20.0, init_group=False) == [None, None, [1.0], [1.0]]
    with PausableStore(4) as store:
        for text in run_processes(_stop_store_in_first_call, 4, store, 1.0, init_group=False):
            assert text.startswith("TransferTimeoutError") and "the store did not answer" in text
