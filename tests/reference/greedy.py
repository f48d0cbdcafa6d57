"""The twin of ``native/greedy.cpp``."""

from __future__ import annotations

import random

import numpy as np

from reshard.planner.strategies.greedy import _SEED, Contest


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
