"""Broadcast trees: a chain of hosts, and a chain inside each host; on the sender's host a star or a chain."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from reshard import _native
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes
from reshard.ragged import NO_RANK


def along_trees(problem: PlanProblem, order: Iterable[tuple[int, int]]) -> Routes:
    """Broadcast each task along one tree, one task after another.

    Each byte enters each host once. Hosts form a chain in cyclic host order from the sender's host, pod by pod. On
    every other host, the receiver that has received the fewest bytes from other hosts so far takes the data. It
    forwards the data to the next host, and along a chain to the receivers on its own host. On the sender's host, the
    sender sends to every receiver directly, as long as it sends no more bytes in all than the busiest rank of that host
    receives. Otherwise the sender and these receivers form a chain.

    Args:
        problem: the tasks.
        order: ``(task, sender)`` of each tree, in the order of the plan.
    """
    task, sender = np.array(list(order), dtype=np.int64).reshape(-1, 2).T
    receivers = problem.receivers[task]
    is_real = receivers != NO_RANK
    edge_offsets = np.concatenate([[0], np.cumsum(is_real.sum(axis=1))])
    topology, (source, target) = problem.topology, np.zeros((2, int(edge_offsets[-1])), dtype=np.int64)
    _native.grow_trees(
        np.ascontiguousarray(sender), edge_offsets, receivers[is_real], problem.nbytes[task],
        topology.host_array, np.array([topology.host(host).pod or 0 for host in range(topology.num_hosts)]),
        len(topology.pods), _busiest_receiver_bytes(problem), source, target,
    )  # fmt: skip
    return Routes(task, problem.start[task], problem.stop[task], edge_offsets, source, target)


def _busiest_receiver_bytes(problem: PlanProblem) -> np.ndarray:
    """``(hosts,)`` bytes that the rank with the most to receive on each host receives."""
    host = problem.topology.host_array
    task, replica = np.nonzero(problem.receivers != NO_RANK)
    received = np.zeros(len(host), dtype=np.int64)
    np.add.at(received, problem.receivers[task, replica], problem.nbytes[task])
    max_bytes = np.zeros(problem.topology.num_hosts, dtype=np.int64)
    np.maximum.at(max_bytes, host, received)
    return max_bytes
