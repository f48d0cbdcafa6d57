"""Calls of a store that always return.

A ``TCPStore`` waits for an answer for as long as its connection is open, which is for ever where its host is cut off.
So calls are made by a thread of their own, and given up when they take too long. A busy machine may take seconds to
answer, so a call that only looks is worth another try; a store that says nothing for half a minute is lost.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

#: How long a call may take unless it says otherwise.
STORE_SECONDS = 1.5
#: How long a store may say nothing before it counts as lost.
LOST_STORE_SECONDS = 30.0
LOOK_SECONDS = 0.2


class StoreSilentError(RuntimeError):
    """The store has not answered yet; it may still be there."""


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
        self._asked = 0.0  # when that was asked for

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        begun = time.monotonic()
        stuck = self._stuck
        if stuck is not None and seconds > STORE_SECONDS:
            stuck.done.wait(seconds)
        with self._lock:
            if self._pid != os.getpid():  # no thread outlives a fork
                self._pid, self._stuck, self._jobs = os.getpid(), None, queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._jobs,), name="reshard-store", daemon=True).start()
            if self._stuck is not None and not self._stuck.done.is_set():
                self._raise_silent()
            job = _Job(function)
            self._jobs.put(job)
        if not job.done.wait(max(begun + seconds - time.monotonic(), 0.0)):
            self._stuck, self._asked = job, begun
            self._raise_silent()
        if job.error is not None:
            raise job.error
        return job.result

    def _raise_silent(self) -> None:
        waited = time.monotonic() - self._asked
        kind = StoreSilentError if waited < LOST_STORE_SECONDS else RuntimeError
        raise kind(f"the store did not answer within {waited:.1f} s")

    def close(self) -> None:
        self._jobs.put(None)
        self._pid = None


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()


class Store:
    """A ``torch.distributed`` store whose calls raise RuntimeError when they are not answered in time.

    That is a :class:`StoreSilentError` until :data:`LOST_STORE_SECONDS` have passed. Calls that cannot be made again
    say how many ``seconds`` they wait.

    Args:
        raw: the store, for those that need one of torch's.
    """

    def __init__(self, raw: dist.Store, worker: _Worker | None = None) -> None:
        self.raw = raw
        self._worker = _Worker() if worker is None else worker

    def under(self, prefix: str) -> Store:
        """The same store for keys that begin with a prefix."""
        return Store(dist.PrefixStore(prefix, self.raw), self._worker)

    def set(self, key: str, value: str, seconds: float = STORE_SECONDS) -> None:
        """Write a value."""
        self._worker.call(lambda: self.raw.set(key, value), seconds)

    def get(self, key: str, seconds: float = STORE_SECONDS) -> bytes:
        """A value that is there, see :meth:`check`."""
        found: bytes = self._worker.call(lambda: self.raw.get(key), seconds)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._worker.call(lambda: self.raw.check(list(keys)), STORE_SECONDS))

    def shows(self, key: str) -> bool:
        """Whether a key is known to be there: not if the store says nothing."""
        try:
            return self.check([key])
        except StoreSilentError:
            return False

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
        RuntimeError: it did not return in time; the thread is left to it. Otherwise what it raised.
    """
    job = _Job(function)
    threading.Thread(target=job.run, name="reshard-in-time", daemon=True).start()
    if not job.done.wait(seconds):
        raise RuntimeError(f"no end within {seconds:g} s")
    if job.error is not None:
        raise job.error
    return job.result
