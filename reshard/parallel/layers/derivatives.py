"""Backwards of autograd functions that exchange messages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from reshard.errors import ArgumentError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function that has no second derivative.

    The decorator of torch with this name lets second derivatives count as zero, without an error, if the incoming
    gradient needs none, such as that of a loss.

    Raises:
        ArgumentError: the backward runs with ``create_graph=True``.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ArgumentError("layers on a grid have first derivatives only; run backwards without create_graph=True")
        return backward(ctx, *gradients)

    return run
