"""Reference implementation of ``flow_serially`` of ``native/fluid/fluid.cpp``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from reshard.plan import Plan, find_sender_changes, recvs_ahead, tabulate_messages


class _Link:
    """The times at which a link passes bytes: one message after the other, and later ones in the last gap that a message left."""

    def __init__(self) -> None:
        self.free_from = 0.0
        self.gap = (0.0, 0.0)

    def first_free(self, begin: float) -> float:
        """The first time from ``begin`` on at which the link is free."""
        return max(self.gap[0] if begin < self.gap[1] else self.free_from, begin)

    def add(self, begin: float, seconds: float) -> float:
        """Let the link pass something for so many seconds, from ``begin`` on; return when it has passed."""
        first, to = max(self.gap[0], begin), self.gap[1]
        if first + seconds < to:
            self.gap = (first + seconds, to)
            return first + seconds
        if first < to:
            seconds -= to - first
            self.gap = (self.gap[0], first)
        if begin > self.free_from:
            self.gap = (self.free_from, begin)
            self.free_from = begin
        self.free_from += seconds
        return self.free_from


class _Round:
    """Messages of equal size that begin to flow over a shared link at nearly the same time, and end together."""

    def __init__(self, begin: float, seconds: float, nbytes: int) -> None:
        self.begin, self.seconds, self.nbytes = begin, seconds, nbytes
        self.end = 0.0

    def takes(self, begin: float, nbytes: int) -> bool:
        """Whether a message belongs to the round."""
        return nbytes == self.nbytes and abs(begin - self.begin) <= 0.5 * self.seconds


def serial_seconds_python(plan: Plan) -> float:
    """The arrival of the last message, in seconds after the start, if each port passes one message at a time.

    Links that many ports share pass several at once.
    """
    topology, messages = plan.topology, tabulate_messages(plan)
    changes_sender = find_sender_changes(plan)
    links: dict[tuple[Any, ...], _Link] = defaultdict(_Link)
    started: dict[tuple[int, bool], float] = defaultdict(float)
    sent: dict[tuple[int, bool], list[float]] = defaultdict(list)
    received: dict[int, list[float]] = defaultdict(list)
    arrived: list[float] = []
    latest: dict[tuple[Any, ...], _Round] = {}
    rounds: dict[int, _Round] = {}  # by message: of the shared link that lets it end last
    for i in range(len(messages)):
        sender, receiver, window = (int(getattr(messages, name)[i]) for name in ("sender", "receiver", "window"))
        arrived.append(0.0)
        if sender == receiver:
            continue
        path = _path(plan, sender, receiver)
        a, b = topology.host_of_rank[sender], topology.host_of_rank[receiver]
        earlier = messages.after[messages.after_offsets[i] : messages.after_offsets[i + 1]].tolist()
        begin = max([started[sender, a == b], *(arrived[other] for other in earlier)])
        begin = max([begin, *(rounds[other].end for other in earlier if other in rounds)])
        for ends, back in ((sent[sender, a == b], window), (received[receiver], recvs_ahead(window))):
            if len(ends) >= back:
                begin = max(begin, ends[-back])
        started[sender, a == b] = begin
        wait = topology.inside_latency_seconds if a == b else topology.latency_seconds
        if topology.sender_change_seconds and changes_sender[messages.transfer[i]] and messages.chunk[i] == 0:
            wait += topology.sender_change_seconds
        out, into, *_ = path
        flows = links[into].first_free(links[out].first_free(begin) + wait)
        seconds = {link: float(messages.nbytes[i]) / rate for link, rate in path.items()}
        duration, nbytes, passed = max(seconds.values()), int(messages.nbytes[i]), 0.0
        end = max(flows + duration, links[out].add(flows - wait, wait + seconds.pop(out)))
        for number, (link, passing) in enumerate(seconds.items(), start=1):
            passes_at = links[link].add(flows, passing)
            end = max(end, passes_at)
            if number >= 2 and passes_at >= passed:
                passed = passes_at
                if link not in latest or not latest[link].takes(flows, nbytes):
                    latest[link] = _Round(flows, duration, nbytes)
                rounds[i] = latest[link]
                rounds[i].end = max(rounds[i].end, passes_at)
        for ends in (sent[sender, a == b], received[receiver]):
            ends.append(max(end, ends[-1]) if ends else end)
        arrived[i] = received[receiver][-1]
    return max((ends[-1] for ends in received.values()), default=0.0)


def _path(plan: Plan, sender: int, receiver: int) -> dict[tuple[Any, ...], float]:
    """The rates of the links between two ranks: two ports, then links that many ports share."""
    topology = plan.topology
    a, b = topology.host_of_rank[sender], topology.host_of_rank[receiver]
    if a == b:
        rate = topology.inside_bytes_per_second or 1e18
        total = topology.inside_total_bytes_per_second
        shared = {} if total is None else {("inside", a): total}
        return {("out of rank", sender): rate, ("into rank", receiver): rate, **shared}
    n, m = topology.nic_of_rank[sender], topology.nic_of_rank[receiver]
    ports = {
        ("out of", a, n): topology.host(a).nics[n].egress_bytes_per_second,
        ("into", b, m): topology.host(b).nics[m].ingress_bytes_per_second,
    }
    p, q = topology.host(a).pod, topology.host(b).pod
    if topology.pods and p != q:
        assert p is not None and q is not None
        ports["up", p] = topology.pods[p].egress_bytes_per_second
        ports["down", q] = topology.pods[q].ingress_bytes_per_second
    return ports
