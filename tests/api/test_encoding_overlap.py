"""A rank encodes one message after the other while earlier messages travel, and decodes messages as they arrive."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import reshard
from reshard import Layout, Mesh, Topology
from reshard.codecs import BlockCodec, parse_codec
from reshard.errors import RemoteError
from reshard.runtime.cpu.encoded_shards import DecodedTarget, EncodedSource
from reshard.runtime.transport import GlooTransport, SharedMemory
from reshard.testing.processes import run_processes

SHAPE = (1024, 4096)  # 16 MiB; the elements are 4.1 MiB, in messages of 1 MiB from host to host
SRC, DST, HOSTS = Layout(Mesh([0])), Layout(Mesh([1, 2])), Topology((0, 1, 2))


def _move(rank):
    """Encodings and data messages of rank 0 in order, or what the others decoded before and in ``finish``."""
    events = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((BlockCodec, "encode"), (BlockCodec, "decode"), (DecodedTarget, "finish")):
            _record(patch, owner, name, events)
        for owner in (GlooTransport, SharedMemory):
            _record(patch, owner, "send", events)
        whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        options = {"shape": SHAPE, "dtype": "float32", "topology": HOSTS, "compression": "int8x128"}
        out = reshard.reshard(whole if rank == 0 else None, SRC, DST, **options)
        if rank:
            codec, encoded = parse_codec("int8x128"), torch.empty(SHAPE[0], SHAPE[1] // 128 * 132, dtype=torch.uint8)
            codec.encode(whole, encoded)
            codec.decode(encoded, whole)
            assert torch.equal(out, whole)
    return events


def _record(patch, owner, name, events):
    run = getattr(owner, name)

    def recorded(self, *arguments, **options):
        if owner is not GlooTransport or arguments[0].numel() > 1000:
            events.append(name)
        return run(self, *arguments, **options)

    patch.setattr(owner, name, recorded)


def test_coding_overlaps_the_transfer():
    sent, *received = run_processes(_move, 3)
    assert sent.count("encode") >= 4
    assert sent.index("send") == 1
    assert sent[-3:].count("encode")  # the last slab follows most messages
    for events in received:
        at = events.index("finish")
        assert events[:at].count("decode") >= 4
        assert events[at + 1 :] == ["encode", "decode"]  # of the check; nothing was left for finish


def _fail(rank, side):
    calls = []
    run = getattr(BlockCodec, side)

    def fail(*arguments, **options):
        calls.append(side)
        if len(calls) == 2 and rank == (side == "decode"):
            raise MemoryError("no memory for the second slab")
        return run(*arguments, **options)

    raises = pytest.raises((RemoteError, MemoryError), match="the second slab")
    if side == "decode" and rank != 1:  # may have sent and received all before
        raises = contextlib.suppress(RemoteError)
    with pytest.MonkeyPatch.context() as patch, raises:
        patch.setattr(BlockCodec, side, fail)
        reshard.reshard(
            torch.zeros(SHAPE) if rank == 0 else None, SRC, DST, shape=SHAPE, dtype="float32", topology=HOSTS,
            compression="int8x128", timeout_seconds=20,
        )  # fmt: skip


@pytest.mark.parametrize("side", ["encode", "decode"])
def test_a_failure_to_code_reaches_the_ranks_that_wait(side):
    run_processes(_fail, 3, side, timeout_seconds=30)


@pytest.mark.parametrize(("shape", "num_row_dims"), [((6, 4, 256), 2), ((1100,), 0), ((3, 0), 1)])
@pytest.mark.parametrize("decodes_early", [True, False])
def test_slabs_in_any_order_give_the_codec_of_the_whole(shape, num_row_dims, decodes_early):
    rng, codec = np.random.default_rng(0), parse_codec("int8x128")
    plain, wanted = torch.randn(shape), torch.empty(shape)
    whole = torch.empty(codec.nbytes(shape, num_row_dims), dtype=torch.uint8)
    codec.encode(plain, whole, num_row_dims)
    codec.decode(whole, wanted, num_row_dims)
    source, out = EncodedSource(plain, codec, num_row_dims), torch.empty(shape)
    target = DecodedTarget(out, codec, num_row_dims, decodes_early=decodes_early)
    size = len(source.encoded)
    for first in rng.permutation(size):
        inner = source.encoded.shape[1] if source.encoded.dim() > 2 else 1
        for column in range(inner):
            at = (slice(int(first), int(first) + 1), slice(column, column + 1))[: source.encoded.dim() - 1]
            source.encode(at)
            target.encoded[at] = source.encoded[at]
            target.decode(at)
    assert torch.equal(source.whole().reshape(-1), whole)
    assert not decodes_early or torch.equal(out, wanted)
    target.finish()
    assert torch.equal(out, wanted)
