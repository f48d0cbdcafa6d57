"""Bad input: the same clear error on every calling rank, nothing moved, and the next call works."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensors import same_bytes, take_shard, whole_tensor

import reshard
import reshard.call
from reshard import Layout, Mesh, RegionLayout, Topology, failures
from reshard.agreement import Record
from reshard.group import find_group
from reshard.launch import run_processes

ROWS = Layout(Mesh.of("2"), "S0")
COLS = Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = whole_tensor((6, 4), torch.float32)


def _cases(rank):
    """``{name: (arguments of this rank, what every rank's error must say)}``."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import Partial, Shard

    source = take_shard(ROWS, rank, WHOLE)
    out = torch.full((6, 2), -1.0)
    holds = source if source is not None else torch.zeros(3, 4)  # only used where the rank is a source
    give = {"tensor": source, "src_mesh": ROWS, "dst_mesh": COLS}
    mesh = {"tensor": source, "src_mesh": ROWS.mesh, "dst_mesh": COLS.mesh}
    gap = RegionLayout({0: [[(0, 2), (0, 4)]], 1: [[(3, 6), (0, 4)]]})
    return {
        "unknown axis": (mesh | {"src_spec": "S1 R"}, "names axis 1"),
        "doubled axis": (mesh | {"src_spec": ("0", "0")}, "names axis '0' twice"),
        "unknown axis on one rank": (
            mesh | {"dst_spec": (None, "x" if rank == 3 else "0"), "src_spec": "S0"},
            "rank 3: ",
        ),
        "partial": (mesh | {"src_spec": [Partial()], "dst_spec": [Shard(0)]}, "reduce it first"),
        "rank outside the group": (give | {"dst_mesh": Layout(Mesh([2, 9], {"x": 2}), "S0")}, "ranks 0..3"),
        "shape that does not match": (give | {"shape": (8, 4)}, "gives it [4, 4]"),
        "shape said differently": (give | {"shape": (6, 4 + (rank == 1))}, "disagree on the global shape"),
        "dtype said differently": (give | {"dtype": "float64"}, "disagree on the dtype"),
        "dtype of one shard": (
            give | {"tensor": holds.double() if rank == 1 else source},
            "rank 0 holds float32, rank 1 holds float64",
        ),
        "shard of the wrong shape": (
            give | {"tensor": holds[:2] if rank == 0 else source, "shape": (6, 4)},
            "rank 0 passes",
        ),
        "shard of the wrong ndim": (give | {"tensor": holds[0] if rank == 1 else source}, "rank 1 passes"),
        "no shard": (give | {"tensor": None}, "is in the source layout, but passes None"),
        "shard where none belongs": (give | {"tensor": source if rank != 2 else torch.zeros(3, 4)}, "rank 2 is not in"),
        "not a tensor": (give | {"tensor": [1, 2] if rank == 0 else source}, "passes list"),
        "sparse": (give | {"tensor": holds.to_sparse() if rank == 0 else source}, "only dense"),
        "a fake tensor": (
            give | {"tensor": FakeTensorMode().from_tensor(holds) if rank == 0 else source, "shape": (6, 4)},
            "rank 0 passes a FakeTensor that has no memory of its own",
        ),
        "out of the wrong shape": (
            give | {"out": torch.zeros(2, 6) if rank == 3 else None},
            "rank 3 passes out of float32 [2, 6]",
        ),
        "out of the wrong dtype": (give | {"out": out.int() if rank == 3 else None}, "rank 3 passes out of int32"),
        "out where none belongs": (give | {"out": torch.zeros(6, 2) if rank == 0 else None}, "rank 0 passes out="),
        "out on the source's storage": (
            give | {"out": holds[:, :2] if rank == 0 else None},
            "out shares storage with a source",
        ),
        "other layout": (
            give | {"dst_mesh": COLS if rank else Layout(COLS.mesh)},
            "disagree on the destination layout",
        ),
        "other strategy": (give | {"strategy": "send_recv" if rank == 1 else None}, "disagree on strategy"),
        "unknown strategy": (give | {"strategy": "teleport"}, "there are auto, send_recv"),
        "other topology": (give | {"topology": Topology((0, 0, 1, 1)) if rank else None}, "disagree on topology"),
        "on_loss that is no word": (
            give | {"on_loss": np.array([1, 2]) if rank == 1 else "raise"},
            "on_loss is array([1, 2]); it must be one of",
        ),
        "topology too small": (give | {"topology": Topology((0, 0))}, "rank 3 has no host"),
        "other names": (
            {"tensor": {"a" if rank else "b": source}, "src_mesh": ROWS, "dst_mesh": COLS},
            "disagree on the tensors",
        ),
        "regions that nobody holds": (
            give | {"src_mesh": gap, "tensor": holds[:2] if rank == 0 else source, "shape": (6, 4)},
            "holds only",
        ),
        "tiny staging": (give | {"staging_bytes": 10}, "at least 65536"),
        "topology of the wrong kind on one rank": (
            give | {"topology": "x" if rank == 1 else None},
            "must be a Topology",
        ),
        "strategy of the wrong kind on one rank": (
            give | {"strategy": [] if rank == 2 else None},
            "name or a function",
        ),
        "shape of floats on one rank": (
            give | {"shape": (6.5, 4) if rank == 3 else None},
            "not a sequence of integers",
        ),
        "out that overlaps itself": (
            give | {"out": torch.zeros(20).as_strided((6, 2), (1, 1)) if rank == 3 else None},
            "one place in memory",
        ),
        "out conjugated": (
            give | {"out": torch.zeros(6, 2, dtype=torch.complex64).conj() if rank == 3 else None},
            "conjugated",
        ),
        "no destination": (give | {"dst_mesh": None}, "dst_mesh is missing"),
        "no time": (give | {"timeout_seconds": float("nan")}, "timeout_seconds is nan"),
        "no mesh": (give | {"dst_mesh": 7}, "must be a Mesh"),
    }


def _bad_calls(rank):
    said = {}
    for name, (arguments, expected) in _cases(rank).items():
        before = None if arguments["tensor"] is None else str(arguments["tensor"])
        try:
            reshard.reshard(**arguments)
            said[name] = ("nothing was raised", expected)
        except reshard.ReshardError as error:
            said[name] = (f"{type(error).__name__}: {error}", expected)
        assert before is None or str(arguments["tensor"]) == before
    good = reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, COLS)
    assert good is None or same_bytes(good, take_shard(COLS, rank, WHOLE))
    return said


def test_bad_input_is_one_error_on_every_rank_and_the_next_call_works():
    by_rank = run_processes(_bad_calls, 4)
    for name, (text, expected) in by_rank[0].items():
        assert expected in text, (name, text)
        for rank in (1, 2, 3):
            assert by_rank[rank][name][0] == text, name


def _who_takes_part(rank):
    """Rank 3 believes in another destination mesh; in the second call it believes it takes no part."""
    texts = []
    for mine, theirs in [
        (Layout(Mesh([3, 1], {"x": 2}), "S0"), COLS),
        (Layout(Mesh([1, 2], {"x": 2}), "S0"), COLS),
    ]:
        begun = time.monotonic()
        try:
            reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, mine if rank == 3 else theirs, timeout_seconds=20)
            texts.append("nothing was raised")
        except reshard.ReshardError as error:
            texts.append(str(error))
        assert time.monotonic() - begun < 10
        dist.barrier()
    good = reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, COLS)
    assert good is None or same_bytes(good, take_shard(COLS, rank, WHOLE))
    return texts


def test_ranks_that_disagree_on_who_takes_part_find_out_soon():
    first, second = zip(*run_processes(_who_takes_part, 4), strict=True)
    assert all("disagree on who takes part" in text or "is in neither layout" in text for text in (*first, *second))
    assert "rank 3 with ranks 0-2" in second[0]


def _one_gives_up_early(rank):
    """Rank 3 cannot even read its meshes; the others are told why instead of waiting for it."""
    begun = time.monotonic()
    try:
        reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, "nonsense" if rank == 3 else COLS, timeout_seconds=30)
        text = "nothing was raised"
    except reshard.ReshardError as error:
        text = str(error)
    assert time.monotonic() - begun < 10
    dist.barrier()
    good = reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, COLS)
    assert good is None or same_bytes(good, take_shard(COLS, rank, WHOLE))
    return text


def test_a_rank_that_cannot_read_its_meshes_tells_the_others():
    texts = run_processes(_one_gives_up_early, 4)
    assert all("dst_mesh must be a Mesh" in text for text in texts), texts
    assert len(set(texts[:3])) == 1


def _some_fail_alone(rank, seed):
    """Steps in which ranks fail before they know with whom, and go on at once: what each step gave, or its error."""
    chance = random.Random(seed)
    rows, one = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("1", first_rank=2))
    found = []
    for step in range(30):
        failing = chance.sample(range(3), chance.choice((0, 0, 1, 1, 2, 3)))
        if chance.random() < 0.2:
            time.sleep(0.4 * (rank == chance.randrange(3)))
        shard = torch.full((2, 2), float(step)) if rank < 2 else None
        try:
            out = reshard.reshard(shard, None if rank in failing else rows, one, timeout_seconds=60)
            found.append((failing, None if out is None else out.unique().tolist()))
        except reshard.ArgumentError as error:
            found.append((failing, str(error)))
    dist.barrier()
    return found


@pytest.mark.parametrize("seed", range(2))
def test_calls_of_ranks_that_fail_alone_never_meet_those_of_others(seed):
    for rank, steps in enumerate(run_processes(_some_fail_alone, 3, seed)):
        for step, (failing, got) in enumerate(steps):
            if failing:
                assert "src_mesh is missing" in got, (rank, step, got)
            else:
                assert got == (None if rank < 2 else [float(step)]), (rank, step, got)


def _one_believes_in_others(rank, seconds):
    """In step 2 rank 2 calls with ranks 0 and 1 only, and goes on at once: what each step gave, or its error."""
    rows, one = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("1", first_rank=2))
    found = []
    for step in range(5):
        dst = Layout(Mesh.of("2"), "R S0") if (rank, step) == (2, 2) else one
        if step == 2 and rank < 2:
            time.sleep(seconds)
        shard = torch.full((2, 2), float(step)) if rank < 2 else None
        try:
            out = reshard.reshard(shard, rows, dst, timeout_seconds=60)
            found.append(None if out is None else out.unique().tolist())
        except reshard.ReshardError as error:
            found.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return found


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5])
def test_a_call_with_others_only_never_lets_steps_mix(seconds):
    found = run_processes(_one_believes_in_others, 3, seconds)
    for rank, steps in enumerate(found):
        for step, got in enumerate(steps):
            if step != 2 and got == (None if rank < 2 else [float(step)]):
                continue
            assert step >= 2, (rank, step, got)
            assert "is in neither layout" in got or "rank 2 with ranks 0-1, which leave it out" in got, (
                rank,
                step,
                got,
            )


class _Alone:
    """What of a group counts calls that were left."""

    def __init__(self, rank, errors, given):
        self.rank, self.beacon = (
            rank,
            {"errors": errors, "given": given, "error": ["ArgumentError", f"rank {rank}: no"]},
        )
        self.store = self

    def set(self, key, value):
        pass


def test_failures_that_only_some_know_of_are_counted_once():
    members = (0, 1, 2)
    groups = [_Alone(0, 1, {"1": 1}), _Alone(1, 1, {"2": 1}), _Alone(2, 1, {"0": 1})]

    def meet():
        records = [Record(group.rank, left=failures.count_left(group, members)) for group in groups]
        verdict = failures.find_behind(records, members)
        for group in groups:
            if verdict and group.rank in verdict.behind:
                failures.give_up(group, members, verdict)
        return verdict

    assert meet().behind == [0, 1, 2]
    assert meet() is None


def _meet():
    """Connections to the store can be slow to make; they are not what the next seconds are about."""
    find_group(None)
    dist.barrier()


def _one_never_comes(rank):
    _meet()
    if rank == 3:
        time.sleep(3.5)
        return "rank 3 did not call"
    begun = time.monotonic()
    try:
        reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, COLS, timeout_seconds=1.5)
        text = "nothing was raised"
    except reshard.TransferTimeoutError as error:
        text = str(error)
    assert time.monotonic() - begun < 5
    return text


def test_a_missing_rank_is_named_within_the_timeout():
    texts = run_processes(_one_never_comes, 4)
    assert all("rank 3 did not call" in text for text in texts), texts


def _different_plans(rank):
    plan = reshard.make_plan(ROWS, COLS, (6, 4), "float32", strategy="send_recv" if rank == 2 else None)
    try:
        reshard.Mover(plan)
        return "nothing was raised"
    except reshard.DisagreementError as error:
        return str(error)


def test_movers_of_different_plans_name_the_first_difference():
    texts = run_processes(_different_plans, 4)
    assert len(set(texts)) == 1
    assert "disagree on strategy: rank 0 passes multicast, rank 2 passes send_recv" in texts[0]


def _one_start_fails(rank):
    """A Mover is given a wrong array on one rank: all ranks get that error, not a hang."""
    plan = reshard.make_plan(ROWS, COLS, (6, 4), "float32")
    with reshard.Mover(plan, timeout_seconds=20) as mover:
        source = take_shard(ROWS, rank, WHOLE)
        begun = time.monotonic()
        try:
            mover(source.double() if rank == 1 else source)
            text = "nothing was raised"
        except reshard.ReshardError as error:
            text = str(error)
        assert time.monotonic() - begun < 10
    dist.barrier()
    good = reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, COLS)
    assert good is None or same_bytes(good, take_shard(COLS, rank, WHOLE))
    return text


def test_a_wrong_array_for_a_mover_ends_the_transfer_everywhere():
    texts = run_processes(_one_start_fails, 4)
    # A rank whose own messages were done before may have finished; nobody else may.
    assert sum("rank 1 passes float64" in text for text in texts) >= 3, texts


def _steps(rank, late, skips, seconds):
    """What each step gives, in which shards hold its number; rank ``late`` comes to the second one late, or not."""
    given, group = [], None
    _meet()
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
            good = reshard.reshard(source, ROWS, COLS, group=group, timeout_seconds=1 if step == 1 else 20)
            given.append(step if good is None else sorted(set(good.flatten().tolist())))
        except reshard.ReshardError as error:
            given.append(f"{type(error).__name__}: {error}")
    return given


@pytest.mark.parametrize(
    ("late", "seconds", "skips"),
    [
        (0, 2.8, False),
        (3, 2.8, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 2.8, False), (0, 2.8, True), (3, 1.3, False))),
    ],
)
def test_after_a_time_out_calls_are_refused_and_never_mixed(late, seconds, skips):
    """Nothing tells a rank that is late from one that skips a call, so nobody goes on before there is a new group."""
    for rank, given in enumerate(run_processes(_steps, 4, late, skips, seconds)):
        assert given[0] in ([0.0], 0) and given[4] in ([4.0], 4), given
        if rank != late:
            assert f"rank {late} did not call within 1 s" in given[1], given
        elif not skips:
            assert "can no longer be told apart" in given[1], given
        assert all("make a new group to go on" in text for text in given[2:4]), given


def test_a_first_rank_that_is_late_by_less_than_it_is_waited_for_is_not_missed():
    assert [given[1:4] for given in run_processes(_steps, 4, 0, False, 1.5)] == [
        [1, 2, 3],
        [1, 2, 3],
        [[1.0], [2.0], [3.0]],
        [[1.0], [2.0], [3.0]],
    ]


def _one_fails_of_two_sets(rank):
    """Rank 1 takes part in two sets, and fails alone in a call that could be of either."""
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


def test_a_rank_that_fails_alone_and_calls_with_two_sets_leaves_both_out_of_step():
    """Whom the failed call was meant for is not known, so which calls belong together is not either."""
    first, both, second = run_processes(_one_fails_of_two_sets, 3)
    for given in (first[:1], both[:3], second[:1]):
        assert all(len(one) == 1 for one in given[:1]), given
    for given in (first, second):
        assert given[0] == [0.0] and given[1] in ([1.0], given[1]), given
        assert "nobody knows who takes part" in given[-1], given
        for step, one in enumerate(given):
            assert one == [float(step)] or "make a new group to go on" in one or "failed a call" in one, given
    for step, one in enumerate(both):
        assert one == [float(step // 2)] or "Error" in one, both


SCRIPT = """
import torch, torch.distributed as dist, reshard
dist.init_process_group("gloo")
rank = dist.get_rank()
rows, cols = reshard.Layout(reshard.Mesh.of(2), "S0"), reshard.Layout(reshard.Mesh.of(2, first_rank=2), "R S0")
mover = reshard.Mover(reshard.make_plan(rows, cols, (6, 4), "float32"))
try:
    mover(torch.zeros(3, 4 + rank) if rank < 2 else None)
    print("ok", flush=True)
except reshard.ReshardError as error:
    print("raised", flush=True)
"""


def test_processes_end_normally_after_an_error(tmp_path):
    """With an interpreter that really shuts down, unlike forked test ranks."""
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("raised") >= 3  # not by lines: ranks print into one pipe


A, B = Layout(Mesh([0], {"x": 1})), Layout(Mesh([1], {"x": 1}))


def _alone(rank, how):
    """Rank 0 fails its second call by itself, in a way of its own, and goes on at once."""
    texts = []
    for step in range(1, 5):
        source = torch.full((4,), float(step)) if rank == 0 else None
        try:
            if rank == 0 and step == 2:
                if how == "group":
                    reshard.reshard(source, A, B, group="nonsense")
                if how == "interrupt":
                    read, reshard.call.read_items = reshard.call.read_items, _interrupted
                    try:
                        reshard.reshard(source, A, B)
                    finally:
                        reshard.call.read_items = read
                if how == "mover":
                    reshard.Mover(reshard.make_plan(A, Layout(Mesh([7], {"x": 1})), (4,), "float32"))
            out = reshard.reshard(source, A, B, timeout_seconds=20)
            texts.append(step if out is None else out.unique().tolist())
        except (reshard.ReshardError, KeyboardInterrupt) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def _interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("group", "ArgumentError: rank 0: group must be a process group"),
        ("interrupt", "RemoteError: rank 0 left a call: KeyboardInterrupt"),
        ("mover", "ArgumentError: rank 0: layouts name ranks 7"),
    ],
)
def test_a_call_that_a_rank_fails_alone_is_one_that_the_others_fail_too(how, said):
    ours, theirs = run_processes(_alone, 2, how)
    assert [ours[0], *ours[2:]] == [1, 3, 4], ours
    assert [theirs[0], *theirs[2:]] == [[1.0], [3.0], [4.0]], theirs
    assert theirs[1].startswith(said), theirs
