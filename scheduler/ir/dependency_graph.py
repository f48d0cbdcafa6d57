"""The dependency graph of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..pipeline import Pipeline
from .actions import Action, Kind, StageChannel, compute_seconds

if TYPE_CHECKING:
    import networkx as nx

Node = Action | tuple[StageChannel, int]


def build_dependency_graph(rank_actions: Sequence[Sequence[Action]], pipeline: Pipeline) -> nx.DiGraph:
    """The dependencies of the pp ranks of a schedule that fits the pipeline; see :meth:`Schedule.to_networkx`."""
    import networkx as nx

    graph = nx.DiGraph()
    for pp_rank, actions in enumerate(rank_actions):
        for action in actions:
            _add_node(graph, action, pp_rank, pipeline)
    last_of_channel: dict[tuple[StageChannel, bool], Node] = {}
    for actions in rank_actions:
        before: Node | None = None  # last node that the pp rank has waited for
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
    return (action.channel, action.microbatch) if action.kind.is_transfer else replace(action, overlaps=False)


def _add_node(graph: nx.DiGraph, action: Action, pp_rank: int, pipeline: Pipeline) -> None:
    if not action.kind.is_transfer:
        seconds = compute_seconds(action.kind, pipeline.stages[action.stage])
        attributes: dict[str, Any] = {
            "kind": str(action.kind),
            "pp_rank": pp_rank,
            "seconds": seconds,
            "text": str(action),
        }
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
        attributes = {"kind": "transfer", "pp_rank": pp_rank, "seconds": seconds, "text": text}
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
        needed.append((StageChannel(other, stage, is_forward), microbatch))
        kinds = (Kind.F,) if is_forward else (Kind.B, Kind.I)
        needed += [Action(kind, other, microbatch) for kind in kinds]
    return needed
