"""Ranks that stage pieces for others of their host, and the room that takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reshard.plan.model import num_recv_slots
from reshard.planner.multicast.native_schedule import Schedule, put_in_order
from reshard.planner.multicast.workload import Workload


def keep_staging_short(schedule: Schedule, workload: Workload, num_ranks: int, staging_bytes: int) -> Schedule:
    """The schedule, if no rank stages more messages at once than it may; else one that sends on at once what is staged.

    Then what is staged goes on right behind its landing, and waits for nothing else: no port keeps its order, but no
    rank ever stages more than one message.
    """
    relays = _find_relays(schedule, workload, num_ranks)
    if not relays.any() or _fits(schedule, workload, relays, staging_bytes):
        return schedule
    uses: dict[int, list[int]] = {}
    for later in np.flatnonzero(schedule.source >= 0).tolist():
        if relays[schedule.source[later]]:
            uses.setdefault(int(schedule.source[later]), []).append(later)
    order: list[int] = []
    placed = np.zeros(len(schedule.piece), dtype=bool)
    for message in range(len(schedule.piece)):
        line = [message]
        while line:
            one = line.pop()
            if not placed[one]:
                placed[one] = True
                order.append(one)
                line += reversed(uses.get(one, []))
    is_use = np.zeros(len(schedule.piece), dtype=bool)
    is_use[[use for row in uses.values() for use in row]] = True
    counts = np.diff(schedule.after_at)
    row = np.repeat(np.arange(len(counts)), counts)
    kept = ~is_use[row] | (schedule.after == schedule.source[row])
    after_at = np.concatenate([[0], np.cumsum(np.bincount(row[kept], minlength=len(counts)))])
    return put_in_order(replace(schedule, after_at=after_at, after=schedule.after[kept]), np.array(order))


def _find_relays(schedule: Schedule, workload: Workload, num_ranks: int) -> np.ndarray:
    """``(messages,)`` True where something goes on from a receiver that does not need the piece."""
    relays = np.zeros(len(schedule.piece), dtype=bool)
    used = np.zeros(len(schedule.piece), dtype=bool)
    used[schedule.source[schedule.source >= 0]] = True
    if used.any():
        at, receivers = workload.class_receivers
        needed = np.sort(np.repeat(np.arange(len(at) - 1), np.diff(at)) * num_ranks + receivers)
        taken = workload.piece_class[schedule.piece[used]] * num_ranks + schedule.receiver[used]
        found = np.searchsorted(needed, taken)  # numpy.isin hashes all that is needed, and takes half of a plan's time
        relays[used] = needed[np.minimum(found, len(needed) - 1)] != taken
    return relays


def _fits(schedule: Schedule, workload: Workload, relays: np.ndarray, staging_bytes: int) -> bool:
    """Whether every rank can take each message while it stages those that have not gone on yet."""
    count = len(schedule.piece)
    nbytes = workload.piece_bytes[schedule.piece]
    largest = np.zeros(int(schedule.receiver.max()) + 1, dtype=np.int64)
    np.maximum.at(largest, schedule.receiver, nbytes)
    slots = np.array([num_recv_slots(staging_bytes, int(most)) for most in largest])
    forwards = np.flatnonzero(schedule.source >= 0)
    last_use = np.arange(count)
    np.maximum.at(last_use, schedule.source[forwards], forwards)
    # of each rank in order: what it has staged before a message, less what has gone on
    staged = np.flatnonzero(relays)
    landed = np.sort(schedule.receiver[staged] * count + staged)
    gone = np.sort(schedule.receiver[staged] * count + last_use[staged])
    asked = schedule.receiver * count + np.arange(count)
    held = np.searchsorted(landed, asked) - np.searchsorted(gone, asked)
    return bool((held < slots[schedule.receiver]).all())
