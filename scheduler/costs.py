"""What transfers cost, from the planner: the seconds of a plan alone on its links, and what it takes of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from reshard.cost.port_loads import find_loads
from reshard.cost.simulator import simulate
from reshard.errors import ArgumentError
from reshard.plan.model import Plan
from reshard.planner.planning import plan_tensors
from reshard.planner.strategies.problem import Strategy
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.model import Topology

from .graph import Edge, Loads


def plan_edge(
    src: int,
    dst: int,
    tensors: Sequence[TensorSpec],
    topology: Topology,
    *,
    strategy: str | Strategy | None = None,
    without_gradient: Iterable[str] = (),
) -> Edge:
    """An edge whose costs are those of the plans that move its tensors there and their gradients back.

    Args:
        src, dst: stages. tensors: what crosses for one microbatch, with its layouts on both sides; gradients have those
            of their tensors. topology: of all ranks. strategy: how they move; omitted, the default.
            without_gradient: names of tensors that need none.

    Raises:
        ArgumentError: no tensors. What :func:`reshard.make_plan` raises.
    """
    if isinstance(tensors, TensorSpec):
        raise ArgumentError(f"tensors of edge {src} -> {dst} are a list of TensorSpecs, not one of them")
    if not tensors:
        raise ArgumentError(f"edge {src} -> {dst} has no tensors; where only costs are known, make an Edge of them")
    edge = Edge(src, dst, tensors=tuple(tensors), without_gradient=frozenset(without_gradient))
    return price_edge(edge, topology, strategy=strategy)


def price_edge(
    edge: Edge, topology: Topology, *, strategy: str | Strategy | None = None, links: Topology | None = None
) -> Edge:
    """An edge with tensors, its costs those of its plans.

    Args:
        topology: what the plans are made for. links: what they are timed on, such as measured rates; omitted, the same.
    """
    there, back = edge_plans(edge, topology, strategy=strategy)
    return replace(
        edge,
        forward_seconds=simulate(there, links).makespan_seconds,
        backward_seconds=0.0 if back is None else simulate(back, links).makespan_seconds,
        forward_loads=_loads(there, links),
        backward_loads=() if back is None else _loads(back, links),
    )


def edge_plans(edge: Edge, topology: Topology, *, strategy: str | Strategy | None = None) -> tuple[Plan, Plan | None]:
    """The plans of one transfer, forward and backward; None where nothing has a gradient."""
    gradients = edge.gradients
    return (
        plan_tensors(edge.tensors, strategy=strategy, topology=topology),
        plan_tensors(gradients, strategy=strategy, topology=topology) if gradients else None,
    )


def _loads(plan: Plan, links: Topology | None) -> Loads:
    """Seconds for which a plan keeps each port busy, at most those that it lasts."""
    lasts = simulate(plan, links).makespan_seconds
    return tuple((load.port, min(load.seconds, lasts)) for load in find_loads(plan, links))
