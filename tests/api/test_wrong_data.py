"""Calls that could deliver wrong data raise an error or deliver the right data."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch._dynamo  # once here, not in each forked rank
import torch.distributed.device_mesh
import torch.distributed.tensor

import reshard
from reshard import Layout, Mesh, RegionLayout
from reshard.api.arrays.tensor_checks import check_movable
from reshard.errors import DisagreementError
from reshard.testing.processes import run_processes
from tests.support.tensors import result_or_error, same_bytes, take_shard, whole_tensor

ROWS = Layout(Mesh.of("2"), "S0")
COLS = Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = whole_tensor((8, 6), torch.float32)


def _call_from_two_threads(rank, is_ordered):
    """Two threads move different values. Odd ranks start them in the other order. ``is_ordered`` serializes the calls."""
    results, lock = [], threading.Lock()

    def loop(first):
        for value in range(first, first + 5):
            source = torch.full((4, 6), float(value)) if rank < 2 else None
            with lock if is_ordered else threading.Lock():
                out = result_or_error(lambda source=source: reshard.reshard(source, ROWS, COLS, timeout_seconds=10))
            results.append(out if isinstance(out, str) else out is None or bool((out == value).all()))

    threads = [threading.Thread(target=loop, args=(first,)) for first in (100, 200)]
    for thread in reversed(threads) if rank % 2 else threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("is_ordered", [False, True])
def test_two_threads_on_one_group_never_exchange_data(is_ordered):
    for results in run_processes(_call_from_two_threads, 4, is_ordered):
        assert all(result is True or "thread" in str(result) for result in results), results
        # The group is unusable after the first error.
        assert sum(result is not True for result in results) >= 5, results


def _call_in_turn(rank):
    """Rank 0 always calls from its main thread; the other ranks later call from new threads."""

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


def test_threads_may_call_in_turn():
    assert run_processes(_call_in_turn, 4) == [[True] * 3] * 4


def _call_from_named_threads(rank):
    """Two threads call one after the other, in another order on odd ranks."""
    results = []

    def call(value):
        source = torch.full((4, 6), float(value)) if rank < 2 else None
        out = result_or_error(lambda: reshard.reshard(source, ROWS, COLS, timeout_seconds=10))
        results.append(out if isinstance(out, str) else out is None or bool((out == value).all()))

    for value in (10, 20) if rank % 2 else (20, 10):
        thread = threading.Thread(target=call, args=(value,), name=f"job {value}")
        thread.start()
        thread.join()
    return results


def test_calls_from_threads_with_different_names_are_refused():
    for results in run_processes(_call_from_named_threads, 4):
        assert all("from thread 'job" in str(result) for result in results), results


def _move_under_autograd(rank, dst_dtype, with_mover):
    """The backward pass of a graph that saved ``out`` before it was overwritten."""
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh([1, 0]), "S0")
    weight = torch.ones(4, dtype=getattr(torch, dst_dtype), requires_grad=True)
    loss = (weight * weight).sum()
    source = torch.full((4,), float(rank + 5))
    if with_mover:
        with reshard.Mover(reshard.make_plan(src, dst, (8,), "float32")) as mover:
            mover(source, out=weight)
    else:
        reshard.reshard(source, src, dst, out=weight, dst_dtype=dst_dtype)
    assert weight.tolist() == [6.0 - rank] * 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        out = torch.zeros(4)
    reshard.reshard(source, src, dst, out=out)
    return out.tolist()


@pytest.mark.parametrize(("dst_dtype", "with_mover"), [("float32", False), ("float64", False), ("float32", True)])
def test_autograd_is_told_that_out_changes(dst_dtype, with_mover):
    assert run_processes(_move_under_autograd, 2, dst_dtype, with_mover) == [[6.0] * 4, [5.0] * 4]


def _move_under_other_defaults(rank):
    """Transfers that cast, code, encode without loss and verify, after the caller has changed torch's defaults."""
    given = [{"dst_dtype": "bfloat16"}, {"compression": "int8x128", "max_error": 0.1}, {"compression": "delta"}]
    given += [{"verify": True}, {"on_loss": "recover"}]
    shard = torch.full((64, 256), float(rank)) if rank < 2 else None
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        outs = [reshard.reshard(shard, ROWS, COLS, shape=(128, 256), dtype="float32", **item) for item in given]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return None if shard is not None else [out.float()[::64, 0].tolist() for out in outs]


def test_defaults_of_torch_do_not_matter():
    assert run_processes(_move_under_other_defaults, 4)[2:] == [[[0.0, 1.0]] * 5] * 2


def _override_dtensors(rank):
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
        out = result_or_error(lambda: reshard.reshard(tensor, **({"dst_mesh": mesh, "dst_spec": rows} | given)))
        return out if isinstance(out, str) or out is None else same_bytes(out.full_tensor(), WHOLE)

    partial = DTensor.from_local(torch.ones(8, 6), mesh, [Replicate(), Partial()])
    refused = {
        "out with another layout": (call(cut(rows), out=cut(strided)), "out DTensor is sharded as (dp~2+tp) on"),
        "source with another layout": (call(cut(strided), src_mesh=mesh, src_spec=rows), "dp~2+tp"),
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
        "equal layout in another notation": call(cut(rows), src_mesh=Mesh.of("2x2"), src_spec="S01"),
        "mesh alone": call(cut(rows), src_mesh=mesh),
        "out alone": call(cut(rows), dst_mesh=None, dst_spec=None, out=filled) is True
        and same_bytes(filled.full_tensor(), WHOLE),
        "negative dim": call(cut(rows), dst_spec=[Shard(-1), Replicate()]),
        "spec of axis names": call(cut(rows), dst_spec=("dp", "tp")),
    }
    plan = reshard.make_plan(Layout(Mesh.of("2x2"), "S01"), Layout(Mesh.of("2x2"), "R S1"), (8, 6), "float32")
    with reshard.Mover(plan) as mover:
        out = cut([Replicate(), Shard(1)], values=torch.zeros(8, 6))
        accepted["a Mover"] = mover(cut(rows), out=out) is out and same_bytes(out.full_tensor(), WHOLE)
        accepted["an empty out"] = mover(cut(rows), out=mover.empty_out()).equal(out.to_local())
    with reshard.Mover(plan) as mover:
        refused["a Mover's source"] = result_or_error(lambda: mover(cut(strided))), "but the plan says (0+1)"
    with reshard.Mover(plan) as mover:
        refused["a Mover's out"] = result_or_error(lambda: mover(cut(rows), out=cut(rows))), "but the plan says (-, 1)"
    return refused, accepted


@pytest.mark.integration
def test_arguments_cannot_override_a_dtensor():
    for refused, accepted in run_processes(_override_dtensors, 4):
        for name, (result, text) in refused.items():
            assert text in str(result), (name, result)
        assert all(result is True for result in accepted.values()), accepted


def test_tensors_of_transforms_are_refused():
    for transform, array in ((torch.func.vmap, torch.ones(2)), (torch.func.grad, torch.ones(()))):
        with pytest.raises(reshard.errors.ArgumentError, match="rank 1 passes a tensor inside a torch"):
            transform(lambda one: check_movable(one, "the tensor", 1))(array)


def _replicas(rank):
    mesh, dst = Mesh.of("3"), Mesh.of("1", first_rank=3)
    value = torch.full((4,), float(rank == 2))
    texts = [result_or_error(lambda: reshard.reshard(None if rank == 3 else value, mesh, dst))]
    texts.append(
        result_or_error(
            lambda: reshard.reshard(
                {"a": None if rank == 3 else value * 0, "b": None if rank == 3 else value}, mesh, dst
            )
        )
    )
    same = result_or_error(lambda: reshard.reshard(None if rank == 3 else torch.ones(4), mesh, dst))
    texts.append(result_or_error(lambda: reshard.reshard(None if rank == 3 else value, Layout(mesh), dst, verify=True)))
    grid = Layout(Mesh.of("3x1"), "S1")
    with reshard.Mover(reshard.make_plan(grid, Layout(dst), (4,), "float32"), verify=True) as mover:
        texts.append(result_or_error(lambda: mover(None if rank == 3 else value)))
    overlap = RegionLayout({0: [[(0, 3)]], 1: [[(2, 4)]], 2: [[(2, 4)]]})
    source = None if rank == 3 else value[: 3 if rank == 0 else 2]
    texts.append(result_or_error(lambda: reshard.reshard(source, overlap, Layout(dst), verify=True)))
    return texts, rank < 3 or same.equal(torch.ones(4))


def test_different_replicas_are_refused():
    """Without a spec, replicas are compared before any data moves; with ``verify``, in every layout."""
    by_rank = run_processes(_replicas, 4)
    assert all(same for _, same in by_rank)
    for texts, _ in by_rank:
        assert texts == by_rank[0][0]
        assert "DisagreementError: the tensor: rank 2 holds other elements than ranks 0-1" in texts[0]
        assert "DisagreementError: tensor 'b': rank 2 holds other elements than ranks 0-1" in texts[1]
        for text, box in zip(texts[2:], ("[0:4]", "[0:4]", "[2:3]"), strict=True):
            assert f"VerificationError: the source {box} differs between its replicas: rank 2 holds" in text


def strided_nibbles(data):
    """A tensor of uint4 with these bytes, whose columns are contiguous: torch cannot copy it."""
    return data.t().contiguous().t().view(torch.uint4)


def test_reshard_local_moves_dtypes_that_torch_cannot_copy():
    data = torch.arange(64, dtype=torch.uint8).view(8, 8)
    halves, whole = Layout(Mesh.of("2"), "R S0"), Layout(Mesh.of("1"))
    shards = {rank: strided_nibbles(data[:, 4 * rank :][:, :4]) for rank in (0, 1)}
    versions = {"compression": "delta", "base": shards, "out": {0: strided_nibbles(data)}}
    for moved in (
        reshard.reshard_local(shards, halves, whole, shape=(8, 8)),
        reshard.reshard_local(shards, halves, whole, shape=(8, 8), **versions),
        reshard.reshard_local({0: strided_nibbles(data)}, Mesh.of("1"), whole, shape=(8, 8)),
    ):
        assert moved[0].dtype is torch.uint4 and torch.equal(moved[0].view(torch.uint8), data)


def move_nibbles(rank):
    data, dst = torch.arange(64, dtype=torch.uint8).view(8, 8), Mesh.of("1", first_rank=1)
    shard = None if rank else strided_nibbles(data)
    found = [
        reshard.reshard(shard, Mesh.of("1"), dst),
        reshard.reshard(shard, Mesh.of("1"), dst, src_spec="R", verify=True),
        reshard.reshard(
            shard,
            Mesh.of("1"),
            dst,
            src_spec="R",
            compression="delta",
            base=shard,
            out=strided_nibbles(data) if rank else None,
        ),
    ]
    return [None if item is None else torch.equal(item.view(torch.uint8), data) for item in found]


def test_reshard_moves_dtypes_that_torch_cannot_copy():
    assert run_processes(move_nibbles, 2) == [[None] * 3, [True] * 3]


def test_reshard_local_refuses_a_spec_beside_a_layout():
    rows, cols = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2"), "R S0")
    shards = {0: np.zeros((1, 2)), 1: np.ones((1, 2))}
    with pytest.raises(reshard.errors.ArgumentError, match="src is a layout, which already has a spec; omit src_spec"):
        reshard.reshard_local(shards, rows, cols, shape=(2, 2), src_spec="S0")
    with pytest.raises(reshard.errors.ArgumentError, match="dst is a layout, which already has a spec; omit dst_spec"):
        reshard.reshard_local(shards, rows, cols, shape=(2, 2), dst_spec="S0")


def test_reshard_local_compares_replicas():
    mesh, dst = Mesh.of("2"), Layout(Mesh.of("1", first_rank=2))
    with pytest.raises(DisagreementError, match="rank 1 holds other elements than rank 0"):
        reshard.reshard_local({0: np.zeros(4), 1: np.ones(4)}, mesh, dst, shape=(4,))
    out = reshard.reshard_local({0: np.full(4, 1.5), 1: np.full(4, 1.5)}, mesh, dst, shape=(4,), dst_dtype="fp32")[2]
    assert out.dtype == np.float32 and (out == 1.5).all()
    mixed = {0: np.arange(4, dtype="<i4"), 1: np.arange(4, dtype=">i4")}  # equal elements in two byte orders
    assert reshard.reshard_local(mixed, mesh, dst, shape=(4,))[2].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ({0: torch.zeros(2), 1: np.zeros(2, np.float32)}, "rank 0 holds a torch tensor and rank 1 a NumPy array"),
        ({0: np.zeros(2, np.float32), 1: torch.zeros(2)}, "rank 1 holds a torch tensor and rank 0 a NumPy array"),
        ({0: np.zeros(2), 1: np.ma.array([1.0, 2.0], mask=[True, False])}, "rank 1 holds MaskedArray"),
        ({0: np.float32(1), 1: np.float32(1)}, "rank 0 holds float32, not a NumPy array"),
        ({0: torch.zeros(2), 1: torch.zeros(2).to_sparse()}, "rank 1 passes a sparse or quantized tensor"),
        ({0: torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)}, "rank 0 passes a nested tensor"),
    ],
)
def test_reshard_local_refuses_other_arrays(shards, text):
    with pytest.raises(reshard.errors.ArgumentError, match=text):
        reshard.reshard_local(shards, ROWS, Layout(Mesh.of("1", first_rank=2)), shape=(4,))


def _pass_size(rank, sizes, src_spec, grid):
    source = torch.zeros(sizes[rank], 2) if rank < len(sizes) else None
    dst = Mesh.of("1", first_rank=len(sizes))
    return result_or_error(lambda: reshard.reshard(source, Mesh.of(grid), dst, src_spec=src_spec))


@pytest.mark.parametrize(
    ("sizes", "src_spec", "grid", "text"),
    [
        ((3, 4), "S0", "2", "rank 0 passes 3 elements along dim 0, but should pass 4"),
        ((4, 4, 4, 3), "S0", "2x2", "rank 3 passes 3 elements along dim 0, but should pass 4"),
        ((3, 4, 4), "R R", "3", "rank 0 passes 3 elements along dim 0, but should pass 4"),
        ((4, 4, 1), "S0", "3", "rank 0 passes 4 elements along dim 0, but should pass 3"),
    ],
)
def test_shard_sizes_that_fit_no_global_shape_are_refused(sizes, src_spec, grid, text):
    errors = run_processes(_pass_size, len(sizes) + 1, sizes, src_spec, grid)
    assert len(set(errors)) == 1 and text in errors[0], errors
