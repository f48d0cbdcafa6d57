"""The order of the 2023 study: rounds of regions that share no port."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from reshard import _native

GREEDY_TRIES = 100
#: Visits that the order may spend, one per class and random set. Past it, it tries fewer sets per round,
#: then takes several tasks of each class at once.
_GREEDY_VISITS = 200_000
#: Of :class:`random.Random`, whose random() is the same on every version of Python; shuffle() need not be.
_SEED = 2023


@dataclass(frozen=True, eq=False)
class Contest:
    """Classes of tasks that compete for ports. All int64.

    Attributes:
        way_at: class i can be sent in ways ``way_at[i]:way_at[i + 1]``.
        home: ``(ways,)`` the sending host. crosses: ``(ways,)`` 1 where that leaves the host.
        port_at, port: way w takes ports ``port[port_at[w]:port_at[w + 1]]``.
        task_at, nbytes: class i has tasks of ``nbytes[task_at[i]:task_at[i + 1]]``, the first to be sent last.
        num_hosts, num_ports: one more than the largest of each.
    """

    way_at: np.ndarray
    home: np.ndarray
    crosses: np.ndarray
    port_at: np.ndarray
    port: np.ndarray
    task_at: np.ndarray
    nbytes: np.ndarray
    num_hosts: int
    num_ports: int

    @property
    def effort(self) -> tuple[int, int]:
        """How many random sets each round tries, and how many tasks of a class it takes at once."""
        counts = np.diff(self.task_at)
        longest, count = int(counts.max()), len(counts)
        visits = longest * max(1, count // self.num_hosts) * count  # of one random set per round
        return max(1, min(GREEDY_TRIES, _GREEDY_VISITS // visits)), max(1, min(longest, visits // _GREEDY_VISITS))


def order_greedily(contest: Contest) -> tuple[np.ndarray, np.ndarray]:
    """The class of each task in turn, and the way it is sent.

    Each round keeps the set with the most bytes (ties: the lowest spread of what hosts have sent).
    """
    c = contest
    state = np.array(random.Random(_SEED).getstate()[1], dtype=np.int64)
    classes, ways = (np.zeros(len(c.nbytes), dtype=np.int64) for _ in range(2))
    _native.order_greedily(
        c.way_at, c.home, c.crosses, c.port_at, c.port, c.task_at, c.nbytes, c.num_hosts, c.num_ports, *c.effort,
        state, classes, ways,
    )  # fmt: skip
    return classes, ways
