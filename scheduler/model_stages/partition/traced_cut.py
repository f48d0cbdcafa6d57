"""Stages of a model whose forward torch.fx can trace down to the modules that are cut."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from reshard.errors import ArgumentError

from ...runtime.stage import StageOutput

#: Attributes and methods that return no data of a tensor.
_METADATA = {"shape", "dtype", "device", "ndim", "size", "dim", "numel"}


class UntraceableError(ArgumentError):
    """torch.fx cannot trace the forward of a model."""


class _Tracer(fx.Tracer):
    """Traces through the modules that contain a cut. All other modules are leaves."""

    def __init__(self, cut_before: Sequence[str]) -> None:
        super().__init__()
        self._cuts = cut_before

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Whether the module has no cut inside."""
        return not any(cut.startswith(module_qualified_name + ".") for cut in self._cuts)


class TracedCut:
    """A traced model, cut into stages.

    Args:
        model: the model.
        cut_before: paths of modules, in the order in which forward calls them.
        inputs: names of the inputs in the batch. Other parameters of forward have their defaults.
        loss: ``loss(output, ...)``, whose other parameters name inputs of the batch; default: the model returns the
            loss, ``(loss, metrics)`` or a StageOutput.

    Raises:
        UntraceableError: the model cannot be traced.
        ArgumentError: a cut is not a module that forward calls, in this order.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cut_before: Sequence[str],
        inputs: Iterable[str],
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self.num_stages = len(cut_before) + 1
        known = {*inspect.signature(model.forward).parameters}
        known |= {*list(inspect.signature(loss).parameters)[1:]} if loss is not None else set()
        inputs = list(inputs)
        self.inputs = frozenset(inputs) & known
        for path in cut_before:
            try:
                model.get_submodule(path)
            except AttributeError:
                children = ", ".join(name for name, _ in model.named_modules() if name.count(".") == path.count("."))
                raise ArgumentError(
                    f"{type(model).__name__} has no module {path!r}, which cut_before names; at that depth it has "
                    f"{children or 'none'}"
                ) from None
        self._graph = _trace(model, cut_before, inputs, loss)
        self._stage_of = self._assign(model, cut_before)

    def _assign(self, model: torch.nn.Module, cut_before: Sequence[str]) -> dict[fx.Node, int]:
        """The stage of each node, without nodes that every stage can compute itself."""
        stage_of: dict[fx.Node, int] = {}
        stage = 0
        for node in self._graph.nodes:
            if node.op == "call_module" and stage < len(cut_before) and node.target == cut_before[stage]:
                stage += 1
            if node.op in ("placeholder", "get_attr") or _is_cheap(node, stage_of):
                continue
            stage_of[node] = stage
            if node.op == "call_function" and node.target is operator.getitem and node.args[0] in stage_of:
                stage_of[node] = stage_of[node.args[0]]  # an element of a tuple belongs to the stage that made it
        if stage < len(cut_before):
            path = cut_before[stage]
            raise ArgumentError(
                f"{type(model).__name__} cannot be cut before {path!r}: its forward does not call that module after "
                f"{cut_before[stage - 1]!r}"
                if stage
                else f"{type(model).__name__} cannot be cut before {path!r}: its forward does not call that module"
            )
        return stage_of

    def build(self, root: torch.nn.Module) -> list[fx.GraphModule]:
        """The modules of all stages, which share their parts with ``root``."""
        sent_by: dict[int, list[fx.Node]] = {stage: [] for stage in range(self.num_stages)}
        graphs = []
        for stage in reversed(range(self.num_stages)):
            graph, received = self._stage_graph(stage, sent_by[stage])
            for node in received:
                sender = self._stage_of[node]
                if node not in sent_by[sender]:
                    sent_by[sender].append(node)
            graphs.append(graph)
        stages = []
        for graph in reversed(graphs):
            stage_module = fx.GraphModule(root, graph)
            stage_module.training = root.training
            stages.append(stage_module)
        return stages

    def _stage_graph(self, stage: int, outputs: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
        """The graph of one stage, and the nodes of earlier stages that it reads."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        received: list[fx.Node] = []

        def find(node: fx.Node) -> fx.Node:
            if node in made:
                return made[node]
            if node.op == "placeholder":
                made[node] = graph.placeholder(str(node.target))
            elif self._stage_of.get(node, stage) < stage:
                received.append(node)
                made[node] = graph.placeholder(node.name)
            else:
                for all_input_node in node.all_input_nodes:
                    find(all_input_node)
                made[node] = graph.node_copy(node, find)
            return made[node]

        result = None
        for node in self._graph.nodes:
            if node.op == "output":
                if stage == self.num_stages - 1:
                    for all_input_node in node.all_input_nodes:
                        find(all_input_node)
                    value = fx.node.map_arg(node.args[0], find)
                    result = graph.call_function(finish_output, (value,))
            elif self._stage_of.get(node) == stage:
                find(node)
        sent = {node.name: find(node) for node in outputs}
        graph.output(sent if result is None else result)
        _move_placeholders_up(graph)
        return graph, received


def _trace(
    model: torch.nn.Module, cut_before: Sequence[str], inputs: Iterable[str], loss: Callable[..., Any] | None
) -> fx.Graph:
    """The graph of the model, and of ``loss`` on its output."""
    name = type(model).__name__
    given = set(inputs)
    parameters = inspect.signature(model.forward).parameters
    unset = {}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UntraceableError(
                f"{name} cannot be cut by module paths: its forward takes *{parameter.name}; pass blocks=, a function "
                "that returns its blocks"
            )
        if parameter.name not in given:
            if parameter.default is parameter.empty:
                raise ArgumentError(f"the batch has no {parameter.name!r}, which {name} needs; it has {sorted(given)}")
            unset[parameter.name] = parameter.default
    try:
        graph = _Tracer(cut_before).trace(model, concrete_args=unset or None)
    except Exception as error:  # whatever the forward of the model raises on proxies
        raise UntraceableError(
            f"{name} cannot be cut by module paths, because torch.fx cannot trace its forward: {error}. Pass blocks=, "
            "a function that returns its blocks, or cut at modules that contain the untraceable part"
        ) from error
    for node in reversed(list(graph.nodes)):
        is_check = node.op == "call_function" and getattr(node.target, "__name__", "") in ("_assert_is_none", "_assert")
        if is_check or (node.op == "placeholder" and not node.users):
            graph.erase_node(node)
    if loss is not None:
        _append_loss(graph, loss, given)
    return graph


def _append_loss(graph: fx.Graph, loss: Callable[..., Any], given: set[str]) -> None:
    output = next(node for node in graph.nodes if node.op == "output")
    _, *further = inspect.signature(loss).parameters.values()
    placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    arguments = {}
    for item in further:
        if item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD):
            raise ArgumentError(f"the loss function takes *{item.name}; its parameters must name inputs of the batch")
        if item.name not in given:
            if item.default is item.empty:
                raise ArgumentError(f"the loss function needs {item.name!r}, but the batch has {sorted(given)}")
            continue
        if item.name not in placeholders:
            with graph.inserting_before(next(iter(graph.nodes))):
                placeholders[item.name] = graph.placeholder(item.name)
        arguments[item.name] = placeholders[item.name]
    with graph.inserting_before(output):
        value = graph.call_function(loss, (output.args[0],), arguments)
    output.args = (value,)


def _is_cheap(node: fx.Node, stage_of: Mapping[fx.Node, int]) -> bool:
    """Whether every stage can compute the node itself: it is metadata of a tensor, or depends on inputs alone."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target is getattr and node.args[1] in _METADATA:
        return True
    if node.op == "call_method" and node.target in _METADATA:
        return True
    return all(all_input_node not in stage_of for all_input_node in node.all_input_nodes) and not _reads_parameters(
        node
    )


def _reads_parameters(node: fx.Node) -> bool:
    return any(
        all_input_node.op == "get_attr" or (all_input_node.op.startswith("call_") and _reads_parameters(all_input_node))
        for all_input_node in node.all_input_nodes
    )


def _move_placeholders_up(graph: fx.Graph) -> None:
    """Put all placeholders first, as a graph needs them."""
    first = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op == "placeholder" and node is not first:
            first.prepend(node)


def finish_output(output: Any) -> StageOutput:
    """The result of the last stage for the output of the model."""
    if isinstance(output, StageOutput):
        return output
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Mapping):
        return StageOutput(loss=output[0], metrics=output[1])
    if isinstance(output, torch.Tensor):
        return StageOutput(loss=output)
    raise ArgumentError(
        f"the model returns {type(output).__name__}; it must return the loss, (loss, metrics) or a StageOutput, or "
        "Pipe needs loss="
    )


#: The function computes nothing, so it also works on the shards of a model that :mod:`reshard.parallel` has cut.
finish_output.works_on_parts = True  # type: ignore[attr-defined]
