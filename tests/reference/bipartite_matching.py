"""The reference implementation of ``native/multicast/bipartite_matching.h``: weighted matching of senders and receivers."""

from __future__ import annotations


def find_pairs(
    senders: list[int], receivers: list[int], partners: dict[int, list[int]], weight: dict[int, float]
) -> dict[int, int]:
    """The sender of each matched receiver: earlier receivers have priority, then heavier senders.

    Receivers are matched in order along augmenting paths, so a matched receiver stays matched. Then each unmatched sender
    replaces a lighter one along an alternating path that keeps the same receivers.

    Args:
        senders: by descending weight.
        receivers: by descending priority.
        partners: possible senders of each receiver.
        weight: weight of each sender.
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
    receivers_of: dict[int, list[int]] = {s: [] for s in senders}
    for r in receivers:
        for s in partners[r]:
            receivers_of[s].append(r)

    def replace(s: int, limit: float, seen: set[int]) -> bool:
        for r in receivers_of[s]:
            if r in seen or r not in sender_of:
                continue
            seen.add(r)
            other = sender_of[r]
            if weight[other] < limit:
                del receiver_of[other]
            elif not replace(other, limit, seen):
                continue
            receiver_of[s], sender_of[r] = r, s
            return True
        return False

    for s in senders:
        if s not in receiver_of:
            replace(s, weight[s], set())
    return sender_of
