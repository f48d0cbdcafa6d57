"""Strategies that broadcast whole regions along chunked chains. They differ in the order of the regions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from reshard.planner.strategies.greedy import GreedyProblem, order_greedily
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes
from reshard.planner.strategies.sender_selection import SendLoads, real_ranks, rotation
from reshard.planner.strategies.sends_and_all_gathers import send_recv
from reshard.planner.strategies.trees import along_trees
from reshard.ragged import NO_RANK

#: Maximum number of tasks for the greedy order, which is too slow for more. More tasks are sent in rotation.
_GREEDY_TASKS = 20_000


def crosses_hosts(problem: PlanProblem, task: int, sender: int) -> bool:
    """Whether the task has a receiver on another host than the sender."""
    hosts = problem.topology.host_of_rank
    return any(hosts[rank] != hosts[sender] for rank in real_ranks(problem.receivers[task]))


def needed_tasks(problem: PlanProblem) -> list[int]:
    """Tasks with at least one receiver, ascending."""
    return np.flatnonzero((problem.receivers != NO_RANK).any(axis=1)).tolist()


def broadcast_naive(problem: PlanProblem) -> Routes:
    """Broadcast each region from its first holder, in task order.

    Steps: one chunked chain per region. Bytes between hosts: unique.
    """
    return along_trees(problem, ((task, int(problem.holders[task, 0])) for task in needed_tasks(problem)))


def broadcast_size(problem: PlanProblem) -> Routes:
    """Broadcast each region from the host with the fewest bytes to send so far, in task order.

    Steps: one chunked chain per region. Bytes between hosts: unique.
    """
    loads = SendLoads(problem)

    def order() -> Iterable[tuple[int, int]]:
        for task in needed_tasks(problem):
            sender = loads.pick(real_ranks(problem.holders[task]))
            loads.add(sender, int(problem.nbytes[task]), crosses=crosses_hosts(problem, task, sender))
            yield task, sender

    return along_trees(problem, order())


def broadcast_greedy(problem: PlanProblem) -> Routes:
    """Broadcast in rounds of regions that share no port.

    Steps: one chunked chain per region. Bytes between hosts: unique. Each round draws random maximal sets of
    regions that share no port, and keeps the set with the most bytes (ties: the most even sender loads).
    :func:`port_classes` defines the ports of a region. The seed is fixed, so every rank derives the same plan. If there
    are more than 20,000 regions, they are sent in :func:`rotation` order instead.

    Source: the 2023 cross-mesh resharding study. Unlike the study, this function weights a region by its bytes.
    """
    if len(problem) > _GREEDY_TASKS:
        return broadcast_in_rotation(problem)
    return along_trees(problem, _greedy_order(problem))


def broadcast_in_rotation(problem: PlanProblem) -> Routes:
    """Broadcast regions in :func:`rotation` order, each from the host with the fewest bytes to send so far."""
    if problem.holders.shape[1] == 1 and (problem.receivers != NO_RANK).sum(axis=1).max() <= 1:
        return send_recv(problem)  # no sender to choose, no tree to build
    needed = np.array(needed_tasks(problem), dtype=np.int64)
    receiver = problem.receivers[needed].max(axis=1)
    order = needed[rotation(problem.holders[needed, 0], receiver)]
    loads = SendLoads(problem)

    def with_senders() -> Iterable[tuple[int, int]]:
        for task in order.tolist():
            sender = loads.pick(real_ranks(problem.holders[task]))
            loads.add(sender, int(problem.nbytes[task]), crosses=crosses_hosts(problem, task, sender))
            yield task, sender

    return along_trees(problem, with_senders())


#: One way to broadcast a region: the sending host, and a bit mask of the ports that the broadcast uses.
Option = tuple[int, int]


def port_classes(problem: PlanProblem) -> tuple[list[tuple[tuple[Option, ...], list[int]]], int]:
    """Group the tasks into classes with the same broadcast options.

    A task uses the egress port of its sender's host (bit ``2 * host``) and the ingress port of each receiving host (bit
    ``2 * host + 1``), plus that host's egress port if the chain goes through several hosts. A task that stays inside a
    host uses the ports of its ranks instead. Tasks of one class compete for the same ports.

    Returns:
        ``(options, tasks)`` of each class, with the task to send first at the end of ``tasks``; and the bit of rank 0's
        first port.
    """
    host_of = problem.topology.host_of_rank
    rank_port = 2 * (max(host_of, default=0) + 1)
    classes: dict[tuple[Option, ...], list[int]] = {}
    for task in needed_tasks(problem):
        receivers = real_ranks(problem.receivers[task])
        into = {host_of[rank] for rank in receivers}
        options: dict[Option, None] = {}
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
            options[home, mask] = None
        classes.setdefault(tuple(options), []).append(task)
    return [(options, sorted(tasks, reverse=True)) for options, tasks in classes.items()], rank_port


def pick_on_host(problem: PlanProblem, task: int, option: Option, rank_port: int, loads: SendLoads) -> int:
    """Pick the holder that sends a task with this option: the one with the fewest bytes so far. Add to ``loads``."""
    home, mask = option
    holders = [rank for rank in real_ranks(problem.holders[task]) if problem.topology.host_of_rank[rank] == home]
    inside = mask >> rank_port
    if inside:  # the ports of ranks identify the sender
        holders = [rank for rank in holders if inside >> 2 * rank & 1]
    sender = min(holders, key=lambda rank: loads.rank.get(rank, 0))
    loads.add(sender, int(problem.nbytes[task]), crosses=not inside)
    return sender


def _greedy_order(problem: PlanProblem) -> Iterable[tuple[int, int]]:
    queues, rank_port = port_classes(problem)
    if not queues:
        return
    options = [option for queue, _ in queues for option in queue]
    ports = [ports_of_mask(mask) for _, mask in options]
    classes, chosen = order_greedily(
        GreedyProblem(
            option_offsets=np.cumsum([0] + [len(queue) for queue, _ in queues]),
            home=np.array([home for home, _ in options], dtype=np.int64),
            crosses=np.array([not mask >> rank_port for _, mask in options], dtype=np.int64),
            port_offsets=np.cumsum([0] + [len(queue) for queue in ports]),
            port=np.array([port for queue in ports for port in queue], dtype=np.int64),
            task_offsets=np.cumsum([0] + [len(tasks) for _, tasks in queues]),
            nbytes=problem.nbytes[[task for _, tasks in queues for task in tasks]],
            num_hosts=rank_port // 2,
            num_ports=1 + max(queue[-1] for queue in ports),
        )
    )
    loads = SendLoads(problem)
    for index, option in zip(classes.tolist(), chosen.tolist(), strict=True):
        task = queues[index][1].pop()
        yield task, pick_on_host(problem, task, options[option], rank_port, loads)


def ports_of_mask(mask: int) -> list[int]:
    """Positions of the set bits of a mask, ascending."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits
