"""Large exchanges in closed form: in slot t, port i sends to port i + t, so every port passes one message at a time."""

from __future__ import annotations

import numpy as np

from reshard.plan import Transfers
from reshard.planner.multicast.workload import Ports
from reshard.planner.strategies.problem import INSIDE_WINDOW, WINDOW, Problem
from reshard.ragged import NO_RANK, number_values


def rotate_ports(problem: Problem, ports: Ports) -> Transfers:
    """Send each region in one message, in rotation over the ports, each message after the last ones of its two ports.

    Steps: 1. Bytes between hosts: total. If all pairs of ports exchange equally much over equal links, no order is
    faster. Messages inside hosts come first and wait for nothing.

    Args:
        problem: regions with one holder, and at most one receiver that does not hold them.
        ports: one for each NIC.
    """
    task = np.flatnonzero((problem.receivers != NO_RANK).any(axis=1) & (problem.nbytes > 0))
    sender, receiver = problem.holders[task].max(axis=1), problem.receivers[task].max(axis=1)
    host, of_rank = problem.topology.host_by_rank, np.array(ports.of_rank, dtype=np.int64)
    crosses = host[sender] != host[receiver]
    (senders, i), (receivers, j) = number_values(of_rank[sender]), number_values(of_rank[receiver])
    slot = np.where(crosses, (j - i) % max(len(senders), len(receivers)), -1)
    order = np.lexsort((receiver, sender, i, slot))
    task, sender, receiver, crosses, i, j = (column[order] for column in (task, sender, receiver, crosses, i, j))
    moving = np.flatnonzero(crosses)
    before = np.stack([_previous(port[moving], moving) for port in (i, j)], axis=1)
    before[before[:, 0] == before[:, 1], 1] = -1  # the same message, which is named once
    after = np.full((len(task), 2), -1, dtype=np.int64)
    after[moving] = before
    return Transfers.unchecked(
        box_at=np.arange(len(task) + 1),
        box_tensor=problem.tensor[task],
        box_start=problem.start[task],
        box_stop=problem.stop[task],
        edge_at=np.arange(len(task) + 1),
        sender=sender,
        receiver=receiver,
        splits=np.ones((len(task), problem.start.shape[1]), dtype=np.int64),
        window=np.where(crosses, WINDOW, INSIDE_WINDOW),
        after_at=np.concatenate([[0], np.cumsum((after >= 0).sum(axis=1))]),
        after=after[after >= 0],
        source=np.full(len(task), -1, dtype=np.int64),
    )


def _previous(port: np.ndarray, message: np.ndarray) -> np.ndarray:
    """``(messages,)`` for each message the one before it at its port, -1 for the first; both in order."""
    order = np.argsort(port, kind="stable")
    before = np.full(len(port), -1, dtype=np.int64)
    follows = port[order[1:]] == port[order[:-1]]
    before[order[1:][follows]] = message[order[:-1][follows]]
    return before
