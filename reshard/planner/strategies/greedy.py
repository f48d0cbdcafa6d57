"""The order of the 2023 study: rounds of regions that share no port; native where it is built, with its twin."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

GREEDY_TRIES = 100
#: Visits that the order may spend, one per class and random set. Past it, it tries fewer sets per round,
#: then takes several tasks of each class at once.
_GREEDY_VISITS = 200_000
#: Of :class:`random.Random`, whose random() is the same on every version of Python; shuffle() need not be.
_SEED = 2023

_Orders = Callable[["Contest"], tuple[np.ndarray, np.ndarray]]


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


def order_python(contest: Contest) -> tuple[np.ndarray, np.ndarray]:
    """The class of each task in turn, and the way it is sent.

    Each round keeps the set with the most bytes (ties: the lowest spread of what hosts have sent).
    """
    tries, at_once = contest.effort
    way_at, home, crosses = contest.way_at.tolist(), contest.home.tolist(), contest.crosses.tolist()
    port_at, port = contest.port_at.tolist(), contest.port.tolist()
    masks = [sum(1 << p for p in port[port_at[w] : port_at[w + 1]]) for w in range(len(home))]
    task_at, nbytes = contest.task_at.tolist(), contest.nbytes.tolist()
    left = [task_at[i + 1] for i in range(len(way_at) - 1)]  # of each class, the end of its tasks that are not sent
    load = [0] * contest.num_hosts
    rng = random.Random(_SEED)
    classes, ways = [], []
    alive = [i for i in range(len(left)) if left[i] > task_at[i]]
    while alive:
        best: tuple[tuple[int, int], list[tuple[int, int]]] | None = None
        for _ in range(tries):
            order = sorted(alive, key=lambda _: rng.random())
            taken, chosen, total = 0, [], 0
            sent: dict[int, int] = {}
            for i in order:
                free = [w for w in range(way_at[i], way_at[i + 1]) if not masks[w] & taken]
                if free:
                    way = min(free, key=lambda w: load[home[w]] + sent.get(home[w], 0))
                    taken |= masks[way]
                    size = nbytes[left[i] - 1]
                    total += size
                    sent[home[way]] = sent.get(home[way], 0) + size
                    chosen.append((i, way))
            # the mean is the same for every set of so many bytes, so squares say how loads are spread
            score = (total, -sum(size * (2 * load[host] + size) for host, size in sent.items()))
            if best is None or score > best[0]:
                best = (score, chosen)
        assert best is not None
        for i, way in sorted(best[1]):
            for _ in range(min(at_once, left[i] - task_at[i])):
                left[i] -= 1
                classes.append(i)
                ways.append(way)
                if crosses[way]:
                    load[home[way]] += nbytes[left[i]]
        alive = [i for i in alive if left[i] > task_at[i]]
    return np.array(classes, dtype=np.int64), np.array(ways, dtype=np.int64)


order_native: _Orders | None = None
with contextlib.suppress(ImportError, AttributeError):  # where it is not built the twin does the same, slower
    from reshard import _native

    _loop: Callable[..., Any] = _native.order_greedily

    def _call_native(contest: Contest) -> tuple[np.ndarray, np.ndarray]:
        c = contest
        state = np.array(random.Random(_SEED).getstate()[1], dtype=np.int64)
        classes, ways = (np.zeros(len(c.nbytes), dtype=np.int64) for _ in range(2))
        _loop(c.way_at, c.home, c.crosses, c.port_at, c.port, c.task_at, c.nbytes, c.num_hosts, c.num_ports, *c.effort,
              state, classes, ways)  # fmt: skip
        return classes, ways

    order_native = _call_native

order_greedily: _Orders = order_native or order_python
