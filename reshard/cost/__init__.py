"""The time of a plan: the lower bound of its problem, and its simulation.

Imports :mod:`reshard.plan` and the layers below it.
"""

from reshard.cost.cost_report import NOTABLE_LATENCY, CostReport, describe_ties, find_busiest_ports
from reshard.cost.encoded_plans import encoded_makespan
from reshard.cost.fluid import flow
from reshard.cost.latency_bounds import LatencyBounds, find_latency_bounds
from reshard.cost.lower_bound import Bound, find_bound
from reshard.cost.prediction import Makespan, predict_makespan, predict_timeline
from reshard.cost.simulator import Timeline, network_of, simulate

__all__ = [
    "NOTABLE_LATENCY",
    "Bound",
    "CostReport",
    "LatencyBounds",
    "Makespan",
    "Timeline",
    "describe_ties",
    "encoded_makespan",
    "find_bound",
    "find_busiest_ports",
    "find_latency_bounds",
    "flow",
    "network_of",
    "predict_makespan",
    "predict_timeline",
    "simulate",
]
