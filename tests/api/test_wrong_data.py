"""Calls that could end with wrong data end with an error instead, or with the right data."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
import torch

import reshard
from reshard import DisagreementError, Layout, Mesh, RegionLayout
from reshard.testing.processes import run_processes
from tests.support.tensors import same_bytes, take_shard, whole_tensor

ROWS = Layout(Mesh.of("2"), "S0")
COLS = Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = whole_tensor((8, 6), torch.float32)


def _said(call):
    """What a call returned, or its error in words."""
    try:
        return call()
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"


def _calls_of_threads(rank, is_ordered):
    """Each thread moves values of its own; with ``is_ordered`` a lock keeps calls apart, in another order on odd ranks."""
    results, lock = [], threading.Lock()

    def loop(first):
        for value in range(first, first + 5):
            source = torch.full((4, 6), float(value)) if rank < 2 else None
            with lock if is_ordered else threading.Lock():
                out = _said(lambda source=source: reshard.reshard(source, ROWS, COLS, timeout_seconds=10))
            results.append(out if isinstance(out, str) else out is None or bool((out == value).all()))

    threads = [threading.Thread(target=loop, args=(first,)) for first in (100, 200)]
    for thread in reversed(threads) if rank % 2 else threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("is_ordered", [False, True])
def test_calls_of_two_threads_on_one_group_never_take_each_others_data(is_ordered):
    for results in run_processes(_calls_of_threads, 4, is_ordered):
        assert all(result is True or "thread" in str(result) for result in results), results
        assert sum(result is not True for result in results) >= 5, results  # the group is of no more use


def _one_after_the_other(rank):
    """Rank 0 calls from its main thread alone, the others from others later."""

    def call():
        out = reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, COLS)
        results.append(rank < 2 or same_bytes(out, take_shard(COLS, rank, WHOLE)))

    results = []
    call()
    for number in range(2):
        if rank == 0:
            call()
        else:
            thread = threading.Thread(target=call, name=f"helper {number}")
            thread.start()
            thread.join()
    return results


def test_one_thread_after_another_may_call():
    assert run_processes(_one_after_the_other, 4) == [[True] * 3] * 4


def _jobs(rank):
    """Two short threads call one after the other, in another order on odd ranks."""
    results = []

    def call(value):
        source = torch.full((4, 6), float(value)) if rank < 2 else None
        out = _said(lambda: reshard.reshard(source, ROWS, COLS, timeout_seconds=10))
        results.append(out if isinstance(out, str) else out is None or bool((out == value).all()))

    for value in (10, 20) if rank % 2 else (20, 10):
        thread = threading.Thread(target=call, args=(value,), name=f"job {value}")
        thread.start()
        thread.join()
    return results


def test_threads_of_different_names_never_meet():
    for results in run_processes(_jobs, 4):
        assert all("from thread 'job" in str(result) for result in results), results


class _Alarm(Exception):
    pass


def _interrupted(rank, who, kind):
    """A signal handler raises in a call of one rank, which waits for the other; both go on."""

    def ring(*_):
        raise kind("step took too long")

    signal.signal(signal.SIGALRM, ring)
    mesh, said = Mesh.of("2"), []
    for step in range(4):
        if step == 1:
            if rank == who:
                signal.setitimer(signal.ITIMER_REAL, 0.4)
            else:
                time.sleep(1.0)
        try:
            source = torch.full((2, 4), float(step))
            out = reshard.reshard(source, Layout(mesh, "S0 R"), Layout(mesh, "R S0"), timeout_seconds=10)
            said.append(bool((out == step).all()))
        except (kind, reshard.ReshardError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("kind", [_Alarm, TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("who", [0, 1])
def test_a_call_that_a_signal_handler_ends_never_meets_a_later_one(who, kind):
    said = run_processes(_interrupted, 2, who, kind)
    assert said[who][1] == f"{kind.__name__}: step took too long"
    for steps in said:
        assert steps[0] is True
        assert all(
            "out of sync" in text or "left a call" in text or "step took too long" in text for text in steps[1:]
        ), said


def _interrupted_mover(rank, monkeypatch):
    """An interrupt comes while a Mover looks at its arrays."""
    plan, said = reshard.make_plan(ROWS, COLS, (8, 6), "float32"), []
    with reshard.Mover(plan, timeout_seconds=10) as mover:
        for step in range(3):
            if rank == 1 and step == 1:
                with monkeypatch.context() as patched:
                    patched.setattr("reshard.api.mover.check_apart", _interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        mover(take_shard(ROWS, rank, WHOLE) + step)
                continue
            source = take_shard(ROWS, rank, WHOLE)
            out = _said(lambda source=source, step=step: mover(None if source is None else source + step))
            said.append(
                out if isinstance(out, str) else out is None or same_bytes(out, take_shard(COLS, rank, WHOLE) + step)
            )
    return said


def _interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_start_ends_a_movers_transfers_on_all_ranks(monkeypatch):
    for said in run_processes(_interrupted_mover, 4, monkeypatch):
        assert said[0] is True
        assert all(
            "KeyboardInterrupt" in str(text) or "closed the connections" in str(text) or text is True
            for text in said[1:]
        ), said
        assert "KeyboardInterrupt" in str(said[-1]) or "closed the connections" in str(said[-1]), said


def _mover_of_two_threads(rank):
    plan = reshard.make_plan(ROWS, COLS, (8, 6), "float32")
    results = []
    with reshard.Mover(plan, timeout_seconds=10) as mover:
        thread = threading.Thread(target=lambda: results.append(_said(lambda: mover(take_shard(ROWS, rank, WHOLE)))))
        if rank == 1:
            thread.start()
            thread.join()
        else:
            results.append(_said(lambda: mover(take_shard(ROWS, rank, WHOLE))))
    return results[0]


def test_a_mover_is_used_by_the_thread_that_made_it():
    said = run_processes(_mover_of_two_threads, 4)
    assert "rank 1: thread" in said[1], said
    assert said[2] == said[3] == said[1], said


def _dtensors(rank):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    other_mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    rows = [Shard(0), Shard(0)]
    strided = [_StridedShard(0, split_factor=2), Shard(0)]

    def cut(placements, where=mesh, values=WHOLE):
        return distribute_tensor(values.clone(), where, placements, src_data_rank=None)

    def call(tensor, **given):
        out = _said(lambda: reshard.reshard(tensor, **({"dst_mesh": mesh, "dst_spec": rows} | given)))
        return out if isinstance(out, str) or out is None else same_bytes(out.full_tensor(), WHOLE)

    partial = DTensor.from_local(torch.ones(8, 6), mesh, [Replicate(), Partial()])
    refused = {
        "out of another layout": (call(cut(rows), out=cut(strided)), "out DTensor is sharded as (dp~2+tp) on"),
        "source of another layout": (call(cut(strided), src_mesh=mesh, src_spec=rows), "dp~2+tp"),
        "source on another mesh": (call(cut(rows, other_mesh), src_mesh=mesh), "Mesh(dp=2, tp=2; ranks 0-3)"),
        "pending sum": (call(partial, src_mesh=mesh, src_spec=[Replicate(), Replicate()]), "PartialError: "),
        "pending sum in out": (call(cut(rows), dst_spec=None, out=partial), "PartialError: "),
        "another shape": (call(cut(rows), shape=(16, 6)), "has shape [8, 6], but shape is [16, 6]"),
        "shape of out": (
            call(cut(rows), out=cut(rows, values=torch.zeros(9, 6))),
            "has shape [9, 6], but shape is [8, 6]",
        ),
    }
    filled = cut(strided, values=torch.zeros(8, 6))
    accepted = {
        "the same in other words": call(cut(rows), src_mesh=Mesh.of("2x2"), src_spec="S01"),
        "mesh alone": call(cut(rows), src_mesh=mesh),
        "out alone": call(cut(rows), dst_mesh=None, dst_spec=None, out=filled) is True
        and same_bytes(filled.full_tensor(), WHOLE),
        "counted from the last dim": call(cut(rows), dst_spec=[Shard(-1), Replicate()]),
        "spec in our notation": call(cut(rows), dst_spec=("dp", "tp")),
    }
    plan = reshard.make_plan(Layout(Mesh.of("2x2"), "S01"), Layout(Mesh.of("2x2"), "R S1"), (8, 6), "float32")
    with reshard.Mover(plan) as mover:
        out = cut([Replicate(), Shard(1)], values=torch.zeros(8, 6))
        accepted["a Mover"] = mover(cut(rows), out=out) is out and same_bytes(out.full_tensor(), WHOLE)
        accepted["an empty out"] = mover(cut(rows), out=mover.empty_out()).equal(out.to_local())
    with reshard.Mover(plan) as mover:
        refused["a Mover's source"] = _said(lambda: mover(cut(strided))), "but the plan says (0+1)"
    with reshard.Mover(plan) as mover:
        refused["a Mover's out"] = _said(lambda: mover(cut(rows), out=cut(rows))), "but the plan says (-, 1)"
    return refused, accepted


def test_what_a_dtensor_says_of_itself_is_not_overruled():
    for refused, accepted in run_processes(_dtensors, 4):
        for name, (said, text) in refused.items():
            assert text in str(said), (name, said)
        assert all(result is True for result in accepted.values()), accepted


def _replicas(rank):
    mesh, dst = Mesh.of("3"), Mesh.of("1", first_rank=3)
    value = torch.full((4,), float(rank == 2))
    texts = [_said(lambda: reshard.reshard(None if rank == 3 else value, mesh, dst))]
    texts.append(
        _said(
            lambda: reshard.reshard(
                {"a": None if rank == 3 else value * 0, "b": None if rank == 3 else value}, mesh, dst
            )
        )
    )
    same = _said(lambda: reshard.reshard(None if rank == 3 else torch.ones(4), mesh, dst))
    texts.append(_said(lambda: reshard.reshard(None if rank == 3 else value, Layout(mesh), dst, verify=True)))
    grid = Layout(Mesh.of("3x1"), "S1")
    with reshard.Mover(reshard.make_plan(grid, Layout(dst), (4,), "float32"), verify=True) as mover:
        texts.append(_said(lambda: mover(None if rank == 3 else value)))
    overlap = RegionLayout({0: [[(0, 3)]], 1: [[(2, 4)]], 2: [[(2, 4)]]})
    source = None if rank == 3 else value[: 3 if rank == 0 else 2]
    texts.append(_said(lambda: reshard.reshard(source, overlap, Layout(dst), verify=True)))
    return texts, rank < 3 or same.equal(torch.ones(4))


def test_replicas_that_differ_are_found():
    """Where no spec says how a tensor is sharded, before a byte moves; with ``verify`` in every layout."""
    said = run_processes(_replicas, 4)
    assert all(same for _, same in said)
    for texts, _ in said:
        assert texts == said[0][0]
        assert "DisagreementError: the tensor: rank 2 holds other elements than ranks 0-1" in texts[0]
        assert "DisagreementError: tensor 'b': rank 2 holds other elements than ranks 0-1" in texts[1]
        for text, box in zip(texts[2:], ("[0:4]", "[0:4]", "[2:3]"), strict=True):
            assert f"VerificationError: the source {box} differs between its replicas: rank 2 holds" in text


def test_replicas_in_one_process_are_compared_too():
    mesh, dst = Mesh.of("2"), Layout(Mesh.of("1", first_rank=2))
    with pytest.raises(DisagreementError, match="rank 1 holds other elements than rank 0"):
        reshard.reshard_local({0: np.zeros(4), 1: np.ones(4)}, mesh, dst, shape=(4,))
    out = reshard.reshard_local({0: np.full(4, 1.5), 1: np.full(4, 1.5)}, mesh, dst, shape=(4,), dst_dtype="fp32")[2]
    assert out.dtype == np.float32 and (out == 1.5).all()


def _uneven(rank, sizes, src_spec, grid):
    source = torch.zeros(sizes[rank], 2) if rank < len(sizes) else None
    dst = Mesh.of("1", first_rank=len(sizes))
    return _said(lambda: reshard.reshard(source, Mesh.of(grid), dst, src_spec=src_spec))


@pytest.mark.parametrize(
    ("sizes", "src_spec", "grid", "text"),
    [
        ((3, 4), "S0", "2", "rank 0 passes 3 elements along dim 0, but should pass 4"),
        ((4, 4, 4, 3), "S0", "2x2", "rank 3 passes 3 elements along dim 0, but should pass 4"),
        ((3, 4, 4), "R R", "3", "rank 0 passes 3 elements along dim 0, but should pass 4"),
        ((4, 4, 1), "S0", "3", "rank 0 passes 4 elements along dim 0, but should pass 3"),
    ],
)
def test_sizes_that_no_layout_gives_are_refused(sizes, src_spec, grid, text):
    said = run_processes(_uneven, len(sizes) + 1, sizes, src_spec, grid)
    assert len(set(said)) == 1 and text in said[0], said
