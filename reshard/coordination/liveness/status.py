"""Per-rank status in the store: current call, last error, heartbeat."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import torch.distributed as dist

from reshard.coordination.messages import RankStatus
from reshard.coordination.process_group import Group
from reshard.coordination.store import Store
from reshard.errors import RemoteError

#: In fault-tolerant calls, a rank without a connection and without a heartbeat for this long counts as dead.
SILENT_SECONDS = 4.0

#: Key of ``out_of_sync`` that stands for every set of ranks of the group.
ANY_RANKS = "*"


def beat_key(rank: int) -> str:
    """The store key of a rank's heartbeat counter."""
    return f"beat/{rank}"


class HeartbeatReader:
    """Heartbeats of other ranks, as observed by this rank."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[int, tuple[bytes, float]] = {}  # rank -> counter, when it was first seen

    def read(self, rank: int) -> tuple[bool, float]:
        """Read a rank's heartbeat; returns whether it ever sent one, and seconds since a change was observed."""
        key, now = beat_key(rank), time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = beat, now
        return beat != b"", now - self._seen[rank][1]

    def is_silent(self, rank: int) -> bool:
        """Whether a rank has sent heartbeats, but none for :data:`SILENT_SECONDS`."""
        has_beaten, seconds = self.read(rank)
        return has_beaten and seconds > SILENT_SECONDS

    def reset(self) -> None:
        """Drop earlier observations, after a pause in reading."""
        self._seen.clear()


def publish_status(group: Group) -> None:
    """Write this rank's status to the store; does nothing if the store is lost."""
    with contextlib.suppress(RuntimeError):
        group.store.set(f"status/{group.rank}", group.status.to_json())


#: Added to the error count of a dead rank. No rank reaches this count by itself.
_DEAD_RANK_ERRORS = 2**40


def is_reported_dead(status: RankStatus) -> bool:
    """Whether another process has reported this rank dead."""
    return int(status.errors) >= _DEAD_RANK_ERRORS


def report_dead(store: dist.Store | Store, rank: int, text: str) -> None:
    """Report a dead rank on its behalf, so that ranks that wait for it get an error.

    Args:
        store: store of the group. rank: the dead rank. text: error text that waiting ranks raise.
    """
    key = f"status/{rank}"
    status = RankStatus.from_json(store.get(key)) if store.check([key]) else RankStatus()
    dead = replace(status, errors=status.errors + _DEAD_RANK_ERRORS, error=(RemoteError.__name__, text))
    store.set(key, dead.to_json())
