"""Strategies in which each receiver fetches what it needs, or a part of it, and receivers gather the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from reshard.planner.strategies.problem import Problem, Routes
from reshard.planner.strategies.sender_selection import Loads, pick_sender, real_ranks, reorder, rotation
from reshard.ragged import NO_RANK

Edges = list[tuple[int, int]]


def send_recv(problem: Problem) -> Routes:
    """One message from a holder to each receiver.

    Steps: 1. Bytes between hosts: total. The sender is a holder on the receiver's host where there is one,
    else on the host with the least to send. Messages are ordered in rotations (sender i to receiver i, then
    i + 1, ...), so that every port stays busy.
    """
    task, replica = np.nonzero(problem.receivers != NO_RANK)
    receiver = problem.receivers[task, replica]
    if problem.holders.shape[1] == 1:
        sender = problem.holders[task, 0]
    else:
        loads = Loads(problem)
        holders = [real_ranks(row) for row in problem.holders]
        rows = zip(task.tolist(), receiver.tolist(), strict=True)
        sender = np.array([pick_sender(loads, holders[t], r, int(problem.nbytes[t])) for t, r in rows], dtype=np.int64)
    order = rotation(sender, receiver)
    return Routes.direct(problem, task[order], sender[order], receiver[order])


def local_all_gather(problem: Problem) -> Routes:
    """Replicas on one host each fetch 1/k of a region and pass it on inside the host.

    Steps: 2. Bytes between hosts: unique; inside hosts: (k - 1) times that. It applies to a region whose
    receivers are k >= 2 ranks of one host, and where k divides one of its dims; other regions go as in
    :func:`send_recv`. Source: the 2023 cross-mesh resharding study.
    """
    hosts = problem.topology.host_of_rank

    def cut(task: int, receivers: list[int]) -> int | None:
        if len({hosts[rank] for rank in receivers}) > 1:
            return None
        size = problem.stop[task] - problem.start[task]
        dims = np.flatnonzero(size % len(receivers) == 0)
        return int(dims[0]) if len(dims) else None

    return _gather(problem, cut, lambda part: [(part[0], other) for other in part[1:]])


def global_all_gather(problem: Problem) -> Routes:
    """All k receivers of a region each fetch 1/k of it and gather the rest in a ring.

    Steps: k, in chunks. Bytes between hosts: unique for the parts, and up to (hosts of the receivers) times that for
    the ring, which stands in host order and so enters each host once per part, the host where the part came in
    twice. Parts differ by at most one row. It applies to a region of k >= 2 receivers with at least k rows in some
    dim; other regions go as in :func:`send_recv`. Source: the 2023 cross-mesh resharding study.
    """
    hosts = problem.topology.host_of_rank

    def cut(task: int, receivers: list[int]) -> int | None:
        receivers.sort(key=lambda rank: (hosts[rank], rank))
        size = problem.stop[task] - problem.start[task]
        dims = np.flatnonzero(size >= len(receivers))
        even = [dim for dim in dims.tolist() if size[dim] % len(receivers) == 0]
        return (even or [int(dims[0])])[0] if len(dims) else None

    return _gather(problem, cut, lambda part: list(itertools.pairwise(part)))


def _gather(
    problem: Problem, cut: Callable[[int, list[int]], int | None], spread: Callable[[list[int]], Edges]
) -> Routes:
    """Each receiver fetches a part; ``cut`` says along which dim, ``spread`` how a part goes on from the first rank."""
    loads = Loads(problem)
    hosts = problem.topology.host_of_rank
    plain: list[tuple[int, int, int]] = []
    rows: list[tuple[int, Edges]] = []
    bounds: list[tuple[np.ndarray, np.ndarray]] = []
    for task in range(len(problem)):
        receivers, holders = real_ranks(problem.receivers[task]), real_ranks(problem.holders[task])
        k = len(receivers)
        near = not {hosts[rank] for rank in holders}.isdisjoint(hosts[rank] for rank in receivers)
        dim = cut(task, receivers) if k > 1 and not near else None
        if dim is None:
            for receiver in receivers:
                plain.append((task, pick_sender(loads, holders, receiver, int(problem.nbytes[task])), receiver))
            continue
        low, size = int(problem.start[task, dim]), int(problem.stop[task, dim] - problem.start[task, dim])
        for nth, first in enumerate(receivers):
            sender = loads.pick(holders)
            loads.add(sender, int(problem.nbytes[task]) // k, crosses=True)
            rows.append((task, [(sender, first), *spread(receivers[nth:] + receivers[:nth])]))
            start, stop = problem.start[task].copy(), problem.stop[task].copy()
            start[dim], stop[dim] = low + size * nth // k, low + size * (nth + 1) // k
            bounds.append((start, stop))
    gathered = Routes.of(problem, rows)
    if rows:
        gathered = Routes(
            task=gathered.task,
            start=np.stack([start for start, _ in bounds]),
            stop=np.stack([stop for _, stop in bounds]),
            edge_at=gathered.edge_at,
            sender=gathered.sender,
            receiver=gathered.receiver,
        )
        sender, receiver = gathered.sender[gathered.edge_at[:-1]], gathered.receiver[gathered.edge_at[:-1]]
        gathered = reorder(gathered, rotation(sender, receiver))
    table = np.array(plain, dtype=np.int64).reshape(-1, 3)
    order = rotation(table[:, 1], table[:, 2])
    direct = Routes.direct(problem, table[order, 0], table[order, 1], table[order, 2])
    return Routes.join([gathered, direct])
