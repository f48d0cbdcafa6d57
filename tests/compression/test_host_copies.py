"""Options for the CPU only, on tensors elsewhere: the transfer runs on copies. CPU tensors stand for those of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard import Layout, Mesh, Topology
from reshard.compression import GradientSum
from reshard.runtime.cuda import host_copies
from reshard.testing import LaunchError, run_processes
from reshard.topology import CodecRate
from tests.support.tensors import take_shard

SRC, DST = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = torch.randn(32, 1536, generator=torch.Generator().manual_seed(0)).bfloat16()
RATE = CodecRate("int8x128", 6e9, 8e9)
OPTIONS = [
    {"verify": True},
    {"on_loss": "recover"},
    {"compression": "int8x128", "max_error": 0.1},
    {"compression": "auto", "topology": replace(Topology.uniform((0, 1, 2, 3), 1e6), codec_rates=(RATE,))},
    {"compression": "bf16-lossless"},
    {"compression": "delta"},
]


@pytest.fixture
def copied(monkeypatch):
    """All transfers whose options need it run on copies."""
    monkeypatch.setattr(host_copies, "COPIED_DEVICE_TYPES", {"cpu"})


def _move(rank, options):
    source, wanted = take_shard(SRC, rank, WHOLE), take_shard(DST, rank, WHOLE)
    out = None if wanted is None else torch.full_like(wanted, 7.0)
    before = None if source is None else source.clone()
    arguments = {"src_mesh": SRC, "dst_mesh": DST, "shape": WHOLE.shape, "dtype": WHOLE.dtype, **options}
    tolerance = 0.1 if options.get("compression") in ("int8x128", "auto") else 0.0
    for given in (out, None):
        handle = reshard.reshard_async(source, out=given, **arguments)
        if given is not None and options.get("compression") != "delta":
            while not handle.done():
                pass
            assert (given == 7.0).all()  # it changes in wait()
        result = handle.wait()
        assert (result is None) == (wanted is None) and (given is None or result is given)
        assert result is None or torch.allclose(result.float(), wanted.float(), atol=tolerance)
    assert before is None or torch.equal(before, source)


def _move_into_inference_tensor(rank):
    with torch.inference_mode():
        wanted = take_shard(DST, rank, WHOLE)
        out = None if wanted is None else torch.zeros_like(wanted)
    for compression in ("delta", None):
        reshard.reshard(take_shard(SRC, rank, WHOLE), SRC, DST, out=out, compression=compression, verify=True)
        assert out is None or torch.equal(out, wanted)


def test_copies_are_written_to_tensors_of_inference_mode(copied):
    run_processes(_move_into_inference_tensor, 4)


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_calls_move_copies(copied, options):
    run_processes(_move, 4, options)


def _move_with_mover(rank, options, codec):
    source, wanted = take_shard(SRC, rank, WHOLE), take_shard(DST, rank, WHOLE)
    plan = reshard.make_plan(SRC, DST, WHOLE.shape, WHOLE.dtype, compression=codec)
    out = None if wanted is None else torch.zeros_like(wanted)
    with reshard.Mover(plan, **options) as mover:
        assert mover._is_copied
        for factor in (1, 2):
            base = source if factor == 2 and options.get("compression") == "delta" else None
            result = mover(None if source is None else source * factor, out=out, base=base)
            assert result is out and (out is None or torch.equal(out, wanted * factor))
        fresh = mover(source)
        assert fresh is None or torch.equal(fresh, wanted)


@pytest.mark.parametrize(
    "options", [{"verify": True}, {"compression": "bf16-lossless"}, {"compression": "delta"}], ids=str
)
def test_movers_move_copies(copied, options):
    run_processes(_move_with_mover, 4, options, None)


def _move_dtensors(rank):
    mesh = dist.init_device_mesh("cpu", (4,))
    moved = reshard.reshard(distribute_tensor(WHOLE, mesh, [Shard(0)]), dst_mesh=mesh, dst_spec=[Shard(1)], verify=True)
    assert torch.equal(moved.full_tensor(), WHOLE)


def test_dtensors_move_as_copies(copied):
    run_processes(_move_dtensors, 4)


def _lose_a_rank(rank):
    source, wanted = take_shard(Layout(Mesh.of("2"), "R R"), rank, WHOLE), take_shard(DST, rank, WHOLE)
    out = None if wanted is None else torch.zeros_like(wanted)
    dist.barrier()
    if rank == 0:
        raise SystemExit(3)
    moved = reshard.reshard(
        source,
        Layout(Mesh.of("2"), "R R"),
        DST,
        shape=WHOLE.shape,
        dtype=WHOLE.dtype,
        out=out,
        on_loss="recover",
        timeout_seconds=6,
    )
    return moved is out and (out is None or torch.equal(out, wanted))


def test_copies_are_recovered_when_a_rank_is_lost(copied):
    with pytest.raises(LaunchError) as caught:
        run_processes(_lose_a_rank, 4, grace_seconds=40.0)
    assert caught.value.results == {1: True, 2: True, 3: True}


def _sum(rank):
    gradients = {"a": torch.full((40, 3), rank + 1.0), "b": torch.full((8,), 2.0, dtype=torch.bfloat16)}
    GradientSum(None, average=False)(gradients)
    return gradients["a"].unique().tolist(), gradients["b"].unique().tolist()


def test_gradients_are_summed(copied):
    assert run_processes(_sum, 4) == [([10.0], [8.0])] * 4
