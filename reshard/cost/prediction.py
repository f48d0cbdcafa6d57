"""The predicted time of a plan: simulated, or estimated if a simulation would take too long."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from reshard.cost.fluid import TooMuchWork
from reshard.cost.serial_ports import serial_seconds
from reshard.cost.simulator import Timeline, simulate_until
from reshard.plan import Plan, RotationPlan

#: Operations of a simulation, of a few nanoseconds each: 0.1 to 3 s.
MAX_OPERATIONS = 10**8
#: A plan that orders the messages of each port is simulated only up to this number of messages. Beyond it, the
#: estimate is exact to a few per cent.
MAX_IN_ORDER = 200_000
#: The serial estimate of a plan without an order at its ports is multiplied by this factor. Its ports pass several
#: messages at once, and these wait for each other at the other ends. If dims do not divide, this grows with the hosts:
#: ``S0 S1`` to ``S1 S0`` of 65536 x 65521, hosts of 8 ranks with one NIC, took 1.87, 1.98, 2.95 and 3.97 times the
#: estimate with 256, 512, 1,024 and 2,048 ranks a side. Where they divide, it took at most 2.14 times, and so did all
#: other plans but ``R S01`` to ``S0 S1`` (2.61), of 60 that are estimated (``tests/campaigns/estimates.py``).
UNORDERED = 4.0
#: Like ``UNORDERED``, of a plan in closed form whose senders do not all send to the same receivers equally often.
_UNEVEN = 2.5
#: The time of bytes and latencies of a plan in closed form is multiplied by this factor if hosts receive in several
#: lanes.
_IN_LANES = 1.5


@dataclass(frozen=True)
class Makespan:
    """The arrival of the last message of a plan.

    Attributes:
        seconds: infinite if a simulation showed that it is above the cutoff.
        is_estimate: whether the time is an upper estimate instead of the result of a simulation.
    """

    seconds: float
    is_estimate: bool = False


def predict_makespan(plan: Plan, cutoff: float = math.inf) -> Makespan:
    """The makespan that :func:`reshard.simulate` gives, or an estimate if the simulation takes too many operations.

    The estimate is the time that the plan takes if each port passes one message at a time, in the plan's order. A plan
    of ``multicast`` does pass them like that. Other plans let the messages of a port share it, and get 4 times this
    time. Both are the same on every rank.

    Args:
        plan: the plan.
        cutoff: seconds. The simulation stops as soon as the makespan is sure to be above it.
    """
    return predict_timeline(plan, cutoff)[0]


def predict_timeline(plan: Plan, cutoff: float = math.inf) -> tuple[Makespan, Timeline | None]:
    """The result of :func:`predict_makespan`, and the timeline: None for an estimate, or if the plan ends late."""
    if isinstance(plan, RotationPlan) and plan.num_messages > MAX_IN_ORDER:
        return Makespan(_seconds_of_rotation(plan), True), None
    is_ordered = len(plan.transfers.after) > 0
    if not is_ordered or plan.num_messages <= MAX_IN_ORDER:
        try:
            timeline = simulate_until(plan, cutoff, MAX_OPERATIONS)
            return Makespan(math.inf if timeline is None else timeline.makespan_seconds), timeline
        except TooMuchWork:
            pass
    moves = bool((plan.transfers.sender != plan.transfers.receiver).any())
    seconds = serial_seconds(plan) * (1.0 if is_ordered else UNORDERED)
    return Makespan(plan.topology.start_seconds * moves + seconds, True), None


def _seconds_of_rotation(plan: RotationPlan) -> float:
    """The time of the busiest port if each passes one message at a time, or of the busiest rank inside a host.

    The last region to arrive then passes along the ranks of its host. Hosts that receive in several lanes also wait for
    latencies of their senders.
    """
    loads, topology = plan.loads, plan.topology
    inside = loads.inside * topology.inside_latency_seconds
    rate = topology.inside_bytes_per_second or math.inf
    inside = inside + loads.inside_bytes / rate
    if topology.inside_total_bytes_per_second is not None:
        inside = np.maximum(inside, loads.inside_total / topology.inside_total_bytes_per_second)
    leaving, arrival = loads.seconds_one_by_one(), topology.latency_seconds + loads.seconds_in().max()
    if plan.has_lanes:
        waits = (loads.messages * loads.overhead_seconds).max(), loads.entries * topology.latency_seconds / 2
        arrival = _IN_LANES * (arrival + max(waits))
    passing = 0.0
    for spec, exchange in zip(plan.tensors, plan.exchanges, strict=True):
        region = math.prod(spec.shape) * spec.itemsize / exchange.num_regions
        hops = exchange.groups.shape[2] - 1
        passing = max(passing, hops * (topology.inside_latency_seconds + region / rate))
    num_slots = sum(int(exchange.order.num_receivers.max()) for exchange in plan.exchanges)
    longest = max(leaving, arrival) + topology.sender_change_seconds * num_slots
    if not all(exchange.order.is_complete for exchange in plan.exchanges):
        longest *= _UNEVEN
    return topology.start_seconds + float(max(longest, inside.max()) + passing)
