"""The reference implementation of ``order_greedily`` of ``native/strategies/strategies.cpp``."""

from __future__ import annotations

import random

import numpy as np

from reshard.planner.strategies.greedy import _SEED, GreedyProblem


def order_python(greedy_problem: GreedyProblem) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`reshard.planner.strategies.greedy.order_greedily`."""
    tries, at_once = greedy_problem.effort
    option_offsets, home, crosses = (
        greedy_problem.option_offsets.tolist(),
        greedy_problem.home.tolist(),
        greedy_problem.crosses.tolist(),
    )
    port_offsets, port = greedy_problem.port_offsets.tolist(), greedy_problem.port.tolist()
    masks = [sum(1 << p for p in port[port_offsets[w] : port_offsets[w + 1]]) for w in range(len(home))]
    task_offsets, nbytes = greedy_problem.task_offsets.tolist(), greedy_problem.nbytes.tolist()
    left = [task_offsets[i + 1] for i in range(len(option_offsets) - 1)]  # per class, the end of its unsent tasks
    load = [0] * greedy_problem.num_hosts
    rng = random.Random(_SEED)
    classes, options = [], []
    alive = [i for i in range(len(left)) if left[i] > task_offsets[i]]
    while alive:
        best: tuple[tuple[int, int], list[tuple[int, int]]] | None = None
        for _ in range(tries):
            order = sorted(alive, key=lambda _: rng.random())
            taken, chosen, total = 0, [], 0
            sent: dict[int, int] = {}
            for i in order:
                free = [w for w in range(option_offsets[i], option_offsets[i + 1]) if not masks[w] & taken]
                if free:
                    option = min(free, key=lambda w: load[home[w]] + sent.get(home[w], 0))
                    taken |= masks[option]
                    size = nbytes[left[i] - 1]
                    total += size
                    sent[home[option]] = sent.get(home[option], 0) + size
                    chosen.append((i, option))
            # sets with the same bytes have the same mean load, so the sum of squares ranks them by evenness
            score = (total, -sum(size * (2 * load[host] + size) for host, size in sent.items()))
            if best is None or score > best[0]:
                best = (score, chosen)
        assert best is not None
        for i, option in sorted(best[1]):
            for _ in range(min(at_once, left[i] - task_offsets[i])):
                left[i] -= 1
                classes.append(i)
                options.append(option)
                if crosses[option]:
                    load[home[option]] += nbytes[left[i]]
        alive = [i for i in alive if left[i] > task_offsets[i]]
    return np.array(classes, dtype=np.int64), np.array(options, dtype=np.int64)
