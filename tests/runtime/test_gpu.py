"""Tests that need a GPU: ``make gpu-check``. Several ranks share one GPU; to NCCL, each is a different host."""

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
from reshard.cli.demo import count_unlike, shard_of_positions
from reshard.planner.registry import STRATEGIES
from reshard.runtime.cpu.staging import TorchMemory, carrier
from reshard.runtime.cuda.stream import CudaRoundStreams
from reshard.runtime.program import build_program
from reshard.runtime.rounds.executor import RoundRunner
from reshard.runtime.rounds.schedule import find_rounds
from reshard.runtime.strided_regions import box_regions, copy_regions_python, make_tables
from reshard.scheduler import auto_schedule, one_f_one_b
from reshard.testing.processes import run_processes
from tests.scheduler.runtime.test_engine import make_data, make_modules, make_pipeline, single_process
from tests.support import stages_with_replicas as replicas
from tests.support.devices import HAS_GPU
from tests.support.random_problems import random_problem
from tests.support.tensors import same_bytes, take_shard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="this machine has no NVIDIA GPU")]

SHAPE = (96, 40)
SRC, DST = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = Layout(Mesh.of("1"), "R R")
RANKS = 4
CASTS = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float8_e4m3fn"), ("int32", "int64")]
#: Time that the survivors of a dead rank must keep running. Torch's watchdog would kill them sooner.
SURVIVAL_SECONDS = 90.0
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "complex64", "int64")
CASES = [
    ("S0 R", "R S0", "float32"),
    ("R R", "S0 R", "bfloat16"),
    ("R S0", "R R", "float8_e4m3fn"),
    ("S0 R", "S0 R", "complex64"),
    ("R S0", "S0 R", "bool"),
]


def _set_up(rank):
    """Set NCCL's environment so that each rank is a separate host and uses sockets."""
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_SOCKET_IFNAME="lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    os.environ.setdefault("NCCL_DEBUG", "WARN")  # NCCL prints its version, and which call failed
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # loading a kernel could wait for a receive under way
    torch.cuda.set_device(rank % torch.cuda.device_count())


def _on_ranks(rank, function, *args):
    _set_up(rank)
    result = function(rank, *args)
    torch.cuda.synchronize()
    return result


def _run(function, *args, ranks=RANKS):
    return run_processes(_on_ranks, ranks, function, *args, timeout_seconds=300.0)


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
    _run(_move_all_cases)


def _move_and_cast(rank):
    for src, dst in CASTS:
        whole = shard_of_positions(WHOLE, 0, SHAPE, src)
        source = take_shard(SRC, rank, whole)
        wanted = take_shard(DST, rank, whole.cuda().to(getattr(torch, dst)))
        out = reshard.reshard(None if source is None else source.cuda(), SRC, DST, dst_dtype=dst)
        assert (out is None and wanted is None) or same_bytes(out.cpu(), wanted.cpu()), (src, dst)


def test_elements_are_cast_during_the_transfer():
    _run(_move_and_cast)


def _move_cupy_arrays(rank):
    import cupy

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
    _run(_move_cupy_arrays)


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
    assert max(_run(_time_wait)) < 0.3


def _capture_transfers(rank):
    """Alternate graph replays with eager transfers of other arrays. The replays must still move the captured arrays.

    Returns the error of capturing a transfer of arrays that the Mover has not moved before.
    """
    source, wanted = _shards(rank)
    out = None if wanted is None else torch.zeros_like(wanted)
    other = None if wanted is None else torch.zeros_like(wanted)
    with reshard.Mover(reshard.make_plan(SRC, DST, SHAPE, "float32"), device="cuda") as mover:
        mover.start(source, out=out).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mover.start(source, out=out).wait()
        for turn in range(3):
            if out is not None:
                out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert wanted is None or not count_unlike(out.cpu(), wanted.cpu())
            moved = mover.start(None if source is None else source + turn, out=other).synchronize()
            assert moved is None or torch.equal(moved, wanted + turn)
        fresh = None if source is None else source.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                mover.start(fresh, out=None if out is None else torch.empty_like(out)).wait()
        except reshard.ArgumentError as error:
            return str(error)
    return "no error"


def test_mover_transfers_can_be_captured():
    errors = _run(_capture_transfers)
    assert any("call the Mover with them once first" in text for text in errors), errors


def _lose_rank_3(rank):
    """Kill rank 3. The others return the text of their error and the seconds until it, and then use the GPU again."""
    source, _ = _shards(rank)
    with reshard.Mover(reshard.make_plan(SRC, DST, SHAPE, "float32"), device="cuda") as mover:
        mover.start(source).synchronize()
        torch.distributed.barrier()  # all ranks have finished the first transfer
        if rank == 3:
            os._exit(9)
        start, result = time.monotonic(), None
        try:
            mover.start(source).synchronize()
        except reshard.ReshardError as error:
            result = str(error), time.monotonic() - start
    time.sleep(SURVIVAL_SECONDS)
    assert float(torch.ones(8, device="cuda").sum()) == 8
    return result


def test_rank_that_dies_is_named_and_survivors_keep_running():
    from reshard.testing.processes import LaunchError

    with pytest.raises(LaunchError) as caught:
        run_processes(_on_ranks, RANKS, _lose_rank_3, grace_seconds=SURVIVAL_SECONDS + 60.0, timeout_seconds=300.0)
    assert sorted(caught.value.results) == [0, 1, 2]
    for error, seconds in caught.value.results.values():
        assert "rank 3" in error
        assert seconds < 10


def _train_one_step(rank, sizes):
    from reshard.scheduler.runtime.engine import Engine

    ranks = [0, 1, 2]
    pipeline, last = make_pipeline(ranks, "float64"), make_pipeline(ranks, "float64", sizes[-1])
    modules = {rank: make_modules(torch.float64)[rank].cuda()}
    data = make_data(torch.float64, sizes)
    feed = {0: [{"x": x.cuda()} for x, _ in data], 2: [{"target": y.cuda()} for _, y in data]}
    schedule = auto_schedule(pipeline, len(sizes))
    with Engine(schedule, pipeline, modules, last_pipeline=last, timeout_seconds=60) as engine:
        step = engine.step(feed, loss_weights=[n / sum(sizes) for n in sizes])
        torch.cuda.synchronize()
    return step.losses, {name: p.grad.cpu().numpy() for name, p in modules[rank].named_parameters()}


def test_engine_losses_and_gradients_equal_one_process():
    sizes = [4, 4, 2]
    losses, grads = single_process(torch.float64, sizes)
    for stage, (step_losses, named) in enumerate(_run(_train_one_step, sizes, ranks=3)):
        assert stage != 2 or step_losses == pytest.approx(losses, rel=1e-10)
        for name, grad in named.items():
            torch.testing.assert_close(torch.from_numpy(grad), grads[stage][name], rtol=1e-10, atol=1e-12)


def _train_replicas(rank):
    from reshard.scheduler.runtime.engine import Engine

    pipeline, inner = replicas.make_pipeline(2), (replicas.Last() if rank else replicas.First()).cuda()
    fed = {
        stage: [{name: array.cuda() for name, array in row.items()} for row in rows]
        for stage, rows in replicas.feed(rank, 2).items()
    }
    schedule, module = one_f_one_b(pipeline, replicas.NUM), replicas.wrap(rank, 2, inner)
    with Engine(schedule, pipeline, {int(rank > 0): module}, num_loss_shards=2, timeout_seconds=60) as engine:
        engine.step(fed)
    return replicas.gradients(inner.cpu())


def test_replicas_sum_their_gradients():
    wanted = replicas.single_process()
    for rank, grads in enumerate(_run(_train_replicas, ranks=3)):
        replicas.check(grads, wanted[rank > 0])


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
    assert _run(compare_kernel, ranks=1) == [{1, 2, 4, 8, 16}]


class _InProcessExchange:
    """Connects ranks of one process. The receiver's stream waits for the sender's event and copies the buffer."""

    def __init__(self):
        self.condition, self.queues = threading.Condition(), defaultdict(deque)

    def __call__(self, rank, recvs, sends):
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
                runner.run([carrier(source)], [carrier(out)], lambda *posted: exchange(rank, *posted), streams)
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
    assert _run(_run_all_ranks, ranks=1) == [[]]


def _send_to_rank_1(rank):
    src, dst = Layout(Mesh.of("1"), "R R"), Layout(Mesh.of("1", first_rank=1), "R R")
    source, wanted = _shards(rank, src, dst)
    out = reshard.reshard(source, src, dst, shape=SHAPE, dtype="float32")
    assert out is None or not count_unlike(out.cpu(), wanted.cpu())


def test_two_ranks_share_one_gpu_over_nccl():
    _run(_send_to_rank_1, ranks=2)
