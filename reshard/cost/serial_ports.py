"""The time of a plan if every port is serial: it passes one message at a time, in the plan's order."""

from __future__ import annotations

import numpy as np

from reshard import _native
from reshard.plan import MAX_RECVS_AHEAD, Plan, find_sender_changes, recvs_ahead, tabulate_messages
from reshard.topology import MAX_NICS, Topology

#: The rate of a link that the topology does not limit.
UNLIMITED_RATE = 1e18


def serial_seconds(plan: Plan) -> float:
    """The arrival of the last message, in seconds after the start, if each port passes one message at a time.

    A message starts when its ports are free and the rules of :func:`reshard.simulate` allow it. Bursts and send buffers
    are left out. The work is proportional to the messages.
    """
    messages, topology = tabulate_messages(plan), plan.topology
    delay = np.zeros(0)
    if topology.sender_change_seconds:
        changes_sender = find_sender_changes(plan)[messages.transfer] & (messages.chunk == 0)
        delay = np.where(changes_sender, topology.sender_change_seconds, 0.0)
    ports, rate = _ports_of_ranks(topology)
    return _native.flow_serially(
        sender=messages.sender,
        receiver=messages.receiver,
        nbytes=messages.nbytes,
        window=messages.window,
        after_offsets=messages.after_offsets,
        after=messages.after,
        delay=delay,
        host_of=topology.host_array,
        ports=ports,
        rate=rate,
        ahead=np.array([recvs_ahead(window) for window in range(MAX_RECVS_AHEAD + 1)], dtype=np.int64),  # then constant
        latency_across=topology.latency_seconds,
        latency_inside=topology.inside_latency_seconds,
    )


def _ports_of_ranks(topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """``(ranks, 7)`` numbers of the ports of each rank, and the rate of each port in bytes per second.

    The columns are the ports of a rank: out of and into the rank inside its host, out of and into its NIC, out of and
    into its pod (-1 without pods), and the total rate inside its host (-1 without a limit).
    """
    host, num_hosts, num_pods = topology.host_array, topology.num_hosts, len(topology.pods)
    inside = np.full(len(host), topology.inside_bytes_per_second or UNLIMITED_RATE)
    nics = [np.broadcast_to(rates[:num_hosts], (num_hosts, MAX_NICS)).ravel() for rates in topology.nic_rates]
    pods = [
        np.array([getattr(pod, f"{direction}_bytes_per_second") for pod in topology.pods], dtype=np.float64)
        for direction in ("egress", "ingress")
    ]
    total = topology.inside_total_bytes_per_second
    parts = [inside, inside, *nics, *pods, np.full(num_hosts, total or UNLIMITED_RATE)]
    first = np.cumsum([0, *map(len, parts)])
    nic, pod = host * MAX_NICS + topology.nic_array, np.full(len(host), -1)
    if num_pods:
        pod = np.array([topology.host(h).pod for h in range(num_hosts)], dtype=np.int64)[host]
    ranks = np.arange(len(host))
    columns = [ranks, ranks + first[1], nic + first[2], nic + first[3]]
    columns += [pod + first[4], pod + first[5]] if num_pods else [pod, pod]
    columns.append(np.full(len(host), -1) if total is None else host + first[6])
    return np.stack(columns, axis=1), np.concatenate(parts)
