"""Transfers on GPUs that ranks share (``make gpu-check``): calls, Movers, kernels, graphs, casts and lost ranks."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import threading
import time
from collections import defaultdict, deque

import numpy as np
import pytest
import torch

import reshard
import reshard.cupy
from reshard import Layout, Mesh
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.planner.strategy_registry import STRATEGIES
from reshard.runtime import build_program
from reshard.runtime.cpu.staging import TorchMemory, view_as_bits
from reshard.runtime.cuda.stream import CudaRoundStreams
from reshard.runtime.rounds.round_assignment import find_rounds
from reshard.runtime.rounds.runner import RoundRunner
from reshard.runtime.strided_regions import box_regions, copy_regions_python, make_tables
from reshard.testing import LaunchError
from tests.gpu.ranks import DEVICE, MARKS, RANKS, run
from tests.support.random_problems import random_problem
from tests.support.tensors import same_bytes, take_shard

pytestmark = [*MARKS, pytest.mark.skipif(DEVICE != "cuda", reason="these tests need a GPU")]

SHAPE = (96, 40)
SRC, DST = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = Layout(Mesh.of("1"), "R R")
ALL = Layout(Mesh.of("4"), "R R")
#: Data for all other ranks: from one, from each in rows, and from each in columns.
BROADCASTS = [
    (WHOLE, Layout(Mesh.of("3", first_rank=1), "R R")),
    (Layout(Mesh.of("4"), "S0 R"), ALL),
    (Layout(Mesh.of("4"), "R S0"), ALL),
]
CASTS = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float8_e4m3fn"), ("int32", "int64")]
#: Time that the survivors of a dead rank must keep running.
SURVIVAL_SECONDS = 20.0
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "complex64", "int64")
CASES = [
    ("S0 R", "R S0", "float32"),
    ("R R", "S0 R", "bfloat16"),
    ("R S0", "R R", "float8_e4m3fn"),
    ("S0 R", "S0 R", "complex64"),
    ("R S0", "S0 R", "bool"),
]


def _shards(rank, src=SRC, dst=DST, dtype="float32", shape=SHAPE):
    found = (shard_of_positions(layout, rank, shape, dtype) for layout in (src, dst))
    return [None if array is None else array.cuda() for array in found]


def _move_all_cases(rank):
    for src_spec, dst_spec, dtype in CASES:
        src, dst = Layout(SRC.mesh, src_spec), Layout(DST.mesh, dst_spec)
        source, wanted = _shards(rank, src, dst, dtype)
        for strategy in ("auto", "send_recv", "broadcast_greedy", "local_all_gather"):
            out = reshard.reshard(source, src, dst, shape=SHAPE, dtype=dtype, strategy=strategy)
            assert (out is None) == (wanted is None)
            assert out is None or (out.is_cuda and not count_unlike(out.cpu(), wanted.cpu()))


def test_calls_move_every_element():
    run(_move_all_cases)


def _move_and_cast(rank):
    for src, dst in CASTS:
        whole = shard_of_positions(WHOLE, 0, SHAPE, src)
        source = take_shard(SRC, rank, whole)
        wanted = take_shard(DST, rank, whole.cuda().to(getattr(torch, dst)))
        out = reshard.reshard(None if source is None else source.cuda(), SRC, DST, dst_dtype=dst)
        assert (out is None and wanted is None) or same_bytes(out.cpu(), wanted.cpu()), (src, dst)


def test_elements_are_cast_during_the_transfer():
    run(_move_and_cast)


def _move_cupy_arrays(rank):
    import cupy
    import cupy.cuda.nccl  # ``import cupy`` does not load it

    cupy.cuda.Device(torch.cuda.current_device()).use()
    shared = [cupy.cuda.nccl.get_unique_id()]
    torch.distributed.broadcast_object_list(shared)
    comm = cupy.cuda.nccl.NcclCommunicator(RANKS, shared[0], rank)
    for dtype in ("float32", "complex64", "int8"):
        source, wanted = (
            None if array is None else array.numpy()
            for array in (shard_of_positions(layout, rank, SHAPE, dtype) for layout in (SRC, DST))
        )
        mover = reshard.cupy.Mover(reshard.make_plan(SRC, DST, SHAPE, dtype), comm)
        for _ in range(2):
            out = mover.start(None if source is None else cupy.asarray(source)).synchronize()
            assert (out is None) == (wanted is None)
            if out is not None:
                np.testing.assert_array_equal(cupy.asnumpy(out), wanted)
    comm.destroy()


# Not imported here: if this process initialized CUDA, its forks could not use it.
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy_mover_delivers_every_element():
    run(_move_cupy_arrays)


def _broadcast(rank):
    """Data for all other ranks; in place, into columns of a larger array, and cast."""
    for src, dst in BROADCASTS:
        source, wanted = _shards(rank, src, dst)
        plan = reshard.make_plan(src, dst, SHAPE, "float32", strategy="multicast")
        with reshard.Mover(plan, device="cuda") as mover:
            for turn in range(3):
                out = None if wanted is None else torch.zeros(SHAPE[0], 2 * SHAPE[1], device="cuda")[:, ::2]
                out = out if turn or out is None else out.contiguous()
                moved = mover.start(source, out=out).synchronize()
                assert wanted is None or (moved is out and torch.equal(out, wanted)), (src, turn)
        narrow = reshard.reshard(
            source, src, dst, shape=SHAPE, dtype="float32", dst_dtype="bfloat16", strategy="multicast"
        )
        assert wanted is None or torch.equal(narrow, wanted.bfloat16())


def test_data_for_all_ranks_is_broadcast():
    run(_broadcast)


def _move_large_groups(rank):
    """More than a group may hold, from two ranks to two others, and back into an array that is not contiguous."""
    src, dst = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2), "S0 R")
    shape = (2 * 3 * 2**13, 2**11)  # 192 MiB of a rank to another
    source = torch.randn(shape[0] // 2, shape[1], device="cuda") if rank < 2 else None
    plan = reshard.make_plan(src, dst, shape, "float32")
    with reshard.Mover(plan, device="cuda") as mover:
        assert len(mover._transfers.on_stream._runner.rounds) == 2
        out = None if rank < 2 else torch.zeros(shape[0] // 2, 2 * shape[1], device="cuda")[:, ::2]
        mover(source, out=out)
    moved = reshard.reshard(out, dst, src, shape=shape, dtype="float32")
    assert rank > 1 or torch.equal(moved, source)


def test_whole_rows_move_in_large_groups():
    run(_move_large_groups)


def _time_wait(rank):
    source, wanted = _shards(rank, shape=(4096, 4000))
    with reshard.Mover(reshard.make_plan(SRC, DST, (4096, 4000), "float32"), device="cuda") as mover:
        mover.start(source).synchronize()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # keeps the caller's stream busy for about a second
        start = time.perf_counter()
        out = mover.start(source).wait()
        seconds = time.perf_counter() - start
        assert wanted is None or not count_unlike(out.cpu(), wanted.cpu())
    return seconds


def test_wait_blocks_the_stream_and_not_the_host():
    assert max(run(_time_wait)) < 0.3


def _capture_transfers(rank):
    """Alternate graph replays with eager transfers of other arrays. The replays must still move the captured arrays.

    Both ends pack. All arrays stay alive, so that a new one does not get the address of an earlier one.

    Returns:
        The errors of captures that are refused: of arrays that were not moved before, of a call, and of a Mover.
    """
    shape, src, dst = (24, 40, 12), Layout(SRC.mesh, "R S0 R"), Layout(DST.mesh, "R R S0")
    source, wanted = _shards(rank, src, dst, shape=shape)
    out = None if wanted is None else torch.zeros_like(wanted)
    other = None if wanted is None else torch.zeros_like(wanted)
    plan, kept, errors = reshard.make_plan(src, dst, shape, "float32"), [], []
    with reshard.Mover(plan, device="cuda") as mover:
        mover.start(source, out=out).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mover.start(source, out=out).wait()

        def alternate():
            for turn in range(3):
                if out is not None:
                    out.zero_()
                graph.replay()
                torch.cuda.synchronize()
                assert wanted is None or not count_unlike(out.cpu(), wanted.cpu())
                kept.append(None if source is None else source + turn)
                moved = mover.start(kept[-1], out=other).synchronize()
                assert moved is None or torch.equal(moved, wanted + turn)

        alternate()
        fresh = None if source is None else source.clone()
        target = None if out is None else torch.empty_like(out)
        for refused in (
            lambda: mover.start(fresh, out=target).wait(),
            lambda: reshard.reshard(source, src, dst, shape=shape, dtype="float32"),
            lambda: reshard.Mover(plan, device="cuda"),
        ):
            with pytest.raises(reshard.errors.ArgumentError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
                refused()
            errors.append(str(caught.value))
        alternate()  # the same Mover still works
        moved = reshard.reshard(source, src, dst, shape=shape, dtype="float32")
        assert wanted is None or not count_unlike(moved.cpu(), wanted.cpu())
        graph.reset()
    return errors


def test_mover_transfers_can_be_captured_and_other_captures_are_refused():
    for errors in run(_capture_transfers):
        for text, words in zip(errors, ("once first", "a call of reshard", "make it before"), strict=True):
            assert words in text


def _lose_rank_3(rank, width):
    """Kill rank 3. The others return the text of their error and the seconds until it, and then use the GPU again."""
    source, _ = _shards(rank, shape=(96, width))
    with reshard.Mover(reshard.make_plan(SRC, DST, (96, width), "float32"), device="cuda") as mover:
        mover.start(source).synchronize()
        torch.distributed.barrier()  # all ranks have finished the first transfer
        if rank == 3:
            os._exit(9)
        start, result = time.monotonic(), None
        try:
            while time.monotonic() < start + 30.0:  # small messages are buffered, so a transfer may succeed
                mover.start(source).synchronize()
        except reshard.ReshardError as error:
            result = str(error), time.monotonic() - start
    time.sleep(SURVIVAL_SECONDS)
    assert float(torch.ones(8, device="cuda").sum()) == 8
    return result


@pytest.mark.parametrize("width", [40, 2**18])
def test_rank_that_dies_is_named_and_survivors_keep_running(width):
    with pytest.raises(LaunchError) as caught:
        run(_lose_rank_3, width, grace_seconds=SURVIVAL_SECONDS + 60.0, timeout_seconds=300.0)
    assert sorted(caught.value.results) == [0, 1, 2]
    for error, seconds in caught.value.results.values():
        assert error.startswith("rank 3 is gone") and seconds < 5


def _random_case(seed):
    """Random arrays of random alignment, the regions of random boxes of them, and the size of the packed buffer."""
    generator = np.random.default_rng(seed)
    arrays, regions, size = [], [], 0
    for number in range(3):
        itemsize = int(generator.choice([1, 2, 4, 8, 16]))
        shape = tuple(generator.integers(1, 70, generator.integers(1, 5)).tolist())
        start = int(generator.integers(0, 16 // itemsize)) * itemsize
        storage = torch.from_numpy(generator.integers(0, 256, start + math.prod(shape) * itemsize, dtype=np.uint8))
        arrays.append((storage.cuda(), start))
        for _ in range(generator.integers(1, 4)):
            cuts = [sorted(generator.integers(0, length + 1, 2).tolist()) for length in shape]
            box = tuple(slice(a, b) for a, b in cuts)
            regions += box_regions(number, shape, itemsize, box, size)
            size += -(-math.prod(b - a for a, b in cuts) * itemsize // 256) * 256
    return arrays, regions, size


def compare_kernel(rank):
    """Compare the kernel with its reference on random boxes; returns the units of their tables."""
    from reshard.runtime.cuda.pack_kernel import RegionCopier

    copier, units = RegionCopier(torch.device("cuda")), set()
    copier.warm_up(torch.empty(2**16, dtype=torch.uint8, device="cuda"))
    for seed in range(60):
        arrays, regions, size = _random_case(seed)
        known = tuple(storage.data_ptr() + start for storage, start in arrays)
        tables = make_tables(regions, [math.gcd(address, 16) for address in known])
        units |= {table.unit for table in tables}
        buffer = torch.zeros(size, dtype=torch.uint8, device="cuda")
        wanted = np.zeros(size, dtype=np.uint8)
        flats = [storage.cpu().numpy()[start:] for storage, start in arrays]
        for table in tables:
            copier.copy(copier.upload(table), copier.find_addresses(known), buffer, True)
            copy_regions_python(table, flats, wanted, True)
        assert np.array_equal(buffer.cpu().numpy(), wanted), seed
        emptied = [np.zeros_like(flat) for flat in flats]
        for storage, _ in arrays:
            storage.zero_()
        for table in tables:
            copier.copy(copier.upload(table), copier.find_addresses(known), buffer, False)
            copy_regions_python(table, emptied, wanted, False)
        for (storage, start), flat in zip(arrays, emptied, strict=True):
            assert np.array_equal(storage.cpu().numpy()[start:], flat), seed
    return units


def test_kernel_matches_its_python_reference():
    assert run(compare_kernel, ranks=1) == [{1, 2, 4, 8, 16}]


class _InProcessExchange:
    """Connects ranks of one process. The receiver's stream waits for the sender's event and copies the buffer."""

    def __init__(self):
        self.condition, self.queues = threading.Condition(), defaultdict(deque)

    def __call__(self, rank, recvs, sends, broadcasts):
        assert not broadcasts
        stream, ready = torch.cuda.current_stream(), torch.cuda.Event()
        ready.record()
        sent = [(buffer, ready, torch.cuda.Event(), threading.Event()) for buffer, _ in sends]
        with self.condition:
            for message, (_, peer) in zip(sent, sends, strict=True):
                self.queues[rank, peer].append(message)
            self.condition.notify_all()
        for buffer, peer in recvs:
            queue = self.queues[peer, rank]
            with self.condition:
                assert self.condition.wait_for(lambda queue=queue: queue, 30.0), "timed out"
                data, event, copied, is_recorded = queue.popleft()
            stream.wait_event(event)
            buffer.copy_(data)
            copied.record()
            is_recorded.set()
        for *_, copied, is_recorded in sent:
            assert is_recorded.wait(30.0), "timed out"
            stream.wait_event(copied)


def _run_one_rank(rank, plan, exchange, round_of, src, dst, failures):
    """Run one rank of a plan twice, and append a failure to ``failures``."""
    from reshard.runtime.cuda.pack_kernel import RegionCopier

    tensor = plan.tensors[0]
    device = torch.device("cuda")
    try:
        source, wanted = (
            None if array is None else array.cuda()
            for array in (shard_of_positions(layout, rank, tensor.shape, tensor.dtype) for layout in (src, dst))
        )
        out = None if wanted is None else torch.zeros_like(wanted)
        with torch.cuda.stream(torch.cuda.Stream()):
            runner = RoundRunner(
                build_program(plan, rank), round_of, TorchMemory(device), [tensor.itemsize],
                RegionCopier(device), plan.staging_bytes,
            )  # fmt: skip
            runner.warm_up()
            streams = CudaRoundStreams(device)
            for _ in range(2):
                runner.run(
                    [view_as_bits(source)], [view_as_bits(out)], lambda *posted: exchange(rank, *posted), streams
                )
            torch.cuda.current_stream().synchronize()
        assert wanted is None or not count_unlike(out.cpu(), wanted.cpu())
    except BaseException as error:
        failures.append((plan.strategy, tensor.dtype, rank, repr(error)))


def _run_all_ranks(rank):
    """Run every strategy with dtypes of all sizes. Each rank of a plan runs in its own thread, on its own streams."""
    failures = []
    for seed, (strategy, dtype) in enumerate(itertools.product(sorted(STRATEGIES), DTYPES)):
        src, dst, shape, topology = random_problem(seed)
        plan = reshard.make_plan(src, dst, shape, dtype, strategy=strategy, topology=topology, staging_bytes=2**18)
        exchange, round_of = _InProcessExchange(), find_rounds(plan)
        arguments = (plan, exchange, round_of, src, dst, failures)
        threads = [threading.Thread(target=_run_one_rank, args=(rank, *arguments), daemon=True) for rank in plan.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        failures += [(strategy, dtype, "a rank did not end") for thread in threads if thread.is_alive()]
        if failures:
            break
    return failures


def test_all_ranks_of_a_plan_deliver_in_one_process():
    assert run(_run_all_ranks, ranks=1) == [[]]


def _send_to_rank_1(rank):
    src, dst = Layout(Mesh.of("1"), "R R"), Layout(Mesh.of("1", first_rank=1), "R R")
    source, wanted = _shards(rank, src, dst)
    out = reshard.reshard(source, src, dst, shape=SHAPE, dtype="float32")
    assert out is None or not count_unlike(out.cpu(), wanted.cpu())


def test_two_ranks_share_one_gpu_over_nccl():
    run(_send_to_rank_1, ranks=2)
