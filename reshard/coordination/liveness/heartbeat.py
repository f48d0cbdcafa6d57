"""One thread per group that sends heartbeats and ends transfers that cannot finish."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from reshard.coordination.groups.joining import read_claim_error
from reshard.coordination.groups.process_group import Group
from reshard.coordination.groups.store import ForeignValueError, StoreSilentError
from reshard.coordination.liveness.failure_detector import explain_lost_store
from reshard.coordination.liveness.lost_ranks import rank_silent_error
from reshard.coordination.liveness.presence import Presence
from reshard.coordination.liveness.status import (
    BEAT_SECONDS,
    MAX_HEARTBEAT_AGE_SECONDS,
    HeartbeatReader,
    beat_key,
    format_beat,
    publish_status,
)
from reshard.errors import ArgumentError, ReshardError
from reshard.forks import call_at_exit
from reshard.runtime.cuda.stream import allow_queries_during_capture
from reshard.threads import start_thread

HEARTBEAT_POLL_INTERVAL_SECONDS = 0.2


class Watched(Protocol):
    """A transfer in progress."""

    @property
    def members(self) -> tuple[int, ...]:
        """Participating ranks."""

    def reported_error(self) -> ReshardError | None:
        """An error that another rank reported, if any."""

    def stop(self, error: ReshardError) -> None:
        """End the transfer with an error."""

    def poll(self) -> bool:
        """Whether the transfer is over, for transfers that no other thread polls."""


class Monitor:
    """Sends heartbeats; during transfers also checks for reported errors and silent ranks."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        self._rank, self._store = group.rank, group.store
        self._watched: set[Watched] = set()
        self._lock = threading.RLock()
        self._end_requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._num_beats, self._next_beat = 0, 0.0
        self._heartbeats, self._presence = HeartbeatReader(group.store), Presence(group)
        # The thread holds no strong reference to the monitor or the group, so both can be collected.
        thread = threading.Thread(target=_run, args=(weakref.ref(self), self._end_requests), name="reshard-monitor")
        self._thread = thread
        thread.daemon = True
        try:
            start_thread(thread)
        except BaseException:
            self._presence.close()
            raise
        _monitors.add(self)
        call_at_exit(_end_all, priority=0)

    @classmethod
    def of(cls, group: Group) -> Monitor:
        """The monitor of a group, started on first use."""
        with group.lock:
            if group.resources.monitor is None:
                group.resources.monitor = cls(group)
            monitor: Monitor = group.resources.monitor
            return monitor

    def watch(self, transfer: Watched) -> None:
        """Watch a transfer until :meth:`forget`."""
        with self._lock:
            self._watched.add(transfer)

    def forget(self, transfer: Watched) -> None:
        """Stop watching a transfer."""
        with self._lock:
            self._watched.discard(transfer)

    def end(self) -> None:
        """Ask the thread to end. Takes no lock and does not wait."""
        self._end_requests.put(None)
        self._presence.close()

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread to end."""
        self._thread.join(seconds)

    def poll(self) -> float:
        """Send a heartbeat if due and check all transfers; returns the seconds until the next check."""
        group = self._group()
        if group is None:
            return 0.0
        if group.is_destroyed():
            group.resources.release()
            return 0.0
        now = time.monotonic()
        self._presence.accept()
        try:
            if now >= self._next_beat:
                self._num_beats += 1
                started = {
                    call_group.key: call_group.num_started
                    for call_group in list(group.call_groups.values())
                    if call_group.num_started
                }
                self._store.set(beat_key(self._rank), format_beat(self._num_beats, started))
                self._next_beat = now + BEAT_SECONDS
                self._presence.publish(group)
                if not group.is_status_published:
                    publish_status(group)
                self._check_heartbeats()
                read_claim_error(group)
            for transfer in self._list_watched():
                if transfer.poll():
                    self.forget(transfer)
                    continue
                error = transfer.reported_error()
                if error is not None:
                    transfer.stop(error)
        except StoreSilentError:
            pass  # retried at the next check
        except Exception as error:
            if group.resources.is_released:
                return 0.0
            explained: ReshardError | None = None
            if isinstance(error, ForeignValueError):
                explained = ArgumentError(f"rank {self._rank}: {error}")
            elif self._list_watched():
                explained = explain_lost_store(group, error)
            for transfer in self._list_watched():
                if explained is not None:
                    transfer.stop(explained)
            return BEAT_SECONDS
        # A new transfer does not wake this thread: most end before the next check and then cost nothing here.
        return HEARTBEAT_POLL_INTERVAL_SECONDS

    def detect_pause(self, asked_seconds: float, begun_at: float) -> None:
        """See :meth:`Group.detect_pause`."""
        group = self._group()
        if group is not None:
            group.detect_pause(asked_seconds, begun_at)

    def _list_watched(self) -> list[Any]:
        with self._lock:
            return list(self._watched)

    def _check_heartbeats(self) -> None:
        transfers = self._list_watched()
        for rank in sorted({rank for transfer in transfers for rank in transfer.members} - {self._rank}):
            if self._heartbeats.read(rank)[1] > MAX_HEARTBEAT_AGE_SECONDS:
                for transfer in transfers:
                    if rank in transfer.members:
                        transfer.stop(rank_silent_error(rank))


class _CallGroupWatch:
    """Publishes which rank of a call group is gone, once its first rank finds the connection to it closed."""

    def __init__(self, call_group: Any) -> None:
        self._call_group, self.members = call_group, call_group.members
        self._generation, self._is_over = call_group.generation, False

    def reported_error(self) -> ReshardError | None:
        error: ReshardError | None = self._call_group.reported_error(self._generation)
        return error

    def stop(self, error: ReshardError) -> None:
        self._is_over = True
        self._call_group.fail(self._generation, error)

    def poll(self) -> bool:
        return self._is_over


@contextlib.contextmanager
def publishing_lost_ranks(group: Group, call_group: Any) -> Iterator[None]:
    """Let the monitor publish which rank of a call group is gone, while this rank may be inside a collective of torch.

    Only the first rank of the call group has connections to all others, so this does nothing on other ranks.
    """
    if call_group.members[0] != group.rank or len(call_group.members) == 1:
        yield
        return
    watch, monitor = _CallGroupWatch(call_group), Monitor.of(group)
    monitor.watch(watch)
    try:
        yield
    finally:
        monitor.forget(watch)


#: Monitors whose thread must end before the interpreter does.
_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()


def _run(monitor: weakref.ref[Monitor], end_requests: queue.SimpleQueue[None]) -> None:
    may_query = False
    while (current := monitor()) is not None:
        may_query = may_query or allow_queries_during_capture()
        seconds = current.poll()
        del current
        begun_at = time.monotonic()
        with contextlib.suppress(queue.Empty):
            end_requests.get(timeout=seconds)
            return
        if (current := monitor()) is not None:
            current.detect_pause(seconds, begun_at)
            del current


def _end_all() -> None:
    for monitor in list(_monitors):
        monitor.end()
    for monitor in list(_monitors):
        monitor.join(2 * BEAT_SECONDS)
