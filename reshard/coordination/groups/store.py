"""Store calls with a timeout.

A ``TCPStore`` call has no timeout while its connection is open. If the store's host is partitioned, the call
never returns. So a separate thread makes the calls, and the caller stops waiting after a timeout. A store on a busy
machine may take seconds to answer, so callers may repeat a read. A store that answers nothing for
:data:`LOST_STORE_SECONDS` counts as lost.

Keys of a group:

``u/<members>/hub``        address and nonce of the first member
``error/<rank>/<attempt>`` error for the rank to raise in that round (its rounds are numbered)
``status/<rank>``          what a rank waits for, or why it left
``beat/<rank>``            heartbeat counter
``claim/<rank>``           host and process of the rank, in a joined group
``presence/<rank>``        host, address and port of the rank's process
``lost/<number>``          the ranks that are lost by then
``duplicate``              error about two processes with one rank
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from reshard.formatting import brief
from reshard.threads import has_started, start_thread
from reshard.timeouts import PendingCall

T = TypeVar("T")
#: Default timeout of a call.
STORE_TIMEOUT_SECONDS = 1.5
#: A store that has not answered a call for this long counts as lost.
LOST_STORE_SECONDS = 30.0


class StoreSilentError(RuntimeError):
    """The store has not answered in time, but may still be alive."""


class ForeignValueError(RuntimeError):
    """The store has a value that no rank of the group writes."""


class _StoreThread:
    """Makes store calls one at a time on its own thread. Keeps the store alive until closed."""

    def __init__(self, raw: dist.Store) -> None:
        self.raw: dist.Store | None = raw
        self.thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._calls: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        self._unanswered: PendingCall | None = None  # the last call that timed out
        self._unanswered_since = 0.0
        self._lost: str | None = None  # why the connection to the store ended; torch never reconnects

    def call(self, function: Callable[[dist.Store], Any], seconds: float) -> Any:
        begun = time.monotonic()
        raw = self.check_usable()
        if self._lost is not None:  # torch would print a warning of a dozen lines for each further call
            raise dist.DistNetworkError(self._lost)
        if seconds > STORE_TIMEOUT_SECONDS:  # several threads may have calls without an answer
            while (unanswered := self._unanswered) is not None and not unanswered.done.is_set():
                if not unanswered.done.wait(max(begun + seconds - time.monotonic(), 0.0)):
                    break
        with self._lock:
            self.start()
            if self._unanswered is not None and not self._unanswered.done.is_set():
                self._raise_silent()
            pending = PendingCall(functools.partial(function, raw))
            self._calls.put(pending)
        if not pending.done.wait(max(begun + seconds - time.monotonic(), 0.0)):
            self._unanswered, self._unanswered_since = pending, begun
            self._raise_silent()
        error, pending.error = pending.error, None  # breaks a reference cycle with the traceback, which holds the store
        if error is not None:
            if isinstance(error, dist.DistNetworkError):
                self._lost = str(error)
            raise error
        return pending.result

    def start(self) -> None:
        with self._lock:
            if not has_started(self.thread):
                self.thread = threading.Thread(
                    target=_run_calls, args=(self._calls,), name="reshard-store", daemon=True
                )
                start_thread(self.thread)

    def check_usable(self) -> dist.Store:
        """The store. Raises RuntimeError if it is closed or belongs to a parent process, whose connection it shares."""
        if self._pid != os.getpid():
            raise RuntimeError(f"this store belongs to process {self._pid}; a fork needs its own")
        if self.raw is None:
            raise RuntimeError("this store is closed")
        return self.raw

    def _raise_silent(self) -> None:
        waited = time.monotonic() - self._unanswered_since
        kind = StoreSilentError if waited < LOST_STORE_SECONDS else RuntimeError
        raise kind(f"the store did not answer within {waited:.1f} s")

    def close(self) -> None:
        self.raw = self._unanswered = None
        self._calls.put(None)


def _run_calls(calls: queue.SimpleQueue[PendingCall | None]) -> None:
    while (pending := calls.get()) is not None:
        pending.run()
        del pending  # it refers to the store


class Store:
    """A ``torch.distributed`` store whose calls raise RuntimeError if not answered in time.

    The error is a :class:`StoreSilentError` until :data:`LOST_STORE_SECONDS` have passed. The argument ``seconds`` sets
    the timeout of one call.
    """

    def __init__(self, raw: dist.Store, worker: _StoreThread | None = None, prefix: str = "") -> None:
        self._worker = _StoreThread(raw) if worker is None else worker
        self._prefix = prefix

    @property
    def raw(self) -> dist.Store:
        """The torch store, with this store's key prefix. Raises RuntimeError if it is closed."""
        raw = self._worker.check_usable()
        return dist.PrefixStore(self._prefix[:-1], raw) if self._prefix else raw

    def start(self) -> None:
        """Start the thread, which the first call would start. Raises ResourceError if the system allows none."""
        self._worker.start()

    def under(self, prefix: str) -> Store:
        """The same store with a key prefix."""
        return Store(self.raw, self._worker, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str, seconds: float = STORE_TIMEOUT_SECONDS) -> None:
        """Write a value."""
        self._worker.call(lambda raw: raw.set(self._prefix + key, value), seconds)

    def get(self, key: str, seconds: float = STORE_TIMEOUT_SECONDS) -> bytes:
        """The value of a key that exists (see :meth:`check`); torch would wait for a missing key."""
        value: bytes = self._worker.call(lambda raw: raw.get(self._prefix + key), seconds)
        return value

    def read(self, key: str, make: Callable[[bytes], T], seconds: float = STORE_TIMEOUT_SECONDS) -> T:
        """The value of a key that exists, converted by ``make``; see :meth:`parse`."""
        return self.parse(key, self.get(key, seconds), make)

    def parse(self, key: str, value: bytes, make: Callable[[bytes], T]) -> T:
        """A value of the store, converted by ``make``.

        Args:
            key: key of the value, for the error.
            value: the value as the store has it.
            make: function that converts the value.

        Raises:
            ForeignValueError: ``make`` raises an error.
        """
        try:
            return make(value)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ForeignValueError(
                f"the store has {brief(value)} under the key {self._prefix + key!r}, which no rank of this group "
                "writes: another program uses the same keys"
            ) from error

    def check(self, keys: Sequence[str], seconds: float | None = None) -> bool:
        """Whether all keys exist."""
        limit = STORE_TIMEOUT_SECONDS if seconds is None else seconds
        return bool(self._worker.call(lambda raw: raw.check([self._prefix + key for key in keys]), limit))

    def has_key(self, key: str) -> bool:
        """Whether a key is known to exist; False if the store does not answer."""
        try:
            return self.check([key])
        except StoreSilentError:
            return False

    def compare_set(self, key: str, expected: str, value: str, seconds: float = STORE_TIMEOUT_SECONDS) -> bytes:
        """Write ``value`` if the key holds ``expected``; returns the value that the key then holds."""
        held: bytes = self._worker.call(lambda raw: raw.compare_set(self._prefix + key, expected, value), seconds)
        return held

    def run(self, function: Callable[[dist.Store], T], seconds: float) -> T:
        """Let the thread make several calls in a row, so that the caller waits only once.

        Args:
            function: function of the torch store, with this store's key prefix. It makes the calls.
            seconds: timeout of all of them together.
        """
        result: T = self._worker.call(lambda _: function(self.raw), seconds)
        return result

    def close(self) -> None:
        """Stop using the store and let the thread end. Takes no lock and does not wait."""
        self._worker.close()

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread of a closed store to end."""
        thread = self._worker.thread
        if thread is not None and has_started(thread):
            thread.join(seconds)
