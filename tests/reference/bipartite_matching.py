"""Which sender serves which receiver."""

from __future__ import annotations


def find_pairs(
    senders: list[int], receivers: list[int], partners: dict[int, list[int]], weight: dict[int, float]
) -> dict[int, int]:
    """Pairs that keep the first receivers busy, and among those the heaviest senders; both lists are in that order.

    Receivers are matched by augmenting paths in their order, so that none gives way to a later one; then each sender
    left over takes the place of a lighter one, along a path that keeps the same receivers.
    """
    sender_of: dict[int, int] = {}
    receiver_of: dict[int, int] = {}

    def augment(r: int, seen: set[int]) -> bool:
        for s in partners[r]:
            if s not in receiver_of:
                receiver_of[s], sender_of[r] = r, s
                return True
        for s in partners[r]:
            if s not in seen:
                seen.add(s)
                if augment(receiver_of[s], seen):
                    receiver_of[s], sender_of[r] = r, s
                    return True
        return False

    for r in receivers:
        if len(receiver_of) == len(senders):
            break
        augment(r, set())
    wanting: dict[int, list[int]] = {s: [] for s in senders}
    for r in receivers:
        for s in partners[r]:
            wanting[s].append(r)

    def replace(s: int, heaviest: float, seen: set[int]) -> bool:
        for r in wanting[s]:
            if r in seen or r not in sender_of:
                continue
            seen.add(r)
            other = sender_of[r]
            if weight[other] < heaviest:
                del receiver_of[other]
            elif not replace(other, heaviest, seen):
                continue
            receiver_of[s], sender_of[r] = r, s
            return True
        return False

    for s in senders:
        if s not in receiver_of:
            replace(s, weight[s], set())
    return sender_of
