"""Transfers on streams, without a GPU: a thread replaces the stream, and a stand-in library replaces NCCL."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
import weakref
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.api.arrays.memory_in_use import check_unused
from reshard.api.mover import fail_transfers
from reshard.api.transfers import handle as handles
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.plan import expand_messages
from reshard.planner import plan_tensors
from reshard.runtime.transport import connections
from reshard.scheduler import Edge, Pipeline, Stage, auto_schedule, one_f_one_b
from reshard.scheduler.gradients.tied_params import TiedParameter, TiedParameters
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.testing.processes import run_processes
from tests.scheduler.runtime.test_engine import make_data, make_modules, make_pipeline, run_rank, single_process
from tests.support import stages_with_replicas as replicas
from tests.support.nccl.streams import BlockingStream, Mark, ThreadStream, use_streams
from tests.support.tensors import result_or_error, same_bytes, take_shard, whole_tensor

SHAPE = (48, 20)
SRC, DST = Layout(Mesh.of("2x2"), "S0 R"), Layout(Mesh.of("3", first_rank=3), "R S0")  # rank 3 is in both
RANKS = 6
CASTS = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float8_e4m3fn"), ("int32", "int64")]


STREAM_KINDS = pytest.mark.parametrize("stream", [ThreadStream, BlockingStream])


def _shards(rank):
    return (shard_of_positions(layout, rank, SHAPE, "float32") for layout in (SRC, DST))


def _call(rank):
    source, wanted = _shards(rank)
    for strategy in ("auto", "send_recv", "broadcast_greedy"):
        for _ in range(2):
            out = reshard.reshard_async(source, SRC, DST, shape=SHAPE, dtype="float32", strategy=strategy).synchronize()
            assert (out is None and wanted is None) or not count_unlike(out, wanted)


def test_calls_move_every_element(device):
    run_processes(_call, RANKS)


def _broadcast(rank):
    """Data for all other ranks: from one rank, and from each; in place, packed, and cast."""
    group = dist.new_group([0, 1, 2, 3])
    if rank > 3:
        return
    whole, all_ranks = whole_tensor(SHAPE, torch.float32), Layout(Mesh.of("4"), "R R")
    for src, dst in (
        (Layout(Mesh.of("1"), "R R"), Layout(Mesh.of("3", first_rank=1), "R R")),
        (Layout(Mesh.of("4"), "S0 R"), all_ranks),
        (Layout(Mesh.of("4"), "R S0"), all_ranks),
    ):
        plan = reshard.make_plan(src, dst, SHAPE, "float32", strategy="multicast")
        source, wanted = take_shard(src, rank, whole), take_shard(dst, rank, whole)
        with reshard.Mover(plan, group=group) as mover:
            for turn in range(3):
                out = None if wanted is None else torch.zeros(SHAPE[::-1]).t() if turn else torch.zeros(SHAPE)
                moved = mover.start(source, out=out).synchronize(60.0)
                assert wanted is None or (moved is out and torch.equal(out, wanted))
            assert mover._transfers.on_stream._runner.rounds[0].broadcasts
        out = reshard.reshard(source, src, dst, dst_dtype="bfloat16", strategy="multicast", group=group)
        assert wanted is None or torch.equal(out, wanted.bfloat16())
        dist.barrier(group)


@STREAM_KINDS
def test_data_for_all_ranks_is_broadcast(monkeypatch, standin, stream):
    use_streams(monkeypatch, standin, stream)
    run_processes(_broadcast, RANKS)


def _cast(rank):
    for src, dst in CASTS:
        whole = whole_tensor(SHAPE, getattr(torch, src))
        source, wanted = take_shard(SRC, rank, whole), take_shard(DST, rank, whole.to(getattr(torch, dst)))
        out = reshard.reshard(source, SRC, DST, dst_dtype=dst)
        assert (out is None and wanted is None) or same_bytes(out, wanted), (src, dst)


def test_elements_are_cast_during_the_transfer(device):
    run_processes(_cast, RANKS)


def _move(rank):
    source, wanted = _shards(rank)
    plan = reshard.make_plan(SRC, DST, SHAPE, "float32")
    with reshard.Mover(plan) as mover:
        held, communicator = mover.staging_allocated_bytes, mover._transfers.on_stream._exchange._communicator
        pairs = {(m.sender, m.receiver) for m in expand_messages(plan) if rank in (m.sender, m.receiver)}
        peers = {peer for pair in pairs for peer in pair} - {rank}
        assert communicator.nccl._library.standin_count_connected(communicator._comm) == len(peers)
        out = None if wanted is None else torch.zeros_like(wanted)
        for _ in range(3):
            handle = mover.start(source, out=out)
            assert handle.synchronize(60.0) is out
            assert handle.done()
            assert wanted is None or not count_unlike(out, wanted)
        mover(source, out=out)
        assert mover.staging_allocated_bytes == held <= plan.staging_bytes
        dist.barrier()  # a rank that exits looks like one that died
        return held


def test_mover_runs_repeatedly(device):
    assert max(run_processes(_move, RANKS)) > 0


def _too_little_staging(rank):
    """``check_plan`` accepts 64 bytes of staging for this plan, but the rounds of the plan need more."""
    plan = dataclasses.replace(reshard.make_plan(SRC, DST, SHAPE, "float32"), staging_bytes=64)
    reshard.check_plan(plan)
    source, wanted = _shards(rank)
    before = None if source is None else source.clone()
    try:
        reshard.Mover(plan)
    except reshard.errors.PlanError as error:
        assert before is None or torch.equal(before, source)
        out = reshard.reshard(source, SRC, DST, shape=SHAPE, dtype="float32")  # the group still works
        assert wanted is None or not count_unlike(out, wanted)
        return str(error)
    return ""


def test_plan_without_room_for_its_rounds_is_refused_on_every_rank(device):
    texts = run_processes(_too_little_staging, RANKS)
    assert len(set(texts)) == 1 and "staging_bytes is 64" in texts[0], texts


def _move_both_ways(rank):
    source, _ = _shards(rank)
    there, back = (
        reshard.Mover(reshard.make_plan(a, b, SHAPE, "float32"), both_ways=True) for a, b in ((SRC, DST), (DST, SRC))
    )
    assert there._transfers.on_stream._exchange is not back._transfers.on_stream._exchange
    for _ in range(3):
        returned = back.start(there(source))
        assert source is None or not count_unlike(returned.synchronize(60.0), source)


@STREAM_KINDS
def test_each_direction_has_its_own_communicator(monkeypatch, standin, stream):
    use_streams(monkeypatch, standin, stream)
    run_processes(_move_both_ways, RANKS)


class Never(Mark):
    def query(self):
        return False


class Broken(Mark):
    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _start_with(rank, kind):
    source, _ = _shards(rank)
    mover = reshard.Mover(reshard.make_plan(SRC, DST, SHAPE, "float32"))
    dist.barrier()  # all ranks are connected
    mover._transfers.timeout_seconds = 2.0 if kind is not None else 5.0  # only of transfers
    mover._transfers.on_stream.streams.mark_of = kind if rank == 4 and kind is not None else Never
    if rank == 4 and kind is None:
        mover._transfers.on_stream._exchange.find_error = lambda: "remote process exited"
    begun = time.monotonic()
    try:
        mover.start(source).synchronize()
    except reshard.ReshardError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return None


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (Never, "TransferTimeoutError", "did not finish in time: (all ranks have started it|it waits for)"),
        (Broken, "RemoteError", "rank 4: .*illegal memory"),
        (None, "RemoteError", "rank 4: ConnectionError: remote process exited"),
    ],
)
def test_device_that_fails_or_hangs_ends_the_transfer_on_all_ranks(device, kind, name, text):
    results = run_processes(_start_with, RANKS, kind)
    assert len({(name, text) for name, text, _ in results}) == 1
    assert results[0][0] == name
    assert re.search(text, results[0][1])
    assert max(took for *_, took in results) < 20


def _use_memory_of_a_transfer(rank):
    """A second Mover gets arrays of a transfer whose end the caller's stream does not wait for, and then does."""
    source, wanted = _shards(rank)
    plan, out = reshard.make_plan(SRC, DST, SHAPE, "float32"), None if wanted is None else torch.zeros_like(wanted)
    with reshard.Mover(plan) as one, reshard.Mover(plan) as other:
        one._transfers.on_stream.streams.mark_of = Never
        handle = one.start(source, out=out)
        check = lambda: check_unused([None], [out], [None], other._transfers.order)  # noqa: E731
        text = result_or_error(check)
        check_unused([source], [None], [None], other._transfers.order)  # both only read it
        check_unused([None], [out], [None], one._transfers.order)
        handle.wait()
        check()
        handles._unfinished.clear()  # this stream never ends
    return text


def test_out_of_an_unfinished_transfer_is_not_used_by_another(device):
    texts = run_processes(_use_memory_of_a_transfer, RANKS)
    assert texts[:3] == [None] * 3  # these ranks have no out
    assert all("out lies in memory that an unfinished transfer writes" in text for text in texts[3:])


def _drop_result(rank):
    """Drop a result and its handle before the monitor sees that the device has finished."""
    source, wanted = _shards(rank)
    with reshard.Mover(reshard.make_plan(SRC, DST, SHAPE, "float32")) as mover:
        mover._transfers.on_stream.streams.mark_of = Never
        handle = mover.start(source)
        result = handle.wait()
        assert wanted is None or (not count_unlike(result, wanted) and handle._state in handles._unfinished)
        reference = weakref.ref(source if result is None else result)
        del source, result, handle
        freed = reference() is None
        handles._unfinished.clear()  # this stream never ends
        return freed


def test_dropped_result_is_freed_at_once(device):
    assert run_processes(_drop_result, RANKS) == [True] * RANKS


def _start_fails(rank, kind):
    """The start of rank 4 raises; the other ranks have posted, and wait for the device."""
    source, _ = _shards(rank)
    mover = reshard.Mover(reshard.make_plan(SRC, DST, SHAPE, "float32"), timeout_seconds=30.0)
    dist.barrier()  # all ranks are connected
    mover._transfers.on_stream.streams.mark_of = Never
    if rank == 4:
        mover._transfers.on_stream.start = Mock(side_effect=kind("unexpected argument"))
    begun = time.monotonic()
    try:
        mover.start(source).synchronize()
    except reshard.ReshardError as error:
        return str(error), time.monotonic() - begun
    return None


@pytest.mark.parametrize("kind", [TypeError, ValueError, RuntimeError])
def test_start_that_fails_ends_the_transfer_on_all_ranks(device, kind):
    for text, seconds in run_processes(_start_fails, RANKS, kind):
        assert text == f"rank 4: {kind.__name__}: unexpected argument" and seconds < 20


def _connection_fails(rank):
    """NCCL cannot be used on rank 4; the other ranks wait for it."""
    if rank == 4:
        connections.make_communicator = Mock(side_effect=TypeError("unexpected argument"))
    try:
        reshard.Mover(reshard.make_plan(SRC, DST, SHAPE, "float32"), timeout_seconds=30.0)
    except reshard.ReshardError as error:
        return str(error)
    return None


def test_connection_that_fails_on_one_rank_fails_on_all(device):
    errors = set(run_processes(_connection_fails, RANKS))
    assert errors == {"rank 4: ConnectionError: cannot connect: unexpected argument"}


def _start_blocks(rank):
    """The start of rank 4 blocks, as NCCL does on a dead peer, until its monitor hears of the error of rank 2."""
    source, _ = _shards(rank)
    mover = reshard.Mover(reshard.make_plan(SRC, DST, SHAPE, "float32"), timeout_seconds=30.0)
    dist.barrier()  # all ranks are connected
    mover._transfers.on_stream.streams.mark_of = Never
    begun = time.monotonic()
    if rank == 4:

        def block(src, dst):
            while (
                mover._agreed.call_group.find_failure(mover._agreed.decision.generation) is None
                and time.monotonic() < begun + 20
            ):
                time.sleep(0.01)
            raise RuntimeError("aborted")

        mover._transfers.on_stream.start = block
    try:
        if rank == 2:
            time.sleep(0.5)
            raise fail_transfers(mover, reshard.errors.RemoteError("another stage failed"))
        mover.start(source).synchronize()
    except reshard.ReshardError as error:
        return str(error), time.monotonic() - begun
    return None


def test_transfer_is_watched_while_its_start_blocks(device):
    for text, seconds in run_processes(_start_blocks, RANKS):
        assert text == "rank 2: another stage failed" and seconds < 10


@pytest.mark.nightly
def test_engine_losses_and_gradients_equal_one_process(device):
    losses, grads = single_process(torch.float64, [4, 4, 2])
    for build in (auto_schedule, one_f_one_b):
        results = run_processes(run_rank, 3, build, [0, 1, 2], "float64", [4, 4, 2], 2)
        for stage, (steps, _) in enumerate(results):
            for step_losses, by_stage in steps:
                assert stage != 2 or step_losses == pytest.approx(losses, rel=1e-10)
                for key, grad in by_stage[stage].items():
                    torch.testing.assert_close(torch.from_numpy(grad), grads[stage][key], rtol=1e-10, atol=1e-12)


def _mark_that_breaks():
    """A mark of work that fails after 0.4 s, when all actions of a step have been started."""
    mark, begun = Mark(), time.monotonic()
    mark.query = lambda: time.monotonic() - begun > 0.4 and Broken().query()
    return mark


def _step_on_a_device_that_fails(rank):
    pipeline, modules = make_pipeline([0, 1, 2]), {rank: make_modules(torch.float64)[rank]}
    ((x, y),) = make_data(torch.float64, [4])
    with ScheduleEngine(one_f_one_b(pipeline, 2), pipeline, modules, timeout_seconds=20) as engine:
        if rank == 2:  # it sends the last gradients, for which no later action of it waits
            for mover in engine._program.transfers[0]._movers.values():
                mover._transfers.on_stream.streams.mark_of = _mark_that_breaks
        with contextlib.suppress(reshard.ReshardError):
            engine.step({0: [{"x": x}] * 2, 2: [{"target": y}] * 2})
        dist.barrier()  # the other ranks keep their connections
    return str(engine._error)


def test_step_returns_after_the_device_has_finished_its_transfers(device):
    assert "illegal memory access" in run_processes(_step_on_a_device_that_fails, 3)[2]


def _train_replicas(rank):
    """One step of a pipeline whose second stage has two replicas under DDP, with a buffer that they share."""
    pipeline, inner = replicas.make_pipeline(2), replicas.Last() if rank else replicas.First()
    inner.register_buffer("scale", torch.full((3,), float(rank)))
    schedule = one_f_one_b(pipeline, replicas.NUM)
    module = replicas.wrap(rank, 2, inner)
    modules = {int(rank > 0): module}
    with (
        ScheduleEngine(schedule, pipeline, modules, num_loss_shards=2, timeout_seconds=30) as engine,
        BlockingStream.host(),  # it blocks only if transfers run on such streams
    ):
        engine.step(replicas.feed(rank, 2))
    return replicas.gradients(inner), inner.scale.tolist()


@STREAM_KINDS
def test_replicas_sum_gradients_and_share_buffers_over_nccl(monkeypatch, standin, stream):
    use_streams(monkeypatch, standin, stream)
    wanted = replicas.single_process()
    for rank, (grads, buffer) in enumerate(run_processes(_train_replicas, 3)):
        replicas.check(grads, wanted[rank > 0])
        assert buffer == [float(rank > 0)] * 3


def _open_mover(spec):
    return reshard.Mover(plan_tensors([spec]), timeout_seconds=20, both_ways=True)


def _sum_tied_gradients(rank):
    """The device of rank 1 fails while two stages exchange the gradients of a tied parameter."""
    pipeline = Pipeline(tuple(Stage(1, 1, 1, mesh=Mesh([stage])) for stage in range(2)), (Edge(0, 1, 1, 1),))
    modules = {rank: torch.nn.Linear(2, 3, bias=False)}
    tie = TiedParameter({0: "weight", 1: "weight"}, (3, 2))
    ties = TiedParameters([tie], pipeline, modules, rank, _open_mover)
    ties.share_values()
    for mover in ties._ties[0].raw.values():
        mover._transfers.on_stream.streams.mark_of = Broken if rank == 1 else Never
    with pytest.raises(reshard.errors.RemoteError) as caught:
        ties.add_gradients()
    return str(caught.value)


def test_tied_gradients_that_fail_on_the_device_fail_on_all_ranks(device):
    for text in run_processes(_sum_tied_gradients, 2):
        assert re.search("rank 1: .*illegal memory", text)


def _refuse_in_capture(rank):
    """Calls during the capture of a graph that cannot be captured. Nothing may end the connections of the group."""
    source, wanted = _shards(rank)
    wide = None if source is None else torch.ones(24, 1536)
    plan = reshard.make_plan(SRC, DST, SHAPE, "float32")
    encoded = reshard.make_plan(SRC, DST, (48, 1536), "float32", compression="int8x128")
    with reshard.Mover(plan) as mover, reshard.Mover(encoded) as coding:
        mover(source)
        runner, texts = mover._transfers.on_stream._runner, []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.cuda, "is_initialized", lambda: True)
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            patched.setattr(
                runner, "run", Mock(side_effect=reshard.errors.ArgumentError("these arrays were not moved"))
            )
            patched.setattr(ThreadStream, "enqueue", lambda self, work, arrays: work())
            for call in (
                lambda: mover.start(source),
                lambda: coding.start(wide),
                lambda: reshard.reshard(source, SRC, DST, shape=SHAPE, dtype="float32"),
                lambda: reshard.Mover(plan),
            ):
                with pytest.raises(reshard.errors.ArgumentError) as caught:
                    call()
                texts.append(str(caught.value))
        out, ones = mover.start(source).synchronize(), coding.start(wide).synchronize()
        assert wanted is None or not count_unlike(out, wanted)
        assert ones is None or (ones == 1).all()
    return texts


def test_refused_captures_leave_the_group_usable(device):
    for texts in run_processes(_refuse_in_capture, RANKS):
        for text, words in zip(
            texts, ("not moved", "encoded tensors", "a call of reshard", "make it before"), strict=True
        ):
            assert words in text
