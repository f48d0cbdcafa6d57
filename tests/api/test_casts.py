"""Casts: the result has another dtype than the source."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
import torch

import reshard
import reshard.api.call
from reshard import Layout, Mesh
from reshard.api.arrays.casts import cast_received, check_cast, receive_view, wire_dtype
from reshard.coordination.groups.process_group import find_group
from reshard.dtypes import ITEMSIZE
from reshard.errors import ArgumentError, DisagreementError
from reshard.testing.processes import run_processes
from tests.support.tensors import same_bytes, take_shard, whole_tensor

ROWS = Layout(Mesh.of("2"), "S0")
COLS = Layout(Mesh.of("2x2", first_rank=1), "R S0")  # rank 1 is in both
WHOLE = whole_tensor((6, 5), torch.float32) / 7
PAIRS = [
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "bfloat16"),
    ("float32", "float8_e4m3fn"),
    ("complex128", "complex64"),
    ("int32", "int64"),
    ("bool", "float32"),
    ("int64", "float32"),
    ("float32", "float32"),
]


def _move(rank):
    planned = []
    make = reshard.api.preparation.prepare.plan_tensors
    reshard.api.preparation.prepare.plan_tensors = lambda tensors, **options: (
        planned.extend(tensors) or make(tensors, **options)
    )
    wholes = {f"{src} {dst}": WHOLE.to(getattr(torch, src)) for src, dst in PAIRS}
    wanted = {name: whole.to(getattr(torch, name.split()[1])) for name, whole in wholes.items()}

    def check(out, name):
        if rank in COLS.ranks:
            assert same_bytes(out, take_shard(COLS, rank, wanted[name])), name
        else:
            assert out is None

    for src, dst in PAIRS:
        name = f"{src} {dst}"
        source = take_shard(ROWS, rank, wholes[name])
        before = None if source is None else source.clone()
        for options in ({"verify": True}, {"on_loss": "recover"}) if (src, dst) in PAIRS[:3] else ({},):
            check(reshard.reshard(source, ROWS, COLS, dst_dtype=dst, **options), name)
        shard = take_shard(COLS, rank, wanted[name])
        out = None if shard is None else torch.zeros(shard.shape[::-1], dtype=shard.dtype).t()  # strided
        assert reshard.reshard(source, ROWS, COLS, dst_dtype=getattr(torch, dst), out=out) is out
        check(out, name)
        assert source is None or same_bytes(source, before)
    sources = {name: take_shard(ROWS, rank, whole) for name, whole in wholes.items()}
    outs = reshard.reshard(sources, ROWS, COLS, dst_dtype={name: name.split()[1] for name in wholes})
    for name in wholes:
        check(outs[name], name)
    return {(spec.name, spec.dtype) for spec in planned}


@pytest.mark.integration
def test_results_have_dst_dtype_and_the_narrower_dtype_is_sent():
    for planned in run_processes(_move, 5, timeout_seconds=60):
        for name, dtype in planned:
            if name is not None:
                src, dst = name.split()
                assert ITEMSIZE[dtype] == min(ITEMSIZE[src], ITEMSIZE[dst])
        assert {name for name, _ in planned} == {None, *(f"{src} {dst}" for src, dst in PAIRS)}


def _refuse(rank):
    source = take_shard(ROWS, rank, WHOLE)
    out = torch.zeros(take_shard(COLS, rank, WHOLE).shape) if rank == 3 else None
    errors = []
    for options in (
        {"dst_dtype": "int32"},
        {"dst_dtype": "complex7"},
        {"dst_dtype": "float16" if rank else "bfloat16"},
        {"dst_dtype": "float16", "out": out},
        {"dst_dtype": {"a": "float16"}},
    ):
        try:
            reshard.reshard(source, ROWS, COLS, **options)
        except reshard.ReshardError as error:
            errors.append((type(error), str(error)))
    assert reshard.reshard(source, ROWS, COLS) is not None or rank not in COLS.ranks
    return errors


def test_invalid_casts_raise_the_same_error_on_every_rank():
    for errors in run_processes(_refuse, 5, timeout_seconds=60):
        kinds, texts = zip(*errors, strict=True)
        assert kinds == (ArgumentError, ArgumentError, DisagreementError, ArgumentError, ArgumentError)
        assert "cannot cast float32 to int32" in texts[0]
        assert "dtype 'complex7'" in texts[1]
        assert "disagree on the destination dtype" in texts[2]
        assert "rank 3 passes out= with float32" in texts[3]
        assert "but its shard is float16" in texts[3]
        assert "so the tensor must be one too" in texts[4]


@pytest.mark.parametrize("wide", ["float32", "float64", "complex128", "int64"])
@pytest.mark.parametrize(
    "make",
    [
        torch.empty,
        lambda shape: torch.empty(shape[::-1]).t(),
        lambda shape: torch.empty(shape[0], 2 * shape[1])[:, 1::2],
        lambda shape: torch.empty(3, *shape)[1],
        lambda shape: torch.empty(shape)[:0],
    ],
    ids=["contiguous", "transposed", "strided", "inside", "empty"],
)
def test_received_elements_are_cast_in_the_targets_memory(monkeypatch, wide, make):
    monkeypatch.setattr("reshard.api.arrays.casts.CAST_BYTES", 64)
    narrow = {"float32": "bfloat16", "float64": "float8_e5m2", "complex128": "complex64", "int64": "int8"}[wide]
    target = make((5, 7))
    storage = torch.zeros(target.untyped_storage().nbytes() // 4 * 2, dtype=getattr(torch, wide))
    target = storage.as_strided(target.shape, target.stride(), target.storage_offset())
    received = receive_view(target, narrow)
    assert received.shape == target.shape
    assert received.numel() == 0 or received.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    values = torch.arange(target.numel()).reshape(target.shape).to(getattr(torch, narrow))
    received.copy_(values)
    cast_received([received], [target])
    assert same_bytes(target.contiguous(), values.to(getattr(torch, wide)))
    target.zero_()
    assert not storage.any()  # nothing was written outside the target


def _peak_bytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024


def _growth(rank, values):
    """Growth of peak memory and allocated staging bytes: first for a narrowing cast, then for a widening cast."""
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2), "R S0")
    found = []
    for before, after in (("float32", "bfloat16"), ("bfloat16", "float32")):
        source, out = take_shard(src, rank, values), None
        source = None if source is None else source.to(getattr(torch, before))
        if rank > 1:
            out = torch.ones(8192, 1024, dtype=getattr(torch, after))
        reshard.reshard(source if source is None else source[:2], src, dst, shape=(4, 2048), dst_dtype=after)  # warm up
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")  # resets VmHWM, the peak
        begun = _peak_bytes()
        reshard.reshard(source, src, dst, dst_dtype=after, out=out, staging_bytes=2**22)
        grown, call_group = _peak_bytes() - begun, next(iter(find_group(None).call_groups.values()))
        while call_group.idle_staging is None:  # the thread of the transfer returns the buffers when it ends
            time.sleep(0.01)
        found += [grown, call_group.idle_staging[1].allocated_bytes]
        assert out is None or same_bytes(out, take_shard(dst, rank, values).to(getattr(torch, after)))
    return found


@pytest.mark.integration
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs /proc to measure memory")
def test_casts_stay_within_staging_bytes():
    """Peak memory grows by at most 10 MiB. Casting a whole shard at once would need 16 MiB."""
    values = torch.arange(251, dtype=torch.uint8).repeat(2**24 // 251 + 1)[: 2**24].reshape(8192, 2048)
    for found in run_processes(_growth, 4, values):
        assert max(found[1::2]) <= 2**22
        assert max(found[0::2]) <= 10 * 2**20, found


def test_wire_dtype_is_the_narrower():
    assert wire_dtype("float32", None) == "float32"
    assert wire_dtype("float32", "bfloat16") == "bfloat16"
    assert wire_dtype("bfloat16", "float32") == "bfloat16"
    assert wire_dtype("float16", "bfloat16") == "bfloat16"


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("float32", "int64"),
        ("complex64", "float64"),
        ("int64", "int32"),
        ("int32", "bool"),
        ("bits8", "float32"),
        ("int1", "float32"),
        ("float32", "float8_e8m0fnu"),
    ],
)
def test_check_cast_names_both_dtypes_of_a_refused_cast(src, dst):
    with pytest.raises(ArgumentError, match=f"{src} .*{dst}") as raised:
        check_cast(src, dst, "the tensor")
    assert "INTERNAL" not in str(raised.value)


def test_a_cast_to_float8_warns_that_it_has_no_scale():
    whole = {0: torch.ones(4)}
    with pytest.warns(UserWarning, match="dst_dtype=float8_e4m3fn casts float32 without a scale: numbers beyond 448 "):
        reshard.reshard_local(whole, Mesh.of("1"), Mesh.of("1"), shape=(4,), dst_dtype=torch.float8_e4m3fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reshard.reshard_local(whole, Mesh.of("1"), Mesh.of("1"), shape=(4,), dst_dtype="bfloat16")
        narrow = {0: torch.ones(4, dtype=torch.float8_e4m3fn)}
        reshard.reshard_local(narrow, Mesh.of("1"), Mesh.of("1"), shape=(4,), dst_dtype=torch.float8_e4m3fn)


def _wait_twice(rank, monkeypatch):
    """Two threads wait for a result that is cast in place; then a wait is interrupted while it casts."""

    def cast_slowly(*arguments):
        time.sleep(0.2)
        cast_received(*arguments)

    monkeypatch.setattr("reshard.api.arrays.casts.cast_received", cast_slowly)
    source, wanted = take_shard(ROWS, rank, WHOLE), take_shard(COLS, rank, WHOLE.double())
    handle = reshard.reshard_async(source, ROWS, COLS, dst_dtype="float64")
    outs = []
    threads = [threading.Thread(target=lambda: outs.append(handle.wait())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 2 and outs[0] is outs[1]
    assert wanted is None or same_bytes(outs[0], wanted)

    def cast_half(received, targets):
        cast_received(received, targets)
        raise KeyboardInterrupt

    monkeypatch.setattr("reshard.api.arrays.casts.cast_received", cast_half)
    handle = reshard.reshard_async(source, ROWS, COLS, dst_dtype="float64")
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    monkeypatch.setattr("reshard.api.arrays.casts.cast_received", cast_received)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="ended with KeyboardInterrupt, and left its result incomplete"):
            handle.wait()


def test_a_result_is_cast_once(monkeypatch):
    run_processes(_wait_twice, 5, monkeypatch)
