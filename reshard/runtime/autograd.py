"""Marks for autograd on the arrays that a transfer writes."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def mark_written(outs: Iterable[torch.Tensor | None]) -> None:
    """Tell autograd that these arrays change, as after an in-place operation of torch.

    Otherwise the backward pass of a graph that saved one of them would use the new values.
    """
    torch.autograd.graph.increment_version([out for out in outs if out is not None and not out.is_inference()])
