"""The time of a plan beyond the bound of its bytes, divided by cause, and advice that would make the plan faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reshard.cost.latency_bounds import LatencyBounds
from reshard.cost.prediction import Makespan, predict_makespan
from reshard.cost.simulator import simulate
from reshard.formatting import format_bytes, format_seconds
from reshard.plan import Plan
from reshard.topology import INSIDE_MESSAGE_SECONDS, MESSAGE_SECONDS, Topology

#: A report names a cause that makes at least this fraction of the predicted time.
_NOTABLE = 0.02
#: A plan within this factor of its lower bound counts as optimal.
_AT_BOUND = 1.01


@dataclass(frozen=True)
class Excess:
    """The seconds of a plan beyond the bound of its bytes, divided by cause.

    Attributes:
        latency: seconds that the plan saves on the same network without latencies.
        inside: further seconds that it saves if rates inside hosts are also unlimited.
        waiting: the rest, in which messages wait for each other.
    """

    latency: float
    inside: float
    waiting: float


def find_excess(plan: Plan, makespan: Makespan, bound_seconds: float) -> Excess | None:
    """The causes of the time beyond the bound; None for a plan in closed form that is too large to simulate."""
    if makespan.is_estimate and not plan.is_listed:
        return None
    free = plan.topology.without_latency()
    unlimited = replace(free, inside_bytes_per_second=None, inside_total_bytes_per_second=None)
    seconds = [makespan.seconds]
    for topology, before in ((free, plan.topology), (unlimited, free)):
        seconds.append(seconds[-1] if topology == before else min(_predict(plan, topology, makespan), seconds[-1]))
    return Excess(seconds[0] - seconds[1], seconds[1] - seconds[2], max(seconds[2] - bound_seconds, 0.0))


def _predict(plan: Plan, topology: Topology, makespan: Makespan) -> float:
    """The time of the same messages on another topology, simulated or estimated as the makespan was."""
    if makespan.is_estimate:
        return predict_makespan(replace(plan, topology=topology)).seconds
    return simulate(plan, topology).makespan_seconds


def describe_excess(plan: Plan, excess: Excess, makespan: Makespan, bounds: LatencyBounds | None) -> list[str]:
    """Two lines: the causes with their shares of the predicted time, and what would help against the largest."""
    by_cause = {
        "latency": excess.latency,
        "rates inside hosts": excess.inside,
        "messages that wait for each other": excess.waiting,
    }
    causes = sorted(by_cause, key=lambda cause: -by_cause[cause])
    shares = [(cause, by_cause[cause] / makespan.seconds) for cause in causes]
    named = [f"{cause} ({100 * share:.0f} % of the prediction)" for cause, share in shares if share >= _NOTABLE]
    if not named:
        return []
    text = f"above bound  {', '.join(named)}"
    unmerged = 0.0 if bounds is None else bounds.unmerged_seconds
    if unmerged / _AT_BOUND <= makespan.seconds <= unmerged * _AT_BOUND:
        text += "; no plan is faster whose messages carry one region each"
    help_of = {
        "latency": _help_with_latency,
        "rates inside hosts": _help_inside,
        "messages that wait for each other": _help_with_waiting,
    }
    return [text, f"what helps   {help_of[causes[0]](plan)}"]


def _help_with_latency(plan: Plan) -> str:
    topology = plan.topology
    larger = "a larger tensor, or several in one plan" if len(plan.tensors) == 1 else "larger tensors"
    if (topology.latency_seconds, topology.inside_latency_seconds) == (MESSAGE_SECONDS, INSIDE_MESSAGE_SECONDS):
        return (
            "latency_seconds and inside_latency_seconds of the topology, if your links have less than these defaults, "
            f"which are those of TCP; otherwise {larger}"
        )
    message = _mean_message_bytes(plan)
    if not message:
        return larger
    can_gather = plan.strategy != "gathered_multicast" and len(set(topology.host_of_rank)) < len(topology.host_of_rank)
    gathered = "; or strategy gathered_multicast, if CPUs are idle" if can_gather else ""
    rates = [nic.egress_bytes_per_second for host in topology.hosts for nic in host.nics]
    seconds = format_seconds(message / max(rates))
    return (
        f"{larger}: a message between hosts carries {format_bytes(message)} on average, {seconds} of a NIC, and has a "
        f"latency of {format_seconds(topology.latency_seconds)}{gathered}"
    )


def _mean_message_bytes(plan: Plan) -> float:
    """The mean bytes of the messages between hosts; 0 for a plan in closed form, or without such messages."""
    if not plan.is_listed:
        return 0.0
    transfers, host = plan.transfers, plan.topology.host_array
    crosses = host[transfers.sender] != host[transfers.receiver]
    of_edge = transfers.transfer_of_edge[crosses]
    num_messages = int(transfers.num_chunks[of_edge].sum())
    return float(plan.message_bytes[of_edge].sum()) / num_messages if num_messages else 0.0


def _help_inside(plan: Plan) -> str:
    inside = format_bytes(plan.bytes_moved()[1])
    return (
        f"a destination layout that needs less twice in a host: {inside} move inside hosts, which the bound leaves out"
    )


def _help_with_waiting(plan: Plan) -> str:
    if len(plan.tensors) == 1:
        return f"another strategy than {plan.strategy}, perhaps: reshard plan --strategy all compares them"
    return f"another strategy than {plan.strategy}, perhaps: reshard plan --strategy NAME plans with it"
