"""Broadcasts in an order found by branch and bound, limited to a fixed number of steps."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.planner.strategies.broadcast import Option, broadcast_greedy, pick_on_host, port_classes, ports_of_mask
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes
from reshard.planner.strategies.sender_selection import SendLoads
from reshard.planner.strategies.trees import along_trees

#: Limit on search steps. A time limit would give different orders on different ranks.
SEARCH_STEPS = 20_000
#: With more classes of regions each step is so slow that the greedy order is better.
MAX_CLASSES = 400


def broadcast_search(problem: PlanProblem) -> Routes:
    """Broadcast in an order found by depth-first search over (next region, sending host), with pruning.

    Steps: one chunked chain per region. Bytes between hosts: unique. A region starts when all its ports (see
    :func:`~reshard.planner.strategies.broadcast.port_classes`) are free, and occupies them for its bytes over the
    slowest port's rate. The region that can start earliest is tried first. A branch is cut when its lower bound is not
    below the best order so far. The search ends after 20,000 steps. Source: the 2023 cross-mesh resharding study, which
    uses a time limit instead.
    """
    return search_briefly(problem, SEARCH_STEPS)


def search_work(problem: PlanProblem) -> int:
    """Number of choices that the search for the first order compares, at most."""
    queues, _ = port_classes(problem)
    return len(problem) * sum(len(options) for options, _ in queues)


def search_briefly(problem: PlanProblem, num_steps: int) -> Routes:
    """Like :func:`broadcast_search`, but end after ``num_steps`` steps, or after the first order if that takes more."""
    queues, rank_port = port_classes(problem)
    if len(queues) > MAX_CLASSES:
        return broadcast_greedy(problem)
    order = _BranchAndBound(problem, queues).run(num_steps)
    loads = SendLoads(problem)

    def with_senders() -> Iterable[tuple[int, int]]:
        rest = [list(tasks) for _, tasks in queues]
        for queue, option in order:
            task = rest[queue].pop()
            yield task, pick_on_host(problem, task, option, rank_port, loads)

    return along_trees(problem, with_senders())


class _BranchAndBound:
    def __init__(self, problem: PlanProblem, queues: list[tuple[tuple[Option, ...], list[int]]]) -> None:
        self.options = [[(option, ports_of_mask(option[1])) for option in options] for options, _ in queues]
        rates = _port_rates(problem)
        # rate of the slowest port, by queue and option
        self.rate = [
            [min(rates.get(port, float("inf")) for port in ports) for _, ports in options] for options in self.options
        ]
        # bytes of the tasks of each queue, the next task last, and their seconds with the fastest option
        self.nbytes = [[int(problem.nbytes[task]) for task in tasks] for _, tasks in queues]
        self.seconds = [
            [nbytes / max(rate) for nbytes in tasks] for tasks, rate in zip(self.nbytes, self.rate, strict=True)
        ]
        # a port that all options of a queue use carries all tasks of the queue
        self.certain = [set.intersection(*(set(ports) for _, ports in options)) for options in self.options]
        self.work: dict[int, float] = {}  # seconds of work left, by port
        for index, ports in enumerate(self.certain):
            for port in ports:
                self.work[port] = self.work.get(port, 0.0) + sum(self.seconds[index])
        self.free: dict[int, float] = {}
        self.best_seconds = float("inf")
        self.best: list[tuple[int, Option]] = []
        self.steps = 0

    def run(self, num_steps: int) -> list[tuple[int, Option]]:
        """The best order found in about ``num_steps`` steps, at least one order: ``(queue, option)`` of each task."""
        left = [len(seconds) for seconds in self.seconds]
        if not any(left):
            return []
        path: list[tuple[int, Option]] = []
        # one frame per depth: the choices left to try; ``undo`` holds what reverts the choice taken
        frames = [self.choices(left, 0.0)]
        undo: list[tuple[int, dict[int, float | None]]] = []
        ends = [0.0]
        while frames:
            if not frames[-1] or (self.steps >= num_steps and self.best):
                frames.pop()
                ends.pop()
                if undo:
                    queue, freed = undo.pop()
                    self._undo(queue, freed, left)
                    path.pop()
                continue
            _, finish, queue, number = frames[-1].pop()
            self.steps += 1
            option, ports = self.options[queue][number]
            end = max(ends[-1], finish)
            left[queue] -= 1
            freed = {port: self.free.get(port) for port in ports}
            for port in ports:
                self.free[port] = finish
            for port in self.certain[queue]:
                self.work[port] -= self.seconds[queue][left[queue]]
            path.append((queue, option))
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

    def _undo(self, queue: int, freed: dict[int, float | None], left: list[int]) -> None:
        for port in self.certain[queue]:
            self.work[port] += self.seconds[queue][left[queue]]
        for port, before in freed.items():
            if before is None:
                del self.free[port]
            else:
                self.free[port] = before
        left[queue] += 1

    def bound(self, end: float) -> float:
        """Lower bound in seconds on the end of any order that starts with the current path."""
        return max(end, max((self.free.get(port, 0.0) + work for port, work in self.work.items()), default=0.0))

    def choices(self, left: list[int], end: float) -> list[tuple[float, float, int, int]]:
        """``(start, finish, queue, option number)`` of the tasks that can come next, the best one last."""
        candidates = []
        for queue, count in enumerate(left):
            if count:
                nbytes = self.nbytes[queue][count - 1]
                for number, (_, ports) in enumerate(self.options[queue]):
                    start = max(self.free.get(port, 0.0) for port in ports)
                    candidates.append((start, start + nbytes / self.rate[queue][number], queue, number))
        earliest = min(finish for _, finish, _, _ in candidates)
        # a task that starts after another one could have finished need not be next
        candidates = [choice for choice in candidates if choice[0] < earliest or choice[1] <= max(end, earliest)]
        work = self.work
        return sorted(
            candidates,
            key=lambda c: (c[0], -max((work.get(p, 0.0) for p in self.certain[c[2]]), default=0.0), c),
            reverse=True,
        )


def _port_rates(problem: PlanProblem) -> dict[int, float]:
    """Bytes per second by host port; ports of ranks inside a host have no limit."""
    rates: dict[int, float] = {}
    for host in set(problem.topology.host_of_rank):
        nics = problem.topology.host(host)
        rates[2 * host], rates[2 * host + 1] = nics.egress_bytes_per_second, nics.ingress_bytes_per_second
    return rates
