"""The strategy that is used where none is asked for: multicast, or another where that is predicted to be faster."""

from __future__ import annotations

import math

from reshard.broadcasts import broadcast_greedy, broadcast_size
from reshard.chunks import Classes
from reshard.exchanges import send_recv
from reshard.lanes import Lanes, least_seconds
from reshard.multicast import (
    multicast,
    multicast_from_fast,
    multicast_from_partners,
    multicast_near,
    without_slow_holders,
)
from reshard.plan import Plan
from reshard.routes import Problem, Strategy, complete
from reshard.simulation import simulate
from reshard.topology import Topology
from reshard.transfers import Transfers

#: What multicast is compared with where it may lose: NICs that differ in rate or number, and messages that cost
#: something themselves. First come its own variants, where they make a difference.
OTHERS: dict[str, Strategy] = {
    "multicast (near first)": multicast_near,
    "multicast (from fast hosts)": multicast_from_fast,
    "multicast (from partners)": multicast_from_partners,
    "send_recv": send_recv,
    "broadcast_size": broadcast_size,
    "broadcast_greedy": broadcast_greedy,
}
#: Another strategy must win by this part; one within it of the bound is not compared.
_MARGIN = 0.005
#: The same where all rates are equal: there little is lost but latencies and the fill.
_MARGIN_OF_EQUALS = 0.03
#: Plain sends are taken where they are as fast and have so many times fewer messages.
_FEWER = 2
#: Plans with more messages are not compared: simulating them takes longer than they would gain.
_MOST_MESSAGES = 20_000
_MOST_MESSAGES_OF_EQUALS = 6_000
#: Past so many regions broadcasts are not tried, which take long to plan; least of all in the greedy order.
_MOST_REGIONS_OF_EQUALS = {"broadcast_size": 512, "broadcast_greedy": 32}


def choose_fastest(problem: Problem) -> tuple[str, Transfers]:
    """The name of the strategy with the least makespan by :func:`reshard.simulate`, and what it returns."""
    name, best = "multicast", complete(problem, multicast(problem))
    topology = problem.topology
    are_equal = _has_one_rate(topology)
    makes_sense: dict[Strategy, bool] = {
        multicast_near: any(len(host.nics) > 1 for host in topology.hosts),
        multicast_from_partners: not are_equal and not topology.pods,
        multicast_from_fast: not are_equal and without_slow_holders(problem) is not None,
    }
    costs_nothing = not (topology.latency_seconds or topology.inside_latency_seconds or topology.turn_seconds)
    most = _MOST_MESSAGES_OF_EQUALS if are_equal else _MOST_MESSAGES
    if best.first_message[-1] > most or (are_equal and costs_nothing):
        return name, best
    bound = least_seconds(topology, Lanes.of(Classes.of(problem), topology))
    seconds = _time(problem, best)
    direct = None if costs_nothing else complete(problem, send_recv(problem))
    if direct is not None:
        taken = _time(problem, direct) if _FEWER * direct.first_message[-1] <= best.first_message[-1] else math.inf
        if taken <= seconds * (1 + _MARGIN):  # as fast, and each message saved is processor time saved
            name, best, seconds = "send_recv", direct, taken
    if seconds <= bound * (1 + (_MARGIN_OF_EQUALS if are_equal else _MARGIN)):
        return name, best
    for other, strategy in OTHERS.items():
        if not makes_sense.get(strategy, True):
            continue
        if are_equal and len(problem) > _MOST_REGIONS_OF_EQUALS.get(other, len(problem)):
            continue
        found = direct if direct is not None and other == "send_recv" else complete(problem, strategy(problem))
        if found.first_message[-1] > most:
            continue
        taken = _time(problem, found)
        if taken < seconds * (1 - _MARGIN):
            name, best, seconds = other.split(" ")[0], found, taken
    return name, best


def _has_one_rate(topology: Topology) -> bool:
    ports = (*(nic for host in topology.hosts for nic in host.nics), *topology.pods)
    rates = {rate for port in ports for rate in (port.egress_bytes_per_second, port.ingress_bytes_per_second)}
    return len(rates) == 1 and len({len(host.nics) for host in topology.hosts}) == 1


def _time(problem: Problem, transfers: Transfers) -> float:
    plan = Plan(problem.tensors, problem.topology, "", transfers, problem.staging_bytes)
    return simulate(plan).makespan_seconds
