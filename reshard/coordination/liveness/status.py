"""What a rank leaves in the store for those that wait for it in vain: what it does, why it gave up, that it lives."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import torch.distributed as dist

from reshard.coordination.process_group import Group, new_status
from reshard.coordination.store import Store
from reshard.errors import RemoteError

#: In fault-tolerant calls, a rank without a connection and without a heartbeat for this long counts as gone.
SILENT_SECONDS = 4.0

#: Key of ``out_of_sync`` for calls with any ranks of the group.
ANY_RANKS = "*"


def beat_key(rank: int) -> str:
    """Where a rank counts its heartbeats."""
    return f"beat/{rank}"


class Pulses:
    """The heartbeats of other ranks, looked at now and then."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[int, tuple[bytes, float]] = {}

    def look(self, rank: int) -> tuple[bool, float]:
        """Whether a rank has ever beaten, and for how many seconds of being looked at it has not."""
        key, now = beat_key(rank), time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = beat, now
        return beat != b"", now - self._seen[rank][1]

    def is_silent(self, rank: int) -> bool:
        """Whether it has beaten once, but not for :data:`SILENT_SECONDS`."""
        has_beaten, seconds = self.look(rank)
        return has_beaten and seconds > SILENT_SECONDS

    def forget(self) -> None:
        """Begin anew, where nobody has looked for a while."""
        self._seen.clear()


def publish_status(group: Group) -> None:
    """Let other ranks see what this one is doing, if the store is there."""
    with contextlib.suppress(RuntimeError):
        group.store.set(f"status/{group.rank}", json.dumps(group.status))


#: More errors than anybody counts as dealt with: of a rank that never comes again.
_NEVER = 2**40


def is_blamed(status: dict[str, Any]) -> bool:
    """Whether somebody said in a rank's place that it is gone."""
    return int(status["errors"]) >= _NEVER


def blame(store: dist.Store | Store, rank: int, text: str) -> None:
    """Let those who wait for a rank know why it does not come, in its place.

    Args:
        store: of the group. rank: of the one that is gone; text: why.
    """
    key = f"status/{rank}"
    status = json.loads(store.get(key)) if store.check([key]) else new_status()
    store.set(key, json.dumps(status | {"errors": status["errors"] + _NEVER, "error": [RemoteError.__name__, text]}))
