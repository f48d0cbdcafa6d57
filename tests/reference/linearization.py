"""One order of all messages that suits senders and receivers alike."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from tests.reference.rank_assignment import Messages

#: How many of its messages before one goes on a sender stages it.
STAGED_BEFORE = 2
#: How many messages behind one that a receiver only stages it must have gone on.
STAGED_BEHIND = 4


def linearize(messages: Messages, crosses: list[bool]) -> list[int]:
    """Messages in an order in which what they come after is before them.

    Ranks start messages in the plan's order, and count them as arrived in that order. So each sender's messages
    between hosts stand in order of their starts, each receiver's in order of their ends; where both cannot be, what
    ends first comes first. What a rank only stages goes on before it stages much more.

    Args:
        messages: with what each comes after. crosses: which of them are between hosts.
    """
    count = len(messages.piece)
    later: list[list[int]] = [[] for _ in range(count)]
    num_before = [0] * count

    def put(first: int, second: int) -> None:
        later[first].append(second)
        num_before[second] += 1

    def chain(
        members: list[int], owner: list[int], key: Callable[[int], tuple[float, bool, int]]
    ) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = {}
        for i in members:
            rows.setdefault(owner[i], []).append(i)
        for row in rows.values():
            row.sort(key=key)
            for first, second in itertools.pairwise(row):
                put(first, second)
        return rows

    everything = list(range(count))

    def by_end(i: int) -> tuple[float, bool, int]:
        return messages.end[i], not crosses[i], i

    across = [i for i in everything if crosses[i]]
    waiting = {i for i in messages.staged if not crosses[i]}
    for row in chain(across, messages.sender, lambda i: (messages.start[i], False, i)).values():
        for at, i in enumerate(row):
            if messages.source[i] in waiting:
                waiting.remove(messages.source[i])
                if at >= STAGED_BEFORE:
                    put(row[at - STAGED_BEFORE], messages.source[i])
    uses: dict[int, list[int]] = {i: [] for i in messages.staged if crosses[i]}
    for i in everything:
        if messages.source[i] in uses and not crosses[i]:
            uses[messages.source[i]].append(i)
    for row in chain(everything, messages.receiver, by_end).values():
        for i, later_one in zip(row, row[STAGED_BEHIND:], strict=False):
            for use in uses.get(i, ()):
                put(use, later_one)
    for i in everything:
        for first in messages.after[i]:
            put(first, i)
    ready = [by_end(i) for i in everything if not num_before[i]]
    heapq.heapify(ready)
    in_line = sorted(everything, key=by_end)
    is_done = [False] * count
    sequence: list[int] = []
    at = 0
    while True:
        while ready:
            i = heapq.heappop(ready)[-1]
            if is_done[i]:
                continue
            is_done[i] = True
            sequence.append(i)
            for second in later[i]:
                num_before[second] -= 1
                if not num_before[second] and not is_done[second]:
                    heapq.heappush(ready, by_end(second))
        while at < count and is_done[in_line[at]]:
            at += 1
        if at == count:
            return sequence
        stuck = next(i for i in in_line[at:] if not is_done[i] and all(is_done[first] for first in messages.after[i]))
        ready.append(by_end(stuck))
