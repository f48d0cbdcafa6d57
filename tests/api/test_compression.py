"""Encoded transfers over processes: values, replicas, recovery, tensors that go raw, limits on the error, wrong calls."""

from __future__ import annotations

import functools
import io
import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

import reshard
import reshard.api.call
from reshard import Layout, Mesh, RegionLayout, Topology
from reshard.codecs import parse_codec
from reshard.compression import Policy
from reshard.errors import ArgumentError, CompressionError, DisagreementError, VerificationError
from reshard.runtime.transport import GlooTransport
from reshard.testing.processes import LaunchError, run_processes
from reshard.topology import Host, Link
from tests.support.tensors import same_bytes, take_shard

SHAPE = (256, 512)
ROWS, COLS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2x2", first_rank=2), "R S1")  # two replicas of each column
HOSTS = Topology((0, 0, 1, 1, 2, 2))


def _whole(shape=SHAPE, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _round_trip(whole, name, num_row_dims=None):
    """A tensor after a codec has encoded and decoded it. Every encoded transfer must deliver these values."""
    codec = parse_codec(name)
    encoded, decoded = torch.empty(codec.nbytes(whole.shape, num_row_dims), dtype=torch.uint8), torch.empty_like(whole)
    codec.encode(whole, encoded, num_row_dims)
    codec.decode(encoded, decoded, num_row_dims)
    return decoded


def _is_right(rank, layout, out, wanted):
    shard = take_shard(layout, rank, wanted)
    return out is None if shard is None else same_bytes(out, shard)


def _move(rank):
    planned = []
    make = reshard.api.preparation.prepare.plan_tensors
    reshard.api.preparation.prepare.plan_tensors = lambda tensors, **options: (
        planned.extend(tensors) or make(tensors, **options)
    )
    for name in ("int8x128", "int4x128", "fp8x64", "int6x128", "int4x128-bf16"):
        casts = (("float32", "bfloat16"), ("bfloat16", "float32")) if name in ("int8x128", "fp8x64") else ()
        for src, dst in (("float32", None), *casts):
            whole = _whole(dtype=getattr(torch, src))
            wanted = _round_trip(whole.float(), name).to(getattr(torch, dst or src))
            out = reshard.reshard(
                take_shard(ROWS, rank, whole), ROWS, COLS, shape=SHAPE, dtype=src, dst_dtype=dst, topology=HOSTS,
                compression=name, verify=True,
            )  # fmt: skip
            assert _is_right(rank, COLS, out, wanted), (name, src, dst)
    assert {spec.dtype for spec in planned} == {"int8x128", "int4x128", "fp8x64", "int6x128", "int4x128-bf16"}

    wholes = {
        "w": _whole(),
        "odd": _whole((300, 512)),
        "flat": _whole((96, 192)),
        "ids": torch.arange(2**17).view(SHAPE),
    }
    wholes["bias"] = _whole((64,))
    plain = {"odd": _round_trip(wholes["odd"], "int8x128"), "w": _round_trip(wholes["w"], "int8x128")}
    plain["flat"] = _round_trip(wholes["flat"], "int8x32")
    sources = {name: take_shard(ROWS, rank, whole) for name, whole in wholes.items()}
    targets = Layout(Mesh.of("2x2", first_rank=2), [(), ("1",)])
    layouts = {name: targets if whole.ndim == 2 else Layout(targets.mesh) for name, whole in wholes.items()}
    handle = reshard.reshard_async(
        sources,
        ROWS,
        layouts,
        compression="int8x128",
        shape={n: w.shape for n, w in wholes.items()},
        dtype={n: w.dtype for n, w in wholes.items()},
    )
    for name, out in handle.wait().items():
        assert _is_right(rank, layouts[name], out, plain.get(name, wholes[name])), name
    dtypes = {spec.name: spec.dtype for spec in planned[-5:]}
    assert dtypes == {"bias": "float32", "flat": "int8x32", "ids": "int64", "odd": "int8x128", "w": "int8x128"}


@pytest.mark.nightly
def test_every_codec_dtype_and_front_end_gives_the_values_of_the_codec():
    run_processes(_move, 6)


def _strided(rank):
    """Encoded values may exceed the range of the dtype: they are limited alike in every target, and rounded once."""
    src, dst = Layout(Mesh.of("1")), Layout(Mesh.of("2", first_rank=1))
    shape, dtypes = (64, 256), (torch.float16, torch.bfloat16, torch.float32)
    for dtype, target, name in itertools.product(dtypes, dtypes, ("int8x128", "int4x128", "int4x128-bf16")):
        largest = min(torch.finfo(item).max for item in (dtype, target))
        whole = torch.rand(shape, generator=torch.Generator().manual_seed(0)).mul(largest * 1.1).clamp(max=largest)
        whole = whole.to(dtype)
        out = torch.empty(shape[::-1], dtype=target).t() if rank == 2 else None
        options = {"shape": shape, "dst_dtype": target, "compression": name}
        moved = reshard.reshard(whole if rank == 0 else None, src, dst, dtype=dtype, out=out, **options)
        local = reshard.reshard_local({0: whole}, src, dst, **options)
        assert moved is None or (moved.isfinite().all() and same_bytes(moved, local[1])), (dtype, target, name)


@pytest.mark.nightly
def test_values_decode_alike_in_targets_with_strides_and_in_one_process():
    run_processes(_strided, 3)


def _limits(rank):
    whole = _whole()
    whole[0, 0] = 1e4  # dominates the norm, so that one block alone decides the error
    source = take_shard(ROWS, rank, whole)
    options = {"shape": SHAPE, "dtype": "float32", "compression": "int4x128", "topology": HOSTS}
    logged = io.StringIO()
    logging.getLogger("reshard.api.preparation.agreed_plan").addHandler(logging.StreamHandler(logged))
    logging.getLogger("reshard.api.preparation.agreed_plan").setLevel(logging.INFO)
    raw = reshard.reshard(source, ROWS, COLS, max_error=1e-6, **options)
    assert _is_right(rank, COLS, raw, whole)
    assert logged.getvalue().endswith("but max_error is 1e-06; it travels without the codec\n")
    encoded = reshard.reshard(source, ROWS, COLS, max_error=0.5, **options)
    assert _is_right(rank, COLS, encoded, _round_trip(whole, "int4x128"))
    measured = reshard.find_topology(codecs=["int8x128", "int4x128"])
    rates = [(rate.codec, rate.encode_bytes_per_second > 1e6) for rate in measured.codec_rates]
    assert rates == [("int8x128", True), ("int4x128", True)]
    slow = replace(HOSTS, hosts=(Host((Link.of(1e6),)),), codec_rates=measured.codec_rates)
    chosen = reshard.reshard(source, ROWS, COLS, **{**options, "topology": slow, "compression": "auto"}, max_error=0.01)
    assert _is_right(rank, COLS, chosen, _round_trip(whole, "int8x128"))
    chosen = reshard.reshard(source, ROWS, COLS, **{**options, "topology": slow, "compression": "auto"}, max_error=0.2)
    assert _is_right(rank, COLS, chosen, _round_trip(whole, "int4x128"))
    texts = []
    for kwargs, kind in (
        ({"max_error": 1e-6, "on_error": "raise"}, CompressionError),
        ({"max_error": -1}, ArgumentError),
        ({"on_error": "ignore"}, ArgumentError),
        ({"compression": "zfp"}, ArgumentError),
        ({"compression": "int8x128" if rank else "int4x128"}, DisagreementError),
    ):
        with pytest.raises(kind) as caught:
            reshard.reshard(source, ROWS, COLS, **{**options, **kwargs})
        texts.append(str(caught.value))
    return texts


@pytest.mark.nightly
def test_limits_on_the_error_hold_on_all_ranks_alike_and_wrong_calls_name_the_rule():
    texts = run_processes(_limits, 6)
    assert all(text == texts[0] for text in texts)
    assert "codec int4x128 changes the tensor by " in texts[0][0] and "max_error is 1e-06" in texts[0][0]
    assert "disagree on compression: ranks 1-5 pass int8x128, rank 0 passes int4x128" in texts[0][4]


def _lose_a_rank(rank, victim):
    import os
    import signal

    src, dst = Layout(Mesh.of("2x2"), "R S1"), Layout(Mesh.of("2x2", first_rank=4), "S0 R")
    whole, topology = _whole((512, 1024)), Topology((0, 0, 1, 1, 2, 2, 3, 3))
    options = {"shape": whole.shape, "dtype": "float32", "topology": topology, "strategy": "multicast"}
    options |= {"staging_bytes": 2**16, "timeout_seconds": 20, "compression": "int8x128"}
    source = take_shard(src, rank, whole)
    reshard.reshard(source, src, dst, **options)
    if rank == victim:
        count = [0]

        def die(plain):
            def operation(self, *args):
                count[0] += 1
                if count[0] == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(self, *args)

            return operation

        GlooTransport.send, GlooTransport.recv = die(GlooTransport.send), die(GlooTransport.recv)
    out = reshard.reshard(source, src, dst, on_loss="recover", **options)
    return _is_right(rank, dst, out, _round_trip(whole, "int8x128"))


@pytest.mark.integration
@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_replicas_are_equal_bit_for_bit_after_a_rank_is_lost(victim):
    with pytest.raises(LaunchError) as caught:
        run_processes(_lose_a_rank, 8, victim, timeout_seconds=90, grace_seconds=60)
    assert {failure.rank for failure in caught.value.failures} == {victim}, caught.value
    assert [caught.value.results[rank] for rank in range(8) if rank != victim] == [True] * 7


def _corrupt(rank):
    """Flip one byte of an encoded message at its sender, after its digest was taken."""
    if rank == 0:
        send = GlooTransport.send

        def flip(self, data, *args):
            if data.numel() > 2**12:
                data = data.clone()
                data[data.numel() // 2] ^= 1
            return send(self, data, *args)

        GlooTransport.send = flip
    source = take_shard(ROWS, rank, _whole())
    with pytest.raises(reshard.errors.VerificationError) as caught:
        reshard.reshard(source, ROWS, COLS, shape=SHAPE, dtype="float32", compression="int8x128", verify=True)
    return str(caught.value)


def test_a_byte_that_changes_on_the_wire_is_found_and_named():
    texts = run_processes(_corrupt, 6)
    assert len(set(texts)) == 1 and "from rank 0" in texts[0]


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_one_process_moves_encoded_shards(kind):
    whole = _whole((96, 1000), seed=2)
    src, dst = Layout(Mesh.of("3"), "S0"), Layout(Mesh.of("2", first_rank=3))
    shards = {rank: kind(take_shard(src, rank, whole).numpy()) for rank in src.ranks}
    moved = reshard.reshard_local(shards, src, dst, shape=whole.shape, compression="int8x128")
    wanted = _round_trip(whole, "int8x128", 0)  # rows are joined, since 128 divides the 32,000 values of a shard
    for out in moved.values():
        assert isinstance(out, type(shards[0])) and (np.asarray(out) == wanted.numpy()).all()


def test_one_process_limits_the_error_as_processes_do():
    whole = _whole((96, 1000), seed=2).numpy()
    src, dst = Layout(Mesh.of("3"), "S0"), Layout(Mesh.of("1", first_rank=3))
    shards = {rank: take_shard(src, rank, whole) for rank in src.ranks}

    def move(max_error, compression="int8x128"):
        out = reshard.reshard_local(
            shards, src, dst, shape=whole.shape, compression=compression, max_error=max_error, dst_dtype="float16"
        )
        return out[3].astype(np.float64)

    assert (move(1e-6) == whole.astype(np.float16)).all()
    assert 1e-3 < np.linalg.norm(move(0.02) - whole) / np.linalg.norm(whole) < 0.02
    with pytest.raises(ArgumentError, match="max_error is nan; it must be a positive number"):
        move(float("nan"))
    with pytest.raises(ArgumentError, match="without compression= nothing is changed"):
        move(0.02, None)
    with pytest.raises(ArgumentError, match="a plan cannot limit what int8x128 changes"):
        reshard.make_plan(src, dst, whole.shape, "float32", compression="int8x128", max_error=0.02)


def test_regions_and_uneven_cuts_are_encoded_where_blocks_fit_and_go_raw_elsewhere():
    def plan(src, dst, shape, dtype="float32"):
        return reshard.make_plan(src, dst, shape, dtype, compression="int8x128").tensors[0]

    wide, tall = Layout(Mesh.of("3"), "R S0"), Layout(Mesh.of("2", first_rank=3), "S0 R")
    assert (plan(wide, tall, (64, 384)).dtype, plan(wide, tall, (64, 384)).shape) == ("int8x128", (64, 3))
    assert plan(wide, tall, (64, 288)).dtype == "int8x32"
    assert "cuts do not lie between blocks of 32" in plan(wide, tall, (64, 300)).raw_because
    assert plan(tall, Layout(Mesh.of("2", first_rank=7)), (64, 3, 3, 64)).shape == (288,)  # all dims are joined
    assert plan(tall, Layout(Mesh.of("2", first_rank=7)), (130, 2, 65)).shape == (130, 5)  # rows are padded to 160
    assert plan(Layout(Mesh.of("2"), "S0"), tall, (2**15, 1)).shape == (2**8,)  # the cut dim is joined too
    assert "fewer than 16384" in plan(wide, tall, (8, 96)).raw_because
    assert "not int64" in plan(wide, tall, (64, 384), "int64").raw_because
    regions = RegionLayout({5: [[(0, 64), (0, 128)], [(0, 64), (256, 300)]], 6: [[(0, 64), (128, 256)]]}, join_dim=1)
    assert plan(regions, Layout(Mesh.of("2")), (64, 300)).shape == (64, 5)
    swapped = RegionLayout({5: [[(0, 64), (256, 300)], [(0, 64), (0, 128)]], 6: [[(0, 64), (128, 256)]]}, join_dim=1)
    assert plan(swapped, Layout(Mesh.of("2")), (64, 300)).raw_because


def test_encoded_plans_print_and_parse_back():
    plan = reshard.make_plan(
        ROWS, {"w": COLS, "b": COLS}, {"w": SHAPE, "b": (4, 4)}, "bfloat16", compression="int4x128-bf16"
    )
    assert reshard.parse_plan(str(plan)) == plan == reshard.plan_from_json(reshard.plan_to_json(plan))
    assert "int4x128-bf16 [256, 4] of bfloat16 [256, 512] named" in str(plan)
    assert "# tensor 1 is not encoded: its 32 bytes are fewer than 16384" in str(plan)
    assert f"# tensor 0: encoded shards take up to {128 * 4 * 72} bytes of a rank beyond staging_bytes" in str(plan)
    text = str(plan).replace("of bfloat16 [256, 512]", "of bfloat16 [256, 700]")
    with pytest.raises(reshard.errors.PlanError, match="do not compress the rows"):
        reshard.parse_plan(text)


@pytest.mark.parametrize("dtype", [">f4", ">f2", "<f4"])
def test_arrays_of_either_byte_order_are_encoded(dtype):
    whole = _whole().numpy().astype(dtype)
    out = reshard.reshard_local({0: whole[:128], 1: whole[128:]}, ROWS, ROWS, shape=SHAPE, compression="int8x128")
    assert out[0].dtype == whole.dtype
    wanted = _round_trip(torch.from_numpy(whole.astype(whole.dtype.newbyteorder("="))), "int8x128").numpy()
    assert np.array_equal(np.concatenate([out[0], out[1]]), wanted)


def test_negated_views_are_encoded_in_one_process():
    whole = torch._neg_view(-_whole())
    out = reshard.reshard_local({0: whole[:128], 1: whole[128:]}, ROWS, ROWS, shape=SHAPE, compression="int8x128")
    assert torch.equal(torch.cat([out[0], out[1]]), _round_trip(_whole(), "int8x128"))


def _infer(rank, is_inside):
    """Move inside inference mode, or into tensors that were made there."""
    from tests.api.test_custom_codecs import Fixed8

    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=1), "R S0")
    whole = _whole()
    for codec, dst_dtype in (("int8x128", None), ("int8x128", "bfloat16"), (Fixed8(), None), ("delta", None)):
        for is_strided in (False, True):
            with torch.inference_mode():
                dtype = torch.float32 if dst_dtype is None else getattr(torch, dst_dtype)
                out = torch.zeros(256, 256, dtype=dtype)
                out = None if rank == 0 else out.t() if is_strided else out
            with torch.inference_mode(is_inside):
                handle = reshard.reshard_async(
                    take_shard(src, rank, whole), src, dst, shape=SHAPE, dtype="float32", dst_dtype=dst_dtype,
                    compression=codec, out=out,
                )  # fmt: skip
            handle.wait()
            assert out is None or (out.float() - take_shard(dst, rank, whole)).abs().max() < 0.05


@pytest.mark.parametrize("is_inside", [False, True])
def test_encoded_transfers_work_in_inference_mode(is_inside):
    run_processes(_infer, 3, is_inside)


@pytest.mark.parametrize(("codec", "dtype"), [("int8x128", torch.float32), ("bf16-lossless", torch.bfloat16)])
def test_meta_tensors_have_no_values_to_code(codec, dtype):
    rows, columns = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2"), "R S0")
    shards = {rank: torch.empty(128, 256, dtype=dtype, device="meta") for rank in range(2)}
    with pytest.raises(ArgumentError, match="shards: rank 0 passes a meta tensor"):
        reshard.reshard_local(shards, rows, columns, shape=(256, 256), compression=codec)


def _verify_encoded_replicas(rank):
    """Rank 0 holds the right half of what rank 1 holds; a changed sign leaves the scales of the blocks as they are."""
    src, dst = RegionLayout({0: [[(0, 64), (256, 512)]], 1: [[(0, 64), (0, 512)]]}), Layout(Mesh.of("1", first_rank=2))
    whole = _whole((64, 512))
    shard = take_shard(src, rank, whole)
    options = {"shape": (64, 512), "dtype": "float32", "compression": "int8x128", "verify": True}
    assert _is_right(rank, dst, reshard.reshard(shard, src, dst, **options), _round_trip(whole, "int8x128"))
    if rank == 1:
        shard[60, 400] *= -1
    with pytest.raises(VerificationError, match=r"the source \[0:64, 2:4\] differs between its replicas: rank 1 holds"):
        reshard.reshard(shard, src, dst, **options)


def test_encoded_replicas_in_shards_of_different_shapes_are_verified():
    run_processes(_verify_encoded_replicas, 3)


def _pass_policies(rank):
    values = torch.linspace(-1, 1, 256 * 256).view(256, 256)
    move = functools.partial(
        reshard.reshard, src_mesh=Mesh.of("1"), dst_mesh=Mesh.of("1", first_rank=1), shape=(256, 256)
    )
    shard = values if rank == 0 else None
    by_policy, by_name = (move(shard, compression=item) for item in (Policy(pp="int8x128"), "int8x128"))
    assert rank == 0 or torch.equal(by_policy, by_name)
    for wrong, text in (
        (Policy(dp="int8x128"), "a transfer uses pp= of a policy and nothing else"),
        (Policy(pp=("int8x128", None)), "two codecs in pp="),
    ):
        with pytest.raises(ArgumentError, match=text):
            move(shard, compression=wrong if rank == 0 else "int8x128")


def test_a_policy_gives_its_codec_of_transfers():
    run_processes(_pass_policies, 2)
