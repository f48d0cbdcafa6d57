"""Broadcast trees: chains between hosts, then stars or chains inside each host."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from reshard import _native
from reshard.planner.strategies.problem import Problem, Routes
from reshard.ragged import NO_RANK


def along_trees(problem: Problem, order: Iterable[tuple[int, int]]) -> Routes:
    """Broadcast whole tasks along trees, one after another; ``order`` yields ``(task, sender)``.

    Each byte enters each host once. Hosts form a chain in cyclic host order from the sender's host, pod by pod. On each
    host the receiver with the fewest bytes received from other hosts so far takes the data. It forwards the data to the
    next host, and along a chain inside its host. On its own host the sender serves every receiver directly while it
    sends no more than the busiest rank there receives; after that these receivers form a chain too.
    """
    task, sender = np.array(list(order), dtype=np.int64).reshape(-1, 2).T
    rows = problem.receivers[task]
    is_real = rows != NO_RANK
    edge_at = np.concatenate([[0], np.cumsum(is_real.sum(axis=1))])
    topology, (source, target) = problem.topology, np.zeros((2, int(edge_at[-1])), dtype=np.int64)
    _native.grow_trees(
        np.ascontiguousarray(sender), edge_at, rows[is_real], problem.nbytes[task],
        topology.host_by_rank, np.array([topology.host(host).pod or 0 for host in range(topology.num_hosts)]),
        len(topology.pods), _most_arriving(problem), source, target,
    )  # fmt: skip
    return Routes(task, problem.start[task], problem.stop[task], edge_at, source, target)


def _most_arriving(problem: Problem) -> np.ndarray:
    """``(hosts,)`` the most bytes that a rank of each host receives."""
    host = problem.topology.host_by_rank
    task, replica = np.nonzero(problem.receivers != NO_RANK)
    arriving = np.zeros(len(host), dtype=np.int64)
    np.add.at(arriving, problem.receivers[task, replica], problem.nbytes[task])
    most = np.zeros(problem.topology.num_hosts, dtype=np.int64)
    np.maximum.at(most, host, arriving)
    return most
