"""Calls of a store that always return.

A ``TCPStore`` waits for an answer for as long as its connection is open, which is for ever where its host is cut off.
So calls are made by a thread of their own, and given up when they take too long.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

#: How long a call may take unless it says otherwise.
STORE_SECONDS = 5.0


class _Job:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.done.set()


class _Worker:
    """Makes calls one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pid: int | None = None
        self._stuck: _Job | None = None  # the last job that was given up

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        with self._lock:
            if self._pid != os.getpid():  # no thread outlives a fork
                self._pid, self._stuck, self._jobs = os.getpid(), None, queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._jobs,), name="reshard-store", daemon=True).start()
            if self._stuck is not None and not self._stuck.done.is_set():
                raise RuntimeError("the store does not answer")
            job = _Job(function)
            self._jobs.put(job)
        if not job.done.wait(seconds):
            self._stuck = job
            raise RuntimeError(f"the store did not answer within {seconds:g} s")
        if job.error is not None:
            raise job.error
        return job.result

    def close(self) -> None:
        self._jobs.put(None)
        self._pid = None


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()


class Store:
    """A ``torch.distributed`` store whose calls raise RuntimeError when they are not answered in time.

    Args:
        raw: the store, for those that need one of torch's.
    """

    def __init__(self, raw: dist.Store, worker: _Worker | None = None) -> None:
        self.raw = raw
        self._worker = _Worker() if worker is None else worker

    def under(self, prefix: str) -> Store:
        """The same store for keys that begin with a prefix."""
        return Store(dist.PrefixStore(prefix, self.raw), self._worker)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._worker.call(lambda: self.raw.set(key, value), STORE_SECONDS)

    def get(self, key: str) -> bytes:
        """A value that is there, see :meth:`check`."""
        found: bytes = self._worker.call(lambda: self.raw.get(key), STORE_SECONDS)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._worker.call(lambda: self.raw.check(list(keys)), STORE_SECONDS))

    def compare_set(self, key: str, expected: str, value: str, seconds: float = STORE_SECONDS) -> bytes:
        """Write a value if another one is there; what is there then."""
        found: bytes = self._worker.call(lambda: self.raw.compare_set(key, expected, value), seconds)
        return found

    def close(self) -> None:
        """End the thread; it begins again with the next call."""
        self._worker.close()


def in_time(function: Callable[[], Any], seconds: float) -> Any:
    """What a function returns, called by a thread of its own.

    Raises:
        RuntimeError: it did not return in time; the thread is left to it.
    """
    job = _Job(function)
    threading.Thread(target=job.run, name="reshard-in-time", daemon=True).start()
    if not job.done.wait(seconds):
        raise RuntimeError(f"no end within {seconds:g} s")
    if job.error is not None:
        raise job.error
    return job.result
