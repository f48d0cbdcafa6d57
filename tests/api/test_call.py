"""``reshard`` on real processes: argument forms, groups, DTensors, several tensors and handles."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
import torch
import torch._dynamo  # once here, not in each forked rank
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.distributed.tensor

import reshard
import reshard.api.call
from reshard import Layout, Mesh, RegionLayout
from reshard.testing.processes import run_processes
from tests.support.tensors import same_bytes, take_shard, whole_tensor

ROWS = Layout(Mesh.of("2"), "S0")
COLS = Layout(Mesh.of("2", first_rank=2), "R S0")


def _equal_shards(rank):
    """The warnings of a rank when both source ranks pass the whole tensor, and in cases that only look like it."""
    src, dst, whole = Mesh.of("2"), Mesh.of("2", first_rank=2), whole_tensor((4, 4), torch.float32)
    texts = []
    for tensor, shape in ((whole, None), (whole, (8, 4)), (torch.ones(4, 4), None), (whole + rank, None)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shard = tensor if rank < 2 else None
            reshard.reshard(shard, src, dst, src_spec="S0 R", dst_spec="R S0", shape=shape)
        texts.append([str(warning.message) for warning in caught])
    return texts


@pytest.mark.integration
def test_equal_shards_that_may_each_be_the_whole_tensor_warn_on_source_ranks():
    *sources, third, fourth = run_processes(_equal_shards, 4)
    assert [third, fourth] == [[[], [], [], []]] * 2
    for texts in sources:
        assert [len(of_case) for of_case in texts] == [1, 0, 0, 0], texts
        assert texts[0][0].startswith(
            "the tensor: ranks 0-1 pass shards of shape [4, 4] that seem equal, so the whole has"
        )


def _forms(rank):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = whole_tensor((6, 8), torch.float32)
    source, expected = take_shard(ROWS, rank, whole), take_shard(COLS, rank, whole)
    passed = []

    def check(name, out, want):
        assert (out is None) == (want is None), name
        assert want is None or same_bytes(out, want), name
        passed.append(name)

    check("layouts", reshard.reshard(source, ROWS, COLS), expected)
    check("meshes", reshard.reshard(source, ROWS.mesh, COLS.mesh, src_spec="S0 R", dst_spec=(None, "0")), expected)
    a_mesh = DeviceMesh("cpu", [0, 1])
    b_mesh = DeviceMesh("cpu", [2, 3])
    check(
        "device meshes",
        reshard.reshard(source, a_mesh, b_mesh, src_spec=[Shard(0)], dst_spec=[Shard(1)]),
        expected,
    )
    check("replicated by default", reshard.reshard(source, ROWS, COLS.mesh), whole if rank > 1 else None)

    # A strided source that requires grad, and a conjugated one.
    if source is not None:
        odd = torch.zeros(8, 3, requires_grad=True) + source.t()
        view = odd.t()
        assert not view.is_contiguous()
        assert view.requires_grad
    else:
        view = None
    out = reshard.reshard(view, ROWS, COLS)
    check("strided", out, expected)
    assert out is None or not out.requires_grad
    values = torch.complex(whole, -whole)
    conj = None if source is None else take_shard(ROWS, rank, values).conj()
    check("conjugated", reshard.reshard(conj, ROWS, COLS), take_shard(COLS, rank, values.conj().resolve_conj()))

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    ragged = whole_tensor((7, 5), torch.bfloat16)
    for before, after in [
        ([Shard(0), Shard(0)], [Replicate(), Shard(1)]),
        ([_StridedShard(0, split_factor=2), Shard(0)], [Shard(1), Replicate()]),
        ([Replicate(), Shard(1)], [_StridedShard(0, split_factor=2), Shard(0)]),
    ]:
        dtensor = distribute_tensor(ragged, mesh, before, src_data_rank=None)
        moved = reshard.reshard(dtensor, dst_mesh=mesh, dst_spec=after)
        assert isinstance(moved, DTensor)
        assert list(moved.placements) == list(after)
        want = distribute_tensor(ragged, mesh, after, src_data_rank=None).to_local()
        check(f"dtensor {before} {after}", moved.to_local(), want)

    # A rank outside the source passes no DTensor, but still gets one.
    dtensor = distribute_tensor(ragged, a_mesh, [Shard(0)], src_data_rank=None) if rank < 2 else None
    where = {} if rank < 2 else {"src_mesh": a_mesh, "src_spec": [Shard(0)]}
    moved = reshard.reshard(dtensor, dst_mesh=b_mesh, dst_spec=[Shard(1)], **where)
    assert moved is None if rank < 2 else isinstance(moved, DTensor)
    check("dtensor across", None if moved is None else moved.to_local(), take_shard(COLS, rank, ragged))

    # Several tensors of different shapes and dtypes in one plan; the order of the names differs between ranks.
    fused = RegionLayout({2: [[(0, 2), (0, 3)], [(4, 6), (0, 3)]], 3: [[(2, 4), (0, 3)]]})
    wholes = {"b": whole_tensor((6, 3), torch.uint8), "a": whole, "c": whole_tensor((), torch.float64)}
    dst = {"a": COLS, "b": fused, "c": Layout(COLS.mesh)}
    src = {"a": ROWS, "b": ROWS, "c": Layout(ROWS.mesh)}
    names = sorted(wholes, reverse=bool(rank % 2))
    outs = reshard.reshard({n: take_shard(src[n], rank, wholes[n]) for n in names}, src, dst)
    assert list(outs) == names
    for name in names:
        check(f"several {name}", outs[name], take_shard(dst[name], rank, wholes[name]))
    return passed


@pytest.mark.integration
def test_every_form_of_arguments_delivers():
    passed = run_processes(_forms, 4)
    assert len(passed[0]) == 13
    assert passed.count(passed[0]) == 4 or all(sorted(p) == sorted(passed[0]) for p in passed)


def _groups(rank):
    """Ranks 2-5 form a subgroup; layouts use subgroup ranks, DeviceMeshes world ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    group = dist.new_group([2, 3, 4, 5])
    meshes = [DeviceMesh("cpu", [2, 3]), DeviceMesh("cpu", [5, 4])]
    store = dist.distributed_c10d._get_default_store()
    if rank not in (2, 3, 4, 5):
        store.wait([f"rank {mover} has moved" for mover in (2, 3, 4, 5)])  # ranks outside the group do not call
        return
    whole = whole_tensor((5, 4), torch.int32)
    source = take_shard(ROWS, rank - 2, whole)
    out = reshard.reshard(source, ROWS, COLS, group=group)
    assert out is None or same_bytes(out, take_shard(COLS, rank - 2, whole))
    out = reshard.reshard(source, *meshes, src_spec=[Shard(0)], dst_spec=[Shard(1)], group=group)
    reversed_order = Layout(Mesh([3, 2], {"0": 2}), "R S0")
    assert out is None or same_bytes(out, take_shard(reversed_order, rank - 2, whole))
    store.set(f"rank {rank} has moved", "")


def test_subgroup_translates_ranks_and_needs_no_other_rank():
    run_processes(_groups, 7)


def _two_jobs(rank, port):
    """Ranks 0-1 are a trainer, ranks 2-4 a server; each job has its own world, numbered from 0."""
    ours, size = (rank, 2) if rank < 2 else (rank - 2, 3)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("trainer" if rank < 2 else "server", store), rank=ours, world_size=size
    )
    group = reshard.join(dist.PrefixStore("both", store), rank, 5)
    whole = whole_tensor((7, 6), torch.float16)
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("3", first_rank=2), "R S0")
    out = reshard.reshard(take_shard(src, rank, whole), src, dst, group=group)
    assert out is None if rank < 2 else same_bytes(out, take_shard(dst, rank, whole))
    # Each job passes DTensors on a DeviceMesh of its own world, and a Mesh for the ranks of the other job.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", list(range(size)))
    if rank < 2:
        given = {"tensor": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), "dst_mesh": dst.mesh}
        assert reshard.reshard(**given, dst_spec="R S0", group=group) is None
    else:
        given = {"src_mesh": src.mesh, "src_spec": "S0", "dst_mesh": mesh, "dst_spec": [Shard(1)]}
        out = reshard.reshard(**given, group=group)
        assert out.device_mesh == mesh and same_bytes(out.to_local(), take_shard(dst, rank, whole))
    reversed_order = reshard.join(
        dist.PrefixStore("reversed_order", store), 4 - rank, 5
    )  # in the reverse order of the worlds
    try:
        reshard.reshard(
            None, src.mesh, mesh, dst_spec=[Shard(0)], shape=(7, 6), group=reversed_order, timeout_seconds=3
        )
    except reshard.ReshardError as error:
        return str(error)


def test_join_makes_one_group_of_two_jobs():
    errors = run_processes(_two_jobs, 5, init_group=False)
    assert all(errors), errors


def _forward_without_wait(rank, strategy):
    """Rank 0 holds the tensor, each rank is on its own host; ranks 1 and 2 forward data but do not call ``wait``."""
    whole = whole_tensor((1024, 1024), torch.float32)
    src, dst = Layout(Mesh.of("1")), Layout(Mesh.of("3", first_rank=1))
    topology = reshard.Topology((0, 1, 2, 3))
    handle = reshard.reshard_async(
        whole if rank == 0 else None,
        src,
        dst,
        shape=whole.shape,
        dtype=whole.dtype,
        topology=topology,
        strategy=strategy,
    )
    plan = reshard.make_plan(src, dst, whole.shape, whole.dtype, topology=topology, strategy=strategy)
    assert {1, 2} & set(plan.transfers.sender.tolist())
    if rank == 3:
        assert same_bytes(handle.wait(timeout_seconds=30), whole)
    dist.barrier()  # keeps the forwarding ranks alive, which did not wait
    return rank in (1, 2) or handle.wait(timeout_seconds=30) is not None or rank == 0


@pytest.mark.parametrize("strategy", ["multicast", "broadcast"])
def test_rank_that_never_waits_still_forwards(strategy):
    assert run_processes(_forward_without_wait, 4, strategy) == [True] * 4


def _two_transfers(rank):
    """Starts two transfers on the same ranks and waits for them in reverse order."""
    one, two = whole_tensor((600, 700), torch.int64), whole_tensor((600, 700), torch.int64) + 10**9
    first = reshard.reshard_async(take_shard(ROWS, rank, one), ROWS, COLS)
    second = reshard.reshard_async(take_shard(ROWS, rank, two), ROWS, COLS)
    b, a = second.wait(60), first.wait(60)
    return rank < 2 or (same_bytes(a, take_shard(COLS, rank, one)) and same_bytes(b, take_shard(COLS, rank, two)))


def test_two_transfers_in_progress_do_not_mix():
    assert run_processes(_two_transfers, 4) == [True] * 4


def _count_leaks(rank):
    """Counts threads and file descriptors before and after 30 calls."""
    whole = whole_tensor((16, 16))
    source = take_shard(ROWS, rank, whole)

    def counts():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        reshard.reshard(source, ROWS, COLS)
    before = counts()
    for _ in range(30):
        reshard.reshard(source, ROWS, COLS)
    dist.barrier()
    time.sleep(0.3)
    after = counts()
    return after[0] <= before[0] + 1 and after[1] <= before[1]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to count file descriptors")
def test_calls_leak_no_threads_or_file_descriptors():
    assert run_processes(_count_leaks, 4) == [True] * 4


def _two_threads(rank):
    """While one thread of rank 0 waits for rank 1, another thread calls."""
    layout, results = Layout(Mesh.of(2)), []

    def call(value):
        try:
            out = reshard.reshard(torch.full((4,), value), layout, layout, timeout_seconds=20)
            results.append(bool((out == value).all()) or "values of another call")
        except reshard.ReshardError as error:
            results.append(f"{type(error).__name__}: {error}")

    if rank == 1:
        time.sleep(1.0)
        for value in (1.0, 2.0, 3.0):
            call(value)
        return results
    threads = [threading.Thread(target=call, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    call(3.0)
    return results


def test_concurrent_calls_of_two_threads_are_refused():
    """The refused call makes calls of rank 1 fail; calls of different steps never exchange data."""
    (refused, *ours), theirs = run_processes(_two_threads, 2)
    assert refused.startswith("ArgumentError: rank 0: two threads call on one group of 2 ranks at once"), refused
    assert any("two threads" in str(result) for result in theirs), theirs
    assert all(result is True or "Error: " in result for result in (*ours, *theirs)), (ours, theirs)
