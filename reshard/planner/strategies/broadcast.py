"""Broadcasts of whole regions along chunked chains, in several orders."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from reshard.planner.strategies.direct import send_recv
from reshard.planner.strategies.greedy import Contest, order_greedily
from reshard.planner.strategies.problem import Problem, Routes
from reshard.planner.strategies.sender_selection import Loads, real_ranks, rotation
from reshard.planner.strategies.trees import along_trees
from reshard.ragged import NO_RANK

#: More tasks than this are sent in rotation, each from the host with the fewest bytes to send so far.
_GREEDY_TASKS = 20_000


def crosses_hosts(problem: Problem, task: int, sender: int) -> bool:
    """True if a task sent from there leaves its host."""
    hosts = problem.topology.host_of_rank
    return any(hosts[rank] != hosts[sender] for rank in real_ranks(problem.receivers[task]))


def needed_tasks(problem: Problem) -> list[int]:
    """Tasks that some rank needs and does not hold."""
    return np.flatnonzero((problem.receivers != NO_RANK).any(axis=1)).tolist()


def broadcast_naive(problem: Problem) -> Routes:
    """Broadcast each region from its first replica, in the order of the tasks.

    Steps: one chunked chain per region. Bytes between hosts: unique.
    """
    return along_trees(problem, ((task, int(problem.holders[task, 0])) for task in needed_tasks(problem)))


def broadcast_size(problem: Problem) -> Routes:
    """Broadcast each region from the host with the fewest bytes to send so far, in the order of the tasks.

    Steps: one chunked chain per region. Bytes between hosts: unique.
    """
    loads = Loads(problem)

    def order() -> Iterable[tuple[int, int]]:
        for task in needed_tasks(problem):
            sender = loads.pick(real_ranks(problem.holders[task]))
            loads.add(sender, int(problem.nbytes[task]), crosses=crosses_hosts(problem, task, sender))
            yield task, sender

    return along_trees(problem, order())


def broadcast_greedy(problem: Problem) -> Routes:
    """Broadcast in rounds of regions that do not get in each other's way.

    Steps: one chunked chain per region. Bytes between hosts: unique. Each round tries random maximal sets of
    regions that share no port, keeps the set with the most bytes (ties: the lowest spread of sender loads),
    and appends it. A region takes its sender's host port out and every receiving host's port in (and out,
    where it is passed on); one that stays inside a host takes the ports of its devices. The seed is fixed:
    every rank derives the same plan. Source: the 2023 cross-mesh resharding study, with its weights corrected
    to the bytes of the slice. Past 20,000 regions they are sent in rotation instead, as :func:`send_recv` does.
    """
    if len(problem) > _GREEDY_TASKS:
        return broadcast_in_rotation(problem)
    return along_trees(problem, _greedy_order(problem))


def broadcast_in_rotation(problem: Problem) -> Routes:
    """Broadcast regions in rotation over pairs of ranks, each from the host with the fewest bytes to send so far."""
    if problem.holders.shape[1] == 1 and (problem.receivers != NO_RANK).sum(axis=1).max() <= 1:
        return send_recv(problem)  # no sender to choose, no tree to build
    needed = np.array(needed_tasks(problem), dtype=np.int64)
    receiver = problem.receivers[needed].max(axis=1)
    order = needed[rotation(problem.holders[needed, 0], receiver)]
    loads = Loads(problem)

    def with_senders() -> Iterable[tuple[int, int]]:
        for task in order.tolist():
            sender = loads.pick(real_ranks(problem.holders[task]))
            loads.add(sender, int(problem.nbytes[task]), crosses=crosses_hosts(problem, task, sender))
            yield task, sender

    return along_trees(problem, with_senders())


#: A way to broadcast a region: the sending host, and the ports taken as bits of a mask.
Way = tuple[int, int]


def port_classes(problem: Problem) -> tuple[list[tuple[tuple[Way, ...], list[int]]], int]:
    """Tasks by the ways in which they can be broadcast, the first one last, and the first bit that is a rank's port.

    A task takes its sender's host port out (bit ``2 * host``) and every receiving host's port in (the next bit), and
    out where it is passed on; one that stays inside a host takes the ports of its devices. Tasks of one class exclude
    each other, so only the head of each class competes.
    """
    host_of = problem.topology.host_of_rank
    rank_port = 2 * (max(host_of, default=0) + 1)
    classes: dict[tuple[Way, ...], list[int]] = {}
    for task in needed_tasks(problem):
        receivers = real_ranks(problem.receivers[task])
        into = {host_of[rank] for rank in receivers}
        ways: dict[Way, None] = {}
        for holder in real_ranks(problem.holders[task]):
            home = host_of[holder]
            others = into - {home}
            if others:
                mask = 1 << 2 * home
                for host in others:
                    mask |= (2 << 2 * host) | ((1 << 2 * host) if len(others) > 1 else 0)
            else:
                mask = 1 << (rank_port + 2 * holder)
                for rank in receivers:
                    mask |= 1 << (rank_port + 2 * rank + 1)
            ways[home, mask] = None
        classes.setdefault(tuple(ways), []).append(task)
    return [(ways, sorted(tasks, reverse=True)) for ways, tasks in classes.items()], rank_port


def pick_on_host(problem: Problem, task: int, way: Way, rank_port: int, loads: Loads) -> int:
    """The holder that sends a task in this way."""
    home, mask = way
    holders = [rank for rank in real_ranks(problem.holders[task]) if problem.topology.host_of_rank[rank] == home]
    inside = mask >> rank_port
    if inside:  # inside a host the ports name the sender
        holders = [rank for rank in holders if inside >> 2 * rank & 1]
    sender = min(holders, key=lambda rank: loads.rank.get(rank, 0))
    loads.add(sender, int(problem.nbytes[task]), crosses=not inside)
    return sender


def _greedy_order(problem: Problem) -> Iterable[tuple[int, int]]:
    queues, rank_port = port_classes(problem)
    if not queues:
        return
    ways = [way for options, _ in queues for way in options]
    ports = [ports_of_mask(mask) for _, mask in ways]
    classes, chosen = order_greedily(
        Contest(
            way_at=np.cumsum([0] + [len(options) for options, _ in queues]),
            home=np.array([home for home, _ in ways], dtype=np.int64),
            crosses=np.array([not mask >> rank_port for _, mask in ways], dtype=np.int64),
            port_at=np.cumsum([0] + [len(row) for row in ports]),
            port=np.array([port for row in ports for port in row], dtype=np.int64),
            task_at=np.cumsum([0] + [len(tasks) for _, tasks in queues]),
            nbytes=problem.nbytes[[task for _, tasks in queues for task in tasks]],
            num_hosts=rank_port // 2,
            num_ports=1 + max(row[-1] for row in ports),
        )
    )
    loads = Loads(problem)
    for index, way in zip(classes.tolist(), chosen.tolist(), strict=True):
        task = queues[index][1].pop()
        yield task, pick_on_host(problem, task, ways[way], rank_port, loads)


def ports_of_mask(mask: int) -> list[int]:
    """The bits of a mask, ascending."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits
