"""Check the code of a traced model between its modules. Each function there must also be right for a shard."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from reshard.errors import ArgumentError

#: Functions that are elementwise, or read no elements of a tensor.
_FUNCTIONS = {
    dict, operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.iadd,
    operator.imul, torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.relu, torch.sigmoid, torch.tanh,
    torch.exp, functional.relu, functional.gelu, functional.silu, functional.mish, functional.sigmoid, functional.tanh,
    functional.elu, functional.leaky_relu, functional.softplus,
}  # fmt: skip
#: Methods of the same two kinds.
_METHODS = {
    "add", "sub", "mul", "div", "neg", "relu", "sigmoid", "tanh", "to", "float", "double", "half", "bfloat16", "detach",
    "contiguous", "clone", "dim",
}  # fmt: skip
#: Attributes that are equal for a tensor and for the shard that a rank holds.
_ATTRIBUTES = {"dtype", "device", "ndim"}


def check_graph(module: fx.GraphModule, path: str) -> None:
    """Check the functions that a traced model calls between its modules.

    Raises:
        ArgumentError: a function needs whole samples or features; or the model reads a size, which would be that of
            the shard; or the model itself holds a parameter, whose gradient no submodule would sum.
    """
    for node in module.graph.nodes:
        problem = _find_problem(module, node)
        if problem is not None:
            what = repr(path) if path else "the model"
            raise ArgumentError(
                f"{what} {problem} between its modules, which parallelize cannot cut over a grid; "
                "put it into a module, and see reshard.parallel.register"
            )


def _find_problem(module: fx.GraphModule, node: fx.Node) -> str | None:
    target: Any = node.target
    if node.op == "get_attr":
        is_parameter = isinstance(operator.attrgetter(target)(module), torch.nn.Parameter)
        return f"reads the parameter {target!r}" if is_parameter else None
    if node.op == "call_method":
        return None if target in _METHODS else f"calls {target}"
    if node.op != "call_function":
        return None
    if target is getattr:
        return None if node.args[1] in _ATTRIBUTES else f"reads {node.args[1]} of a tensor"
    if target is operator.getitem:
        is_element = isinstance(node.args[1], str) or not _gives_tensor(module, node.args[0])
        return None if is_element and isinstance(node.args[1], (int, str)) else f"reads {node}, elements of a tensor,"
    is_known = target in _FUNCTIONS or getattr(target, "works_on_parts", False)
    return None if is_known else f"calls {getattr(target, '__name__', target)}"


def _gives_tensor(module: fx.GraphModule, node: Any) -> bool:
    """Whether a node returns a tensor and not a container, judged by its operation and target."""
    if node.op == "call_module":
        return type(module.get_submodule(node.target)).__module__.startswith("torch.nn.modules.")
    return node.op != "call_function" or node.target is not dict
