"""Transfers of every supported torch dtype preserve all bits, including NaNs, with and without packing."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from reshard import Layout, Mesh, make_plan
from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.errors import ArgumentError
from tests.support.memory_transport import run_in_threads
from tests.support.tensors import same_bytes, take_shard

SRC, DST = Layout(Mesh.of("3"), "S0"), Layout(Mesh.of("2", first_rank=3), "R S0")


@pytest.mark.parametrize("name", sorted(name for name in ITEMSIZE if hasattr(torch, name)))
def test_every_dtype_arrives_bit_for_bit(name):
    dtype, shape = getattr(torch, name), (7, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        generator = torch.Generator().manual_seed(5)
        raw = torch.randint(0, 256, (7, 10 * ITEMSIZE[name]), dtype=torch.uint8, generator=generator)
        whole = (raw % 2).view(dtype) if name == "bool" else raw.view(dtype)

        def shard(layout, rank):
            carried = whole.view(
                {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize, dtype)
            )
            part = take_shard(layout, rank, carried)
            return None if part is None else part.view(dtype)

        plan = make_plan(SRC, DST, shape, dtype)
        outs = {r: [torch.empty(7, 5, dtype=dtype) if r in DST.ranks else None] for r in plan.ranks}
        run_in_threads(plan, {r: [shard(SRC, r)] for r in plan.ranks}, outs)
        for rank in DST.ranks:
            assert same_bytes(outs[rank][0], shard(DST, rank))


def test_dtype_name_accepts_all_libraries():
    assert dtype_name("float") == dtype_name(torch.float32) == dtype_name(np.float32) == "float32"
    assert dtype_name(np.dtype("int8")) == dtype_name(torch.int8) == "int8"
    with pytest.raises(ArgumentError, match="is not supported; supported dtypes are"):
        dtype_name("string")
    with pytest.raises(ArgumentError, match=r"dtype 'flaot32' is not supported; did you mean 'float32'\?; supported"):
        dtype_name("flaot32")
    for name, size in ITEMSIZE.items():
        if hasattr(torch, name):
            assert getattr(torch, name).itemsize == size
