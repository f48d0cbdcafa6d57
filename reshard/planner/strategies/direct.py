"""Strategies that send each receiver its region directly, or a part of it followed by an all-gather."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from reshard.planner.strategies.problem import Problem, Routes
from reshard.planner.strategies.sender_selection import (
    SendLoads,
    pick_sender,
    pick_senders,
    real_ranks,
    reorder,
    rotation,
)
from reshard.ragged import NO_RANK

Edges = list[tuple[int, int]]


def send_recv(problem: Problem) -> Routes:
    """Send each region from a holder directly to each receiver.

    Steps: 1. Bytes between hosts: total. The sender is a holder on the receiver's host if there is one, else a holder
    on the host with the fewest bytes to send so far. Messages are in rotation order (sender i to receiver i, then to
    receiver i + 1, ...), which keeps every port busy.
    """
    task, replica = np.nonzero(problem.receivers != NO_RANK)
    receiver = problem.receivers[task, replica]
    if problem.holders.shape[1] == 1:
        sender = problem.holders[task, 0]
    else:
        sender = pick_senders(problem, task, receiver)
    order = rotation(sender, receiver)
    return Routes.direct(problem, task[order], sender[order], receiver[order])


def local_all_gather(problem: Problem) -> Routes:
    """The k receivers of a region each fetch 1/k of it, and all-gather it inside their host.

    Steps: 2. Bytes between hosts: unique; inside hosts: (k - 1) times that. Applies to a region whose k >= 2 receivers
    are all on one host, if k divides one of its dims. Other regions are sent as in :func:`send_recv`. Source: the 2023
    cross-mesh resharding study.
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
    """The k receivers of a region each fetch 1/k of it, and all-gather it in a ring, also across hosts.

    Steps: k, in chunks. Bytes between hosts: unique for the parts, plus up to (hosts of the receivers) times that for
    the ring. The ring is in host order, so each part enters each host once; it can enter the host of its first receiver
    twice. Parts differ by at most one row. Applies to a region with k >= 2 receivers and a dim of size >= k. Other
    regions are sent as in :func:`send_recv`. Source: the 2023 cross-mesh resharding study.
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
    """Each receiver fetches one part of the region and forwards it to the other receivers.

    Args:
        cut: maps a task and its receivers to the dim to cut, or None to send the region directly. May sort receivers.
        spread: the edges that forward a part, given the receivers with the part's first receiver in front.
    """
    loads = SendLoads(problem)
    hosts = problem.topology.host_of_rank
    direct_rows: list[tuple[int, int, int]] = []
    rows: list[tuple[int, Edges]] = []
    bounds: list[tuple[np.ndarray, np.ndarray]] = []
    for task in range(len(problem)):
        receivers, holders = real_ranks(problem.receivers[task]), real_ranks(problem.holders[task])
        k = len(receivers)
        has_near_holder = not {hosts[rank] for rank in holders}.isdisjoint(hosts[rank] for rank in receivers)
        dim = cut(task, receivers) if k > 1 and not has_near_holder else None
        if dim is None:
            for receiver in receivers:
                direct_rows.append((task, pick_sender(loads, holders, receiver, int(problem.nbytes[task])), receiver))
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
    table = np.array(direct_rows, dtype=np.int64).reshape(-1, 3)
    order = rotation(table[:, 1], table[:, 2])
    direct = Routes.direct(problem, table[order, 0], table[order, 1], table[order, 2])
    return Routes.join([gathered, direct])
