"""Calls of different steps never match: calls that one rank fails, misses or makes with others only end in errors.

The arrays of a step hold its number, so data from a call of another step is visible.
"""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

import reshard
import reshard.api.call
from reshard import Layout, Mesh
from reshard.coordination.groups.agreement_messages import RankStatus, RoundRequest
from reshard.coordination.groups.process_group import find_group
from reshard.coordination.liveness import call_sequence
from reshard.testing.processes import run_processes
from tests.support.tensors import take_shard, whole_tensor

ROWS = Layout(Mesh.of("2"), "S0")
COLS = Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = whole_tensor((6, 4), torch.float32)


def _run_steps_with_failures(rank, seed):
    """Ranks fail before their members are known and continue at once; returns the result or error of each step."""
    chance = random.Random(seed)
    rows, one = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("1", first_rank=2))
    steps_with_failures = []
    for step in range(30):
        failing = chance.sample(range(3), chance.choice((0, 0, 1, 1, 2, 3)))
        if chance.random() < 0.2:
            time.sleep(0.4 * (rank == chance.randrange(3)))
        shard = torch.full((2, 2), float(step)) if rank < 2 else None
        try:
            out = reshard.reshard(shard, None if rank in failing else rows, one, timeout_seconds=60)
            steps_with_failures.append((failing, None if out is None else out.unique().tolist()))
        except reshard.errors.ArgumentError as error:
            steps_with_failures.append((failing, str(error)))
    dist.barrier()
    return steps_with_failures


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_calls_failed_by_one_rank_never_match_other_calls(seed):
    for rank, steps in enumerate(run_processes(_run_steps_with_failures, 3, seed)):
        for step, (failing, got) in enumerate(steps):
            if failing:
                assert "src_mesh is missing" in got, (rank, step, got)
            else:
                assert got == (None if rank < 2 else [float(step)]), (rank, step, got)


def _run_steps_with_skipped_call(rank, seconds):
    """The result or error of each step. In step 2, rank 2 calls with ranks 0 and 1 only, and continues at once."""
    rows, one = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("1", first_rank=2))
    steps_with_skipped_call = []
    for step in range(5):
        dst = Layout(Mesh.of("2"), "R S0") if (rank, step) == (2, 2) else one
        if step == 2 and rank < 2:
            time.sleep(seconds)
        shard = torch.full((2, 2), float(step)) if rank < 2 else None
        try:
            out = reshard.reshard(shard, rows, dst, timeout_seconds=60)
            steps_with_skipped_call.append(None if out is None else out.unique().tolist())
        except reshard.ReshardError as error:
            steps_with_skipped_call.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return steps_with_skipped_call


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5])
def test_call_that_excludes_its_caller_never_mixes_steps(seconds):
    found = run_processes(_run_steps_with_skipped_call, 3, seconds)
    for rank, steps in enumerate(found):
        for step, got in enumerate(steps):
            if step != 2 and got == (None if rank < 2 else [float(step)]):
                continue
            assert step >= 2, (rank, step, got)
            assert "is in neither layout" in got or "rank 2 with ranks 0-1, which do not include rank 2" in got, (
                rank,
                step,
                got,
            )


class _FakeGroup:
    """The parts of a group that count left calls."""

    def __init__(self, rank, errors, given):
        self.rank = rank
        self.status = RankStatus(errors=errors, abandoned=given, error=("ArgumentError", f"rank {rank}: no"))
        self.store = self

    def set(self, key, value):
        pass


def test_failures_known_to_some_ranks_are_counted_once():
    members = (0, 1, 2)
    groups = [_FakeGroup(0, 1, {"1": 1}), _FakeGroup(1, 1, {"2": 1}), _FakeGroup(2, 1, {"0": 1})]

    def run_round():
        requests = [RoundRequest(group.rank, left=call_sequence.count_left_calls(group, members)) for group in groups]
        decision = call_sequence.find_lagging(requests, members)
        for group in groups:
            if decision and group.rank in decision.lagging:
                call_sequence.record_abandoned_call(group, members, decision)
        return decision

    assert run_round().lagging == [0, 1, 2]
    assert run_round() is None


def _connect_to_store():
    """Connect to the store first, because that can be slow and must not count towards the measured time."""
    find_group(None)
    dist.barrier()


def _one_never_calls(rank):
    _connect_to_store()
    if rank == 3:
        time.sleep(3.5)
        return "rank 3 did not call"
    start = time.monotonic()
    try:
        reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, COLS, timeout_seconds=1.5)
        text = "nothing was raised"
    except reshard.errors.TransferTimeoutError as error:
        text = str(error)
    assert time.monotonic() - start < 20
    return text


def test_missing_rank_is_named_within_the_timeout():
    texts = run_processes(_one_never_calls, 4)
    assert all("rank 3 did not call" in text for text in texts), texts


def _run_steps_with_late_rank(rank, late, skips, seconds):
    """The results of five steps. Shards hold the number of the step. Rank ``late`` enters step 1 late or skips it."""
    given, group = [], None
    _connect_to_store()
    for step in range(5):
        if step == 1 and rank == late:
            time.sleep(seconds)
            if skips:
                given.append("skipped")
                continue
        if step == 4:
            group = dist.new_group(list(range(4)))
        try:
            source = None if take_shard(ROWS, rank, WHOLE) is None else torch.full((3, 4), float(step))
            out = reshard.reshard(source, ROWS, COLS, group=group, timeout_seconds=1 if step == 1 else 20)
            given.append(step if out is None else sorted(set(out.flatten().tolist())))
        except reshard.ReshardError as error:
            given.append(f"{type(error).__name__}: {error}")
    return given


@pytest.mark.parametrize(
    ("late", "seconds", "skips"),
    [
        (0, 2.8, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((3, 2.8, True), (3, 2.8, False), (0, 2.8, True), (3, 1.3, False))
        ),
    ],
)
def test_calls_after_a_timeout_are_refused(late, seconds, skips):
    """No rank continues before there is a new group, because a late rank looks like one that skips a call."""
    for rank, given in enumerate(run_processes(_run_steps_with_late_rank, 4, late, skips, seconds)):
        assert given[0] in ([0.0], 0) and given[4] in ([4.0], 4), given
        if rank != late:
            assert f"rank {late} did not call within 1 s" in given[1], given
        elif not skips:
            assert "are out of sync" in given[1], given
        assert all("create a new group" in text for text in given[2:4]), given


def test_first_rank_within_the_grace_period_is_not_missing():
    assert [given[1:4] for given in run_processes(_run_steps_with_late_rank, 4, 0, False, 1.5)] == [
        [1, 2, 3],
        [1, 2, 3],
        [[1.0], [2.0], [3.0]],
        [[1.0], [2.0], [3.0]],
    ]


def _one_fails_in_two_sets(rank):
    """Rank 1 belongs to two sets, and fails a call that could belong to either."""
    first, second = Layout(Mesh([0, 1], {"x": 2}), "S0"), Layout(Mesh([1, 2], {"x": 2}), "S0")
    texts = []
    for step in range(4):
        for layout in (first, second):
            if rank not in layout.ranks:
                continue
            bad = rank == 1 and step == 1 and layout is second
            try:
                source = torch.full((2, 2), float(step))
                out = reshard.reshard(source, None if bad else layout, layout, src_spec=None, timeout_seconds=20)
                texts.append(sorted(set(out.flatten().tolist())))
            except reshard.ReshardError as error:
                texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_failed_call_of_a_rank_in_two_sets_puts_both_out_of_sync():
    """The members of the failed call are unknown, so later calls cannot be matched either."""
    first, both, second = run_processes(_one_fails_in_two_sets, 3)
    for given in (first[:1], both[:3], second[:1]):
        assert all(len(item) == 1 for item in given[:1]), given
    for given in (first, second):
        assert given[0] == [0.0] and given[1] in ([1.0], given[1]), given
        assert "whose members are unknown" in given[-1], given
        for step, item in enumerate(given):
            assert item == [float(step)] or "create a new group" in item or "failed a call" in item, given
    for step, item in enumerate(both):
        assert item == [float(step // 2)] or "Error" in item, both


A, B = Layout(Mesh([0], {"x": 1})), Layout(Mesh([1], {"x": 1}))


def _fail_one_call(rank, how):
    """Rank 0 alone fails its second call in the given way and continues at once."""
    texts = []
    for step in range(1, 5):
        source = torch.full((4,), float(step)) if rank == 0 else None
        try:
            if rank == 0 and step == 2:
                if how == "group":
                    reshard.reshard(source, A, B, group="nonsense")
                if how == "interrupt":
                    read, reshard.api.arguments.inputs.read_items = (
                        reshard.api.arguments.inputs.read_items,
                        _raise_interrupt,
                    )
                    try:
                        reshard.reshard(source, A, B)
                    finally:
                        reshard.api.arguments.inputs.read_items = read
                if how == "mover":
                    reshard.Mover(reshard.make_plan(A, Layout(Mesh([7], {"x": 1})), (4,), "float32"))
            out = reshard.reshard(source, A, B, timeout_seconds=20)
            texts.append(step if out is None else out.unique().tolist())
        except (reshard.ReshardError, KeyboardInterrupt) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def _raise_interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("group", "ArgumentError: rank 0: group must be a process group"),
        ("interrupt", "RemoteError: rank 0 left a call: KeyboardInterrupt"),
        ("mover", "ArgumentError: rank 0: the plan or a layout names rank 7"),
    ],
)
def test_call_failed_by_one_rank_fails_on_the_others(how, expected):
    first, second = run_processes(_fail_one_call, 2, how)
    assert [first[0], *first[2:]] == [1, 3, 4], first
    assert [second[0], *second[2:]] == [[1.0], [3.0], [4.0]], second
    assert second[1].startswith(expected), second
