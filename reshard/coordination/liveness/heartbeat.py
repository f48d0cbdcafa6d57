"""One thread per group that shows this process is alive and ends transfers that cannot finish."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from reshard.coordination.liveness.status import Pulses, beat_key
from reshard.coordination.process_group import Group
from reshard.coordination.store import StoreSilentError
from reshard.errors import RemoteError, ReshardError
from reshard.runtime.cuda.stream import allow_queries_during_capture

BEAT_SECONDS = 1.0
#: A rank whose heartbeat stands still for this long while others wait for it counts as lost.
LOST_SECONDS = 30.0
LOOK_SECONDS = 0.2


_registered: set[tuple[int, Any]] = set()


def call_at_exit(function: Callable[[], None], priority: int) -> None:
    """Call ``function`` when this process ends, once; higher priorities first.

    A child of multiprocessing ends without calling what atexit knows, but calls its own finalizers.
    """
    if (os.getpid(), function) not in _registered:
        _registered.add((os.getpid(), function))
        multiprocessing.util.Finalize(None, function, exitpriority=priority)


class Watched(Protocol):
    """A transfer under way."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""

    def reported_error(self) -> ReshardError | None:
        """An error that another rank told of."""

    def stop(self, error: ReshardError) -> None:
        """End with an error."""

    def look(self) -> bool:
        """Whether it is over, where nobody else finds out."""


class Monitor:
    """Beats into the store, and while transfers are under way looks for errors told and for silent ranks."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        self._rank, self._store = group.rank, group.store
        self._watched: set[Watched] = set()
        self._lock = threading.Lock()
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._beats, self._next_beat = 0, 0.0
        self._pulses = Pulses(group.store)
        # The thread knows neither the monitor nor the group, either of which may be dropped.
        thread = threading.Thread(target=_serve, args=(weakref.ref(self), self._ends), name="reshard-monitor")
        self._thread = thread
        thread.daemon = True
        thread.start()
        _monitors.add(self)
        call_at_exit(_end_all, priority=0)

    @classmethod
    def of(cls, group: Group) -> Monitor:
        """The monitor of a group, started on first use."""
        with group.lock:
            if group.held.monitor is None:
                group.held.monitor = cls(group)
            monitor: Monitor = group.held.monitor
            return monitor

    def watch(self, transfer: Watched) -> None:
        """Look after a transfer until :meth:`forget`."""
        with self._lock:
            if not self._watched:
                self._pulses.forget()
            self._watched.add(transfer)

    def forget(self, transfer: Watched) -> None:
        """The transfer ended."""
        with self._lock:
            self._watched.discard(transfer)

    def end(self) -> None:
        """Let the thread end, soon. Takes no lock and does not wait."""
        self._ends.put(None)

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread to end."""
        self._thread.join(seconds)

    def look(self) -> float:
        """Beat where it is time, and look after all transfers; for how many seconds that is enough."""
        group = self._group()
        if group is None:
            return 0.0
        if group.is_destroyed():
            group.held.release()
            return 0.0
        now = time.monotonic()
        try:
            if now >= self._next_beat:
                self._beats += 1
                self._store.set(beat_key(self._rank), str(self._beats))
                self._next_beat = now + BEAT_SECONDS
                self._look_for_silence()
            for transfer in self._transfers():
                if transfer.look():
                    self.forget(transfer)
                    continue
                error = transfer.reported_error()
                if error is not None:
                    transfer.stop(error)
        except StoreSilentError:
            pass  # look again later
        except Exception as error:
            if group.held.is_released:
                return 0.0
            for transfer in self._transfers():
                transfer.stop(RemoteError(f"rank {self._rank}: the store is lost: {error}"))
            return BEAT_SECONDS
        # Not woken by a new transfer: most are over before the next look, and then cost nothing here.
        return LOOK_SECONDS

    def _transfers(self) -> list[Any]:
        with self._lock:
            return list(self._watched)

    def _look_for_silence(self) -> None:
        transfers = self._transfers()
        for rank in sorted({rank for transfer in transfers for rank in transfer.members} - {self._rank}):
            if self._pulses.look(rank)[1] > LOST_SECONDS:
                for transfer in transfers:
                    if rank in transfer.members:
                        transfer.stop(
                            RemoteError(f"rank {rank} gave no sign of life for {LOST_SECONDS:g} s during a transfer")
                        )


#: Those with a thread, which must not be inside a call when the interpreter ends.
_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()


def _serve(monitor: weakref.ref[Monitor], ends: queue.SimpleQueue[None]) -> None:
    may_query = False
    while (looking := monitor()) is not None:
        may_query = may_query or allow_queries_during_capture()
        seconds = looking.look()
        del looking
        with contextlib.suppress(queue.Empty):
            ends.get(timeout=seconds)
            return


def _end_all() -> None:
    for monitor in list(_monitors):
        monitor.end()
    for monitor in list(_monitors):
        monitor.join(2 * BEAT_SECONDS)
