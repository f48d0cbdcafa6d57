"""The strategy that is used where none is asked for: multicast, or another where that is predicted to be faster."""

from __future__ import annotations

from reshard.broadcasts import broadcast_greedy, broadcast_size
from reshard.chunks import Classes
from reshard.exchanges import send_recv
from reshard.lanes import Lanes, least_seconds
from reshard.multicast import multicast
from reshard.plan import Plan
from reshard.routes import Problem, Strategy, complete
from reshard.simulation import simulate
from reshard.topology import Topology
from reshard.transfers import Transfers

#: What multicast is compared with where it may lose: rates that differ, and messages so short that latency counts.
OTHERS: dict[str, Strategy] = {
    "send_recv": send_recv,
    "broadcast_greedy": broadcast_greedy,
    "broadcast_size": broadcast_size,
}
#: Another strategy must win by this part; one within it of the bound is not compared.
_MARGIN = 0.005
#: Transfers that take more latencies than this are cut into so many chunks that latency hardly counts.
_MANY_LATENCIES = 200
#: Plans with more messages are not compared: simulating them takes longer than they would gain.
_MOST_MESSAGES = 20_000


def choose_fastest(problem: Problem) -> tuple[str, Transfers]:
    """The name of the strategy with the least makespan by :func:`reshard.simulate`, and what it returns."""
    name, best = "multicast", complete(problem, multicast(problem))
    topology = problem.topology
    latency = max(topology.latency_seconds, topology.inside_latency_seconds)
    has_one_rate = _has_one_rate(topology)
    if len(best) > _MOST_MESSAGES or (has_one_rate and not latency):
        return name, best
    bound = least_seconds(topology, Lanes.of(Classes.of(problem), topology))
    if has_one_rate and bound >= _MANY_LATENCIES * latency:
        return name, best
    seconds = _time(problem, best)
    if seconds <= bound * (1 + _MARGIN):
        return name, best
    for other, strategy in OTHERS.items():
        found = complete(problem, strategy(problem))
        taken = _time(problem, found)
        if taken < seconds * (1 - _MARGIN):
            name, best, seconds = other, found, taken
    return name, best


def _has_one_rate(topology: Topology) -> bool:
    ports = (*(nic for host in topology.hosts for nic in host.nics), *topology.pods)
    return len({rate for port in ports for rate in (port.egress_bytes_per_second, port.ingress_bytes_per_second)}) == 1


def _time(problem: Problem, transfers: Transfers) -> float:
    plan = Plan(problem.tensors, problem.topology, "", transfers, problem.staging_bytes)
    return simulate(plan).makespan_seconds
