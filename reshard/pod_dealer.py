"""Scheduling where pods of hosts stand behind uplinks, which are scarce and come first."""

from __future__ import annotations

from reshard.dealer import Dealer
from reshard.matching import find_pairs


class PodDealer(Dealer):
    """Fills uplinks first, with what no other pod can give, then the ports inside pods.

    A pod gets a chunk over its uplink once; uplinks with time to spare may bring what the pod has already.
    """

    may_enter_again = False

    def pair(
        self, senders: list[int], receivers: list[int], to_get: dict[int, float], to_give: dict[int, float]
    ) -> bool:
        """See :meth:`Dealer.pair`."""
        free = _Free(self, senders, receivers, to_get)
        started = self.enter_pods(free)
        senders = [s for s in senders if s not in free.sending]
        receivers = [r for r in receivers if r not in free.receiving]
        partners = {r: [s for s in free.inside[r] if s not in free.sending] for r in receivers}
        sender_of = find_pairs(senders, receivers, partners, to_give)
        for r in receivers:
            if r in sender_of:
                started |= free.start(sender_of[r], r)
        return self.help_pods(free) or started

    def enter_pods(self, free: _Free) -> bool:
        """Start transfers that bring pods what they lack; whether one started."""
        to_enter, to_leave = self.uplink_loads()
        pods = range(len(self.up))
        refused: set[tuple[int, int]] = set()
        started = False
        while True:
            down = sorted((q for q in pods if self.down[q].free > 0), key=lambda q: (-to_enter[q], q))
            up = sorted((p for p in pods if self.up[p].free > 0), key=lambda p: (-to_leave[p], p))
            partners = {
                q: [p for p in up if p != q and (p, q) not in refused and free.best_entry(p, q) is not None]
                for q in down
            }
            up_of = find_pairs(up, down, partners, to_leave)
            if not up_of:
                return started
            for q in down:
                if q in up_of:
                    entry = free.best_entry(up_of[q], q)
                    if entry is not None and free.start(*entry):
                        started = True
                    else:
                        refused.add((up_of[q], q))

    def uplink_loads(self) -> tuple[dict[int, float], dict[int, float]]:
        """What each pod must still let in, and what it must let out because no other pod has it, in time."""
        pods = range(len(self.up))
        lacks = [self.missing_in(q) & ~self.in_pod[q] for q in pods]
        once = several = 0
        for q in pods:
            several |= once & self.in_pod[q]
            once |= self.in_pod[q]
        to_enter = {q: lacks[q].bit_count() / self.down[q].rate for q in pods}
        to_leave = {}
        for p in pods:
            alone = self.in_pod[p] & ~several
            count = sum((alone & lacks[q]).bit_count() for q in pods if q != p)
            to_leave[p] = count / self.up[p].rate
        return to_enter, to_leave

    def missing_in(self, pod: int) -> int:
        """The chunks that some host of a pod lacks."""
        missing = 0
        for host, its in enumerate(self.ports.pod):
            if its == pod:
                missing |= self.miss[host]
        return missing

    def help_pods(self, free: _Free) -> bool:
        """Let idle senders of other pods serve idle receivers, over uplinks that have the time."""
        started = False
        for r in free.receivers:
            q = free.pod_of[r]
            must = (self.missing_in(q) & ~self.in_pod[q]).bit_count() / self.down[q].rate
            if r in free.receiving or must + 1 > free.to_get[r]:
                continue
            for s in free.senders:
                if s in free.sending or free.pod_of[s] == q or self.rate(s, r) <= 0:
                    continue
                self.may_enter_again = True
                begun = free.start(s, r)
                self.may_enter_again = False
                started |= begun
                if begun:
                    break
        return started

    def candidates(self, s: int, r: int) -> int:
        """See :meth:`Dealer.candidates`."""
        if self.may_enter_again:
            return self.have[self.ports.host[s]] & self.miss[self.ports.host[r]]
        return super().candidates(s, r)


class _Free:
    """Ports that were free, which of them have been taken since, and who can feed whom inside a pod."""

    def __init__(self, dealer: PodDealer, senders: list[int], receivers: list[int], to_get: dict[int, float]) -> None:
        self.dealer, self.senders, self.receivers, self.to_get = dealer, senders, receivers, to_get
        ports = dealer.ports
        self.pod_of = {p: ports.pod[ports.host[p]] for p in (*senders, *receivers)}
        self.sending: set[int] = set()
        self.receiving: set[int] = set()
        self.inside = {
            r: [s for s in senders if self.pod_of[s] == self.pod_of[r] and dealer.can_start(s, r)] for r in receivers
        }

    def start(self, s: int, r: int) -> bool:
        """Start a transfer and take its ports."""
        if not self.dealer.start(s, r):
            return False
        self.sending.add(s)
        self.receiving.add(r)
        return True

    def best_entry(self, p: int, q: int) -> tuple[int, int] | None:
        """The sender in pod p and the receiver in pod q that leave most others fed inside their pods.

        None if more, or more urgent, receivers would go without for it.
        """
        best: tuple[tuple[int, float], int, int] | None = None
        before = self.fed(p) | self.fed(q)
        fed_beside: dict[int, set[int]] = {}
        for s in self.senders:
            if s in self.sending or self.pod_of[s] != p:
                continue
            fed_without: set[int] | None = None
            for r in self.receivers:
                if r in self.receiving or self.pod_of[r] != q or not self.dealer.can_start(s, r):
                    continue
                if fed_without is None:
                    fed_without = self.fed(p, without=s)
                if r not in fed_beside:
                    fed_beside[r] = self.fed(q, beside=r) | {r}
                after = fed_without | fed_beside[r]
                won, lost = after - before, before - after
                worth = len(won) - len(lost), self.most_urgent(won) - self.most_urgent(lost)
                if best is None or worth > best[0]:
                    best = worth, s, r
            if best is not None and best[0][0] >= 1:
                break
        return None if best is None or best[0] <= (0, 0.0) else (best[1], best[2])

    def most_urgent(self, receivers: set[int]) -> float:
        """The most that one of them has left to get."""
        return max((self.to_get[r] for r in receivers), default=0.0)

    def fed(self, pod: int, without: int = -1, beside: int = -1) -> set[int]:
        """The free receivers of a pod that its own free senders can feed, but for sender and receiver given."""
        receiver_of: dict[int, int] = {}

        def augment(r: int, seen: set[int]) -> bool:
            for s in self.inside[r]:
                if s not in self.sending and s != without and s not in seen:
                    seen.add(s)
                    if s not in receiver_of or augment(receiver_of[s], seen):
                        receiver_of[s] = r
                        return True
            return False

        for r in self.receivers:
            if self.pod_of[r] == pod and r not in self.receiving and r != beside:
                augment(r, set())
        return set(receiver_of.values())
