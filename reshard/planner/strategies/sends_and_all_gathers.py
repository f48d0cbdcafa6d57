"""Strategies that send each receiver its region directly, or a part of it followed by an all-gather."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes
from reshard.planner.strategies.sender_selection import (
    SendLoads,
    pick_sender,
    pick_senders,
    real_ranks,
    rotation,
)
from reshard.ragged import NO_RANK

Edges = list[tuple[int, int]]


def send_recv(problem: PlanProblem) -> Routes:
    """Send each region from a holder directly to each receiver.

    Steps: 1. Bytes between hosts: total. The sender is a holder on the receiver's host if there is one. Otherwise it is
    a holder on the host with the fewest bytes to send so far. Messages are in rotation order (sender i to receiver i,
    then to receiver i + 1, ...), which keeps every port busy.
    """
    task, replica = np.nonzero(problem.receivers != NO_RANK)
    receiver = problem.receivers[task, replica]
    if problem.holders.shape[1] == 1:
        sender = problem.holders[task, 0]
    else:
        sender = pick_senders(problem, task, receiver)
    order = rotation(sender, receiver)
    return Routes.direct(problem, task[order], sender[order], receiver[order])


def local_all_gather(problem: PlanProblem) -> Routes:
    """The k receivers of a region each fetch 1/k of it, and all-gather it inside their host.

    Steps: 2. Bytes between hosts: unique; inside hosts: (k - 1) times that. Applies to a region whose k >= 2 receivers
    are all on one host, if k divides one of its dims. Other regions are sent as in :func:`send_recv`. Source: the 2023
    cross-mesh resharding study.
    """
    return _gather(problem, local_cuts(problem), False, lambda part: [(part[0], other) for other in part[1:]])


def global_all_gather(problem: PlanProblem) -> Routes:
    """The k receivers of a region each fetch 1/k of it, and all-gather it in a ring, also across hosts.

    Steps: k, in chunks. Bytes between hosts: unique for the parts, plus up to (hosts of the receivers) times that for
    the ring. The ring is in host order, so each part enters each host once; it can enter the host of its first receiver
    twice. Parts differ by at most one row. Applies to a region with k >= 2 receivers and a dim of size >= k. Other
    regions are sent as in :func:`send_recv`. Source: the 2023 cross-mesh resharding study.
    """
    return _gather(problem, global_cuts(problem), True, lambda part: list(itertools.pairwise(part)))


def local_cuts(problem: PlanProblem) -> np.ndarray:
    """``(tasks,)`` the dim along which :func:`local_all_gather` cuts each region, -1 if it sends it directly."""
    host = np.append(problem.topology.host_array, -1)[problem.receivers]
    first = np.where(host < 0, problem.topology.num_hosts, host).min(axis=1, initial=problem.topology.num_hosts)
    on_one_host = first == host.max(axis=1, initial=-1)
    return np.where(on_one_host, _first_dim(problem, _divides(problem)), -1)


def global_cuts(problem: PlanProblem) -> np.ndarray:
    """``(tasks,)`` the dim along which :func:`global_all_gather` cuts each region, -1 if it sends it directly."""
    fits = problem.stop - problem.start >= problem.num_receivers[:, None]
    even = _first_dim(problem, fits & _divides(problem))
    return np.where(even >= 0, even, _first_dim(problem, fits))


def _divides(problem: PlanProblem) -> np.ndarray:
    """``(tasks, ndim)`` whether the number of receivers divides the size of the dim."""
    return (problem.stop - problem.start) % np.maximum(problem.num_receivers, 1)[:, None] == 0


def _first_dim(problem: PlanProblem, may_cut: np.ndarray) -> np.ndarray:
    """``(tasks,)`` the first dim that may be cut, -1 without any, or if the region should not be gathered."""
    gathers = may_cut.any(axis=1) & (problem.num_receivers > 1) & ~problem.has_near_holder
    return np.where(gathers, may_cut.argmax(axis=1), -1) if may_cut.shape[1] else np.full(len(problem), -1)


def _gather(
    problem: PlanProblem, cuts: np.ndarray, in_host_order: bool, spread: Callable[[list[int]], Edges]
) -> Routes:
    """Each receiver fetches one part of the region and forwards it to the other receivers.

    Args:
        problem: the problem.
        cuts: ``(tasks,)`` the dim to cut, or -1 to send the region directly.
        in_host_order: whether to sort the receivers of regions that no host both holds and needs.
        spread: the edges that forward a part, given the receivers with the part's first receiver in front.
    """
    loads = SendLoads(problem)
    hosts, is_near = problem.topology.host_of_rank, problem.has_near_holder
    direct_rows: list[tuple[int, int, int]] = []
    routes: list[tuple[int, Edges]] = []
    bounds: list[tuple[np.ndarray, np.ndarray]] = []
    for task in range(len(problem)):
        receivers, holders = real_ranks(problem.receivers[task]), real_ranks(problem.holders[task])
        k = len(receivers)
        if in_host_order and k > 1 and not is_near[task]:
            receivers.sort(key=lambda rank: (hosts[rank], rank))
        dim = int(cuts[task])
        if dim < 0:
            for receiver in receivers:
                direct_rows.append((task, pick_sender(loads, holders, receiver, int(problem.nbytes[task])), receiver))
            continue
        low, size = int(problem.start[task, dim]), int(problem.stop[task, dim] - problem.start[task, dim])
        for nth, first in enumerate(receivers):
            sender = loads.pick(holders)
            loads.add(sender, int(problem.nbytes[task]) // k, crosses=True)
            routes.append((task, [(sender, first), *spread(receivers[nth:] + receivers[:nth])]))
            start, stop = problem.start[task].copy(), problem.stop[task].copy()
            start[dim], stop[dim] = low + size * nth // k, low + size * (nth + 1) // k
            bounds.append((start, stop))
    gathered = Routes.of(problem, routes)
    if routes:
        gathered = Routes(
            task=gathered.task,
            start=np.stack([start for start, _ in bounds]),
            stop=np.stack([stop for _, stop in bounds]),
            edge_offsets=gathered.edge_offsets,
            sender=gathered.sender,
            receiver=gathered.receiver,
        )
        sender, receiver = gathered.sender[gathered.edge_offsets[:-1]], gathered.receiver[gathered.edge_offsets[:-1]]
        gathered = gathered.take(rotation(sender, receiver))
    table = np.array(direct_rows, dtype=np.int64).reshape(-1, 3)
    order = rotation(table[:, 1], table[:, 2])
    direct = Routes.direct(problem, table[order, 0], table[order, 1], table[order, 2])
    return Routes.join([gathered, direct])
