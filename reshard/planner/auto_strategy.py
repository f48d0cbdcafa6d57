"""The default strategy, "auto": plan with several strategies and keep the plan with the shortest simulated time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.cost import predict_makespan
from reshard.plan import Plan, PlanTransfers
from reshard.planner.estimates import StrategyBounds, bound_of_transfers
from reshard.planner.multicast.chunk_workload import ChunkWorkload
from reshard.planner.multicast.classes import Pieces
from reshard.planner.multicast.gathering import Gathering
from reshard.planner.multicast.problem_parts import split_by_ports
from reshard.planner.multicast.rotation import rotate_hosts
from reshard.planner.multicast.strategy import (
    has_many_hosts,
    make_workload,
    multicast_from_fast,
    multicast_from_partners,
    multicast_in_parts,
    multicast_near,
    nics_of,
    schedule_chunks,
    without_slow_holders,
)
from reshard.planner.strategies.branch_and_bound import SEARCH_STEPS, search_briefly, search_work
from reshard.planner.strategies.chunking import routes_to_transfers
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes, Strategy
from reshard.planner.strategies.sends_and_all_gathers import local_cuts
from reshard.planner.strategy_registry import STRATEGIES
from reshard.ragged import NO_RANK
from reshard.topology import Topology

#: The strategies that ``auto`` can plan, by name. ``_Choice.others`` decides which of them it tries.
CANDIDATES: dict[str, Strategy] = {
    **STRATEGIES,
    "multicast_near": multicast_near,
    "multicast_from_partners": multicast_from_partners,
    "multicast_in_parts": multicast_in_parts,
    "multicast_from_fast": multicast_from_fast,
}


@dataclass(frozen=True, slots=True)
class _CandidateRule:
    """Arguments and limits with which ``auto`` plans a candidate.

    Attributes:
        strategy: name of the strategy of the plan.
        chunk_options: arguments of :func:`schedule_chunks`, for candidates that share the workload of multicast.
        search_steps: steps of broadcast_search.
        max_regions: limit on regions, for strategies that spend tens of microseconds on each.
    """

    strategy: str
    chunk_options: dict[str, bool] | None = None
    search_steps: int | None = None
    max_regions: int | None = None


#: The rules by name of the candidate, broadcasts in the order in which they are tried. The full search takes much
#: longer and is rarely better: ``auto`` tries it only with more than ``_FEW_RANKS`` ranks, and only if a shorter search
#: has found the best plan so far.
_RULES = {
    "multicast": _CandidateRule("multicast", chunk_options={}),
    "multicast_near": _CandidateRule("multicast", chunk_options={"near_first": True}),
    "multicast_from_partners": _CandidateRule("multicast", chunk_options={"keeps_partners": True}),
    "multicast_in_parts": _CandidateRule("multicast"),
    "multicast_from_fast": _CandidateRule("multicast"),
    "broadcast_naive": _CandidateRule("broadcast_naive", max_regions=20_000),
    "broadcast_size": _CandidateRule("broadcast_size", max_regions=20_000),
    "broadcast_greedy": _CandidateRule("broadcast_greedy", max_regions=10_000),
    "broadcast_search": _CandidateRule("broadcast_search", search_steps=100, max_regions=1_000),
    "broadcast_search_longer": _CandidateRule("broadcast_search", search_steps=400),
    "broadcast_search_full": _CandidateRule("broadcast_search", search_steps=SEARCH_STEPS),
}
#: Smallest number of regions for the longer searches. With fewer regions, 100 steps cover most orders.
_FEWEST_FOR_LONGER = 5
#: Two plans whose times differ by less than this fraction count as equally fast. The plan with fewer messages wins.
_MARGIN = 0.005
#: Stop the search when the best plan is at most this fraction above the lower bound of all strategies.
_GOOD_ENOUGH = 0.0075
#: Limit on messages x ranks. Above it, a simulation may take long. So multicast is planned before send_recv, and its
#: variants are not planned.
_LARGE = 2 * 10**7
#: With at most this many messages, send_recv is always tried first, because few messages are simulated fast.
_FEW_MESSAGES = 50_000
#: With more messages than this, send_recv is planned only if multicast is slow: its simulation would take too long.
_MANY_MESSAGES = 300_000
#: ``multicast_from_partners`` is tried up to this number of scheduling steps between pods. A step takes tens of
#: microseconds.
_MAX_POD_STEPS = 10_000
#: Strategies other than send_recv and multicast are tried up to this number of receivers x ranks.
_MAX_PLANNED = 8 * 10**6
#: A plan with more messages takes more than 4 GB.
_MAX_MESSAGES = 10_000_000
#: The variants of multicast are skipped if multicast takes more than this many times the best time.
_VARIANT_CUTOFF = 1.25
#: The simulation of multicast ends at this many times the best time. The factor is above ``_VARIANT_CUTOFF``, because
#: the best time can grow: by up to ``_MARGIN`` each time a plan with fewer messages replaces the best plan.
_MULTICAST_CUTOFF = 1.4
#: Cutoffs of the first two plans, which are simulated in turns:
#:
#: 1. The plan with the smaller lower bound comes first. Its simulation ends at ``_FIRST_CUTOFF`` times the lower bound
#:    of the other plan.
#: 2. The other plan follows, then the first again. Each cutoff is ``_CUTOFF_GROWTH`` times the cutoff before.
_FIRST_CUTOFF, _CUTOFF_GROWTH = 1.05, 1.5
#: Limit on the work of broadcast_search, in units of a microsecond, with more than ``_FEW_RANKS`` ranks. With at most
#: so many ranks, the limit is a quarter of this.
_MAX_SEARCH_WORK, _FEW_RANKS = 2**17, 64
#: Limit on holders over all regions, for strategies other than send_recv and multicast. They visit each holder.
_MAX_HOLDINGS = 100_000
#: Gathering inside the sending hosts must make a transfer this many times as fast in the simulation, which counts no
#: CPU time: on hosts with busy CPUs, gathering with a smaller predicted gain was slower (decision 31).
MIN_GATHER_GAIN = 2.0
#: Gathering is planned only if, otherwise, latencies are at least this fraction of the time.
_MIN_LATENCY = 0.25
#: Limit on receivers of all regions, padding included, for trying to gather regions inside the sending hosts.
_MAX_COLLECTED = 2**20
#: Limit on messages for trying the all-gathers.
_MAX_GATHERED = 20_000

_Candidate = tuple[str, float, PlanTransfers]  # name, lower bound in seconds, transfers


def choose_fastest(problem: PlanProblem) -> tuple[str, PlanTransfers]:
    """The strategy with the shortest makespan by :func:`reshard.simulate`: its name and its transfers."""
    return _Choice(problem).make()


class _Choice:
    """The search for the fastest plan: the best strategy so far, its transfers and its time."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        self.bounds = StrategyBounds(problem)
        self.num_ranks = len({rank for spec in problem.tensors for rank in (*spec.src.ranks, *spec.dst.ranks)})
        self.has_several_nics = any(len(host.nics) > 1 for host in problem.topology.hosts)
        self.name = ""
        self.best: PlanTransfers | None = None
        self.num_messages = 0
        self.seconds = math.inf
        self.chunked_seconds, self.num_chunked = math.inf, 0  # time and messages of multicast
        self.planned: dict[
            str, tuple[float, PlanTransfers]
        ] = {}  # lower bounds and transfers of send_recv and multicast
        self.simulated: list[
            tuple[PlanTransfers, float, float]
        ] = []  # plans, their makespans, and the cutoffs of these

    def make(self) -> tuple[str, PlanTransfers]:
        """Try the strategies whose lower bound is below the best time so far; return the best name and transfers."""
        if self.multicast_beats_direct():
            self.compare("multicast", *self.plan("multicast"))
        else:
            self.make_first()
        for name, bound in self.others():
            if self.is_good_enough:
                break
            if bound <= self.seconds * (1 - _MARGIN) and not self.is_ruled_out(name):
                self.compare(name, *self.plan(name))
        self.try_gathered()
        assert self.best is not None
        return _RULES[self.name].strategy if self.name in _RULES else self.name, self.best

    def try_gathered(self) -> None:
        """Try to gather regions inside the sending hosts. Such plans may be faster than the bounds of others."""
        if self.seconds <= self.bounds.of_merged * (1 + _GOOD_ENOUGH) or self.problem.receivers.size > _MAX_COLLECTED:
            return
        if self.bounds.latency_of_classes < self.seconds * _MIN_LATENCY:
            return
        limit = self.seconds / MIN_GATHER_GAIN
        gathering = Gathering.find(self.problem)
        if gathering is None or StrategyBounds(gathering.collected).of_trees > limit:
            return
        gathered = gathering.plan()
        if gathered is None:
            return
        transfers = routes_to_transfers(self.problem, gathered)
        if (
            bound_of_transfers(self.problem, transfers) <= limit
            and (seconds := self.makespan(transfers, limit)) <= limit
        ):
            self.name, self.best, self.seconds = "gathered_multicast", transfers, seconds
            self.num_messages = int(transfers.first_message[-1])

    def multicast_beats_direct(self) -> bool:
        """Whether multicast is sure to be faster than send_recv. If so, send_recv is not planned."""
        bounds = self.bounds
        if bounds.of_direct <= bounds.of_ungathered * (1 + _GOOD_ENOUGH):
            return False
        bound, transfers = self.plan("multicast")
        if bound * (1 + _MARGIN) >= bounds.of_direct:
            return False
        return self.makespan(transfers, bounds.of_direct) * (1 + _MARGIN) < bounds.of_direct

    def make_first(self) -> None:
        """Try send_recv and multicast."""
        bounds = self.bounds
        if self.is_large:
            self.make_first_of_many()
            return
        direct = ("send_recv", *self.plan("send_recv"))
        first = [direct] if direct[2].first_message[-1] <= _MAX_MESSAGES else []
        if first and direct[1] <= bounds.of_ungathered * (1 + _GOOD_ENOUGH):
            self.compare(*first.pop())
        if not self.is_good_enough and bounds.of_trees <= self.seconds * (1 - _MARGIN):
            first.append(("multicast", *self.plan("multicast")))
        first.sort(key=lambda one: one[1])
        for candidate in self.put_in_order(*first) if len(first) > 1 else first:
            self.compare(*candidate)

    def make_first_of_many(self) -> None:
        """Try multicast, and send_recv unless its lower bound rules it out or a simulation of it takes too long.

        A plan of multicast passes one message at a time at each port, so its time is found fast.
        """
        bounds, num_messages = self.bounds, int(self.problem.num_receivers.sum())
        is_first = num_messages <= _FEW_MESSAGES and self.rotated is None
        if is_first and bounds.of_direct <= bounds.of_ungathered * (1 + _GOOD_ENOUGH):
            self.compare("send_recv", *self.plan("send_recv"))
        if not self.is_good_enough:
            self.compare("multicast", *self.plan("multicast"))
        may_be_faster = bounds.of_direct < self.seconds * (1 - (_MARGIN if num_messages <= _MANY_MESSAGES else 0.1))
        if may_be_faster and "send_recv" not in self.planned and num_messages <= _MAX_MESSAGES:
            self.compare("send_recv", *self.plan("send_recv"))

    @cached_property
    def is_large(self) -> bool:
        """Whether a simulation of send_recv may take long."""
        return self.is_too_large(int(self.problem.num_receivers.sum()))

    def others(self) -> Iterator[tuple[str, float]]:
        """The remaining candidates worth planning, each with a lower bound on its makespan in seconds."""
        problem, topology, bounds = self.problem, self.problem.topology, self.bounds
        num_receivers = (problem.receivers != NO_RANK).sum(axis=1)
        if int(num_receivers.sum()) * self.num_ranks > _MAX_PLANNED or problem.holders.size > _MAX_HOLDINGS:
            return
        if split_by_ports(problem, 0) and not split_by_ports(problem):
            yield "multicast_in_parts", bounds.of_trees
        if self.chunked_seconds <= self.seconds * _VARIANT_CUTOFF and not self.is_too_large(self.num_chunked):
            if self.has_several_nics:
                yield "multicast_near", bounds.of_trees
            if not topology.pods or self.prepared[0].num_steps <= _MAX_POD_STEPS:
                yield "multicast_from_partners", bounds.of_trees
            if not _has_one_rate(topology) and without_slow_holders(problem) is not None:
                yield "multicast_from_fast", bounds.of_trees
        for name, rule in _RULES.items():
            if rule.max_regions is None or len(problem) > rule.max_regions:
                continue
            if name == "broadcast_search":
                work = search_work(problem)
                if work > (_MAX_SEARCH_WORK if self.num_ranks > _FEW_RANKS else _MAX_SEARCH_WORK // 4):
                    continue
            if name != "broadcast_size" or problem.holders.shape[1] > 1:
                yield name, bounds.of_broadcasts
                if name == "broadcast_search" and len(problem) >= _FEWEST_FOR_LONGER:
                    yield "broadcast_search_longer", bounds.of_broadcasts
        if num_receivers.max(initial=0) > 1 and int((num_receivers**2).sum()) <= _MAX_GATHERED:
            yield "local_all_gather", bounds.of_gathers(num_receivers)
            yield "global_all_gather", bounds.of_gathers(num_receivers)
        if self.num_ranks > _FEW_RANKS and self.name in _RULES and _RULES[self.name].search_steps is not None:
            yield "broadcast_search_full", bounds.of_broadcasts

    def is_ruled_out(self, name: str) -> bool:
        """Whether the time of the messages that a strategy is sure to send rules it out before it is planned."""
        return name == "global_all_gather" and self.bounds.of_ring > self.seconds * (1 + _MARGIN)

    @property
    def is_good_enough(self) -> bool:
        """Whether the best plan is close enough to the lower bound of all strategies to stop."""
        return self.seconds <= self.bounds.of_ungathered * (1 + _GOOD_ENOUGH)

    def plan(self, name: str) -> tuple[float, PlanTransfers]:
        """The transfers that a strategy makes, preceded by a lower bound on their makespan in seconds."""
        if name == "local_all_gather" and (local_cuts(self.problem) < 0).all():
            name = "send_recv"  # this strategy would send every region directly as well
        if name in self.planned:
            return self.planned[name]
        transfers = routes_to_transfers(self.problem, self.choose(name))
        if name == "multicast" and self.is_too_large_with_relays(transfers):
            transfers = routes_to_transfers(self.problem, self.choose("multicast_near"))
        is_many = (
            name == "multicast" and int(transfers.first_message[-1]) > _MANY_MESSAGES
        )  # the bound takes as long as the time
        bound = self.bounds.of_ungathered if is_many else bound_of_transfers(self.problem, transfers)
        if name in ("send_recv", "multicast"):
            self.planned[name] = bound, transfers
        return bound, transfers

    def choose(self, name: str) -> Routes | PlanTransfers:
        """Run the strategy with this name; variants of multicast share one workload."""
        rule = _RULES.get(name)
        if rule is not None and rule.search_steps is not None:
            return search_briefly(self.problem, rule.search_steps)
        if name == "multicast" and self.rotated is not None:
            return self.rotated
        if rule is None or rule.chunk_options is None or has_many_hosts(self.problem):
            return CANDIDATES[name](self.problem)
        if name == "multicast" and self.takes_near_chunks:
            rule = _RULES["multicast_near"]
        return schedule_chunks(self.problem, prepared=self.prepared, **(rule.chunk_options or {}))

    @property
    def takes_near_chunks(self) -> bool:
        """Whether to plan ``multicast_near`` in place of multicast, because there is no time to compare them.

        Of 59 random pairs of over 5,000 messages, the variant took 0.53 % longer at worst, and was up to 13 % faster.
        """
        return self.has_several_nics and self.is_too_large(self.prepared[0].num_messages)

    def is_too_large_with_relays(self, transfers: PlanTransfers) -> bool:
        """Whether multicast on hosts with several NICs is too large just because of messages to relays."""
        if not self.has_several_nics or not self.is_too_large(int(transfers.first_message[-1])):
            return False
        if has_many_hosts(self.problem) or self.rotated is not None:
            return False
        return not self.takes_near_chunks

    @cached_property
    def rotated(self) -> PlanTransfers | None:
        """Multicast in closed form; None if chunks must be scheduled."""
        return rotate_hosts(self.problem, self.bounds.host_classes, nics_of(self.problem))

    @cached_property
    def prepared(self) -> tuple[ChunkWorkload, Pieces]:
        """The workload of multicast and its pieces."""
        return make_workload(self.problem, self.bounds.host_classes)

    def compare(self, name: str, bound: float, transfers: PlanTransfers) -> None:
        """Keep this plan if it is faster than the best, or as fast with fewer messages."""
        num_messages = int(transfers.first_message[-1])
        margin = _MARGIN if num_messages < self.num_messages else -_MARGIN
        if name == "multicast":
            self.chunked_seconds, self.num_chunked = bound, num_messages
        if self.best is not None and bound > self.seconds * (1 + margin):
            return
        cutoff = self.seconds * (1 + margin)
        seconds = self.makespan(
            transfers, max(cutoff, self.seconds * _MULTICAST_CUTOFF) if name == "multicast" else cutoff
        )
        if name == "multicast":
            self.chunked_seconds = seconds
        if self.best is None or seconds <= self.seconds * (1 + margin):
            self.name, self.best, self.num_messages, self.seconds = name, transfers, num_messages, seconds

    def is_too_large(self, num_messages: int) -> bool:
        """Whether a simulation of this many messages may take long."""
        return num_messages * self.num_ranks > _LARGE

    def put_in_order(self, first: _Candidate, second: _Candidate) -> tuple[_Candidate, _Candidate]:
        """Two candidates in the order in which to compare them: the second first if it is sure to be faster.

        The order does not change the choice. It lets each simulation stop as early as possible. The two plans
        are simulated in turn, with growing cutoffs, until one simulation ends.
        """
        look = second[1] * _FIRST_CUTOFF
        while True:
            if self.makespan(first[2], look) < math.inf:
                return first, second
            seconds = self.makespan(second[2], look * _CUTOFF_GROWTH)
            if seconds < math.inf:
                break
            look *= _CUTOFF_GROWTH**2
        cutoff = _MULTICAST_CUTOFF if first[0] == "multicast" else 1 + 2 * _MARGIN
        return (first, second) if self.makespan(first[2], seconds * cutoff) < math.inf else (second, first)

    def makespan(self, planned: PlanTransfers, cutoff: float) -> float:
        """The predicted time of a plan, infinite if it is above the cutoff; equal plans are simulated once."""
        for i, (transfers, seconds, known) in enumerate(self.simulated):
            if _are_equal(transfers, planned):
                if seconds < math.inf or cutoff <= known:
                    return seconds if seconds <= cutoff else math.inf
                del self.simulated[i]
                break
        plan = Plan(self.problem.tensors, self.problem.topology, "", planned, self.problem.staging_bytes)
        seconds = predict_makespan(plan, cutoff).seconds
        self.simulated.append((planned, seconds, cutoff))
        return seconds if seconds <= cutoff else math.inf


def _are_equal(one: PlanTransfers, other: PlanTransfers) -> bool:
    """Whether two plans of one problem have the same messages."""
    names = PlanTransfers.__dataclass_fields__
    return one is other or all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def _has_one_rate(topology: Topology) -> bool:
    links = (*(nic for host in topology.hosts for nic in host.nics), *topology.pods)
    rates = {rate for link in links for rate in (link.egress_bytes_per_second, link.ingress_bytes_per_second)}
    return len(rates) == 1 and len({len(host.nics) for host in topology.hosts}) == 1
