"""The reference implementation of ``grow_trees`` of ``native/strategies/strategies.cpp``: broadcast trees, one after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.sender_selection import real_ranks
from reshard.ragged import NO_RANK


class Trees:
    """Builds one broadcast tree after another; see :func:`reshard.planner.strategies.trees.along_trees`."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._host_of = problem.topology.host_of_rank
        self._pod_of = [problem.topology.host(host).pod or 0 for host in range(problem.topology.num_hosts)]
        self._entered: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        arriving = np.zeros(len(self._host_of), dtype=np.int64)
        task, replica = np.nonzero(problem.receivers != NO_RANK)
        np.add.at(arriving, problem.receivers[task, replica], problem.nbytes[task])
        self._max_arriving = np.zeros(max(self._host_of, default=0) + 1, dtype=np.int64)
        np.maximum.at(self._max_arriving, problem.topology.host_array, arriving)

    def edges(self, task: int, sender: int) -> list[tuple[int, int]]:
        """Edges of one task's tree: first between hosts, then inside hosts."""
        nbytes = int(self._problem.nbytes[task])
        by_host: dict[int, list[int]] = {}
        for rank in real_ranks(self._problem.receivers[task]):
            by_host.setdefault(self._host_of[rank], []).append(rank)
        home = self._host_of[sender]
        near = _ranks_after(sender, by_host.pop(home, []))
        between: list[tuple[int, int]] = []
        inside: list[tuple[int, int]] = []
        last = sender
        for host in self.hosts_after(home, by_host):
            entry = min(by_host[host], key=lambda rank: (self._entered.get(rank, 0), rank))
            self._entered[entry] = self._entered.get(entry, 0) + nbytes
            between.append((last, entry))
            last = entry
            inside.extend(itertools.pairwise([entry, *_ranks_after(entry, by_host[host])]))
        if self._sent.get(sender, 0) + nbytes * len(near) <= self._max_arriving[home]:
            inside.extend((sender, rank) for rank in near)
        else:
            inside.extend(itertools.pairwise([sender, *near]))
        for source, _ in between + inside:
            self._sent[source] = self._sent.get(source, 0) + nbytes
        return between + inside

    def hosts_after(self, home: int, hosts: Iterable[int]) -> list[int]:
        """Hosts in cyclic order, starting after ``home``; all of one pod before the next pod."""
        pods = len(self._problem.topology.pods)

        def position(host: int) -> tuple[int, bool, int]:
            pod_distance = (self._pod_of[host] - self._pod_of[home]) % pods if pods else 0
            return pod_distance, host < home, host

        return sorted(hosts, key=position)


def _ranks_after(first: int, ranks: list[int]) -> list[int]:
    """The other ranks in cyclic order, starting after ``first``."""
    return sorted((rank for rank in ranks if rank != first), key=lambda rank: (rank < first, rank))


def grow_python(problem: PlanProblem, order: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The edges of the trees of ``(task, sender)`` in this order, tree after tree."""
    trees = Trees(problem)
    return [edge for task, sender in order for edge in trees.edges(task, sender)]
