"""Tensor parallelism inside a stage: torch's ``parallelize_module``, or a grid of :mod:`reshard.parallel`."""

from __future__ import annotations

import fnmatch
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from reshard.errors import ArgumentError

from .placement import Placement


def find_plan(
    placement: Placement, model: torch.nn.Module, default: Mapping[str, Any] | None, stage: int
) -> Mapping[str, Any]:
    """The tensor-parallel plan of a stage: from its placement, else the default, else the model's own ``_tp_plan``.

    Args:
        placement: placement of the stage.
        model: the whole model.
        default: plan of stages whose placement has none.
        stage: index of the stage, for errors.

    Returns:
        ``{module path: ParallelStyle}``; empty if ``tp`` is 1.

    Raises:
        ArgumentError: ``tp`` is more than 1 and there is no plan, the plan is not a mapping or names an unknown module
            or style, or the model's own plan would divide a head.
    """
    if placement.tp == 1:
        return {}
    plan = placement.tp_plan or default or getattr(model, "_tp_plan", None)
    if not plan:
        raise ArgumentError(
            f"stage {stage} has tp={placement.tp}, but no plan says how to shard its modules; pass tp_plan="
            "{module path: ColwiseParallel(), ...}, or use dp"
        )
    if not placement.tp_plan and not default:
        _check_heads(model, placement.tp, stage)
    if not isinstance(plan, Mapping):
        raise ArgumentError(f"tp_plan must be {{module path: style}}, not {type(plan).__name__}")
    names = [name for name, _ in model.named_modules()]
    for path in plan:
        if not fnmatch.filter(names, path):
            raise ArgumentError(f"the tp_plan names {path!r}, but {type(model).__name__} has no such module")
    return {path: _parse_style(path, style) for path, style in plan.items()}


def _check_heads(model: Any, tp: int, stage: int) -> None:
    """Raise ArgumentError if the model's own plan would divide a head."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(getattr(model, "config", None), name, None)
        if isinstance(heads, int) and heads % tp:
            raise ArgumentError(
                f"stage {stage} has tp={tp}, but {type(model).__name__} has {heads} {name}; its plan needs a multiple "
                "of tp; use another tp, or a grid, which cuts any number of heads"
            )


def _parse_style(path: str, style: Any) -> Any:
    """The ParallelStyle of a name from the plans of ``transformers``. Other objects are returned as they are."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if not isinstance(style, str):
        return style
    known = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        # a norm of the features of each head: ranks hold other heads, the dim before the features, so that their
        # gradients are partial sums
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=-2, use_local_output=True),
    }
    if style not in known:
        raise ArgumentError(f"the tp_plan has the style {style!r} for {path!r}; known are {', '.join(known)}")
    return known[style]()


def divides_sequence(plan: Mapping[str, Any]) -> bool:
    """Whether a style of the plan shards a dim that is counted from the front, such as the sequence.

    Such styles compute the size of a whole tensor from one shard. If shards are unequal, ranks get different sizes.
    """
    from torch.distributed.tensor import Shard

    def shards_front(value: Any) -> bool:
        if isinstance(value, Shard):
            return value.dim >= 0
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        return any(map(shards_front, parts))

    return any(shards_front(getattr(style, "__dict__", {})) for style in plan.values())


def parallelize(module: torch.nn.Module, device_mesh: Any, plan: Mapping[str, Any], *, moves_data: bool = True) -> None:
    """Shard the modules of a stage that the plan names, in place. Tied parameters stay tied.

    Args:
        module: module of the stage.
        device_mesh: one-dimensional, of the tensor-parallel ranks.
        plan: as :func:`find_plan` returns it; names of other stages' modules are ignored.
        moves_data: whether to broadcast the values of the first rank. If False, the ranks need not call together.

    Raises:
        ArgumentError: two modules of the stage share a parameter, and the plan shards it in two ways; or a style does
            not know the class of its module.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    names = [name for name, _ in module.named_modules()]
    own_plan = {path: style for path, style in plan.items() if fnmatch.filter(names, path)}
    if not own_plan:
        return
    shared: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    try:
        parallelize_module(module, device_mesh, own_plan, src_data_rank=0 if moves_data else None)
    except NotImplementedError as error:  # a style of torch, for a module that is neither a Linear nor an Embedding
        given = [frame.f_locals.get("module") for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        path = next((name for name, submodule in module.named_modules() if submodule is given), "")
        raise ArgumentError(
            f"the tp_plan does not fit {path!r} ({type(given).__name__}): {error} Use a style of your own there, or "
            "a grid, such as Placement(grid=(1, 2, 1)), which cuts such modules of transformers"
        ) from error
    for first, *others in shared.values():
        _tie(module, first, others)


def put_on_grid(
    module: torch.nn.Module, device_mesh: Any, timeout_seconds: float, keep_inputs: bool
) -> torch.nn.Module:
    """Shard the modules of a stage over a grid. Returns the module to run.

    Args:
        module: module of the stage.
        device_mesh: mesh with the axes depth, sample and col.
        timeout_seconds: time limit of each collective.
        keep_inputs: see :func:`reshard.parallel.parallelize`.

    Raises:
        ArgumentError: a module cannot be sharded.
    """
    import reshard.parallel

    grid = reshard.parallel.Grid(device_mesh, timeout_seconds=timeout_seconds)
    return reshard.parallel.parallelize(module, grid, has_local_input=True, keep_inputs=keep_inputs)


def _tie(module: torch.nn.Module, first: str, others: list[str]) -> None:
    """Tie parameters again: ``parallelize_module`` shards each name of a tied parameter separately."""
    parameter = module.get_parameter(first)
    for name in others:
        other = module.get_parameter(name)
        if getattr(other, "placements", None) != getattr(parameter, "placements", None):
            raise ArgumentError(
                f"{first!r} and {name!r} are one parameter, but the tp_plan shards them in two ways: "
                f"{_describe(parameter)} and {_describe(other)}; give both modules styles that shard the same dim"
            )
        parent, _, key = name.rpartition(".")
        module.get_submodule(parent).register_parameter(key, parameter)


def _describe(parameter: Any) -> str:
    return str(getattr(parameter, "placements", "not sharded"))
