"""What crossings cost, from the planner: the seconds of a plan alone on its links, and what it takes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard.errors import ArgumentError
from reshard.loads import find_loads
from reshard.plan import Plan, TensorSpec
from reshard.planning import plan_tensors
from reshard.routes import Strategy
from reshard.simulation import simulate
from reshard.topology import Topology

from .pipeline import Edge, Loads


def plan_edge(
    src: int,
    dst: int,
    tensors: Sequence[TensorSpec],
    topology: Topology,
    *,
    strategy: str | Strategy | None = None,
) -> Edge:
    """An edge whose costs are those of the plans that move its tensors there and their gradients back.

    Args:
        src, dst: stages. tensors: what crosses for one microbatch, with its layouts on both sides; gradients have those
            of their tensors. topology: of all ranks. strategy: how they move; omitted, the default.

    Raises:
        ArgumentError: no tensors. What :func:`reshard.make_plan` raises.
    """
    if not tensors:
        raise ArgumentError(f"edge {src} -> {dst} has no tensors; where only costs are known, make an Edge of them")
    there, back = edge_plans(tensors, topology, strategy=strategy)
    return Edge(
        src,
        dst,
        simulate(there).makespan_seconds,
        simulate(back).makespan_seconds,
        _loads(there),
        _loads(back),
        tuple(tensors),
    )


def edge_plans(
    tensors: Sequence[TensorSpec], topology: Topology, *, strategy: str | Strategy | None = None
) -> tuple[Plan, Plan]:
    """The plans of one crossing, forward and backward."""
    gradients = [replace(spec, src=spec.dst, dst=spec.src) for spec in tensors]
    return (
        plan_tensors(tensors, strategy=strategy, topology=topology),
        plan_tensors(gradients, strategy=strategy, topology=topology),
    )


def _loads(plan: Plan) -> Loads:
    """Seconds for which a plan keeps each port busy, at most those that it lasts."""
    lasts = simulate(plan).makespan_seconds
    return tuple((load.port, min(load.seconds, lasts)) for load in find_loads(plan))
