"""Broadcasts in an order found by searching, as far as a fixed number of steps goes."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.planner.strategies.broadcast import Way, broadcast_greedy, pick_on_host, port_classes, ports_of_mask
from reshard.planner.strategies.problem import Problem, Routes
from reshard.planner.strategies.sender_selection import Loads
from reshard.planner.strategies.trees import along_trees

#: Steps of the search; counted, not timed, so that every rank and every machine finds the same order.
SEARCH_STEPS = 20_000
#: With more classes of regions each step is slow and the search cannot get far: the greedy order is taken instead.
MAX_CLASSES = 400


def broadcast_search(problem: Problem) -> Routes:
    """Broadcast in an order found depth first over (next region, sending host), with pruning.

    Steps: one chunked chain per region. Bytes between hosts: unique. A region starts when its ports (see
    :func:`~reshard.planner.strategies.broadcast.port_classes`) are free and takes them for its
    bytes over the rate of the slowest; what starts earliest is tried first; a branch is left when the busiest receiving
    port cannot be done before the best order so far. Ends after 20,000 steps. Source: the 2023 cross-mesh resharding
    study, which stops by the clock.
    """
    return _search(problem, SEARCH_STEPS)


def broadcast_earliest(problem: Problem) -> Routes:
    """As :func:`broadcast_search` with the first order that it finds: what can start earliest, one after the other."""
    return _search(problem, 0)


def _search(problem: Problem, num_steps: int) -> Routes:
    queues, rank_port = port_classes(problem)
    if len(queues) > MAX_CLASSES:
        return broadcast_greedy(problem)
    order = _Search(problem, queues).run(num_steps)
    loads = Loads(problem)

    def with_senders() -> Iterable[tuple[int, int]]:
        rest = [list(tasks) for _, tasks in queues]
        for queue, way in order:
            task = rest[queue].pop()
            yield task, pick_on_host(problem, task, way, rank_port, loads)

    return along_trees(problem, with_senders())


class _Search:
    def __init__(self, problem: Problem, queues: list[tuple[tuple[Way, ...], list[int]]]) -> None:
        self.ways = [[(way, ports_of_mask(way[1])) for way in ways] for ways, _ in queues]
        rates = _port_rates(problem)
        # of each queue and way the rate of its slowest port
        self.rate = [[min(rates.get(port, float("inf")) for port in ports) for _, ports in ways] for ways in self.ways]
        # of each queue the bytes of its tasks, the next one last, and their seconds in the fastest way
        self.nbytes = [[int(problem.nbytes[task]) for task in tasks] for _, tasks in queues]
        self.seconds = [
            [nbytes / max(rate) for nbytes in tasks] for tasks, rate in zip(self.nbytes, self.rate, strict=True)
        ]
        # ports that every way of a queue takes must carry all of it
        self.certain = [set.intersection(*(set(ports) for _, ports in ways)) for ways in self.ways]
        self.work: dict[int, float] = {}  # of each port, what must still pass it
        for index, ports in enumerate(self.certain):
            for port in ports:
                self.work[port] = self.work.get(port, 0.0) + sum(self.seconds[index])
        self.free: dict[int, float] = {}
        self.best_seconds = float("inf")
        self.best: list[tuple[int, Way]] = []
        self.steps = 0

    def run(self, num_steps: int) -> list[tuple[int, Way]]:
        """The best order found in about so many steps: ``(queue, way)`` of each task in turn."""
        left = [len(seconds) for seconds in self.seconds]
        if not any(left):
            return []
        path: list[tuple[int, Way]] = []
        # one frame per depth: the choices that are left there, and what undoes the one that was taken
        frames = [self.choices(left, 0.0)]
        undo: list[tuple[int, dict[int, float | None]]] = []
        ends = [0.0]
        while frames:
            if not frames[-1] or (self.steps >= num_steps and self.best):
                frames.pop()
                ends.pop()
                if undo:
                    queue, freed = undo.pop()
                    self._take_back(queue, freed, left)
                    path.pop()
                continue
            _, finish, queue, number = frames[-1].pop()
            self.steps += 1
            way, ports = self.ways[queue][number]
            end = max(ends[-1], finish)
            left[queue] -= 1
            freed = {port: self.free.get(port) for port in ports}
            for port in ports:
                self.free[port] = finish
            for port in self.certain[queue]:
                self.work[port] -= self.seconds[queue][left[queue]]
            path.append((queue, way))
            undo.append((queue, freed))
            if not any(left):
                if end < self.best_seconds * (1 - 1e-9):
                    self.best_seconds, self.best = end, list(path)
                frames.append([])
            elif self.bound(end) >= self.best_seconds * (1 - 1e-9):
                frames.append([])
            else:
                frames.append(self.choices(left, end))
            ends.append(end)
        return self.best

    def _take_back(self, queue: int, freed: dict[int, float | None], left: list[int]) -> None:
        for port in self.certain[queue]:
            self.work[port] += self.seconds[queue][left[queue]]
        for port, before in freed.items():
            if before is None:
                del self.free[port]
            else:
                self.free[port] = before
        left[queue] += 1

    def bound(self, end: float) -> float:
        """No order that begins like this ends earlier."""
        return max(end, max((self.free.get(port, 0.0) + work for port, work in self.work.items()), default=0.0))

    def choices(self, left: list[int], end: float) -> list[tuple[float, float, int, int]]:
        """``(start, finish, queue, way)`` of what can come next, the best one last."""
        found = []
        for queue, count in enumerate(left):
            if count:
                nbytes = self.nbytes[queue][count - 1]
                for number, (_, ports) in enumerate(self.ways[queue]):
                    start = max(self.free.get(port, 0.0) for port in ports)
                    found.append((start, start + nbytes / self.rate[queue][number], queue, number))
        earliest = min(finish for _, finish, _, _ in found)
        # what starts after something else could have ended can always come later
        found = [choice for choice in found if choice[0] < earliest or choice[1] <= max(end, earliest)]
        work = self.work
        return sorted(
            found,
            key=lambda c: (c[0], -max((work.get(p, 0.0) for p in self.certain[c[2]]), default=0.0), c),
            reverse=True,
        )


def _port_rates(problem: Problem) -> dict[int, float]:
    """Of each port of a host its rate; ports of ranks inside a host have none."""
    rates: dict[int, float] = {}
    for host in set(problem.topology.host_of_rank):
        nics = problem.topology.host(host)
        rates[2 * host], rates[2 * host + 1] = nics.egress_bytes_per_second, nics.ingress_bytes_per_second
    return rates
