"""Python reference for ``flow_serially`` of ``native/fluid/fluid.cpp``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from reshard.plan import Plan, find_sender_switches, recvs_ahead, tabulate_messages


def serial_seconds_python(plan: Plan) -> float:
    """The arrival of the last message, in seconds after the start, if each port passes one message at a time.

    Links that many ports share pass several at once.
    """
    topology, messages = plan.topology, tabulate_messages(plan)
    switches_sender = find_sender_switches(plan)
    free_at: dict[tuple[Any, ...], float] = defaultdict(float)
    sent: dict[tuple[int, bool], list[float]] = defaultdict(list)
    received: dict[int, list[float]] = defaultdict(list)
    arrived: list[float] = []
    for i in range(len(messages)):
        sender, receiver, window = (int(getattr(messages, name)[i]) for name in ("sender", "receiver", "window"))
        arrived.append(0.0)
        if sender == receiver:
            continue
        path = _path(plan, sender, receiver)
        a, b = topology.host_of_rank[sender], topology.host_of_rank[receiver]
        earlier = messages.after[messages.after_at[i] : messages.after_at[i + 1]].tolist()
        begin = max([0.0, *(arrived[other] for other in earlier), *(free_at[port] for port in list(path)[:2])])
        for ends, back in ((sent[sender, a == b], window), (received[receiver], recvs_ahead(window))):
            if len(ends) >= back:
                begin = max(begin, ends[-back])
        held = begin + (topology.inside_latency_seconds if a == b else topology.latency_seconds)
        if topology.sender_switch_seconds and switches_sender[messages.transfer[i]] and messages.chunk[i] == 0:
            held += topology.sender_switch_seconds
        nbytes = float(messages.nbytes[i])
        seconds = nbytes / min(path.values())
        end = held + seconds
        for number, (link, rate) in enumerate(path.items()):
            is_shared = number >= 2
            free_at[link] = (max(free_at[link], held - seconds) if is_shared else held) + nbytes / rate
            end = max(end, free_at[link]) if is_shared else end
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
