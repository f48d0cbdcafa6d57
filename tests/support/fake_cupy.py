"""A fake CuPy with NCCL: arrays are NumPy arrays, streams are synchronous and ranks are threads.

As in NCCL, messages between two ranks match by order. A group ends when all its messages have completed.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import types
from collections import defaultdict

import numpy as np

from reshard.runtime.rounds.deadlock_check import Call

_posted = threading.local()


class Device(contextlib.AbstractContextManager):
    """Fake of ``cupy.cuda.Device``. Each thread has a current device, like CUDA."""

    _local = threading.local()

    def __init__(self, device):
        self.id, self._before = device, []

    @classmethod
    def current(cls):
        return getattr(cls._local, "id", 0)

    def use(self):
        self._local.id = self.id

    def __enter__(self):
        self._before.append(self.current())
        self.use()
        return self

    def __exit__(self, *_):
        self._local.id = self._before.pop()


class Array(np.ndarray):
    """Fake of ``cupy.ndarray``: a NumPy array on a device."""

    device_id = 0

    def __array_finalize__(self, base):
        self.device_id = getattr(base, "device_id", Device.current())

    @property
    def device(self):
        return Device(self.device_id)


def _empty(shape, dtype=float):
    return np.empty(shape, dtype=dtype).view(Array)


def _asarray(array):
    return np.asarray(array).view(Array)


class Event:
    done = True

    def synchronize(self):
        pass


class Stream(contextlib.AbstractContextManager):
    ptr = 7

    def __init__(self, non_blocking=False):
        self.waited, self.device_id = [], Device.current()

    def record(self):
        return Event()

    def wait_event(self, event):
        assert isinstance(event, Event)
        self.waited.append(event)

    def __enter__(self):
        if self.device_id != Device.current():
            raise RuntimeError(f"stream of device {self.device_id}, but the current device is {Device.current()}")
        return self

    def __exit__(self, *_):
        pass


class Hub:
    def __init__(self, size):
        self.size, self.barrier = size, threading.Barrier(size)
        # Made before the threads start: two threads that first use a key of a defaultdict can get two queues.
        self.queues = {(sender, receiver): queue.Queue() for sender in range(size) for receiver in range(size)}
        self.gathered = [b""] * size


class Communicator:
    """Fake of ``cupy.cuda.nccl.NcclCommunicator``."""

    def __init__(self, hub, rank, seconds=10.0):
        self.hub, self.rank, self.seconds, self.groups = hub, rank, seconds, []
        self.device = Device.current()

    def device_id(self):
        return self.device

    def rank_id(self):
        return self.rank

    def size(self):
        return self.hub.size

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):  # noqa: N802
        assert datatype == NCCL.NCCL_UINT8
        self.hub.gathered[self.rank] = ctypes.string_at(sendbuf, count)
        self.hub.barrier.wait(self.seconds)
        whole = b"".join(self.hub.gathered)
        ctypes.memmove(recvbuf, whole, len(whole))
        self.hub.barrier.wait(self.seconds)

    def send(self, sendbuf, count, datatype, peer, stream):
        assert datatype == NCCL.NCCL_UINT8
        assert stream == Stream.ptr
        _posted.calls.append((self, True, peer, sendbuf, count))

    def recv(self, recvbuf, count, datatype, peer, stream):
        assert datatype == NCCL.NCCL_UINT8
        _posted.calls.append((self, False, peer, recvbuf, count))


def _group_start():
    _posted.calls = []


def _group_end():
    for comm, is_send, peer, address, count in _posted.calls:
        if is_send:
            comm.hub.queues[comm.rank, peer].put(ctypes.string_at(address, count))
    for comm, is_send, peer, address, count in _posted.calls:
        if not is_send:
            received = comm.hub.queues[peer, comm.rank].get(timeout=comm.seconds)
            assert len(received) == count
            ctypes.memmove(address, received, count)
    if _posted.calls:
        _posted.calls[0][0].groups.append(
            [Call("send" if is_send else "receive", peer, count) for _, is_send, peer, _, count in _posted.calls]
        )
    del _posted.calls


NCCL = types.ModuleType("cupy.cuda.nccl")
NCCL.NCCL_UINT8, NCCL.groupStart, NCCL.groupEnd = 1, _group_start, _group_end


def make_module():
    """The fake modules, by name, for ``sys.modules``."""
    cuda = types.ModuleType("cupy.cuda")
    streams = defaultdict(Stream)  # the current stream of each device
    cuda.Stream, cuda.get_current_stream, cuda.nccl = Stream, lambda: streams[Device.current()], NCCL
    cuda.Device = Device
    module = types.ModuleType("cupy")
    module.cuda, module.ndarray, module.uint8, module.asnumpy = cuda, Array, np.uint8, np.asarray
    module.empty, module.asarray, module.may_share_memory = _empty, _asarray, np.may_share_memory
    return {"cupy": module, "cupy.cuda": cuda, "cupy.cuda.nccl": NCCL}


def run_ranks(size, function, seconds=20.0):
    """Run ``function(comm)`` for each rank in a thread; returns results or exceptions in rank order."""
    hub, results = Hub(size), [None] * size

    def one(rank):
        try:
            results[rank] = function(Communicator(hub, rank))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a rank did not end in time"
    return results
