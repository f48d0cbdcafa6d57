"""Calls of a store that always return.

A ``TCPStore`` waits for an answer for as long as its connection is open, which is for ever where its host is cut off.
So calls are made by a thread of their own, and given up when they take too long. A busy machine may take seconds to
answer, so a call that only looks is worth another try; a store that says nothing for half a minute is lost.

Keys of a group:

``u/<members>/hub``        where the first member listens
``told/<rank>/<attempt>``  an error for a rank that waits for ranks that left
``status/<rank>``          what a rank is waiting for, or why it gave up
``beat/<rank>``            its heartbeats
"""

from __future__ import annotations

import functools
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
    """Makes calls of a store one after the other, and holds the store until it is closed."""

    def __init__(self, raw: dist.Store) -> None:
        self.raw: dist.Store | None = raw
        self.thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stuck: _Job | None = None  # the last job that was given up
        self._asked = 0.0  # when that was asked for

    def call(self, function: Callable[[dist.Store], Any], seconds: float) -> Any:
        begun = time.monotonic()
        raw = self.check_usable()
        stuck = self._stuck
        if stuck is not None and seconds > STORE_SECONDS:
            stuck.done.wait(seconds)
        with self._lock:
            if self.thread is None:
                self.thread = threading.Thread(target=_work, args=(self._jobs,), name="reshard-store", daemon=True)
                self.thread.start()
            if self._stuck is not None and not self._stuck.done.is_set():
                self._raise_silent()
            job = _Job(functools.partial(function, raw))
            self._jobs.put(job)
        if not job.done.wait(max(begun + seconds - time.monotonic(), 0.0)):
            self._stuck, self._asked = job, begun
            self._raise_silent()
        error, job.error = job.error, None  # else the error and its traceback would keep each other, and the store
        if error is not None:
            raise error
        return job.result

    def check_usable(self) -> dist.Store:
        """The store; raises RuntimeError once it is closed, and in a forked child, which shares its connection."""
        if self._pid != os.getpid():
            raise RuntimeError(f"this store was connected in process {self._pid}")
        if self.raw is None:
            raise RuntimeError("this store is closed")
        return self.raw

    def _raise_silent(self) -> None:
        waited = time.monotonic() - self._asked
        kind = StoreSilentError if waited < LOST_STORE_SECONDS else RuntimeError
        raise kind(f"the store did not answer within {waited:.1f} s")

    def close(self) -> None:
        self.raw = self._stuck = None
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # and with it the store


class Store:
    """A ``torch.distributed`` store whose calls raise RuntimeError when they are not answered in time.

    That is a :class:`StoreSilentError` until :data:`LOST_STORE_SECONDS` have passed. Calls that cannot be made again
    say how many ``seconds`` they wait.
    """

    def __init__(self, raw: dist.Store, worker: _Worker | None = None, prefix: str = "") -> None:
        self._worker = _Worker(raw) if worker is None else worker
        self._prefix = prefix

    @property
    def raw(self) -> dist.Store:
        """The store, for those that need one of torch's; raises RuntimeError once it is closed."""
        raw = self._worker.check_usable()
        return dist.PrefixStore(self._prefix[:-1], raw) if self._prefix else raw

    def under(self, prefix: str) -> Store:
        """The same store for keys that begin with a prefix."""
        return Store(self.raw, self._worker, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str, seconds: float = STORE_SECONDS) -> None:
        """Write a value."""
        self._worker.call(lambda raw: raw.set(self._prefix + key, value), seconds)

    def get(self, key: str, seconds: float = STORE_SECONDS) -> bytes:
        """A value that is there, see :meth:`check`."""
        found: bytes = self._worker.call(lambda raw: raw.get(self._prefix + key), seconds)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._worker.call(lambda raw: raw.check([self._prefix + key for key in keys]), STORE_SECONDS))

    def shows(self, key: str) -> bool:
        """Whether a key is known to be there: not if the store says nothing."""
        try:
            return self.check([key])
        except StoreSilentError:
            return False

    def answers(self) -> bool:
        """Whether it answers within :data:`STORE_SECONDS`."""
        try:
            self.check(["anything"])
        except StoreSilentError:
            return False
        return True

    def compare_set(self, key: str, expected: str, value: str, seconds: float = STORE_SECONDS) -> bytes:
        """Write a value if another one is there; what is there then."""
        found: bytes = self._worker.call(lambda raw: raw.compare_set(self._prefix + key, expected, value), seconds)
        return found

    def close(self) -> None:
        """Give up the store, and let its thread end. Takes no lock and does not wait."""
        self._worker.close()

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread to end, once the store is closed."""
        if self._worker.thread is not None:
            self._worker.thread.join(seconds)


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
