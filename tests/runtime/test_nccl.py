"""The NCCL binding on a stand-in with NCCL's C interface, and on the real library and header if installed."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from reshard.coordination.call_group import CallGroup
from reshard.coordination.groups.process_group import GroupResources
from reshard.errors import RemoteError
from reshard.runtime.cuda import nccl
from reshard.runtime.cuda.nccl import Communicator
from reshard.runtime.cuda.nccl_exchange import NcclCollectives, NcclExchange
from reshard.runtime.cuda.nccl_library import DATA_TYPES, Library, NcclError, find_library
from reshard.runtime.cuda.stream import STREAMS
from reshard.runtime.transport import Connections
from reshard.testing.processes import LaunchError, run_processes
from tests.support.nccl.build import build_standin


def _message(array, rank):
    return array.data_ptr(), array.numel() * array.element_size(), rank


def _communicator(path, rank, port, size, key="id", **options):
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    library = Library(path)
    if rank == 0:
        store.set(key, library.make_unique_id())
    return Communicator(library, store.get(key), rank, size, **({"timeout_seconds": 10.0} | options))


def _exchange(rank, port, path):
    comm = _communicator(path, rank, port, 3)
    for turn in range(3):
        outs, inns = {}, {}
        for peer in {0, 1, 2} - {rank}:
            outs[peer] = [torch.full((1000 * (peer + 1) + part,), 10 * rank + part + turn) for part in range(2)]
            inns[peer] = [torch.empty(1000 * (rank + 1) + part, dtype=torch.int64) for part in range(2)]
        recvs = [_message(array, peer) for peer, arrays in inns.items() for array in arrays]
        sends = [_message(array, peer) for peer, arrays in outs.items() for array in arrays]
        comm.exchange(recvs, sends, stream=0)
        for peer, arrays in inns.items():
            assert all((array == 10 * peer + part + turn).all() for part, array in enumerate(arrays))
    assert comm.find_error() is None
    total = torch.full((5,), float(rank + 1))
    comm.all_reduce(total.data_ptr(), 5, "float32", "sum", stream=0)
    largest = torch.tensor([rank, -rank])
    comm.all_reduce(largest.data_ptr(), 2, "int64", "max", stream=0)
    shared = torch.full((3,), rank, dtype=torch.uint8)
    comm.broadcast(shared.data_ptr(), 3, 0, stream=0)
    comm.close()
    comm.close()
    return total.tolist(), largest.tolist(), shared.tolist()


def test_messages_match_by_order_and_collectives_reduce(standin):
    results = run_processes(_exchange, 3, standin, init_group=False)
    assert results == [([6.0] * 5, [2, 0], [0] * 3)] * 3


def _mistakes(rank, port, path):
    """A group ends even after an error inside it. The next group of this thread works, on another communicator."""
    array = torch.full((4,), float(rank))
    broken = _communicator(path, rank, port, 2)
    with pytest.raises(NcclError, match=r"ncclSend: invalid argument: invalid rank"):
        broken.exchange([], [_message(array, 7)], stream=0)
    with pytest.raises(NcclError, match=r"ncclSend: invalid argument"):
        broken.exchange([], [_message(array, 1 - rank)], stream=0)
    assert "invalid argument" in broken.find_error()
    broken.close()  # aborts it
    assert broken.find_error() is None
    comm = _communicator(path, rank, port, 2, key="another")
    with pytest.raises(ctypes.ArgumentError):
        comm.exchange([], [(array, 16, 1 - rank)], stream=0)
    got = torch.empty(4)
    comm.exchange([_message(got, 1 - rank)], [_message(array, 1 - rank)], stream=0)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"done {rank}", "")
    store.wait([f"done {1 - rank}"])  # an abort would break unfinished operations of the other rank
    comm.abort()
    comm.abort()
    with pytest.raises(NcclError, match="aborted"):
        comm.exchange([_message(got, 1 - rank)], [], stream=0)
    return got.tolist()


def test_wrong_call_leaves_no_group_open(standin):
    assert run_processes(_mistakes, 2, standin, init_group=False) == [[1.0] * 4, [0.0] * 4]


def _absent(rank, port, path):
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"NCCL took longer than 0.5 s creating a communicator"):
        _communicator(path, rank, port, 2, timeout_seconds=0.5)

    def poll():
        raise ValueError("another rank failed")

    library = Library(path)
    with pytest.raises(ValueError, match="another rank"):
        Communicator(library, library.make_unique_id(), 1, 2, timeout_seconds=60.0, poll=poll)
    return time.monotonic() - begun


def test_absent_rank_is_awaited_until_the_timeout(standin):
    assert run_processes(_absent, 1, standin, init_group=False)[0] < 20


def _unmatched_group(rank, port, path):
    """Rank 0 posts a group with rank 1, but rank 1 never posts one with rank 0, so the two never connect."""
    comm = _communicator(path, rank, port, 2, timeout_seconds=60.0)
    if rank == 1:
        time.sleep(1.5)
        return None
    array = torch.zeros(1)
    failures = []

    def exchange():
        try:
            comm.exchange([], [_message(array, 1)], stream=0)
        except NcclError as error:
            failures.append(str(error))

    thread = threading.Thread(target=exchange)
    thread.start()
    time.sleep(0.3)
    begun = time.monotonic()
    comm.abort()
    thread.join(5.0)
    assert not thread.is_alive()
    return failures, time.monotonic() - begun


def test_abort_ends_the_wait_of_another_thread(standin):
    (failures, seconds), _ = run_processes(_unmatched_group, 2, standin, init_group=False)
    assert failures == ["the communicator was aborted"]
    assert seconds < 20


def _exchange_in_threads(rank, port, path):
    """Each rank posts 40 groups in each of four threads. All messages are equal, so any order of groups is correct."""
    comm = _communicator(path, rank, port, 2)
    failures, own = [], torch.full((64,), float(rank))

    def post():
        try:
            for _ in range(40):
                got = torch.empty(64)
                comm.exchange([_message(got, 1 - rank)], [_message(own, 1 - rank)], stream=0)
                assert (got == 1 - rank).all()
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.close()
    return failures


def test_threads_wait_until_the_group_of_another_is_launched(standin):
    assert run_processes(_exchange_in_threads, 2, standin, init_group=False) == [[], []]


def _two_hang(rank, port, path, monkeypatch):
    """On rank 0, a receive hangs on each of two communicators. The abort of one returns only after both are aborted."""
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 20.0)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    connections = Connections(torch.distributed.HashStore(), 0, (0, 1))
    both = [_communicator(path, rank, port, 2, key=f"id {number}", timeout_seconds=60.0) for number in range(2)]
    got, own = torch.empty(1), torch.ones(1)
    for comm in both:
        comm.exchange([_message(got, 1 - rank)], [_message(own, 1 - rank)], stream=0)
    if rank == 1:
        store.wait(["aborted"])  # the end of this rank would end the receives
        return None
    failures = []

    def hang(comm):
        with pytest.raises(NcclError, match="was aborted"):
            comm.exchange([_message(got, 1)], [], stream=0)
        failures.append(comm)

    threads = [threading.Thread(target=hang, args=(comm,)) for comm in both]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    connections._exchanges.update(enumerate(both))
    begun = time.monotonic()
    connections.abort()
    seconds = time.monotonic() - begun
    for thread in threads:
        thread.join(20.0)
    store.set("aborted", "")
    return len(failures), seconds


def test_hanging_communicators_are_aborted_together(standin, monkeypatch):
    (ended, seconds), _ = run_processes(_two_hang, 2, standin, monkeypatch, init_group=False)
    assert ended == 2
    assert seconds < 10


def _close_under_a_graph(rank, port, path, monkeypatch):
    """NCCL neither closes nor aborts a communicator while a graph that captured it exists."""
    monkeypatch.setattr(nccl, "CLOSE_SECONDS", 0.4)
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.3)
    comm = _communicator(path, rank, port, 1)
    comm.nccl._library.standin_set_captured(1)
    begun = time.monotonic()
    comm.close()
    seconds = time.monotonic() - begun
    with pytest.raises(NcclError, match="was aborted"):
        comm.exchange([], [], stream=0)
    comm.nccl._library.standin_set_captured(0)
    assert comm._ended.wait(5.0)
    return seconds


def test_close_returns_while_a_graph_holds_the_communicator(standin, monkeypatch):
    (seconds,) = run_processes(_close_under_a_graph, 1, standin, monkeypatch, init_group=False)
    assert 0.7 <= seconds < 20


def _close_beside_a_receive(rank, port, path, monkeypatch):
    """Rank 0 closes a communicator while a receive on another one waits for rank 1."""
    monkeypatch.setattr(nccl, "CLOSE_SECONDS", 0.4)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    waits = _communicator(path, rank, port, 2)
    got, own = torch.zeros(1), torch.ones(1)
    waits.exchange([_message(got, 1 - rank)], [_message(own, 1 - rank)], stream=0)
    if rank == 0:
        thread = threading.Thread(target=waits.exchange, args=([_message(got, 1)], [], 0))
        thread.start()
        time.sleep(0.2)
    begun = time.monotonic()
    closes = Communicator(waits.nccl, waits.nccl.make_unique_id(), 0, 1, timeout_seconds=10.0)
    closes.close()
    seconds = time.monotonic() - begun
    if rank == 1:
        store.wait(["closed"])
        waits.exchange([], [_message(own, 0)], stream=0)
    else:
        store.set("closed", "")
        thread.join(20.0)
        assert closes._ended.wait(5.0)
    return seconds, got.item()


def test_close_returns_while_another_communicator_receives(standin, monkeypatch):
    """NCCL frees device memory when it destroys a communicator, which waits for the kernels of all others."""
    (seconds, got), _ = run_processes(_close_beside_a_receive, 2, standin, monkeypatch, init_group=False)
    assert 0.4 <= seconds < 20 and got == 1


def _end_many_under_a_graph(rank, port, path, monkeypatch, end):
    """The seconds to end two communicators for each of three sets of ranks while a captured graph keeps them alive."""
    for name, seconds in (("CLOSE_SECONDS", 1.0), ("ABORT_SECONDS", 1.0), ("MIN_ABORT_WAIT_SECONDS", 0.01)):
        monkeypatch.setattr(nccl, name, seconds)
    monkeypatch.setitem(STREAMS, "cpu", Mock())
    library, group = Library(path), GroupResources(Mock())
    for number in range(3):
        call_group = group.call_groups[number] = CallGroup(Mock(), (0,))
        connections = Connections(torch.distributed.HashStore(), 0, (0,))
        call_group._connections = 0, connections
        one, other = (Communicator(library, library.make_unique_id(), 0, 1, timeout_seconds=10.0) for _ in range(2))
        connections._exchanges[0] = NcclExchange(one, {}, torch.device("cpu"))
        connections._collectives = NcclCollectives(other, torch.device("cpu"))
    library._library.standin_set_captured(1)
    begun = time.monotonic()
    if end == "close":
        group.release()
    else:
        for call_group in group.call_groups.values():
            call_group.record_error(0, RemoteError("rank 1 failed"))
    seconds = time.monotonic() - begun
    library._library.standin_set_captured(0)
    return seconds


@pytest.mark.parametrize(("end", "least"), [("abort", 1.0), ("close", 2.0)])
def test_communicators_that_cannot_end_share_one_deadline(standin, monkeypatch, end, least):
    (seconds,) = run_processes(_end_many_under_a_graph, 1, standin, monkeypatch, end, init_group=False)
    assert least <= seconds < 2.5 * least  # one after the other they take three times as long


def _look_while_busy(rank, port, path):
    """Another thread is inside NCCL, as when a launch blocks because the device's queue is full."""
    comm = _communicator(path, rank, port, 1)
    inside, leave = threading.Event(), threading.Event()

    def launch():
        with comm._lock:
            inside.set()
            leave.wait(10.0)

    thread = threading.Thread(target=launch)
    thread.start()
    assert inside.wait(5.0)
    begun = time.monotonic()
    assert comm.find_error() is None
    seconds = time.monotonic() - begun
    leave.set()
    thread.join()
    comm.close()
    return seconds


def test_monitor_does_not_wait_for_a_thread_inside_nccl(standin):
    assert run_processes(_look_while_busy, 1, standin, init_group=False)[0] < 5


def _fails_in_close(rank, port, path):
    """A slow close of a communicator after rank 1 has reported an error, which ``poll`` raises."""
    poll = Mock(side_effect=ValueError("rank 1 failed"))
    comm = _communicator(path, rank, port, 1, poll=poll)
    comm.nccl._library.standin_set_captured(1)
    threading.Timer(0.5, comm.nccl._library.standin_set_captured, (0,)).start()
    comm.close()
    return poll.call_count, comm._aborted


def test_error_of_another_rank_does_not_abort_a_close(standin):
    assert run_processes(_fails_in_close, 1, standin, init_group=False) == [(0, False)]


def _dies(rank, port, path):
    comm = _communicator(path, rank, port, 2)
    array, own = torch.zeros(1), torch.ones(1)
    try:
        comm.exchange([_message(array, 1 - rank)], [_message(own, 1 - rank)], stream=0)
        if rank == 1:
            os._exit(3)
        deadline = time.monotonic() + 10
        while (error := comm.find_error()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
    except NcclError as early:  # the peer was gone before this rank saw that its group was launched
        error = str(early)
    comm.abort()
    return error


def test_dead_peer_is_detected(standin):
    with pytest.raises(LaunchError) as caught:
        run_processes(_dies, 2, standin, init_group=False)
    assert "remote process exited" in caught.value.results[0]
    assert "rank 1" in caught.value.results[0]


def test_missing_and_incomplete_libraries_are_rejected():
    with pytest.raises(OSError, match="no_such_library"):
        Library("libno_such_library.so")
    with pytest.raises(NcclError, match=r"has no ncclGetVersion; NCCL 2.18 or later is needed"):
        Library("libm.so.6")


def _find_real():
    try:
        return find_library()
    except NcclError:
        return None


def _find_header():
    folders = [Path(os.environ["NCCL_HOME"])] if "NCCL_HOME" in os.environ else []
    spec = importlib.util.find_spec("nvidia")
    folders += [Path(folder) / "nccl" for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [folder / "include" / "nccl.h" for folder in folders]
    return next((path for path in found if path.exists()), None)


@pytest.mark.skipif(_find_header() is None, reason="nccl.h was not found; set NCCL_HOME to the folder of NCCL")
def test_standin_has_the_signatures_of_the_real_header(tmp_path):
    """The compiler checks each function of the stand-in against its declaration in nccl.h."""
    types = "".join(f"typedef struct CU{name}_st* cuda{name.capitalize()}_t;\n" for name in ("stream", "event"))
    (tmp_path / "cuda_runtime.h").write_text(f"{types}#define CUDART_VERSION 0\n")
    (tmp_path / "cuda_fp16.h").write_text("")
    header = _find_header()
    build_standin(tmp_path, "-DNCCL_STANDIN_HEADER", f"-I{tmp_path}", f"-I{header.parent}")
    text = header.read_text()
    for name, value in DATA_TYPES.items():
        c_name = "nccl" + {"bfloat16": "Bfloat16"}.get(name, name.capitalize())
        assert f"{c_name} = {value}" in " ".join(text.replace("=", " = ").split()), name


@pytest.mark.skipif(_find_real() is None, reason="no NCCL library is installed")
def test_real_library_accepts_our_calls():
    library = find_library()
    assert library.version >= 21800
    assert len(library.make_unique_id()) == 128
    if not torch.cuda.is_available():
        with pytest.raises(NcclError, match="cuda"):
            Communicator(library, library.make_unique_id(), 0, 1, timeout_seconds=20.0)
