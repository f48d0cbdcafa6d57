"""The cycle of a schedule that deadlocks, and the critical path of one that does not."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import ScheduleError

from ..ir.schedule import Schedule, check_fits
from ..pipeline import Pipeline


def describe_cycle(schedule: Schedule, pipeline: Pipeline) -> str:
    """The cause of a deadlock: ``1F0 waits for activations ..., which waits for ...``; empty if there is none."""
    import networkx as nx

    graph = schedule.to_networkx(pipeline)
    try:
        cycle = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return ""
    names = [graph.nodes[node]["text"] for node, *_ in reversed(cycle)]
    return f"{names[0]} waits for {', which waits for '.join([*names[1:], names[0]])}"


@dataclass(frozen=True)
class CriticalPath:
    """The chain of dependent computations and transfers that takes longest.

    Attributes:
        nodes: names of its computations and transfers, in order.
        seconds: duration of the whole chain.
    """

    nodes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:.6g} s: {' -> '.join(self.nodes)}"


def critical_path(schedule: Schedule, pipeline: Pipeline) -> CriticalPath:
    """The longest chain of dependencies. No run is faster than this chain; link contention can make a run slower.

    Raises:
        ArgumentError: an argument has the wrong type.
        ScheduleError: the schedule was made for another pipeline, or deadlocks.
    """
    import networkx as nx

    check_fits(schedule, pipeline)
    graph = schedule.to_networkx(pipeline)
    if not nx.is_directed_acyclic_graph(graph):
        raise ScheduleError(f"the schedule deadlocks: {describe_cycle(schedule, pipeline)}")
    for _, node, edge in graph.edges(data=True):
        edge["weight"] = graph.nodes[node]["seconds"]
    first = object()
    starts = [node for node in graph if not graph.in_degree(node)]
    graph.add_node(first, seconds=0.0, text="")
    graph.add_weighted_edges_from((first, node, graph.nodes[node]["seconds"]) for node in starts)
    path = nx.dag_longest_path(graph)[1:]
    return CriticalPath(
        tuple(graph.nodes[node]["text"] for node in path), sum(graph.nodes[node]["seconds"] for node in path)
    )
