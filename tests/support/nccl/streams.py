"""Stand-ins for the streams of a GPU: threads that run enqueued work, with a host that never or always blocks."""

from __future__ import annotations

import queue
import threading
from typing import ClassVar

from torch.utils._python_dispatch import TorchDispatchMode

from reshard.runtime.cuda import nccl_exchange
from reshard.runtime.cuda.nccl_library import Library, NcclError
from reshard.runtime.cuda.stream import STREAMS
from reshard.runtime.rounds.device_interfaces import ONE_STREAM
from reshard.runtime.transport import connections


class Mark:
    def __init__(self):
        self.reached, self.error = threading.Event(), None

    def query(self):
        if isinstance(self.error, NcclError):
            raise self.error  # a device would go on until the communicator is aborted
        if self.error is not None:
            raise RuntimeError(f"device: {self.error}")
        return self.reached.is_set()

    def wait(self):
        self.reached.wait()


class ThreadStream:
    """A thread that acts as a stream: it runs enqueued work in order, concurrently with the caller."""

    rounds = ONE_STREAM

    def __init__(self, device):
        self.mark_of, self.works = Mark, queue.SimpleQueue()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            work, mark = self.works.get()
            try:
                work()
            except Exception as error:
                mark.error = error
            del work  # it refers to the arrays
            mark.reached.set()

    def enqueue(self, work, arrays):
        assert all(callable(array.record_stream) for array in arrays)
        mark = self.mark_of()
        self.works.put((work, mark))
        return mark

    def join(self):
        raise AssertionError("no graph is captured here")


class BlockingStream(ThreadStream):
    """A stream of the slowest GPU allowed: enqueueing blocks the host until all earlier transfers of this process end.

    ``with BlockingStream.host():`` makes all tensor operations of this thread block so as well.
    """

    enqueued: ClassVar[list[Mark]] = []

    @classmethod
    def block(cls):
        for mark in cls.enqueued:
            mark.wait()
        cls.enqueued.clear()

    @staticmethod
    def host():
        return _BlockingHost()

    def enqueue(self, work, arrays):
        self.block()
        mark = super().enqueue(work, arrays)
        self.enqueued.append(mark)
        return mark


class _BlockingHost(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        BlockingStream.block()
        return function(*args, **(kwargs or {}))


def use_streams(monkeypatch, standin, stream=ThreadStream):
    """Send CPU tensors through the code for CUDA tensors: rounds, streams, and the NCCL binding with the stand-in."""
    monkeypatch.setitem(STREAMS, "cpu", stream)
    monkeypatch.setattr(nccl_exchange, "NCCL_DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(connections, "NCCL_DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(nccl_exchange, "find_library", lambda: Library(standin))
