"""Run a model whose forward cannot be traced as a single block."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...runtime import torch_compat
from .blocks import Block
from .tracing import finish_output

#: Parameters that a batch cannot name.
_UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def whole_model(model: torch.nn.Module, loss: Callable[..., Any] | None = None) -> list[Block]:
    """A single block that runs the whole model and then ``loss``.

    The block reads the inputs of the batch that the parameters of the forward and of ``loss`` name. Parameters with a
    default are optional.
    """
    named = [each for each in inspect.signature(model.forward).parameters.values() if each.kind not in _UNNAMED]
    further = [] if loss is None else list(inspect.signature(loss).parameters.values())[1:]
    own = {each.name for each in named}
    extra = {each.name for each in further}

    def run(**values: Any) -> Any:
        output = model(**{name: value for name, value in values.items() if name in own})
        if loss is not None:
            output = loss(output, **{name: value for name, value in values.items() if name in extra})
        return finish_output(output)

    parameters = {
        each.name: each for each in [*further, *named]
    }  # a parameter of the model replaces one of ``loss`` with the same name
    by_name = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters.values()]
    run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    parts = [*torch_compat.held_modules(model)]
    for tensors in torch_compat.held_tensors(model):
        parts += tensors
    return [Block("", run, tuple(parts))]
