"""Broadcast trees that know which links are inside a host and which cross hosts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from reshard.planner.strategies.problem import Problem, Routes
from reshard.planner.strategies.sender_selection import real_ranks
from reshard.ragged import NO_RANK


class _Trees:
    """Builds the trees of broadcasts, one after the other; each byte enters each host once.

    Hosts form a chain that starts behind the sender's host in host order, pod after pod. The device of a host that
    was entered by the fewest bytes so far passes on to the next host, and along a chain inside its own. On its own
    host a sender serves every receiver itself as long as it then sends no more than the busiest device there must
    receive anyway; past that they form a chain too.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._host_of = problem.topology.host_of_rank
        self._pod_of = [problem.topology.host(host).pod or 0 for host in range(problem.topology.num_hosts)]
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
        for rank in real_ranks(self._problem.receivers[task]):
            by_host.setdefault(self._host_of[rank], []).append(rank)
        home = self._host_of[sender]
        near = _behind(sender, by_host.pop(home, []))
        between: list[tuple[int, int]] = []
        inside: list[tuple[int, int]] = []
        last = sender
        for host in self.behind(home, by_host):
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

    def behind(self, home: int, hosts: Iterable[int]) -> list[int]:
        """Other hosts, the next higher one first and going round; those of the own pod before those of the next."""
        pods = len(self._problem.topology.pods)

        def place(host: int) -> tuple[int, bool, int]:
            away = (self._pod_of[host] - self._pod_of[home]) % pods if pods else 0
            return away, host < home, host

        return sorted(hosts, key=place)


def _behind(first: int, ranks: list[int]) -> list[int]:
    """The other ranks, starting with the next higher one and going round."""
    return sorted((rank for rank in ranks if rank != first), key=lambda rank: (rank < first, rank))


def along_trees(problem: Problem, order: Iterable[tuple[int, int]]) -> Routes:
    """Whole tasks along trees: ``order`` yields ``(task, sender)``."""
    trees = _Trees(problem)
    return Routes.of(problem, [(task, trees.edges(task, sender)) for task, sender in order])
