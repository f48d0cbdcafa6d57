"""Arrays of unfinished transfers are neither sent nor overwritten."""

from __future__ import annotations

import time

import pytest
import torch

import reshard
from reshard import Layout, Mesh
from reshard.coordination import Monitor
from reshard.testing.processes import run_processes
from tests.support.tensors import result_or_error, whole_tensor

ROWS, COLS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
WHOLE = whole_tensor((8, 6), torch.float32)


def _use_memory_of_a_transfer(rank):
    """Rank 0 uses the arrays of a transfer that cannot end, because rank 1 has not started it."""
    source, out = WHOLE[4 * rank : 4 * rank + 4].clone(), torch.full((8, 3), -1.0)
    with reshard.Mover(reshard.make_plan(ROWS, COLS, (8, 6), "float32")) as mover:
        if rank == 0:
            handle = mover.start(source, out=out)
        texts = [result_or_error(lambda: reshard.reshard(out, COLS, ROWS))]
        texts.append(result_or_error(lambda: reshard.reshard(out.clone(), COLS, ROWS, out=source)))
        reshard.reshard(source, ROWS, COLS)  # both transfers only read it
        if rank == 1:
            handle = mover.start(source, out=out)
        mover.start(source, out=out)  # transfers of one Mover run in order
        assert torch.equal(handle.wait(), WHOLE[:, 3 * rank : 3 * rank + 3])
        assert torch.equal(mover(source, out=out), out)
    assert torch.equal(reshard.reshard(out, COLS, ROWS), source)
    return texts


def test_memory_of_an_unfinished_transfer_is_not_used_again():
    source, out = run_processes(_use_memory_of_a_transfer, 2)[1]
    assert "rank 0: the source lies in memory that an unfinished transfer writes" in source
    assert "rank 0: out lies in memory that an unfinished transfer reads" in out


CASTS = {"dst_dtype": "float64"}
CODES = {"compression": "int8x128"}
LOSSLESS = {"compression": "bf16-lossless"}
RECOVERS = {"on_loss": "recover"}


def _use_result_before_wait(rank, options):
    """The transfer has ended, but ``wait`` has not been called, so ``out`` is not the result yet."""
    dtype = torch.bfloat16 if options is LOSSLESS else torch.float32
    source = torch.full((4, 2048), rank + 1.0, dtype=dtype)
    source[:, 1024:] += 4  # equal shards would warn
    out = torch.full((8, 1024), -1.0, dtype=torch.float64 if options is CASTS else dtype)
    handle = reshard.reshard_async(source, ROWS, COLS, out=out, **options)
    while not handle.done():
        pass
    texts = [result_or_error(lambda: reshard.reshard(out, COLS, ROWS))]
    texts.append(result_or_error(lambda: reshard.reshard(source.to(out.dtype), ROWS, COLS, out=out)))
    if options is RECOVERS:  # a recovery sends from the source again
        texts.append(result_or_error(lambda: reshard.reshard(out.clone(), COLS, ROWS, out=source)))
    assert handle.wait() is out
    back = reshard.reshard(out, COLS, ROWS)
    assert torch.allclose(back.float(), source.float(), rtol=0.01)
    handle = reshard.reshard_async(source, ROWS, COLS, out=out, **options)
    if options is RECOVERS:
        handle.wait()
    while not handle.done():
        pass
    del handle  # nobody waits, so nothing is written any more
    reshard.reshard(back, ROWS, COLS, out=out)
    assert torch.equal(reshard.reshard(out, COLS, ROWS), back)
    return texts


@pytest.mark.parametrize("options", [CASTS, CODES, LOSSLESS, RECOVERS], ids=lambda one: next(iter(one)))
def test_a_result_is_not_used_before_wait(options):
    for texts in run_processes(_use_result_before_wait, 2, options):
        assert "the source lies in memory that an unfinished transfer writes: call wait()" in texts[0]
        assert "out lies in memory that an unfinished transfer writes: call wait()" in texts[1]
        assert all("out lies in memory that an unfinished transfer reads" in text for text in texts[2:])


def _drop_a_handle_while_its_thread_is_slow(rank):
    source, out = torch.full((4, 4), rank + 1.0), torch.zeros(8, 2, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patched:
        forget = Monitor.forget
        patched.setattr(Monitor, "forget", lambda self, handle: (forget(self, handle), time.sleep(0.3)))
        handle = reshard.reshard_async(source, ROWS, COLS, out=out, dst_dtype="float64")
        while not handle.done():
            time.sleep(0.001)
        del handle
        return reshard.reshard(source, ROWS, COLS, out=out, dst_dtype="float64").tolist()


def test_a_dropped_handle_that_is_done_frees_its_result_at_once():
    assert run_processes(_drop_a_handle_while_its_thread_is_slow, 2) == [[[1.0] * 2] * 4 + [[2.0] * 2] * 4] * 2


def _start_twice(rank):
    """Two encoded transfers of one Mover into the same array: waits in another order would leave the older values."""
    plan = reshard.make_plan(ROWS, COLS, (8, 2048), "float32", compression="int8x128")
    source, out = torch.ones(4, 2048), torch.zeros(8, 1024)
    with reshard.Mover(plan) as mover:
        handle = mover.start(source, out=out)
        while not handle.done():
            pass
        return result_or_error(lambda: mover.start(-source, out=out).wait())  # the other rank may report it first


def test_a_mover_does_not_decode_two_transfers_into_one_array():
    for text in run_processes(_start_twice, 2):
        assert "out lies in memory that an unfinished transfer writes" in text


def _use_a_result_as_base_before_wait(rank):
    old, new = torch.full((4, 2048), 1.0, dtype=torch.bfloat16), torch.full((4, 2048), 2.0, dtype=torch.bfloat16)
    shard, result = torch.empty_like(old), reshard.reshard(old, ROWS, COLS)
    handle = reshard.reshard_async(result, COLS, ROWS, out=shard, compression="bf16-lossless")
    while not handle.done():
        pass
    options = {"compression": "delta", "base": shard, "out": result.clone()}
    refused = result_or_error(lambda: reshard.reshard(new, ROWS, COLS, **options))
    handle.wait()
    assert torch.equal(reshard.reshard(new, ROWS, COLS, **options), torch.full((8, 1024), 2.0, dtype=torch.bfloat16))
    return refused


def test_a_result_is_not_the_base_of_differences_before_wait():
    for refused in run_processes(_use_a_result_as_base_before_wait, 2):
        assert "the base lies in memory that an unfinished transfer writes: call wait()" in refused
