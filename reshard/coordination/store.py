"""Store calls with a bounded duration.

A ``TCPStore`` call waits as long as its connection is open, which is forever if the store's host is partitioned. So a
separate thread makes the calls, and the caller gives up on a call that takes too long. A busy machine may take seconds
to answer, so read-only calls are worth repeating; a store that answers nothing for half a minute counts as lost.

Keys of a group:

``u/<members>/hub``        address and secret of the first member
``told/<rank>/<attempt>``  error for the rank to raise in that round
``status/<rank>``          what a rank waits for, or why it left
``beat/<rank>``            heartbeat counter
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

#: Default timeout of a call.
STORE_SECONDS = 1.5
#: A store that has not answered for this long counts as lost.
LOST_STORE_SECONDS = 30.0
#: Interval of checks for reported errors while waiting.
POLL_SECONDS = 0.2


class StoreSilentError(RuntimeError):
    """The store has not answered yet; it may still be alive."""


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
    """Makes store calls one at a time on its own thread, and holds the store until closed."""

    def __init__(self, raw: dist.Store) -> None:
        self.raw: dist.Store | None = raw
        self.thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._unanswered: _Job | None = None  # the last job that timed out
        self._unanswered_since = 0.0

    def call(self, function: Callable[[dist.Store], Any], seconds: float) -> Any:
        begun = time.monotonic()
        raw = self.check_usable()
        unanswered = self._unanswered
        if unanswered is not None and seconds > STORE_SECONDS:
            unanswered.done.wait(seconds)
        with self._lock:
            if self.thread is None:
                self.thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="reshard-store", daemon=True)
                self.thread.start()
            if self._unanswered is not None and not self._unanswered.done.is_set():
                self._raise_silent()
            job = _Job(functools.partial(function, raw))
            self._jobs.put(job)
        if not job.done.wait(max(begun + seconds - time.monotonic(), 0.0)):
            self._unanswered, self._unanswered_since = job, begun
            self._raise_silent()
        error, job.error = job.error, None  # breaks a reference cycle with the traceback, which holds the store
        if error is not None:
            raise error
        return job.result

    def check_usable(self) -> dist.Store:
        """The store; raises RuntimeError if closed, or in a forked child, which shares the parent's connection."""
        if self._pid != os.getpid():
            raise RuntimeError(f"this store was connected in process {self._pid}")
        if self.raw is None:
            raise RuntimeError("this store is closed")
        return self.raw

    def _raise_silent(self) -> None:
        waited = time.monotonic() - self._unanswered_since
        kind = StoreSilentError if waited < LOST_STORE_SECONDS else RuntimeError
        raise kind(f"the store did not answer within {waited:.1f} s")

    def close(self) -> None:
        self.raw = self._unanswered = None
        self._jobs.put(None)


def _run_jobs(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it refers to the store


class Store:
    """A ``torch.distributed`` store whose calls raise RuntimeError if not answered in time.

    The error is a :class:`StoreSilentError` until :data:`LOST_STORE_SECONDS` have passed. Calls that cannot be repeated
    take their own timeout ``seconds``.
    """

    def __init__(self, raw: dist.Store, worker: _Worker | None = None, prefix: str = "") -> None:
        self._worker = _Worker(raw) if worker is None else worker
        self._prefix = prefix

    @property
    def raw(self) -> dist.Store:
        """The torch store itself; raises RuntimeError if closed."""
        raw = self._worker.check_usable()
        return dist.PrefixStore(self._prefix[:-1], raw) if self._prefix else raw

    def under(self, prefix: str) -> Store:
        """The same store with a key prefix."""
        return Store(self.raw, self._worker, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str, seconds: float = STORE_SECONDS) -> None:
        """Write a value."""
        self._worker.call(lambda raw: raw.set(self._prefix + key, value), seconds)

    def get(self, key: str, seconds: float = STORE_SECONDS) -> bytes:
        """The value of an existing key, see :meth:`check`."""
        found: bytes = self._worker.call(lambda raw: raw.get(self._prefix + key), seconds)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._worker.call(lambda raw: raw.check([self._prefix + key for key in keys]), STORE_SECONDS))

    def has_key(self, key: str) -> bool:
        """Whether a key is known to exist; False if the store does not answer."""
        try:
            return self.check([key])
        except StoreSilentError:
            return False

    def responds(self) -> bool:
        """Whether the store answers within :data:`STORE_SECONDS`."""
        try:
            self.check(["anything"])
        except StoreSilentError:
            return False
        return True

    def compare_set(self, key: str, expected: str, value: str, seconds: float = STORE_SECONDS) -> bytes:
        """Write ``value`` if the key holds ``expected``; returns the value that the key then holds."""
        found: bytes = self._worker.call(lambda raw: raw.compare_set(self._prefix + key, expected, value), seconds)
        return found

    def close(self) -> None:
        """Stop using the store and let the thread end. Takes no lock and does not wait."""
        self._worker.close()

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread of a closed store to end."""
        if self._worker.thread is not None:
            self._worker.thread.join(seconds)


def run_with_timeout(function: Callable[[], Any], seconds: float) -> Any:
    """The result of ``function``, called on a new thread.

    Raises:
        RuntimeError: it did not return in time; its thread keeps running. Otherwise the exception of ``function``.
    """
    job = _Job(function)
    threading.Thread(target=job.run, name="reshard-in-time", daemon=True).start()
    if not job.done.wait(seconds):
        raise RuntimeError(f"timed out after {seconds:g} s")
    if job.error is not None:
        raise job.error
    return job.result
