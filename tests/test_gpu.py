"""On a real GPU: ``make gpu-check``. Several ranks share one; NCCL takes them for different hosts."""

from __future__ import annotations

import os
import time

import pytest
import torch
from devices import HAS_GPU
from reshard.scheduler import fitted
from test_engine import make_data, make_modules, make_pipeline, single_process
from test_regions import _case

import reshard
from reshard import Layout, Mesh
from reshard.demo import count_unlike, shard_of_positions
from reshard.launch import run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="this machine has no NVIDIA GPU")]

SHAPE = (96, 40)
SRC, DST = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2), "R S0")
RANKS = 4
CASES = [
    ("S0 R", "R S0", "float32"),
    ("R R", "S0 R", "bfloat16"),
    ("R S0", "R R", "float8_e4m3fn"),
    ("S0 R", "S0 R", "complex64"),
    ("R S0", "S0 R", "bool"),
]


def _set_up(rank):
    """Before NCCL starts: each rank a host of its own, with a socket to the others."""
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_SOCKET_IFNAME="lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
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


def _call(rank):
    for src_spec, dst_spec, dtype in CASES:
        src, dst = Layout(SRC.mesh, src_spec), Layout(DST.mesh, dst_spec)
        source, wanted = _shards(rank, src, dst, dtype)
        for strategy in ("auto", "send_recv", "broadcast_greedy", "local_all_gather"):
            out = reshard.reshard(source, src, dst, shape=SHAPE, dtype=dtype, strategy=strategy)
            assert (out is None) == (wanted is None)
            assert out is None or (out.is_cuda and not count_unlike(out.cpu(), wanted.cpu()))


def test_calls_move_every_element():
    _run(_call)


def _does_not_block(rank):
    source, wanted = _shards(rank, shape=(4096, 4000))
    with reshard.Mover(reshard.make_plan(SRC, DST, (4096, 4000), "float32"), device="cuda") as mover:
        mover.start(source).synchronize()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second of the caller's stream
        begun = time.perf_counter()
        out = mover.start(source).wait()
        took = time.perf_counter() - begun
        assert wanted is None or not count_unlike(out.cpu(), wanted.cpu())
    return took


def test_wait_blocks_the_stream_and_not_the_processor():
    assert max(_run(_does_not_block)) < 0.3


def _in_a_graph(rank):
    source, wanted = _shards(rank)
    out = None if wanted is None else torch.zeros_like(wanted)
    with reshard.Mover(reshard.make_plan(SRC, DST, SHAPE, "float32"), device="cuda") as mover:
        mover.start(source, out=out).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mover.start(source, out=out).wait()
        for _ in range(3):
            if out is not None:
                out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert wanted is None or not count_unlike(out.cpu(), wanted.cpu())


def test_a_movers_transfers_can_be_captured():
    _run(_in_a_graph)


def _dies(rank):
    source, _ = _shards(rank)
    with reshard.Mover(reshard.make_plan(SRC, DST, SHAPE, "float32"), device="cuda") as mover:
        mover.start(source).synchronize()
        if rank == 3:
            os._exit(9)
        begun = time.monotonic()
        try:
            mover.start(source).synchronize()
        except reshard.ReshardError as error:
            return str(error), time.monotonic() - begun
    return None


def test_a_rank_that_dies_is_named():
    from reshard.launch import LaunchError

    with pytest.raises(LaunchError) as caught:
        run_processes(_on_ranks, RANKS, _dies, grace_seconds=30.0, timeout_seconds=300.0)
    assert sorted(caught.value.results) == [0, 1, 2]
    for said, took in caught.value.results.values():
        assert "rank 3" in said
        assert took < 10


def _train(rank, sizes):
    from reshard.scheduler.engine import Engine

    ranks = [0, 1, 2]
    pipeline, last = make_pipeline(ranks, "float64"), make_pipeline(ranks, "float64", sizes[-1])
    modules = {rank: make_modules(torch.float64)[rank].cuda()}
    data = make_data(torch.float64, sizes)
    feed = {0: [{"x": x.cuda()} for x, _ in data], 2: [{"target": y.cuda()} for _, y in data]}
    schedule = fitted(pipeline, len(sizes))
    with Engine(schedule, pipeline, modules, last_pipeline=last, timeout_seconds=60) as engine:
        step = engine.step(feed, loss_weights=[n / sum(sizes) for n in sizes])
        torch.cuda.synchronize()
    return step.losses, {name: p.grad.cpu().numpy() for name, p in modules[rank].named_parameters()}


def test_the_engine_trains():
    sizes = [4, 4, 2]
    losses, grads = single_process(torch.float64, sizes)
    for stage, (said, named) in enumerate(_run(_train, sizes, ranks=3)):
        assert stage != 2 or said == pytest.approx(losses, rel=1e-10)
        for name, grad in named.items():
            torch.testing.assert_close(torch.from_numpy(grad), grads[stage][name], rtol=1e-10, atol=1e-12)


def _kernel(rank):
    from reshard.region_kernel import RegionCopier

    arrays = [((5, 7, 9), 4), ((640, 400), 2), ((3, 3, 3, 3, 3, 5), 8)]
    cuts = [(0, (slice(1, 4), slice(2, 7), slice(0, 5))), (1, (slice(3, 600), slice(8, 400)))]
    cuts.append((2, (*(slice(0, 2),) * 5, slice(1, 4))))
    found = [(tensor, *arrays[tensor], box) for tensor, box in cuts]
    contents, table, wanted, size = _case(arrays, found)
    copier = RegionCopier(table, torch.device("cuda"))
    buffer = torch.zeros(size, dtype=torch.uint8, device="cuda")
    copier.copy([torch.from_numpy(content).cuda() for content in contents], buffer, True)
    held = buffer.cpu().numpy()
    for end, part in wanted:
        start = end - -(-len(part) // 16) * 16
        assert held[start : start + len(part)].tobytes() == part


def test_the_kernel_packs_what_its_twin_packs():
    _run(_kernel, ranks=1)
