"""The strategy that is used where none is asked for: of all that are known, the one that is predicted to be fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from reshard.cost.simulator import simulate
from reshard.plan.model import Plan
from reshard.plan.transfers import Transfers
from reshard.planner.estimates import Floors, least_seconds_of
from reshard.planner.multicast.classes import Pieces
from reshard.planner.multicast.strategy import (
    has_many_hosts,
    is_large_exchange,
    make_workload,
    multicast_from_fast,
    multicast_from_partners,
    multicast_near,
    schedule_chunks,
    without_slow_holders,
)
from reshard.planner.multicast.workload import Workload
from reshard.planner.registry import STRATEGIES
from reshard.planner.strategies.branch_and_bound import broadcast_earliest
from reshard.planner.strategies.problem import Problem, Routes, Strategy, complete
from reshard.ragged import NO_RANK
from reshard.topology.model import Topology

#: Every strategy that is compared, by name; plans do not tell variants of multicast apart.
KNOWN: dict[str, Strategy] = {
    **STRATEGIES,
    "multicast_near": multicast_near,
    "multicast_from_partners": multicast_from_partners,
    "multicast_from_fast": multicast_from_fast,
}
#: What those that schedule the same chunks say beside them.
_VARIANTS: dict[str, dict[str, bool]] = {
    "multicast": {},
    "multicast_near": {"near_first": True},
    "multicast_from_partners": {"keeps_partners": True},
}
#: Plans within this part of each other are as fast; the one with fewer messages is taken.
_MARGIN = 0.005
#: Once a plan is within this part of what no plan can beat, no other is looked for.
_ENOUGH = 0.0075
#: Messages times ranks up to which plans are simulated, which takes up to half a second. What the busiest port takes
#: stands for the time of others, times so much.
_MOST_SIMULATED = 5 * 10**6
_OVER_LEAST = 1.2
#: Steps of scheduling between pods, each of tens of microseconds, up to which it is also done with fixed partners.
_MOST_POD_STEPS = 10_000
#: Receivers of regions times ranks up to which others than plain sends and multicast are planned.
_MOST_PLANNED = 8 * 10**6
#: Plans with more take more than four gigabytes.
_MOST_MESSAGES = 10_000_000
#: Where multicast takes so many times the best, its variants are not tried.
_FAR = 1.25
#: Past so many regions these are not planned, as each region takes them tens of microseconds.
_MOST_REGIONS = {
    "broadcast_naive": 20_000,
    "broadcast_size": 20_000,
    "broadcast_greedy": 10_000,
    "broadcast_search": 128,
}
#: Holders of all regions, times regions, up to which an order is searched: each region is compared with all others.
_MOST_SEARCHED = 500_000
#: Holders of all regions, up to which others than plain sends and multicast are planned, which look at each of them.
_MOST_HOLDINGS = 100_000
#: Where a gather would make so many messages, none is planned.
_MOST_GATHERED = 20_000


def choose_fastest(problem: Problem) -> tuple[str, Transfers]:
    """The name of the strategy with the least makespan by :func:`reshard.simulate`, and what it returns."""
    if is_large_exchange(problem):
        return "send_recv", complete(problem, STRATEGIES["send_recv"](problem))
    return _Choice(problem).make()


class _Choice:
    """The best plan so far: its strategy, its transfers, and its time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.floors = Floors(problem)
        self.num_ranks = len({rank for spec in problem.tensors for rank in (*spec.src.ranks, *spec.dst.ranks)})
        self.name = ""
        self.best: Transfers | None = None
        self.num_messages = 0
        self.seconds = math.inf
        self.chunked_seconds, self.num_chunked = math.inf, 0  # of multicast: its time, and its messages

    def make(self) -> tuple[str, Transfers]:
        """Look at one strategy after the other, as long as one can win."""
        floors = self.floors
        direct = ("send_recv", *self.plan("send_recv"))
        first = [direct] if direct[2].first_message[-1] <= _MOST_MESSAGES else []
        if first and direct[1] <= floors.of_all * (1 + _ENOUGH):
            self.compare(*first.pop())
        if not self.is_enough and floors.of_trees <= self.seconds * (1 - _MARGIN):
            first.append(("multicast", *self.plan("multicast")))
        for candidate in sorted(first, key=lambda one: one[1]):
            self.compare(*candidate)
        for name, floor in self.others():
            if self.is_enough:
                break
            if floor <= self.seconds * (1 - _MARGIN):
                self.compare(name, *self.plan(name))
        assert self.best is not None
        return "multicast" if self.name.startswith("multicast") else self.name, self.best

    def others(self) -> Iterator[tuple[str, float]]:
        """What may differ from those before it, and below which time it cannot be."""
        problem, topology, floors = self.problem, self.problem.topology, self.floors
        num_receivers = (problem.receivers != NO_RANK).sum(axis=1)
        if int(num_receivers.sum()) * self.num_ranks > _MOST_PLANNED or problem.holders.size > _MOST_HOLDINGS:
            return
        for name, most in _MOST_REGIONS.items():
            if name == "broadcast_search" and len(problem) * problem.holders.size > _MOST_SEARCHED:
                continue
            if len(problem) <= most and (name != "broadcast_size" or problem.holders.shape[1] > 1):
                yield name, floors.of_broadcasts
        if num_receivers.max(initial=0) > 1 and int((num_receivers**2).sum()) <= _MOST_GATHERED:
            yield "local_all_gather", floors.of_gathers(num_receivers)
            yield "global_all_gather", floors.of_gathers(num_receivers)
        if self.chunked_seconds > self.seconds * _FAR or self.num_chunked * self.num_ranks > _MOST_SIMULATED:
            return
        has_one_rate = _has_one_rate(topology)
        if any(len(host.nics) > 1 for host in topology.hosts):
            yield "multicast_near", floors.of_trees
        if not topology.pods or self.loaded[0].num_steps <= _MOST_POD_STEPS:
            yield "multicast_from_partners", floors.of_trees
        if not has_one_rate and without_slow_holders(problem) is not None:
            yield "multicast_from_fast", floors.of_trees

    @property
    def is_enough(self) -> bool:
        """Whether no plan can be much faster."""
        return self.seconds <= self.floors.of_all * (1 + _ENOUGH)

    def plan(self, name: str) -> tuple[float, Transfers]:
        """What a strategy plans, and below which time that cannot be."""
        found = complete(self.problem, self.choose(name))
        return least_seconds_of(self.problem, found), found

    def choose(self, name: str) -> Routes | Transfers:
        """As the strategy of that name does; what variants of multicast share is made once."""
        if name == "broadcast_search":  # as good with its first order, and in no time
            return broadcast_earliest(self.problem)
        if name not in _VARIANTS or has_many_hosts(self.problem):
            return KNOWN[name](self.problem)
        return schedule_chunks(self.problem, loaded=self.loaded, **_VARIANTS[name])

    @cached_property
    def loaded(self) -> tuple[Workload, Pieces]:
        """What multicast schedules."""
        return make_workload(self.problem, self.floors.host_classes)

    def compare(self, name: str, least: float, found: Transfers) -> None:
        """Keep what is faster, or as fast with fewer messages."""
        num_messages = int(found.first_message[-1])
        margin = _MARGIN if num_messages < self.num_messages else -_MARGIN
        if name == "multicast":
            self.chunked_seconds, self.num_chunked = least, num_messages
        if self.best is not None and least > self.seconds * (1 + margin):
            return
        effort = num_messages * self.num_ranks
        if effort <= _MOST_SIMULATED:
            plan = Plan(self.problem.tensors, self.problem.topology, "", found, self.problem.staging_bytes)
            seconds = simulate(plan).makespan_seconds
        elif self.best is not None and name not in ("send_recv", "multicast"):
            return  # deep chains take many times what their ports do
        else:
            seconds = least * (1.0 if least <= self.floors.of_all * (1 + _ENOUGH) else _OVER_LEAST)
        if name == "multicast":
            self.chunked_seconds = seconds
        if self.best is None or seconds <= self.seconds * (1 + margin):
            self.name, self.best, self.num_messages, self.seconds = name, found, num_messages, seconds


def _has_one_rate(topology: Topology) -> bool:
    ports = (*(nic for host in topology.hosts for nic in host.nics), *topology.pods)
    rates = {rate for port in ports for rate in (port.egress_bytes_per_second, port.ingress_bytes_per_second)}
    return len(rates) == 1 and len({len(host.nics) for host in topology.hosts}) == 1
