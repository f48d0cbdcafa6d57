"""Rules of the code for CUDA devices that need no GPU to be tested: captures, devices, tables and warnings."""

from __future__ import annotations

import contextlib
import queue
import weakref
from datetime import timedelta
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from reshard import Layout, Mesh, make_plan
from reshard.api.arrays.tensor_checks import check_movable
from reshard.api.transfers import handle
from reshard.coordination.liveness import heartbeat
from reshard.errors import ArgumentError
from reshard.runtime import build_program
from reshard.runtime.cpu.staging import TorchMemory
from reshard.runtime.cuda import nccl_exchange, stream
from reshard.runtime.cuda.nccl_exchange import NcclCollectives
from reshard.runtime.rounds import runner as rounds_runner
from reshard.runtime.rounds.device_interfaces import ONE_STREAM
from reshard.runtime.rounds.round_assignment import find_rounds, rounds_of
from reshard.runtime.rounds.runner import RoundRunner
from reshard.runtime.transport import Connections
from tests.support.memory_transport import PythonCopier

CPU = torch.device("cpu")
SRC, DST = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2), "R S0")
HALVES = (slice(0, 24), slice(24, 48))
#: Texts of CUDA's errors of its capture modes: 900, 901 and 906.
CAPTURE_ERRORS = [
    "CUDA error: operation not permitted when stream is capturing",
    "CUDA error: operation failed due to a previous error during capture",
    "CUDA error: operation would make the legacy stream depend on a capturing blocking stream",
]


def _make_runner(staging_bytes=None):
    plan = make_plan(SRC, DST, (64, 48), "uint8")
    return RoundRunner(build_program(plan, 0), find_rounds(plan), TorchMemory(CPU), [1], PythonCopier(), staging_bytes)


def _sent(runner, source):
    """The bytes that rank 0 sends in each round."""
    found = []
    runner.run([source], [None], lambda _, sends, __: found.extend(bytes(part.numpy()) for part, _ in sends))
    return found


def test_tables_for_other_alignments_stay_within_staging_bytes(monkeypatch):
    """Arrays at addresses of five alignments need five tables. If these do not fit, boxes are copied one by one."""
    monkeypatch.setattr(rounds_runner, "MAX_KINDS", 1)
    least = _make_runner()
    tight = _make_runner(least.nbytes + least.table_bytes - 1)
    assert 0 < tight.nbytes + tight.table_bytes < least.nbytes + least.table_bytes
    runner = _make_runner(least.nbytes + 3 * least.table_bytes)
    whole = np.arange(32 * 48, dtype=np.uint8)
    flat = np.zeros(len(whole) + 32, dtype=np.uint8)
    first = -flat.ctypes.data % 16
    for offset in (0, 1, 2, 4, 8, 1):
        part = flat[first + offset :][: len(whole)]
        part[:] = whole
        sent = _sent(runner, torch.from_numpy(part).view(32, 48))
        assert [item for item in sent if item] == [whole.reshape(32, 48)[:, half].tobytes() for half in HALVES]
        assert runner.allocated_bytes <= least.nbytes + 3 * least.table_bytes
    with_tables = [any(step.has_tables for step in steps) for steps in runner._steps.values()]
    assert with_tables.count(True) < 5 and with_tables.count(False) == 1  # other lists without tables were dropped


class _Stream:
    """A stream that records the arrays that it reports to the allocator."""

    rounds = ONE_STREAM

    def enqueue(self, work, arrays):
        self.arrays = arrays
        work()
        return object()


def test_allocator_knows_that_the_stream_uses_the_buffer():
    runner, on = _make_runner(), _Stream()
    source = torch.zeros(32, 48, dtype=torch.uint8)
    stream.StreamRunner(runner, lambda recvs, sends, broadcasts: None, on).start([source], [None])
    assert {array.data_ptr() for array in on.arrays} == {source.data_ptr(), runner.buffer().data_ptr()}


@pytest.fixture
def cuda_streams(monkeypatch):
    """Replace the caller's current stream and the stream of transfers. Returns both, and a list of their waits."""
    caller, own, waits = Mock(), Mock(), []
    for item in (caller, own):
        item.wait_stream.side_effect = lambda other, item=item: waits.append((item, other))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: caller)
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    return caller, own, waits


def test_transfers_start_after_the_upload_of_their_tables(cuda_streams):
    """The upload runs on the stream that is current when the Mover is made, and not when a transfer starts."""
    caller, own, waits = cuda_streams
    stream.StreamRunner(_make_runner(), lambda recvs, sends, broadcasts: None, stream.CudaTransferStream(CPU))
    assert waits == [(own, caller)]


@pytest.mark.parametrize("fails", [False, True])
def test_error_during_a_capture_leaves_no_stream_in_it(cuda_streams, monkeypatch, fails):
    """A stream left in the capture would raise an error at the end of the capture, which would hide the first error."""
    caller, own, waits = cuda_streams
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    streams, work = (
        stream.CudaTransferStream(CPU),
        Mock(side_effect=ArgumentError("not moved before") if fails else None),
    )
    with pytest.raises(ArgumentError) if fails else contextlib.nullcontext():
        assert streams.enqueue(work, []) is None
    assert waits == [(own, caller), (caller, own)][: 1 + fails]


def test_thread_that_aborts_lets_another_thread_capture(monkeypatch):
    """The aborting thread sets its own device, and a capture mode in which freeing memory invalidates no capture."""
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or contextlib.nullcontext())
    monkeypatch.setattr(nccl_exchange, "allow_queries_during_capture", lambda: entered.append("relaxed"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(nccl_exchange, "find_library", Mock())
    monkeypatch.setattr(nccl_exchange, "Communicator", lambda *_, in_thread, **__: in_thread)
    for device, index in (("cuda", 3), ("cuda:1", 1)):
        store = Mock(get=lambda _: b"id")
        in_thread = nccl_exchange.make_communicator(store, 1, 2, torch.device(device), 1.0, Mock())
        assert entered == [index]
        with in_thread():
            assert entered == [index, "relaxed", index]
        entered.clear()


def test_blocking_communicators_are_refused(monkeypatch):
    """NCCL_COMM_BLOCKING overrides the configuration of a new communicator."""
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    store = Mock()
    with pytest.raises(RuntimeError, match="NCCL_COMM_BLOCKING=1 makes calls of NCCL block without a limit"):
        nccl_exchange.make_communicator(store, 0, 2, CPU, 1.0, Mock())
    assert not store.set.called


def test_rank_that_waits_for_the_id_of_a_communicator_hears_of_errors(monkeypatch):
    """A blocking read of a ``TCPStore`` would block all users of its connection, such as heartbeats, until the time-out."""
    monkeypatch.setattr(nccl_exchange, "find_library", Mock())
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=5))
    with pytest.raises(ValueError, match="rank 0 failed"):
        Connections(store, 1, (0, 1)).exchange(CPU, 0, 5.0, Mock(side_effect=ValueError("rank 0 failed")))


def test_monitor_asks_for_its_capture_mode_until_it_is_changed(monkeypatch):
    """The monitor queries events. In the default capture mode, this would invalidate a capture of another thread."""
    done, answers = [], [False, True]
    monkeypatch.setattr(heartbeat, "allow_queries_during_capture", lambda: done.append("ask") or answers.pop(0))
    monitors = iter([Mock(poll=lambda: done.append("poll") or 0.0)] * 6 + [None])  # two for each turn
    heartbeat._run(lambda: next(monitors), queue.SimpleQueue())
    assert done == ["ask", "poll", "ask", "poll", "poll"]


def test_unfinished_transfers_are_awaited_at_exit(monkeypatch):
    at_exit, unfinished = Mock(), set()
    monkeypatch.setattr(handle, "call_at_exit", at_exit)
    monkeypatch.setattr(handle, "_unfinished", unfinished)
    one = handle.StreamTransferState(Mock(num_started=0), 0, Mock(), 0.0)
    one.begin_at(Mock())
    assert at_exit.call_args.args == (handle._finish_streams,) and unfinished == {one}


def test_process_exit_waits_for_all_transfers_under_one_deadline(monkeypatch):
    waited = []
    watches = [Mock(finish=waited.append) for _ in range(3)]
    monkeypatch.setattr(handle, "time", Mock(monotonic=lambda: 100 + 2 * len(waited)))  # each wait takes 2 s
    monkeypatch.setattr(handle, "EXIT_SECONDS", 3)
    monkeypatch.setattr(handle, "_unfinished", set(watches))
    handle._finish_streams()
    assert waited == [3, 1, 0]


@pytest.mark.parametrize("fails", ["time", "a rank", "NCCL"])
def test_ranks_that_do_not_connect_are_awaited_until_the_deadline(monkeypatch, fails):
    streams = Mock(enqueue=lambda work, arrays: work() or Mock(query=lambda: False))
    monkeypatch.setitem(stream.STREAMS, "cpu", lambda device: streams)
    communicator = Mock(find_error=lambda: "the connection broke" if fails == "NCCL" else None)
    poll = Mock(side_effect=ValueError("rank 1 failed") if fails == "a rank" else [None] * 9 + [AssertionError("late")])
    plan = make_plan(SRC, DST, (64, 48), "uint8")
    rounds = rounds_of(build_program(plan, 0), find_rounds(plan))
    error, text = {
        "time": (TimeoutError, "did not connect over NCCL within 0.3 s"),
        "a rank": (ValueError, "rank 1 failed"),
        "NCCL": (RuntimeError, "the connection broke"),
    }[fails]
    exchange = nccl_exchange.NcclExchange(communicator, {rank: rank for rank in range(4)}, CPU)
    with pytest.raises(error, match=text):
        exchange.connect(0, rounds, 0.3 if fails == "time" else 60.0, poll)
    sent = [(nbytes, peer) for call in communicator.exchange.call_args_list for _, nbytes, peer in call.args[1]]
    assert sorted(sent) == [(1, 2), (1, 3)]  # one byte to each receiver


class _Capture:
    """A stream that a CUDA graph captures: it enqueues work and has no mark."""

    rounds = ONE_STREAM

    def enqueue(self, work, arrays):
        work()

    def join(self):
        pass


def test_buffers_of_a_captured_transfer_are_never_freed():
    runner = _make_runner()
    transfers = stream.StreamRunner(runner, lambda recvs, sends, broadcasts: None, _Capture())
    assert transfers.start([torch.zeros(32, 48, dtype=torch.uint8)], [None]) is None
    held = runner.allocated_bytes
    runner.release()  # as a later call with another plan does
    assert runner.allocated_bytes == held > 0
    reference = weakref.ref(runner)
    del runner, transfers  # as when the program drops the Mover
    assert reference() is not None
    stream._captured.discard(reference())


def test_addresses_that_a_graph_captured_are_kept_and_new_ones_are_refused_in_a_capture(monkeypatch):
    kernel = pytest.importorskip("reshard.runtime.cuda.pack_kernel", reason="triton is not installed")
    copier = kernel.RegionCopier(CPU)
    first = copier.find_addresses((1, 2))
    monkeypatch.setattr(copier, "_is_capturing", lambda: True)
    assert copier.find_addresses((1, 2)) is first
    with pytest.raises(ArgumentError, match="call the Mover with them once first"):
        copier.find_addresses((3,))
    monkeypatch.setattr(copier, "_is_capturing", lambda: False)
    for address in range(2 * kernel.MAX_ADDRESS_TABLES):
        assert copier.find_addresses((10, address)).tolist() == [10, address]
    assert copier.find_addresses((1, 2)) is first
    assert len(copier._addresses) == kernel.MAX_ADDRESS_TABLES + 1


class _Library:
    """A CUDA library with one function, which returns ``status``."""

    def __init__(self, function, status=0):
        self.modes = []
        setattr(self, function, lambda pointer: self.modes.append(pointer._obj.value) or status)


@pytest.fixture
def load(monkeypatch):
    """Pretend that this process has initialized CUDA, and that only the given libraries can be loaded."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def provide(libraries):
        def open_library(name):
            if name not in libraries:
                raise OSError(f"{name}: cannot open shared object file")
            return libraries[name]

        monkeypatch.setattr(stream.ctypes, "CDLL", open_library)
        stream._find_mode_exchange.cache_clear()

    yield provide
    stream._find_mode_exchange.cache_clear()


def test_capture_mode_is_changed_by_the_runtime_or_else_by_the_driver(load):
    runtime, driver = (_Library(f"{prefix}ThreadExchangeStreamCaptureMode") for prefix in ("cuda", "cu"))
    load({"libcudart.so.12": runtime, "libcuda.so.1": driver})
    assert stream.allow_queries_during_capture()
    assert (runtime.modes, driver.modes) == ([2], [])
    load({"libcuda.so.1": driver})
    assert stream.allow_queries_during_capture()
    assert driver.modes == [2]


def test_queries_are_not_allowed_if_the_capture_mode_cannot_be_changed(load, recwarn):
    load({"libcuda.so.1": _Library("cuThreadExchangeStreamCaptureMode", status=3)})
    assert not stream.allow_queries_during_capture()
    assert not recwarn
    load({})
    assert not stream.allow_queries_during_capture()
    assert not stream.allow_queries_during_capture()
    assert [str(item.message) for item in recwarn] == [
        "neither libcudart nor libcuda.so.1 can be loaded, so polling for the end of transfers invalidates graph "
        'captures of other threads: capture with torch.cuda.graph(..., capture_error_mode="thread_local")'
    ]


def test_capture_mode_is_changed_once_cuda_is_initialized(load, monkeypatch):
    """Until then, no call asks CUDA for devices, because a process that has asked cannot fork children that use CUDA."""
    driver = _Library("cuThreadExchangeStreamCaptureMode")
    load({"libcuda.so.1": driver})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", Mock(side_effect=AssertionError("this initializes the driver")))
    assert not stream.allow_queries_during_capture()
    assert driver.modes == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert stream.allow_queries_during_capture()
    assert driver.modes == [2]


@pytest.mark.parametrize("text", [*CAPTURE_ERRORS, "CUDA error: an illegal memory access was encountered"])
def test_query_during_a_capture_is_no_failure(monkeypatch, text):
    class Event:
        def record(self):
            pass

        def query(self):
            raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    mark = stream.CudaMark()
    if text in CAPTURE_ERRORS:
        assert mark.query() is False
    else:
        with pytest.raises(RuntimeError, match="illegal memory"):
            mark.query()


def test_number_of_streams_depends_on_communicators_and_not_on_movers(cuda_streams, monkeypatch):
    """Torch returns the same 32 streams in turn, so a new stream may be one that is in use."""
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append((device, priority)) or Mock())
    monkeypatch.setattr(stream, "current_device", lambda _: CPU)
    plan = make_plan(SRC, DST, (64, 48), "uint8")
    streams = stream.CudaTransferStream(CPU)
    for _ in range(40):
        runner = stream.make_runner(plan, build_program(plan, 0), "cuda")
        stream.StreamRunner(runner, lambda recvs, sends, broadcasts: None, streams)
    assert made == [(CPU, -1)] * 3


@pytest.mark.parametrize(
    ("array", "op", "text"),
    [
        (torch.ones(3), torch.distributed.ReduceOp.AVG, "computes only sum, product, max, min, not RedOpType.AVG"),
        (torch.ones(3).to_sparse(), torch.distributed.ReduceOp.SUM, "needs a dense tensor"),
        (torch.ones(4, 3).t(), torch.distributed.ReduceOp.SUM, r"shape \[3, 4\] has strides \[1, 3\]"),
        (torch.ones(3, dtype=torch.complex64), torch.distributed.ReduceOp.SUM, "cannot reduce torch.complex64"),
    ],
)
def test_all_reduce_that_nccl_lacks_is_refused(array, op, text):
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = op
    with pytest.raises(ArgumentError, match=text):
        NcclCollectives(None, CPU).allreduce([array], options)


def test_device_of_this_process_has_an_index(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert stream.current_device("cuda") == torch.device("cuda", 3)


def test_tensor_on_another_gpu_is_refused(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensor = torch.empty(4, device="cuda:1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ArgumentError, match=r"on cuda:1, but its current device is cuda:0; .*LOCAL_RANK"):
        check_movable(tensor, "the tensor", 5)


@pytest.mark.parametrize(("number", "warns"), [(0, False), (1, True)])
def test_second_communicator_warns_of_a_single_device_connection(monkeypatch, recwarn, number, warns):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    connections = Connections(torch.distributed.HashStore(), 0, (0, 1))
    connections._exchanges[number] = exchange = object()
    assert connections.exchange(CPU, number, 1.0, lambda: None) is exchange
    assert [str(item.message)[:32] for item in recwarn] == ["CUDA_DEVICE_MAX_CONNECTIONS is 1"] * warns
    connections._exchanges.clear()
