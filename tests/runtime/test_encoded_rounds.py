"""Tensors of a block codec in rounds on the stand-in of a GPU."""

from __future__ import annotations

import pytest
import torch

import reshard
from reshard.testing.processes import run_processes
from tests.runtime.test_stream import DST, RANKS, SRC
from tests.support.tensors import take_shard


def _code(rank):
    """Replicas decode the same bytes as in one process, into other dtypes and strides too."""
    whole = torch.randn(96, 1152, generator=torch.Generator().manual_seed(0))
    options = {"shape": whole.shape, "compression": "int4x128"}
    shards = {item: take_shard(SRC, item, whole) for item in SRC.ranks}
    wanted = reshard.reshard_local(shards, SRC, DST, **options)
    assert (wanted[3] != take_shard(DST, 3, whole)).any()
    out = None if rank < 3 else torch.zeros(wanted[rank].shape[::-1]).t()
    for _ in range(2):
        moved = reshard.reshard_async(shards.get(rank), SRC, DST, dtype="float32", out=out, **options).synchronize()
        assert moved is out and (out is None or torch.equal(out, wanted[rank]))
    narrow = reshard.reshard(shards.get(rank), SRC, DST, dtype="float32", dst_dtype="bfloat16", **options)
    assert narrow is None or torch.equal(narrow, wanted[rank].bfloat16())
    plan = reshard.make_plan(SRC, DST, whole.shape, "float32", compression="int4x128")
    with reshard.Mover(plan) as mover:
        handles = [mover.start(shards.get(rank)) for _ in range(2)]
        results = [handle.synchronize(60.0) for handle in handles]
        assert all(result is None or torch.equal(result, wanted[rank]) for result in results)


@pytest.mark.integration
@pytest.mark.usefixtures("device")
def test_encoded_tensors_move_in_rounds():
    run_processes(_code, RANKS)
