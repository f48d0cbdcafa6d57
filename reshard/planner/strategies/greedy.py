"""The greedy order of the 2023 cross-mesh resharding study: rounds of regions that share no port."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from reshard import _native

#: Random sets per round.
GREEDY_TRIES = 100
#: Limit on visits. Drawing one random set visits each class once. Above the limit, each round draws fewer sets. If that
#: is not enough, a round also takes several tasks of a class at once.
_GREEDY_VISITS = 200_000
#: Seed of :class:`random.Random`. Only random() gives the same sequence on all Python versions; shuffle() may not.
_SEED = 2023


@dataclass(frozen=True, eq=False)
class GreedyProblem:
    """Input of :func:`order_greedily`: classes of tasks and the ports that they need. All arrays are int64.

    Attributes:
        option_offsets: class i has options ``option_offsets[i]:option_offsets[i + 1]``.
        home: ``(options,)`` sending host.
        crosses: ``(options,)`` 1 if the broadcast leaves the sending host, else 0.
        port_offsets, port: option w uses ports ``port[port_offsets[w]:port_offsets[w + 1]]``.
        task_offsets, nbytes: class i has tasks of ``nbytes[task_offsets[i]:task_offsets[i + 1]]`` bytes, the task to
        send first last. num_hosts, num_ports: number of hosts and of ports.
    """

    option_offsets: np.ndarray
    home: np.ndarray
    crosses: np.ndarray
    port_offsets: np.ndarray
    port: np.ndarray
    task_offsets: np.ndarray
    nbytes: np.ndarray
    num_hosts: int
    num_ports: int

    @property
    def effort(self) -> tuple[int, int]:
        """Number of random sets per round, and number of tasks of a class that one round takes at once."""
        counts = np.diff(self.task_offsets)
        longest, count = int(counts.max()), len(counts)
        visits = longest * max(1, count // self.num_hosts) * count  # with one random set per round
        return max(1, min(GREEDY_TRIES, _GREEDY_VISITS // visits)), max(1, min(longest, visits // _GREEDY_VISITS))


def order_greedily(greedy_problem: GreedyProblem) -> tuple[np.ndarray, np.ndarray]:
    """The class and the option of each task, in the order of sending; both int64 ``(tasks,)``.

    Each round keeps the set with the most bytes (ties: the most even bytes per sending host).
    """
    c = greedy_problem
    state = np.array(random.Random(_SEED).getstate()[1], dtype=np.int64)
    classes, options = (np.zeros(len(c.nbytes), dtype=np.int64) for _ in range(2))
    _native.order_greedily(
        c.option_offsets, c.home, c.crosses, c.port_offsets, c.port, c.task_offsets, c.nbytes, c.num_hosts, c.num_ports,
        *c.effort, state, classes, options,
    )  # fmt: skip
    return classes, options
