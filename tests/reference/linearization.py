"""Reference implementation of ``native/multicast/linearization.h``: one total order of all messages."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from tests.reference.rank_assignment import Messages

#: A rank stages a piece from its own host at most this many of its sends to other hosts before it sends the piece.
STAGED_BEFORE = 2
#: A rank forwards a staged piece from another host before it receives this many further messages.
STAGED_AFTER = 4


def linearize(messages: Messages, crosses: list[bool]) -> list[int]:
    """Sort messages into one total order in which every message follows the messages it depends on.

    Each rank starts its messages and completes its receives in this order. Therefore the messages that a rank sends to
    other hosts are ordered by start, and the messages that it receives by end. ``STAGED_BEFORE`` and ``STAGED_AFTER``
    limit how many pieces a rank stages at a time. If these rules form a cycle, the next message is the one that ends
    first among those whose dependencies are done.

    Args:
        messages: the messages with their dependencies.
        crosses: whether each message is between hosts.

    Returns:
        Message indices in the new order.
    """
    count = len(messages.piece)
    later: list[list[int]] = [[] for _ in range(count)]
    num_before = [0] * count

    def add_edge(first: int, second: int) -> None:
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
                add_edge(first, second)
        return rows

    every_message = list(range(count))

    def by_end(i: int) -> tuple[float, bool, int]:
        return messages.end[i], not crosses[i], i

    across = [i for i in every_message if crosses[i]]
    waiting = {i for i in messages.staged if not crosses[i]}
    for row in chain(across, messages.sender, lambda i: (messages.start[i], False, i)).values():
        for index, i in enumerate(row):
            if messages.source[i] in waiting:
                waiting.remove(messages.source[i])
                if index >= STAGED_BEFORE:
                    add_edge(row[index - STAGED_BEFORE], messages.source[i])
    uses: dict[int, list[int]] = {i: [] for i in messages.staged if crosses[i]}
    for i in every_message:
        if messages.source[i] in uses and not crosses[i]:
            uses[messages.source[i]].append(i)
    for row in chain(every_message, messages.receiver, by_end).values():
        for i, later_receive in zip(row, row[STAGED_AFTER:], strict=False):
            for use in uses.get(i, ()):
                add_edge(use, later_receive)
    for i in every_message:
        for first in messages.after[i]:
            add_edge(first, i)
    ready = [by_end(i) for i in every_message if not num_before[i]]
    heapq.heapify(ready)
    sorted_by_end = sorted(every_message, key=by_end)
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
        while at < count and is_done[sorted_by_end[at]]:
            at += 1
        if at == count:
            return sequence
        stuck = next(
            i for i in sorted_by_end[at:] if not is_done[i] and all(is_done[first] for first in messages.after[i])
        )
        ready.append(by_end(stuck))
