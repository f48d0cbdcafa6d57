"""One order of all messages that suits senders and receivers alike."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from reshard.landing import Messages


def find_sequence(messages: Messages, crosses: list[bool]) -> list[int]:
    """Messages in an order in which what they come after is before them.

    Ranks start messages in the plan's order, and count them as arrived in that order. So each sender's messages
    between hosts stand in order of their starts, each receiver's in order of their ends; where both cannot be, what
    ends first comes first.

    Args:
        messages: with what each comes after. crosses: which of them are between hosts.
    """
    count = len(messages.piece)
    later: list[list[int]] = [[] for _ in range(count)]
    num_before = [0] * count

    def put(first: int, second: int) -> None:
        later[first].append(second)
        num_before[second] += 1

    def chain(members: list[int], owner: list[int], key: Callable[[int], tuple[float, bool, int]]) -> None:
        rows: dict[int, list[int]] = {}
        for i in members:
            rows.setdefault(owner[i], []).append(i)
        for row in rows.values():
            row.sort(key=key)
            for first, second in itertools.pairwise(row):
                put(first, second)

    everything = list(range(count))

    def by_end(i: int) -> tuple[float, bool, int]:
        return messages.end[i], not crosses[i], i

    chain([i for i in everything if crosses[i]], messages.sender, lambda i: (messages.start[i], False, i))
    chain(everything, messages.receiver, by_end)
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
