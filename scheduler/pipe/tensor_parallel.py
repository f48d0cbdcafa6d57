"""Tensor parallelism inside a stage, by torch's ``parallelize_module``."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch

from reshard.errors import ArgumentError

from .placement import Placement


def find_plan(
    placement: Placement, model: torch.nn.Module, default: Mapping[str, Any] | None, stage: int
) -> Mapping[str, Any]:
    """The tensor-parallel plan of a stage: that of its placement, the default, or the model's own ``_tp_plan``.

    Raises:
        ArgumentError: ``tp`` is more than one and there is no plan, or the plan names an unknown module or style.
    """
    if placement.tp == 1:
        return {}
    plan = placement.tp_plan or default or getattr(model, "_tp_plan", None)
    if not plan:
        raise ArgumentError(
            f"stage {stage} has tp={placement.tp}, but no plan says how to shard its modules; pass tp_plan="
            "{module path: ColwiseParallel(), ...}, or use dp"
        )
    names = [name for name, _ in model.named_modules()]
    for path in plan:
        if not fnmatch.filter(names, path):
            raise ArgumentError(f"the tp_plan names {path!r}, but {type(model).__name__} has no such module")
    return {path: _style(path, style) for path, style in plan.items()}


def _style(path: str, style: Any) -> Any:
    """A ParallelStyle; names are those of the plans of ``transformers``."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if not isinstance(style, str):
        return style
    known = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Shard(-1)),
    }
    if style not in known:
        raise ArgumentError(f"the tp_plan has the style {style!r} for {path!r}; known are {', '.join(known)}")
    return known[style]()


def parallelize(module: torch.nn.Module, device_mesh: Any, plan: Mapping[str, Any]) -> None:
    """Shard the modules of a stage in place, as far as the plan names them."""
    from torch.distributed.tensor.parallel import parallelize_module

    names = [name for name, _ in module.named_modules()]
    mine = {path: style for path, style in plan.items() if fnmatch.filter(names, path)}
    if mine:
        parallelize_module(module, device_mesh, mine)
