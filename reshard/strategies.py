"""Strategies: who sends what to whom, and in which order.

Each is a function from a :class:`~reshard.routes.Problem` to :class:`~reshard.routes.Routes`. Steps and bytes
on the wire of each are in its docstring; B bytes are what the destination needs and does not hold, counted
once per destination host (unique) or once per receiving rank (total).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import numpy as np

from reshard.errors import ArgumentError
from reshard.routes import Problem, Routes, Strategy
from reshard.shards import NO_RANK

GREEDY_TRIES = 100
#: Visits that the greedy order may spend, one per class and random set. Past it, it tries fewer sets per round,
#: then takes several tasks of each class at once.
_GREEDY_VISITS = 200_000
#: More tasks than this are sent in rotation, each from the host with the fewest bytes to send so far.
_GREEDY_TASKS = 20_000


class _Loads:
    """Bytes that each host and rank has been given to send so far; ties go to the first in the list."""

    def __init__(self, problem: Problem) -> None:
        self.host_of = problem.topology.host_of_rank
        self.host = dict.fromkeys(self.host_of, 0)
        self.rank: dict[int, int] = {}

    def pick(self, candidates: Iterable[int]) -> int:
        """The candidate on the least loaded host, and there the least loaded rank."""
        return min(candidates, key=lambda rank: (self.host[self.host_of[rank]], self.rank.get(rank, 0)))

    def add(self, rank: int, nbytes: int, *, crosses: bool) -> None:
        self.rank[rank] = self.rank.get(rank, 0) + nbytes
        if crosses:
            self.host[self.host_of[rank]] += nbytes


def _ranks(row: np.ndarray) -> list[int]:
    return [rank for rank in row.tolist() if rank != NO_RANK]


def _pick_sender(loads: _Loads, holders: list[int], receiver: int, nbytes: int) -> int:
    """A holder on the receiver's host if there is one, else one on the least loaded host."""
    host = loads.host_of[receiver]
    near = [rank for rank in holders if loads.host_of[rank] == host]
    sender = loads.pick(near or holders)
    loads.add(sender, nbytes, crosses=not near)
    return sender


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
        loads = _Loads(problem)
        holders = [_ranks(row) for row in problem.holders]
        rows = zip(task.tolist(), receiver.tolist(), strict=True)
        sender = np.array([_pick_sender(loads, holders[t], r, int(problem.nbytes[t])) for t, r in rows], dtype=np.int64)
    order = _rotation(sender, receiver)
    return Routes.direct(problem, task[order], sender[order], receiver[order])


def _rotation(sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
    """An order of messages in which sender i starts with receiver i and goes round."""
    senders, i = np.unique(sender, return_inverse=True)
    receivers, j = np.unique(receiver, return_inverse=True)
    if not len(sender):
        return np.zeros(0, dtype=np.int64)
    first = i * len(receivers) // len(senders)  # spread where each sender starts
    return np.lexsort((i, (j - first) % len(receivers)))


def local_all_gather(problem: Problem) -> Routes:
    """Replicas on one host each fetch 1/k of a region and pass it on inside the host.

    Steps: 2. Bytes between hosts: unique; inside hosts: (k - 1) times that. It applies to a region whose
    receivers are k >= 2 ranks of one host, and where k divides one of its dims; other regions go as in
    :func:`send_recv`. Source: the 2023 cross-mesh resharding study.
    """
    loads = _Loads(problem)
    hosts = problem.topology.host_of_rank
    plain: list[tuple[int, int, int]] = []
    rows: list[tuple[int, list[tuple[int, int]]]] = []
    bounds: list[tuple[np.ndarray, np.ndarray]] = []
    for task in range(len(problem)):
        receivers, holders = _ranks(problem.receivers[task]), _ranks(problem.holders[task])
        k = len(receivers)
        size = problem.stop[task] - problem.start[task]
        dims = np.flatnonzero(size % k == 0) if k else np.zeros(0)
        one_host = len({hosts[rank] for rank in receivers}) == 1
        local = any(hosts[rank] == hosts[receivers[0]] for rank in holders) if receivers else False
        if k < 2 or not one_host or local or not len(dims):
            for receiver in receivers:
                plain.append((task, _pick_sender(loads, holders, receiver, int(problem.nbytes[task])), receiver))
            continue
        dim, part = int(dims[0]), int(size[dims[0]]) // k
        for nth, first in enumerate(receivers):
            sender = loads.pick(holders)
            loads.add(sender, int(problem.nbytes[task]) // k, crosses=True)
            others = receivers[nth + 1 :] + receivers[:nth]
            rows.append((task, [(sender, first)] + [(first, other) for other in others]))
            start, stop = problem.start[task].copy(), problem.stop[task].copy()
            start[dim] = problem.start[task, dim] + nth * part
            stop[dim] = start[dim] + part
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
        gathered = _reorder(gathered, _rotation(sender, receiver))
    table = np.array(plain, dtype=np.int64).reshape(-1, 3)
    order = _rotation(table[:, 1], table[:, 2])
    direct = Routes.direct(problem, table[order, 0], table[order, 1], table[order, 2])
    return Routes.join([gathered, direct])


def _reorder(routes: Routes, order: np.ndarray) -> Routes:
    counts = np.diff(routes.edge_at)[order]
    edge_at = np.concatenate([[0], np.cumsum(counts)])
    edges = np.repeat(routes.edge_at[order] - edge_at[:-1], counts) + np.arange(edge_at[-1])
    return Routes(
        task=routes.task[order],
        start=routes.start[order],
        stop=routes.stop[order],
        edge_at=edge_at,
        sender=routes.sender[edges],
        receiver=routes.receiver[edges],
    )


class _Trees:
    """Builds the trees of broadcasts, one after the other; each byte enters each host once.

    Hosts form a chain that starts behind the sender's host in host order. The device of a host that was entered
    by the fewest bytes so far passes on to the next host, and along a chain inside its own. On its own host a
    sender serves every receiver itself as long as it then sends no more than the busiest device there must
    receive anyway; past that they form a chain too.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._host_of = problem.topology.host_of_rank
        self._entered: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        arriving = np.zeros(len(self._host_of), dtype=np.int64)
        task, replica = np.nonzero(problem.receivers != NO_RANK)
        np.add.at(arriving, problem.receivers[task, replica], problem.nbytes[task])
        self._most_arriving = np.zeros(max(self._host_of, default=0) + 1, dtype=np.int64)
        np.maximum.at(self._most_arriving, problem.topology.host_by_rank, arriving)

    def edges(self, task: int, sender: int) -> list[tuple[int, int]]:
        """The tree of one task: edges between hosts first, then those inside."""
        nbytes = int(self._problem.nbytes[task])
        by_host: dict[int, list[int]] = {}
        for rank in _ranks(self._problem.receivers[task]):
            by_host.setdefault(self._host_of[rank], []).append(rank)
        home = self._host_of[sender]
        near = _behind(sender, by_host.pop(home, []))
        later = sorted(host for host in by_host if host > home)
        earlier = sorted(host for host in by_host if host < home)
        between: list[tuple[int, int]] = []
        inside: list[tuple[int, int]] = []
        last = sender
        for host in later + earlier:
            entry = min(by_host[host], key=lambda rank: (self._entered.get(rank, 0), rank))
            self._entered[entry] = self._entered.get(entry, 0) + nbytes
            between.append((last, entry))
            last = entry
            inside.extend(itertools.pairwise([entry, *_behind(entry, by_host[host])]))
        if self._sent.get(sender, 0) + nbytes * len(near) <= self._most_arriving[home]:
            inside.extend((sender, rank) for rank in near)
        else:
            inside.extend(itertools.pairwise([sender, *near]))
        for passing, _ in between + inside:
            self._sent[passing] = self._sent.get(passing, 0) + nbytes
        return between + inside


def _behind(first: int, ranks: list[int]) -> list[int]:
    """The other ranks, starting with the next higher one and going round."""
    return sorted((rank for rank in ranks if rank != first), key=lambda rank: (rank < first, rank))


def _broadcast(problem: Problem, order: Iterable[tuple[int, int]]) -> Routes:
    """Whole tasks along trees: ``order`` yields ``(task, sender)``."""
    trees = _Trees(problem)
    return Routes.of(problem, [(task, trees.edges(task, sender)) for task, sender in order])


def _crosses(problem: Problem, task: int, sender: int) -> bool:
    hosts = problem.topology.host_of_rank
    return any(hosts[rank] != hosts[sender] for rank in _ranks(problem.receivers[task]))


def _needed(problem: Problem) -> list[int]:
    return np.flatnonzero((problem.receivers != NO_RANK).any(axis=1)).tolist()


def broadcast_naive(problem: Problem) -> Routes:
    """Broadcast each region from its first replica, in the order of the tasks.

    Steps: one chunked chain per region. Bytes between hosts: unique.
    """
    return _broadcast(problem, ((task, int(problem.holders[task, 0])) for task in _needed(problem)))


def broadcast_size(problem: Problem) -> Routes:
    """Broadcast each region from the host with the fewest bytes to send so far, in the order of the tasks.

    Steps: one chunked chain per region. Bytes between hosts: unique.
    """
    loads = _Loads(problem)

    def order() -> Iterable[tuple[int, int]]:
        for task in _needed(problem):
            sender = loads.pick(_ranks(problem.holders[task]))
            loads.add(sender, int(problem.nbytes[task]), crosses=_crosses(problem, task, sender))
            yield task, sender

    return _broadcast(problem, order())


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
        return _broadcast_in_rotation(problem)
    return _broadcast(problem, _greedy_order(problem))


def _broadcast_in_rotation(problem: Problem) -> Routes:
    if problem.holders.shape[1] == 1 and (problem.receivers != NO_RANK).sum(axis=1).max() <= 1:
        return send_recv(problem)  # no sender to choose, no tree to build
    needed = np.array(_needed(problem), dtype=np.int64)
    receiver = problem.receivers[needed].max(axis=1)
    order = needed[_rotation(problem.holders[needed, 0], receiver)]
    loads = _Loads(problem)

    def with_senders() -> Iterable[tuple[int, int]]:
        for task in order.tolist():
            sender = loads.pick(_ranks(problem.holders[task]))
            loads.add(sender, int(problem.nbytes[task]), crosses=_crosses(problem, task, sender))
            yield task, sender

    return _broadcast(problem, with_senders())


def _greedy_order(problem: Problem) -> Iterable[tuple[int, int]]:
    host_of = problem.topology.host_of_rank
    num_hosts = max(host_of, default=0) + 1
    rank_port = 2 * num_hosts

    # Tasks that take the same ports whatever the sender exclude each other, so only the head of each such
    # class competes: the random sets are those of single tasks, found faster.
    classes: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for task in _needed(problem):
        receivers = _ranks(problem.receivers[task])
        into = {host_of[rank] for rank in receivers}
        ways: dict[tuple[int, int], None] = {}  # (sending host, ports taken)
        for holder in _ranks(problem.holders[task]):
            home = host_of[holder]
            others = into - {home}
            if others:
                mask = 1 << 2 * home
                for host in others:
                    mask |= (2 << 2 * host) | ((1 << 2 * host) if len(others) > 1 else 0)
                ways[(home, mask)] = None
            else:
                mask = 1 << (rank_port + 2 * holder)
                for rank in receivers:
                    mask |= 1 << (rank_port + 2 * rank + 1)
                ways[(home, mask)] = None
        classes.setdefault(tuple(ways), []).append(task)

    queues = [(options, sorted(tasks, reverse=True)) for options, tasks in classes.items()]
    weights = {task: int(problem.nbytes[task]) for _, tasks in queues for task in tasks}
    longest = max((len(tasks) for _, tasks in queues), default=0)
    visits = longest * max(1, len(queues) // num_hosts) * len(queues)  # of one random set per round
    tries = max(1, min(GREEDY_TRIES, _GREEDY_VISITS // max(1, visits)))
    at_once = max(1, min(longest, visits // _GREEDY_VISITS))
    loads = _Loads(problem)
    rng = random.Random(2023)  # random() is the same on every version of Python, shuffle() need not be
    while queues:
        best: tuple[tuple[int, float], list[tuple[int, int, int]]] | None = None
        for _ in range(tries):
            order = sorted(range(len(queues)), key=lambda _: rng.random())
            taken, chosen, total = 0, [], 0
            sent: dict[int, int] = {}
            for index in order:
                options, tasks = queues[index]
                free = [option for option in options if not option[1] & taken]
                if free:
                    home, mask = min(free, key=lambda option: loads.host[option[0]] + sent.get(option[0], 0))
                    taken |= mask
                    nbytes = weights[tasks[-1]]
                    total += nbytes
                    sent[home] = sent.get(home, 0) + nbytes
                    chosen.append((index, home, mask))
            after = [loads.host[host] + sent.get(host, 0) for host in loads.host]
            mean = sum(after) / len(after)
            score = (total, -sum((load - mean) ** 2 for load in after))
            if best is None or score > best[0]:
                best = (score, chosen)
        assert best is not None
        taken_now = [(index, home, mask) for index, home, mask in sorted(best[1]) for _ in range(at_once)]
        for index, home, mask in taken_now:
            if not queues[index][1]:
                continue
            task = queues[index][1].pop()
            holders = [rank for rank in _ranks(problem.holders[task]) if host_of[rank] == home]
            if mask >> rank_port:  # inside a host the ports name the sender
                holders = [rank for rank in holders if mask >> (rank_port + 2 * rank) & 1]
            sender = min(holders, key=lambda rank: loads.rank.get(rank, 0))
            loads.add(sender, weights[task], crosses=not mask >> rank_port)
            yield task, sender
        queues = [queue for queue in queues if queue[1]]


#: Strategies by name. A caller may pass any function of the same form instead of a name.
STRATEGIES: dict[str, Strategy] = {
    "send_recv": send_recv,
    "local_all_gather": local_all_gather,
    "broadcast_naive": broadcast_naive,
    "broadcast_size": broadcast_size,
    "broadcast_greedy": broadcast_greedy,
}

DEFAULT_STRATEGY = "broadcast_greedy"


def find_strategy(strategy: str | Strategy | None) -> tuple[str, Strategy]:
    """The name and the function of a strategy given as either; None is the default, and so is "broadcast".

    Raises:
        ArgumentError: no strategy of that name.
    """
    if strategy is None:
        strategy = DEFAULT_STRATEGY
    if callable(strategy):
        name = getattr(strategy, "__name__", type(strategy).__name__)
        return "".join(name.split()) or "strategy", strategy
    if not isinstance(strategy, str):
        raise ArgumentError(f"strategy must be a name or a function, not {type(strategy).__name__}")
    if strategy == "broadcast":  # in its best order
        strategy = DEFAULT_STRATEGY
    if strategy not in STRATEGIES:
        raise ArgumentError(f"no strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
    return strategy, STRATEGIES[strategy]
