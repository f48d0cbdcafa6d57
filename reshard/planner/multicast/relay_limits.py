"""Limits on the staging buffers of relays: ranks that stage pieces for other ranks of their host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reshard.plan import num_recv_slots
from reshard.planner.multicast.chunk_workload import ChunkWorkload
from reshard.planner.multicast.native_schedule import ChunkSchedule, put_in_order

#: Up to this many receivers per class, comparing a message with each receiver is faster than a search.
_MAX_COMPARED = 16


def limit_relay_staging(
    schedule: ChunkSchedule, workload: ChunkWorkload, num_ranks: int, staging_bytes: int
) -> ChunkSchedule:
    """Return the schedule if every relay has room for its staged messages. Otherwise, reorder it.

    In the new order, a relay forwards each staged message as soon as it arrives, and waits for no other message. Ports
    lose the order that the scheduler chose for them, but no rank stages more than one message at a time.
    """
    relays = _find_relays(schedule, workload, num_ranks)
    if not relays.any() or _fits(schedule, workload, relays, staging_bytes):
        return schedule
    forwards: dict[int, list[int]] = {}
    for later in np.flatnonzero(schedule.source >= 0).tolist():
        if relays[schedule.source[later]]:
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


def _find_relays(schedule: ChunkSchedule, workload: ChunkWorkload, num_ranks: int) -> np.ndarray:
    """``(messages,)`` bool: whether the receiver of each message is a relay, which forwards it but does not need it."""
    relays = np.zeros(len(schedule.piece), dtype=bool)
    if len(schedule.piece) == workload.num_messages:
        return relays
    used = np.zeros(len(schedule.piece), dtype=bool)
    used[schedule.source[schedule.source >= 0]] = True
    if used.any():
        at, receivers = workload.class_receivers
        needed_class, receiver = workload.piece_class[schedule.piece[used]], schedule.receiver[used]
        first, count = at[needed_class], np.diff(at)[needed_class]
        max_count = int(count.max())
        if max_count <= _MAX_COMPARED:
            is_needed = np.zeros(len(receiver), dtype=bool)
            for nth in range(max_count):
                is_needed |= (receivers[np.minimum(first + nth, len(receivers) - 1)] == receiver) & (nth < count)
            relays[used] = ~is_needed
        else:
            needed_keys = np.sort(np.repeat(np.arange(len(at) - 1), np.diff(at)) * num_ranks + receivers)
            used_keys = needed_class * num_ranks + receiver
            position = np.searchsorted(needed_keys, used_keys)  # numpy.isin is much slower: half of the planning time
            relays[used] = needed_keys[np.minimum(position, len(needed_keys) - 1)] != used_keys
    return relays


def _fits(schedule: ChunkSchedule, workload: ChunkWorkload, relays: np.ndarray, staging_bytes: int) -> bool:
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
    staged = np.flatnonzero(relays)
    arrivals = np.sort(schedule.receiver[staged] * count + staged)
    departures = np.sort(schedule.receiver[staged] * count + last_use[staged])
    now = schedule.receiver * count + np.arange(count)
    held = np.searchsorted(arrivals, now) - np.searchsorted(departures, now)
    return bool((held < slots[schedule.receiver]).all())
