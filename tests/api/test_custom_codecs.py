"""A codec of the caller's in plans, calls and Movers: values, replicas, errors on all ranks, and text of plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reshard
from reshard import Layout, Mesh, Topology
from reshard.errors import ArgumentError, CompressionError, DisagreementError
from reshard.testing.processes import run_processes
from tests.support.tensors import same_bytes, take_shard

SHAPE = (256, 320)
ROWS, COLS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2x2", first_rank=2), "R S1")  # two replicas of each column


class Fixed8:
    """8-bit fixed-point numbers; each 64 values share a scale."""

    def __init__(self, values=64):
        self.name, self.element = "fixed8", (values, 4 + values)

    def encode(self, values, out):
        scale = np.maximum(np.abs(values).max(axis=1, keepdims=True) / 127, 1e-30).astype("<f4")
        out[:, :4] = scale.view(np.uint8)
        out[:, 4:] = np.rint(values / scale).astype("i1").view(np.uint8)

    def decode(self, data, out):
        out[:] = data[:, 4:].copy().view("i1") * data[:, :4].copy().view("<f4")


class Broken(Fixed8):
    """Cannot encode."""

    def encode(self, values, out):
        raise ValueError("cannot encode")


class Overwriting(Fixed8):
    """Overwrites its input with the signs of the values, and optionally the data after decoding it."""

    def __init__(self, overwrites_data=False):
        super().__init__()
        self.overwrites_data = overwrites_data

    def encode(self, values, out):
        values[:] = np.sign(values)
        super().encode(values, out)

    def decode(self, data, out):
        super().decode(data, out)
        if self.overwrites_data:
            data[:] = 0


class Spoiling(Fixed8):
    """Decodes the first element to a constant."""

    def __init__(self, constant):
        super().__init__()
        self.constant = constant

    def decode(self, data, out):
        super().decode(data, out)
        out[0] = self.constant


def _wanted(whole):
    """The tensor after coding along whole rows: 320 values are 5 elements."""
    codec, blocks = Fixed8(), whole.float().numpy().reshape(-1, 64)
    data, out = np.empty((len(blocks), 68), np.uint8), np.empty_like(blocks)
    codec.encode(blocks, data)
    codec.decode(data, out)
    return torch.from_numpy(out.reshape(whole.shape)).to(whole.dtype)


def _move(rank):
    options = {"shape": SHAPE, "topology": Topology((0, 0, 1, 1, 2, 2)), "verify": True}
    cols = COLS if rank is not None else None
    narrow = Layout(Mesh.of("5", first_rank=1), "R S0")  # cuts of 64 values
    for dtype, dst in ((torch.float32, narrow), (torch.bfloat16, Layout(Mesh.of("2", first_rank=4)))):
        whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
        out = reshard.reshard(
            take_shard(ROWS, rank, whole), ROWS, dst, dtype=dtype, compression=Fixed8(), max_error=0.02, **options
        ) if rank in (*ROWS.ranks, *dst.ranks) else None  # fmt: skip
        assert out is None or same_bytes(out, take_shard(dst, rank, _wanted(whole)))
        assert not torch.equal(_wanted(whole), whole)

    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    plan = reshard.make_plan(ROWS, narrow, SHAPE, "float32", compression=Fixed8())
    assert (plan.tensors[0].dtype, plan.tensors[0].shape) == ("fixed8-64x68", (256, 5))
    mover = reshard.Mover(plan)
    out = mover(take_shard(ROWS, rank, whole))
    assert out is None or same_bytes(out, take_shard(narrow, rank, _wanted(whole)))
    mover.close()

    # cuts of 160 values lie inside an element
    raw = reshard.reshard(take_shard(ROWS, rank, whole), ROWS, cols, dtype="float32", compression=Fixed8(), **options)
    assert raw is None or same_bytes(raw, take_shard(cols, rank, whole))

    texts = []
    for error, kwargs in (
        (DisagreementError, {"compression": Fixed8(32 if rank == 1 else 64)}),
        (DisagreementError, {"compression": "int8x128" if rank == 1 else Fixed8()}),
        (CompressionError, {"compression": Broken() if rank == 1 else Fixed8()}),
        (ArgumentError, {"compression": object() if rank == 1 else Fixed8()}),
    ):
        with pytest.raises(error) as caught:
            reshard.reshard(take_shard(ROWS, rank, whole), ROWS, narrow, dtype="float32", **options, **kwargs)
        texts.append(str(caught.value))
    parsed = reshard.parse_plan(str(plan))
    assert parsed == plan
    with pytest.raises(ArgumentError) as caught:
        reshard.Mover(parsed)
    return [*texts, str(caught.value)]


@pytest.mark.integration
def test_a_codec_of_the_caller_moves_tensors_and_ranks_compare_it():
    texts = run_processes(_move, 6)
    assert all(text == texts[0] for text in texts)
    assert "compression: ranks 0,2-5 pass fixed8-64x68, rank 1 passes fixed8-32x36" in texts[0][0]
    assert "rank 1 passes int8x128" in texts[0][1]
    assert "rank 1: codec fixed8: encode raised ValueError: cannot encode" in texts[0][2]
    assert "rank 1: compression is a object; it must be the name of a codec, or have name, element" in texts[0][3]
    assert "the plan was made with codec fixed8 of 64 values in 68 bytes" in texts[0][4]


def test_one_process_codes_with_a_codec_of_the_caller():
    whole = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    out = reshard.reshard_local({0: whole[:128], 1: whole[128:]}, ROWS, ROWS, shape=SHAPE, compression=Fixed8())
    assert (np.concatenate([out[0], out[1]]) == _wanted(torch.from_numpy(whole)).numpy()).all()
    plan = reshard.make_plan(ROWS, ROWS, SHAPE, "float32", compression=Fixed8())
    assert reshard.plan_from_json(reshard.plan_to_json(plan)) == plan
    for name, element, text in (("fixed 16", (64, 68), "letters, digits and _"), ("f", (0, 4), "from 1 to 1048576")):
        codec = Fixed8()
        codec.name, codec.element = name, element
        with pytest.raises(ArgumentError, match=text):
            reshard.make_plan(ROWS, ROWS, SHAPE, "float32", compression=codec)
    with pytest.raises(ArgumentError, match="compression is the class Fixed8; pass an object of it"):
        reshard.make_plan(ROWS, ROWS, SHAPE, "float32", compression=Fixed8)


def _overwrite(rank):
    dst = Layout(Mesh.of("3", first_rank=1))
    options = {"topology": Topology((0, 1, 2, 3)), "strategy": "broadcast_naive", "shape": SHAPE, "dtype": "float32"}
    shard = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) if rank == 0 else None
    whole = None if shard is None else shard.clone()
    with pytest.raises(CompressionError, match=r"changes the tensor by 0\.6"):
        reshard.reshard(
            shard, Layout(Mesh.of("1")), dst, compression=Overwriting(), max_error=0.1, on_error="raise", **options
        )
    assert shard is None or same_bytes(shard, whole)
    try:
        reshard.reshard(shard, Layout(Mesh.of("1")), dst, compression=Overwriting(overwrites_data=True), **options)
        assert rank == 0  # it may have sent everything by then; the next rank of the chain would receive zeros
    except CompressionError as error:
        assert "codec " in str(error) and "decode raised ValueError" in str(error) and "read-only" in str(error)


def test_a_codec_may_overwrite_the_values_that_it_encodes_but_not_the_data_that_relays_forward():
    run_processes(_overwrite, 4)


@pytest.mark.parametrize("constant", [float("nan"), float("inf"), 1.0])
def test_a_limit_on_the_error_counts_finite_values_that_a_codec_decodes_to_nan(constant):
    normal = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    for whole in (normal, np.zeros(SHAPE, np.float32)):
        options = {"shape": SHAPE, "compression": Spoiling(constant), "max_error": 0.001}
        moved = reshard.reshard_local({0: whole[:128], 1: whole[128:]}, ROWS, ROWS, **options)
        assert (np.concatenate([moved[0], moved[1]]) == whole).all()
