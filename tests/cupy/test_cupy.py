"""Test the CuPy Mover with a stand-in for CuPy and NCCL."""

from __future__ import annotations

import importlib.util
import inspect
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import reshard.cupy
from reshard import Layout, Mesh, RegionLayout, Topology, make_plan
from reshard.cupy import cupy_mover
from reshard.errors import ArgumentError, DisagreementError, PlanError
from reshard.runtime.rounds.deadlock_check import check_calls
from tests.support.fake_cupy import NCCL, Communicator, Event, Hub, make_module, run_ranks
from tests.support.tensors import take_shard

HAS_CUPY = importlib.util.find_spec("cupy") is not None
HOSTS = Topology((0, 0, 1, 1, 2, 2))
SRC = Layout(Mesh.of("2x2"), "R S1")
DST = Layout(Mesh.of("2x2", first_rank=2), "S0 S1")  # ranks 2 and 3 are in both


@pytest.fixture(autouse=True)
def _cupy(monkeypatch):
    for name, module in make_module().items():
        monkeypatch.setitem(sys.modules, name, module)


def on_device(array):
    """A fake CuPy array; None as it is."""
    return None if array is None else sys.modules["cupy"].asarray(array)


def whole(shape, dtype):
    return np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)


def run_plan(plan, wholes, size=6, outs=None):
    """Run a plan on all ranks twice: with allocated destinations, then with ``outs``."""
    calls = {}

    def one(comm):
        mover = reshard.cupy.Mover(plan, comm)
        rank = comm.rank_id()

        def shards(side):
            named = {
                spec.name: on_device(take_shard(getattr(spec, side), rank, wholes[spec.name])) for spec in plan.tensors
            }
            return named.get(None, named)

        source = shards("src")
        before = {name: None if x is None else x.copy() for name, x in named_items(source)}
        got = mover(source)
        handle = mover.start(source, out=outs and outs(shards("dst")))
        assert handle.done()
        again = handle.synchronize()
        for name, want in named_items(shards("dst")):
            for result in (got, again):
                found = result[name] if isinstance(result, dict) else result
                assert (found is None) == (want is None)
                if want is not None:
                    assert found.dtype == want.dtype
                    np.testing.assert_array_equal(found, want)
        for name, array in named_items(source):
            assert array is None or np.array_equal(array, before[name])
        assert mover.staging_allocated_bytes <= plan.staging_bytes
        calls[rank] = comm.groups
        return "done"

    for result in run_ranks(size, one):
        assert result == "done", repr(result)
    check_calls(calls)


def named_items(value):
    return value.items() if isinstance(value, dict) else [(None, value)]


@pytest.mark.parametrize("strategy", ["multicast", "send_recv", "broadcast_greedy", "local_all_gather"])
@pytest.mark.parametrize(("shape", "dtype"), [((7, 9), "float32"), ((64, 96), "int16"), ((3, 5, 4), "complex128")])
def test_mover_delivers_every_element(strategy, shape, dtype):
    run_plan(make_plan(SRC, DST, shape, dtype, strategy=strategy, topology=HOSTS), {None: whole(shape, dtype)})


def test_strided_outs_and_scalars_are_delivered_beside_ranks_outside_the_plan():
    plan = make_plan(SRC, DST, (6, 10), "float64", topology=HOSTS)

    def strided(shard):
        return None if shard is None else on_device(np.zeros(shard.shape[::-1])).T

    run_plan(plan, {None: whole((6, 10), "float64")}, size=8, outs=strided)
    scalar = make_plan(Layout(Mesh([0])), Layout(Mesh([1, 2])), (), "uint8", topology=HOSTS)
    run_plan(scalar, {None: np.array(200, dtype=np.uint8)}, size=3)


def test_several_tensors_with_irregular_regions_are_delivered():
    fused = RegionLayout({4: [[(0, 2), (0, 3)], [(4, 6), (0, 3)]], 5: [[(2, 4), (0, 3)]]})
    src = {"a": SRC, "b": Layout(Mesh.of("2"), "S0")}
    plan = make_plan(src, {"a": DST, "b": fused}, {"a": (4, 4), "b": (6, 3)}, "float32", topology=HOSTS)
    run_plan(plan, {"a": whole((4, 4), "float32"), "b": whole((6, 3), "float32")})


def _results(function, size=6):
    return run_ranks(size, function)


def test_wrong_plan_is_an_error_on_every_rank():
    plan = make_plan(SRC, DST, (6, 10), "float64", topology=HOSTS)
    other = make_plan(SRC, DST, (6, 12), "float64", topology=HOSTS)
    for error in _results(lambda comm: reshard.cupy.Mover(other if comm.rank_id() == 4 else plan, comm)):
        assert isinstance(error, DisagreementError)
        assert "the plan of ranks 4 differs from that of rank 0" in str(error)
    for error in _results(lambda comm: reshard.cupy.Mover(plan, comm), size=5):
        assert isinstance(error, ArgumentError)
        assert "names rank 5; the communicator has 5 ranks" in str(error)
    tight = replace(make_plan(SRC, DST, (64, 96), "float64", topology=HOSTS), staging_bytes=64)
    for error in _results(lambda comm: reshard.cupy.Mover(tight, comm)):
        assert isinstance(error, PlanError)


@pytest.mark.parametrize("place", ["plan", "arrays"])
def test_interrupt_of_one_rank_before_the_ranks_compare_is_an_error_on_every_rank(monkeypatch, place):
    plan = make_plan(SRC, DST, (6, 10), "float64", topology=HOSTS)
    check, read = cupy_mover.ensure_checked, reshard.cupy.Mover._arrays
    interrupted = threading.local()

    def interrupt_plan(plan):
        if interrupted.place == "plan":
            raise KeyboardInterrupt
        check(plan)

    def interrupt_arrays(mover, *arrays):
        if interrupted.place == "arrays":
            raise KeyboardInterrupt
        return read(mover, *arrays)

    monkeypatch.setattr(cupy_mover, "ensure_checked", interrupt_plan)
    monkeypatch.setattr(reshard.cupy.Mover, "_arrays", interrupt_arrays)

    def one(comm):
        interrupted.place = place if comm.rank_id() == 1 else None
        mover = reshard.cupy.Mover(plan, comm)
        return mover.start(on_device(take_shard(SRC, comm.rank_id(), whole((6, 10), "float64"))))

    for rank, error in enumerate(_results(one)):
        if rank == 1:
            assert isinstance(error, KeyboardInterrupt)
        else:
            assert isinstance(error, PlanError if place == "plan" else ArgumentError)
            assert str(error).startswith("ranks 1 ")


def test_interrupt_while_other_ranks_are_late_ends_the_wait_for_them(monkeypatch):
    """NCCL gathers in the order of the stream, so the host waits for an event."""
    monkeypatch.setattr(Communicator, "allGather", lambda *_, **__: None)
    monkeypatch.setattr(Event, "done", property(lambda _: signal.raise_signal(signal.SIGINT)))
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([1])), (8,), "int8")
    with pytest.raises(KeyboardInterrupt):
        reshard.cupy.Mover(plan, Communicator(Hub(2), 0))


def test_interrupt_as_a_group_of_messages_begins_ends_the_group(monkeypatch):
    nccl, begin, end, ended = sys.modules["cupy.cuda.nccl"], NCCL.groupStart, NCCL.groupEnd, []

    def begin_and_raise():
        begin()
        raise KeyboardInterrupt

    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([0, 1])), (8,), "int8")
    (mover, _) = run_ranks(2, lambda comm: reshard.cupy.Mover(plan, comm))
    monkeypatch.setattr(nccl, "groupStart", begin_and_raise)
    monkeypatch.setattr(nccl, "groupEnd", lambda: ended.append(end()))
    with pytest.raises(KeyboardInterrupt):
        mover.start(on_device(np.zeros(8, np.int8)))
    assert ended == [None]


def test_arrays_that_do_not_fit_are_rejected():
    plan = make_plan(SRC, DST, (6, 10), "float64", topology=HOSTS)

    def one(comm):
        mover = reshard.cupy.Mover(plan, comm)
        source = on_device(take_shard(SRC, comm.rank_id(), whole((6, 10), "float64")))
        wrong = {
            0: (None, None, "is in the source layout, but passes None"),
            1: (source if source is None else source.astype("float32"), None, "passes float32"),
            2: (source, source, "but its shard in the destination is float64"),
            3: ([1.0], None, "passes list"),
            4: (on_device(np.zeros((3, 5))), None, "is not in the source layout"),
            5: (None, {"a": None}, "without a name: give the tensor itself"),
        }[comm.rank_id()]
        with pytest.raises(ArgumentError, match=wrong[2]):
            mover.start(wrong[0], out=wrong[1])
        out, text = None, "ranks 2 pass arrays that do not fit this plan"
        if comm.rank_id() == 2:
            shared = on_device(np.zeros((6, 15)))
            source, out, text = shared[:, :5], shared[:3, :5], "out shares memory with a source"
        with pytest.raises(ArgumentError, match=text):
            mover.start(source, out=out)
        return "refused"

    assert _results(one) == ["refused"] * 6


def test_arrays_on_another_device_than_the_communicator_are_refused_on_all_ranks():
    """In the first call no rank sends a byte of the transfer; later, a rank refuses only its own arrays."""
    cupy = sys.modules["cupy"]
    plan = make_plan(SRC, DST, (6, 10), "float64")

    def one(comm):
        rank, comm.device = comm.rank_id(), 1
        mover = reshard.cupy.Mover(plan, comm)
        text = "ranks 1,3 pass arrays that do not fit this plan"
        if rank in (1, 3):
            text = f"the tensor: rank {rank} passes an array on device 0, but .* is on device 1; .* must be on"
        # The current device is 0.
        here, out = (on_device(take_shard(layout, rank, whole((6, 10), "float64"))) for layout in (SRC, DST))
        with cupy.cuda.Device(1):
            source = on_device(take_shard(SRC, rank, whole((6, 10), "float64")))
        num_groups = len(comm.groups)
        with pytest.raises(ArgumentError, match=text):
            mover.start(here if rank == 1 else source, out=out if rank == 3 else None)
        sizes = [size for group in comm.groups[num_groups:] for *_, size in group]
        assert sizes == ([1, 6] if rank else [1] * 5 + [6] * 5)
        moved = mover(source)
        assert moved is None or moved.device.id == 1
        if rank == 1:
            with pytest.raises(ArgumentError, match="passes an array on device 0"):
                mover.start(here)
        return cupy.cuda.Device.current()

    assert _results(one) == [0] * 6


@pytest.mark.parametrize("error", [TypeError, ValueError])
@pytest.mark.parametrize(("dtype", "carrier"), [("bfloat16", "uint16"), ("float8_e4m3fn", "uint8")])
def test_dtypes_that_cupy_lacks_are_sent_as_unsigned_integers(monkeypatch, dtype, carrier, error):
    """NumPy raises TypeError for a dtype that it does not know. CuPy raises ValueError for one of ml_dtypes."""
    cupy = sys.modules["cupy"]
    empty = cupy.empty

    def make(shape, dtype=float):
        if str(dtype) not in ("uint8", "uint16", "<class 'numpy.uint8'>"):
            raise error(f"Unsupported dtype {dtype}")
        return empty(shape, dtype)

    monkeypatch.setattr(cupy, "empty", make)
    run_plan(make_plan(SRC, DST, (6, 8), dtype), {None: whole((6, 8), carrier)})


def test_the_first_error_of_a_round_is_not_masked(monkeypatch):
    """After a failed send, ``groupEnd`` fails too. The mover raises the error of the send."""
    plan = make_plan(SRC, DST, (6, 8), "float32")
    nccl, at_work = sys.modules["cupy.cuda.nccl"], threading.Barrier(6)

    def one(comm):
        mover = reshard.cupy.Mover(plan, comm)

        source = on_device(take_shard(SRC, comm.rank_id(), whole((6, 8), "float32")))
        mover.start(source)
        at_work.wait(10.0)  # all ranks have moved once
        monkeypatch.setattr(nccl, "groupEnd", lambda: (_ for _ in ()).throw(RuntimeError("the group failed")))

        def refuse(*_):
            raise ValueError("a wrong peer")

        comm.send = comm.recv = refuse
        if comm.rank_id() == 0:
            with pytest.raises(ValueError, match="a wrong peer"):
                mover.start(source)
        return "done"

    assert run_ranks(6, one) == ["done"] * 6


def test_staging_is_allocated_on_the_stream_that_uses_it(monkeypatch):
    """CuPy gives freed memory to other arrays of the same stream, without waiting for other streams."""
    cupy, entered, on = sys.modules["cupy"], [], []
    monkeypatch.setattr(cupy.cuda.Stream, "__enter__", lambda stream: entered.append(stream) or stream)
    monkeypatch.setattr(cupy.cuda.Stream, "__exit__", lambda *_: entered.pop())
    empty = cupy.empty
    monkeypatch.setattr(cupy, "empty", lambda *args, **options: on.append(list(entered)) or empty(*args, **options))
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([0])), (8,), "int8")
    (mover,) = run_ranks(1, lambda comm: reshard.cupy.Mover(plan, comm))
    assert on[0] == [mover._stream]


def test_cupy_without_nccl_is_rejected(monkeypatch):
    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", False, raising=False)
    with pytest.raises(ArgumentError, match="built without NCCL"):
        reshard.cupy.Mover(make_plan(SRC, DST, (6, 8), "float32"), None)


@pytest.mark.skipif(not HAS_CUPY, reason="CuPy is not installed")
def test_fake_has_the_signatures_of_cupy():
    """CuPy is imported in another process: if this one initialized CUDA, its forks could not use it."""
    names = ("rank_id", "size", "device_id", "allGather", "send", "recv")
    code = f"""from cupy.cuda import nccl
print(nccl.NCCL_UINT8, *(getattr(nccl.NcclCommunicator, name).__doc__.splitlines()[0] for name in {names}), sep="\\n")"""
    kind, *given = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split("\n")[:-1]
    assert int(kind) == sys.modules["cupy.cuda.nccl"].NCCL_UINT8
    for name, line in zip(names, given, strict=True):
        real = [part.split()[-1] for part in line[line.index("(") + 1 : line.rindex(")")].split(",")]
        assert list(inspect.signature(getattr(Communicator, name)).parameters) == real
