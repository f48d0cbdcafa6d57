"""A report on the cost of a plan: its lower bound, its simulated time, and the load of each port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.arguments import check_fields
from reshard.cost.excess import Excess, describe_excess, find_excess
from reshard.cost.latency_bounds import LatencyBounds, find_latency_bounds
from reshard.cost.lower_bound import Bound, find_bound
from reshard.cost.prediction import Makespan, predict_makespan
from reshard.cost.simulator import simulate
from reshard.formatting import count_of, format_bytes, format_rate, format_seconds
from reshard.plan import Load, Plan, find_loads

#: A port counts as busiest if it is busy for at least this fraction of the time of the busiest port.
AS_BUSY = 0.999
#: The report mentions latency if it makes more than this fraction of the predicted time.
NOTABLE_LATENCY = 0.05
#: If a plan takes more than this many times the bound, the report says why, and what would help.
_NOTABLE_RATIO = 1.1


@dataclass(frozen=True)
class CostReport:
    """The cost of a plan on its own topology. Each figure is computed on first access; ``str()`` prints them all.

    >>> print(CostReport(plan))  # doctest: +SKIP
    lower bound  0.858993 s: host 0 receives 1 GiB at 1.25 GB/s
    with latency 0.859793 s for any plan, 0.860193 s if no message carries two regions
    predicted    0.873068 s, 1.016 times the bound
    latencies    100 us between hosts, 50 us inside; the prediction counts them for each message
    busiest      host 0 in: 1 GiB at 1.25 GB/s, 0.858993 s
    """

    plan: Plan

    def __post_init__(self) -> None:
        check_fields(self)

    @cached_property
    def bound(self) -> Bound:
        """The lower bound, and the links that set it; see :func:`reshard.find_bound`."""
        return find_bound(self.plan)

    @property
    def lower_bound_seconds(self) -> float:
        """The time that no plan without relays can beat on this topology."""
        return self.bound.seconds

    @cached_property
    def latency_bounds(self) -> LatencyBounds | None:
        """Two lower bounds that count latency; None if messages between hosts have none, or if links pass bursts.

        ``any_plan_seconds`` holds for every plan, ``unmerged_seconds`` for plans without relays whose messages carry
        bytes of one region each.
        """
        return find_latency_bounds(self.plan, self.bound)

    @cached_property
    def makespan(self) -> Makespan:
        """The plan's time, and whether it is an upper estimate because a simulation would take too long."""
        return predict_makespan(self.plan)

    @property
    def predicted_seconds(self) -> float:
        """The plan's time by :func:`reshard.simulate`, or an upper estimate for a large plan; see :attr:`makespan`."""
        return self.makespan.seconds

    @cached_property
    def latency_fraction(self) -> float:
        """The fraction of :attr:`predicted_seconds`, from 0 to 1, due to latency, which the bound ignores.

        0 if the time is an estimate.
        """
        free = self.plan.topology.without_latency()
        if not self.predicted_seconds or self.makespan.is_estimate or free == self.plan.topology:
            return 0.0
        return max(1.0 - simulate(self.plan, free).makespan_seconds / self.predicted_seconds, 0.0)

    @cached_property
    def excess(self) -> Excess | None:
        """The causes of the time beyond the bound; None for a large plan in closed form."""
        return find_excess(self.plan, self.makespan, self.lower_bound_seconds)

    @cached_property
    def causes(self) -> tuple[str, ...]:
        """Lines about a plan that takes more than 1.1 times its bound: the causes, and what helps; else none."""
        if not self._is_far_above or self.excess is None:
            return ()
        return tuple(describe_excess(self.plan, self.excess, self.makespan, self.latency_bounds))

    @property
    def _is_far_above(self) -> bool:
        return 0 < _NOTABLE_RATIO * self.lower_bound_seconds < self.predicted_seconds

    @cached_property
    def port_loads(self) -> tuple[Load, ...]:
        """Bytes and seconds of each NIC and uplink that the plan uses."""
        return tuple(find_loads(self.plan))

    def __str__(self) -> str:
        lines = [f"lower bound  {self.lower_bound_seconds:.6g} s: {self.bound.reason}"]
        if self.latency_bounds is not None and self.latency_bounds.unmerged_seconds and self.lower_bound_seconds:
            lines.append(f"with latency {self._format_latency_bounds(self.latency_bounds)}")
        lines.append(f"predicted    {self._format_prediction()}")
        lines += self.causes
        topology = self.plan.topology
        between, inside = map(format_seconds, (topology.latency_seconds, topology.inside_latency_seconds))
        lines.append(
            f"latencies    {between} between hosts, {inside} inside; the prediction counts them for each message"
        )
        if self.port_loads:
            lines.append(f"busiest      {self._format_busiest()}")
        return "\n".join(lines)

    def _format_latency_bounds(self, bounds: LatencyBounds) -> str:
        any_plan, unmerged = bounds.any_plan_seconds, bounds.unmerged_seconds
        if self.predicted_seconds < unmerged:
            return f"{any_plan:.6g} s for any plan; with one region in each message, unlike here, {unmerged:.6g} s"
        return f"{any_plan:.6g} s for any plan, {unmerged:.6g} s if no message carries two regions"

    def _format_prediction(self) -> str:
        seconds, bound = self.predicted_seconds, self.lower_bound_seconds
        estimate = ""
        if self.makespan.is_estimate:
            estimate = f" (estimated, not simulated: {self.plan.num_messages:,} messages)"
        if not bound:
            return f"{seconds:.6g} s{estimate}"
        text = f"{seconds:.6g} s, {seconds / bound:.3f} times the bound{estimate}"
        if not self.plan.topology.latency_seconds:
            return f"{text}; latency_seconds is 0, so messages between hosts have no latency"
        if self._is_far_above and self.excess is not None:
            return f"{text}, which counts no latency"
        if self.latency_fraction > NOTABLE_LATENCY:
            percent = f"{100 * self.latency_fraction:.0f} %"
            text += f", which counts no latency (latency is {percent} of the prediction)"
        return text

    def _format_busiest(self) -> str:
        ports, names = find_busiest_ports(self.port_loads), self.bound.ports
        ties = len(ports) - 1
        busy = [load for load in self.port_loads if load.port in ports]
        named = [load for load in busy if load.port.partition(",")[0] in names]  # the ports that the bound names
        busiest = max(named or busy, key=lambda load: load.seconds)
        text = f"{busiest.port}: {format_bytes(busiest.nbytes)} at {format_rate(busiest.bytes_per_second)}"
        return f"{text}, {busiest.seconds:.6g} s{describe_ties(ties, '; ')}"


def find_busiest_ports(loads: Sequence[Load]) -> set[str]:
    """The names of the ports that are as busy as the busiest one."""
    limit = AS_BUSY * max((load.seconds for load in loads), default=0.0)
    return {load.port for load in loads if load.seconds >= limit}


def describe_ties(count: int, before: str) -> str:
    """``1 other port is as busy`` after the text ``before``; empty if there is no other."""
    return f"{before}{count_of(count, 'other port')} {'is' if count == 1 else 'are'} as busy" if count > 0 else ""
