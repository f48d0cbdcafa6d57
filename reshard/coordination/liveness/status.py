"""The status (current call, last error) and the heartbeat that a rank publishes in the store for the others."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch.distributed as dist

from reshard.coordination.groups.agreement_messages import RankStatus, read_json
from reshard.coordination.groups.process_group import Group
from reshard.coordination.groups.store import Store
from reshard.errors import RemoteError

#: A rank sends a heartbeat this often.
BEAT_SECONDS = 1.0
#: A rank counts as lost if it sends no heartbeat for this long after one was due.
HEARTBEAT_TIMEOUT_SECONDS = 30.0
#: A rank is lost if its last heartbeat is older than this. Writing and reading a heartbeat may add an interval each.
MAX_HEARTBEAT_AGE_SECONDS = HEARTBEAT_TIMEOUT_SECONDS + 2 * BEAT_SECONDS
#: If heartbeats were not read for this long, because this process or the store paused, silence is counted anew. A rank
#: reads them when it sends its own.
GAP_SECONDS = 5 * BEAT_SECONDS

#: Key of :attr:`RankStatus.out_of_sync` that applies to every set of ranks of the group.
ANY_RANKS = "*"


def beat_key(rank: int) -> str:
    """The store key of a rank's heartbeat counter."""
    return f"beat/{rank}"


def format_beat(number: int, started: Mapping[str, int]) -> str:
    """A heartbeat: a counter, and the number of transfers that the rank has started on a GPU, by set of ranks."""
    return json.dumps([number, started])


def find_late(store: Store, ranks: Iterable[int], key: str, number: int) -> list[int]:
    """The ranks whose last heartbeat says that they have started fewer than ``number`` transfers of a set of ranks."""
    late = []
    for rank in ranks:
        key_of_beat = beat_key(rank)
        has_beat = store.check([key_of_beat])
        _, started = store.read(key_of_beat, lambda text: read_json(text, (int, {str: int}))) if has_beat else (0, {})
        if started.get(key, 0) < number:
            late.append(rank)
    return late


class HeartbeatReader:
    """Heartbeats of other ranks, as observed by this rank."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[int, tuple[bytes, float, float]] = {}  # rank -> its counter, its first and its last reading

    def read(self, rank: int) -> tuple[bool, float]:
        """Read a rank's heartbeat. Returns whether it ever sent one, and the seconds since its counter last changed.

        The seconds count from the first reading after a pause of :data:`GAP_SECONDS`. While this process or the store
        stood still, the counters of other ranks could not be seen to change.
        """
        key = beat_key(rank)
        beat = self._store.get(key) if self._store.check([key]) else b""
        seen, first, last = self._seen.get(rank, (b"", -math.inf, -math.inf))
        now = time.monotonic()
        if seen != beat or now - last > GAP_SECONDS:
            first = now
        self._seen[rank] = beat, first, now
        return beat != b"", now - first


def publish_status(group: Group) -> None:
    """Write this rank's status to the store. If the store is silent, the monitor of the group tries again."""
    group.is_status_published = False
    with contextlib.suppress(RuntimeError):
        group.store.set(f"status/{group.rank}", group.status.to_json())
        group.is_status_published = True


#: :func:`report_dead` adds this to the error count of the dead rank. A live rank never counts this far.
_DEAD_RANK_ERRORS = 2**40


def is_reported_dead(status: RankStatus) -> bool:
    """Whether another process has reported this rank dead."""
    return int(status.errors) >= _DEAD_RANK_ERRORS


def report_dead(store: dist.Store | Store, rank: int, text: str) -> None:
    """Write to the status of a dead rank that it is dead. Ranks that wait for it then raise an error.

    Args:
        store: store of the group.
        rank: the dead rank.
        text: text of the error.
    """
    key = f"status/{rank}"
    status = RankStatus.from_json(store.get(key)) if store.check([key]) else RankStatus()
    dead = replace(status, errors=status.errors + _DEAD_RANK_ERRORS, error=(RemoteError.__name__, text))
    store.set(key, dead.to_json())
