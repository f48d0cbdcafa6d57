"""The dependency graph of a schedule, its cycle if the schedule deadlocks, and its critical path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..graph import Pipeline
from ..ir.schedule import Action, Channel, Kind, Schedule, check_fits

if TYPE_CHECKING:
    import networkx as nx

Node = Action | tuple[Channel, int]


def schedule_to_networkx(schedule: Schedule, pipeline: Pipeline) -> nx.DiGraph:
    """The dependencies of a schedule as a ``networkx.DiGraph``. A schedule deadlocks if the graph has a cycle.

    Nodes are computations, as :class:`Action`, and transfers, as ``(channel, microbatch)``. Node attributes:

    * ``kind``: "F", "B", "I", "W", or "transfer".
    * ``row``: the row that computes, or that sends.
    * ``microbatch``.
    * ``seconds``: duration without link contention.
    * ``text``: a readable name.

    Each edge points to the node that waits. Edge attribute ``reason``:

    * "data": a computation needs data, or a transfer waits for the last action before its send.
    * "order": an action waits for the action before it in its row.
    * "posted": a transfer waits until the receiving row reaches the receive.
    * "channel": a transfer waits for the previous transfer of its channel.

    Raises:
        ArgumentError: an argument has the wrong type.
        ScheduleError: the schedule was made for another pipeline.
    """
    import networkx as nx

    check_fits(schedule, pipeline)
    graph = nx.DiGraph()
    for row, actions in enumerate(schedule.rows):
        for action in actions:
            _add_node(graph, action, row, pipeline)
    last_of_channel: dict[tuple[Channel, bool], Node] = {}
    for actions in schedule.rows:
        before: Node | None = None  # last node that the row has waited for
        for action in actions:
            node = _node_of(action)
            if before is not None and before != node and (not action.kind.is_transfer or action.blocks):
                graph.add_edge(before, node, reason="order")
            elif before is not None and action.kind.is_transfer:
                graph.add_edge(before, node, reason="data" if action.kind.is_send else "posted")
            if action.kind.is_transfer:
                end = action.channel, action.kind.is_send
                if end in last_of_channel:
                    graph.add_edge(last_of_channel[end], node, reason="channel")
                last_of_channel[end] = node
            if not action.kind.is_transfer or action.blocks:
                before = node
    for computation in [node for node in graph if isinstance(node, Action)]:
        for needed in _inputs_of(computation, pipeline):
            if needed in graph:
                graph.add_edge(needed, computation, reason="data")
    return graph


def _node_of(action: Action) -> Node:
    return (action.channel, action.microbatch) if action.kind.is_transfer else action


def _add_node(graph: nx.DiGraph, action: Action, row: int, pipeline: Pipeline) -> None:
    if not action.kind.is_transfer:
        stage = pipeline.stages[action.stage]
        seconds = {
            Kind.F: stage.forward_seconds, Kind.B: stage.backward_seconds,
            Kind.I: stage.input_grad_seconds, Kind.W: stage.weight_grad_seconds,
        }[action.kind]  # fmt: skip
        attributes: dict[str, Any] = {"kind": str(action.kind), "row": row, "seconds": seconds, "text": str(action)}
    elif action.kind.is_send or _node_of(action) not in graph:
        channel = action.channel
        seconds = next(
            (
                edge.forward_seconds if channel.is_forward else edge.backward_seconds
                for edge in pipeline.edges
                if {edge.src, edge.dst} == {channel.sender, channel.receiver}
            ),
            0.0,
        )
        what = "activations" if channel.is_forward else "gradients"
        text = f"{what} of microbatch {action.microbatch} from stage {channel.sender} to {channel.receiver}"
        attributes = {"kind": "transfer", "row": row, "seconds": seconds, "text": text}
    else:
        return
    graph.add_node(_node_of(action), microbatch=action.microbatch, **attributes)


def _inputs_of(action: Action, pipeline: Pipeline) -> list[Node]:
    """All nodes that may supply an input of a computation. A graph has only some of them."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.W:
        return [Action(Kind.I, stage, microbatch)]
    is_forward = action.kind is Kind.F
    needed: list[Node] = [] if is_forward else [Action(Kind.F, stage, microbatch)]
    for other in pipeline.inputs[stage] if is_forward else pipeline.outputs[stage]:
        needed.append((Channel(other, stage, is_forward), microbatch))
        kinds = (Kind.F,) if is_forward else (Kind.B, Kind.I)
        needed += [Action(kind, other, microbatch) for kind in kinds]
    return needed


def describe_cycle(schedule: Schedule, pipeline: Pipeline) -> str:
    """Why a schedule deadlocks: ``1F0 waits for activations ..., which waits for ...``; empty if it does not."""
    import networkx as nx

    graph = schedule_to_networkx(schedule, pipeline)
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

    from reshard.errors import ScheduleError

    graph = schedule_to_networkx(schedule, pipeline)
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
