"""Limits on the staging buffers of relays: ranks that stage pieces for other ranks of their host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reshard.plan import num_recv_slots
from reshard.planner.multicast.chunk_workload import ChunkWorkload
from reshard.planner.multicast.native_schedule import ChunkSchedule, put_in_order


def limit_relay_staging(schedule: ChunkSchedule, workload: ChunkWorkload, staging_bytes: int) -> ChunkSchedule:
    """Return the schedule if every relay has room for its staged messages. Otherwise, reorder it.

    In the new order, a relay forwards each staged message as soon as it arrives, and waits for no other message. Ports
    lose the order that the scheduler chose for them, but no rank stages more than one message at a time.
    """
    if not schedule.staged.any() or _fits(schedule, workload, staging_bytes):
        return schedule
    forwards: dict[int, list[int]] = {}
    for later in np.flatnonzero(schedule.source >= 0).tolist():
        if schedule.staged[schedule.source[later]]:
            forwards.setdefault(int(schedule.source[later]), []).append(later)
    order: list[int] = []
    placed = np.zeros(len(schedule.piece), dtype=bool)
    for message in range(len(schedule.piece)):
        stack = [message]
        while stack:
            following = stack.pop()
            if not placed[following]:
                placed[following] = True
                order.append(following)
                stack += reversed(forwards.get(following, []))
    is_forward = np.zeros(len(schedule.piece), dtype=bool)
    is_forward[[later for row in forwards.values() for later in row]] = True
    counts = np.diff(schedule.after_offsets)
    row = np.repeat(np.arange(len(counts)), counts)
    kept = ~is_forward[row] | (schedule.after == schedule.source[row])
    after_offsets = np.concatenate([[0], np.cumsum(np.bincount(row[kept], minlength=len(counts)))])
    return put_in_order(replace(schedule, after_offsets=after_offsets, after=schedule.after[kept]), np.array(order))


def _fits(schedule: ChunkSchedule, workload: ChunkWorkload, staging_bytes: int) -> bool:
    """Whether every message finds a free receive slot at its receiver, which also stages other messages."""
    count = len(schedule.piece)
    nbytes = workload.piece_bytes[schedule.piece]
    largest = np.zeros(int(schedule.receiver.max()) + 1, dtype=np.int64)
    np.maximum.at(largest, schedule.receiver, nbytes)
    slots = np.array([num_recv_slots(staging_bytes, int(max_bytes)) for max_bytes in largest])
    forwards = np.flatnonzero(schedule.source >= 0)
    last_use = np.arange(count)
    np.maximum.at(last_use, schedule.source[forwards], forwards)
    # for each message, the number staged at its receiver before it: arrived messages minus forwarded ones
    staged = np.flatnonzero(schedule.staged)
    arrivals = np.sort(schedule.receiver[staged] * count + staged)
    departures = np.sort(schedule.receiver[staged] * count + last_use[staged])
    now = schedule.receiver * count + np.arange(count)
    held = np.searchsorted(arrivals, now) - np.searchsorted(departures, now)
    return bool((held < slots[schedule.receiver]).all())
