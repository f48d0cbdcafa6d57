"""Transfer costs from the planner: how long a plan takes alone, and how long it keeps each link busy."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from reshard.arguments import check_arguments
from reshard.cost import encoded_makespan, simulate
from reshard.errors import ArgumentError
from reshard.plan import Plan, find_loads
from reshard.planner import Strategy, compress_tensors, plan_tensors
from reshard.sharding import TensorSpec
from reshard.topology import Topology

from .pipeline import Edge, Loads


@check_arguments()
def plan_edge(
    src: int,
    dst: int,
    tensors: Sequence[TensorSpec],
    topology: Topology,
    *,
    strategy: str | Strategy | None = None,
    without_gradient: Iterable[str] = (),
) -> Edge:
    """An edge with the simulated costs of the plans that move its tensors forward and their gradients backward.

    Args:
        src, dst: stages.
        tensors: tensors of one microbatch, with their layouts on both stages. Gradients use the same layouts.
        topology: hosts and links of all ranks.
        strategy: planning strategy, as for :func:`reshard.make_plan`.
        without_gradient: names of tensors that need no gradient.

    Raises:
        ArgumentError: ``tensors`` is empty or not a list.
        LayoutError, TopologyError: see :func:`reshard.make_plan`.
    """
    if not tensors:
        raise ArgumentError(f"edge {src} -> {dst} has no tensors; if only its costs are known, use Edge(...)")
    edge = Edge(src, dst, tensors=tuple(tensors), without_gradient=frozenset(without_gradient))
    return price_edge(edge, topology, strategy=strategy)


def price_edge(
    edge: Edge, topology: Topology, *, strategy: str | Strategy | None = None, links: Topology | None = None
) -> Edge:
    """The edge with the simulated costs of its plans, with the codecs of the edge.

    Encoding and decoding count if the topology that plans are timed on has the rates of the codec.

    Args:
        edge: an edge with tensors.
        topology: topology that the plans are made for.
        strategy: planning strategy, as for :func:`reshard.make_plan`.
        links: topology that the plans are timed on, for example with measured rates; default: ``topology``.
    """
    rates = {rate.codec: rate for rate in (links or topology).codec_rates}

    def find_costs(plan: Plan | None, codec: str | None) -> tuple[float, Loads]:
        """Seconds of a plan, and seconds for which it keeps each port busy, at most its makespan."""
        if plan is None:
            return 0.0, ()
        makespan = simulate(plan, links).makespan_seconds
        loads = tuple((load.port, min(load.seconds, makespan)) for load in find_loads(plan, links))
        return encoded_makespan(plan, rates[codec], links) if codec in rates else makespan, loads

    forward, backward = edge_plans(edge, topology, strategy=strategy)
    forward_seconds, forward_loads = find_costs(forward, edge.forward_codec)
    backward_seconds, backward_loads = find_costs(backward, edge.backward_codec)
    return replace(
        edge,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        forward_loads=forward_loads,
        backward_loads=backward_loads,
    )


def edge_plans(edge: Edge, topology: Topology, *, strategy: str | Strategy | None = None) -> tuple[Plan, Plan | None]:
    """The plans of one forward and one backward transfer. The second is None if no tensor has a gradient."""
    gradients = edge.gradients
    return (
        plan_encoded(edge.tensors, edge.forward_codec, topology, strategy),
        plan_encoded(gradients, edge.backward_codec, topology, strategy) if gradients else None,
    )


def plan_encoded(
    tensors: Sequence[TensorSpec], codec: str | None, topology: Topology, strategy: str | Strategy | None
) -> Plan:
    """A plan of tensors with a codec, or without one."""
    plan = functools.partial(plan_tensors, strategy=strategy, topology=topology)
    return plan(compress_tensors(tensors, codec, None, topology, plan))
