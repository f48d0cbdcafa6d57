"""Run a model whose forward cannot be traced as a single block."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ... import torch_compat
from .blocks import Block
from .traced_cut import finish_output

#: Parameters that a batch cannot name.
_UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def whole_model(model: torch.nn.Module, loss: Callable[..., Any] | None = None) -> list[Block]:
    """A single block that runs the whole model and then ``loss``.

    The block reads the inputs of the batch that the parameters of the forward and of ``loss`` name. Parameters with a
    default are optional.
    """
    named = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind not in _UNNAMED
    ]
    further = [] if loss is None else list(inspect.signature(loss).parameters.values())[1:]
    own = {item.name for item in named}
    extra = {item.name for item in further}

    def run(**values: Any) -> Any:
        output = model(**{name: value for name, value in values.items() if name in own})
        if loss is not None:
            output = loss(output, **{name: value for name, value in values.items() if name in extra})
        return finish_output(output)

    parameters = {
        item.name: item for item in [*further, *named]
    }  # a parameter of the model replaces one of ``loss`` with the same name
    by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    parts = [*torch_compat.held_modules(model)]
    for tensors in torch_compat.held_tensors(model):
        parts += tensors
    return [Block("", run, tuple(parts))]
