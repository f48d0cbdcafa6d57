"""What a transfer on GPUs may hold: random layouts, DTensors, many named tensors, and tensors of every block codec."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard import Layout, Mesh
from reshard.compression import GradientSum
from tests.gpu.ranks import DEVICE, MARKS, RANKS, run
from tests.support.random_problems import random_problem
from tests.support.tensors import same_bytes, take_shard, whole_tensor

pytestmark = MARKS
SRC, DST = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2), "R S0")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64, torch.float64]
CODECS = ("int8x128", "int4x128", "int6x128", "int4x128-bf16", "fp8x128")


def _on_device(array):
    return None if array is None else array.to(DEVICE)


def _move_random_layouts(rank):
    """Returns the number of calls of this rank, and the seeds whose results are wrong."""
    num, wrong = 0, []
    for seed in range(150):
        src, dst, shape, _ = random_problem(seed)
        if max((*src.ranks, *dst.ranks)) >= RANKS:
            continue
        if rank in (*src.ranks, *dst.ranks):
            whole = whole_tensor(shape, DTYPES[seed % len(DTYPES)])
            source, wanted = _on_device(take_shard(src, rank, whole)), take_shard(dst, rank, whole)
            out = reshard.reshard(source, src, dst, shape=shape, dtype=whole.dtype)
            num += 1
            if (out is None) != (wanted is None) or not (out is None or same_bytes(out.cpu(), wanted)):
                wrong.append(seed)
        dist.barrier()
    return num, wrong


def test_random_layouts_move_every_element():
    results = run(_move_random_layouts)
    assert sum(num for num, _ in results) > 20 and not any(wrong for _, wrong in results)


PLACEMENTS = [
    ([Shard(0)], [Shard(1)]),
    ([Shard(1)], [Replicate()]),
    ([Replicate()], [Shard(0)]),
    ([Shard(0)], [Shard(0)]),
]


def _move_dtensors(rank):
    mesh = dist.init_device_mesh(DEVICE, (RANKS,))
    whole = torch.arange(16.0 * 24, device=DEVICE).view(16, 24)
    for src, dst in PLACEMENTS:
        tensor = distribute_tensor(whole, mesh, src)
        moved = reshard.reshard(tensor, dst_mesh=mesh, dst_spec=dst)
        assert isinstance(moved, DTensor) and tuple(moved.placements) == tuple(dst)
        assert torch.equal(moved.full_tensor(), whole)
    narrow = reshard.reshard(
        distribute_tensor(whole, mesh, [Shard(0)]), dst_mesh=mesh, dst_spec=[Shard(1)], dst_dtype="bfloat16"
    )
    assert torch.equal(narrow.full_tensor(), whole.bfloat16())


def test_dtensors_move():
    run(_move_dtensors)


def _move_named_tensors(rank):
    """48 tensors in a call, then three times in a Mover."""
    wholes = {f"w{number}": whole_tensor((8 + number, 12), DTYPES[number % len(DTYPES)]) for number in range(48)}
    source = {name: _on_device(take_shard(SRC, rank, whole)) for name, whole in wholes.items()}
    wanted = {name: take_shard(DST, rank, whole) for name, whole in wholes.items()}
    shapes = {name: tuple(whole.shape) for name, whole in wholes.items()}
    dtypes = {name: whole.dtype for name, whole in wholes.items()}
    plan = reshard.make_plan(dict.fromkeys(wholes, SRC), dict.fromkeys(wholes, DST), shapes, dtypes)
    results = [reshard.reshard(source, SRC, DST)]
    with reshard.Mover(plan, device=DEVICE) as mover:
        results += [mover.start(source).synchronize() for _ in range(3)]
    for result in results:
        for name, whole in wanted.items():
            assert (result[name] is None and whole is None) or same_bytes(result[name].cpu(), whole), name


def test_many_named_tensors_move_at_once():
    run(_move_named_tensors)


def _code(rank):
    """Encoded transfers give the same bits as the native codecs on the CPU."""
    for codec in CODECS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            whole = torch.randn(32, 1536, generator=torch.Generator().manual_seed(0)).to(dtype)
            shards = {item: take_shard(SRC, item, whole) for item in SRC.ranks}
            wanted = reshard.reshard_local(shards, SRC, DST, shape=whole.shape, compression=codec)
            source = _on_device(shards.get(rank))
            out = reshard.reshard(source, SRC, DST, shape=whole.shape, dtype=dtype, compression=codec)
            assert (out is None) == (rank not in wanted)
            assert out is None or same_bytes(out.cpu(), wanted[rank]), (codec, dtype)


def test_encoded_tensors_equal_those_of_the_cpu():
    run(_code)


OPTIONS = [
    {"verify": True},
    {"on_loss": "recover"},
    {"compression": "int8x128", "max_error": 0.1},
    {"compression": "bf16-lossless"},
    {"compression": "delta"},
]


def _use_options_of_the_cpu(rank):
    """Calls, Movers and GradientSum that move CUDA tensors through copies in host memory."""
    whole = torch.randn(32, 1536, generator=torch.Generator().manual_seed(0)).bfloat16()
    source, wanted = _on_device(take_shard(SRC, rank, whole)), _on_device(take_shard(DST, rank, whole))
    for options in OPTIONS:
        for out in (None, None if wanted is None else torch.zeros_like(wanted)):
            moved = reshard.reshard(
                source, SRC, DST, shape=whole.shape, dtype=whole.dtype, out=out, timeout_seconds=30, **options
            )
            assert (moved is None) == (wanted is None) and (out is None or moved is out), options
            near = 0.1 if "max_error" in options else 0.0
            assert moved is None or torch.allclose(moved.float(), wanted.float(), atol=near), options
    plan, out = reshard.make_plan(SRC, DST, whole.shape, whole.dtype), None if wanted is None else wanted.clone()
    for options in ({"verify": True}, {"compression": "bf16-lossless"}):
        with reshard.Mover(plan, device=DEVICE, **options) as mover:
            moved = mover(None if source is None else source * 2, out=out)
            assert moved is out and (out is None or torch.equal(out, wanted * 2)), options
    gradients = {"a": torch.full((40, 3), rank + 1.0, device=DEVICE)}
    GradientSum(None, average=False)(gradients)
    assert gradients["a"].unique().tolist() == [10.0]


def test_options_of_the_cpu_move_tensors_of_a_gpu():
    run(_use_options_of_the_cpu)
