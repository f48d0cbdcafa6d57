"""Which functions between the modules of a traced model work on the part of a tensor that a rank holds."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from reshard.errors import ArgumentError

#: Functions of each element by itself, and of what has no elements.
_FUNCTIONS = {
    getattr, dict, operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.iadd,
    operator.imul, torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.relu, torch.sigmoid, torch.tanh,
    torch.exp, functional.relu, functional.gelu, functional.silu, functional.mish, functional.sigmoid, functional.tanh,
    functional.elu, functional.leaky_relu, functional.softplus,
}  # fmt: skip
_METHODS = {
    "add", "sub", "mul", "div", "neg", "relu", "sigmoid", "tanh", "to", "float", "double", "half", "bfloat16", "detach",
    "contiguous", "clone", "size", "dim",
}  # fmt: skip


def check_graph(module: fx.GraphModule, path: str) -> None:
    """Raise ArgumentError if the graph of a traced model calls a function that needs whole rows or features."""
    for node in module.graph.nodes:
        if not _works_on_parts(node):
            name = getattr(node.target, "__name__", node.target)
            raise ArgumentError(
                f"{path or 'the model'!r} calls {name} between its modules, which parallelize cannot cut over a grid; "
                "put the call into a module, and see reshard.parallel.register"
            )


def _works_on_parts(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return target in _METHODS
    if node.op != "call_function":
        return True
    if target is operator.getitem:  # an element of a tuple or of a dict
        return isinstance(node.args[1], (int, str))
    return target in _FUNCTIONS or getattr(target, "works_on_parts", False)
