"""``relayout``: move a model and its optimizer to another grid, in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reshard.api.call import reshard
from reshard.arguments import check_arguments
from reshard.codecs import has_variable_size
from reshard.compression import Policy
from reshard.errors import ArgumentError
from reshard.gradients.declared_sums import mark_replaced

from .grid import Grid
from .grid.grid import check_grid
from .layers.attention import check_heads
from .optimizers import check_state, is_linear, is_on_grid, without_low_bits


@check_arguments()
def relayout(
    model: nn.Module,
    grid: Grid,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    compression: Policy | None = None,
) -> None:
    """Move the parameters of a model, and the state of its optimizer, to another grid.

    No bit of a parameter changes. No bit of the optimizer's state changes, unless ``compression`` encodes the state.

    All tensors travel in one plan of :func:`reshard.reshard`, or in two plans with ``compression``. The model keeps its
    modules. Its parameters and the entries of the optimizer are replaced. All ranks make this call between steps, with
    gradients set to None.

    Args:
        model: a model that :func:`~reshard.parallel.parallelize` has returned.
        grid: the new grid, of the same ranks.
        optimizer: the optimizer of the model's parameters.
        compression: a policy that sets ``optimizer``, the codec of the optimizer's state, and nothing else. A block
            codec encodes first moments alone. Other state, such as second moments, travels as bf16.

    Raises:
        ArgumentError: the model is not on a grid or does not fit the new one, the new grid has other ranks, a forward
            has had no backward yet, a parameter has a gradient, the optimizer has state that cannot move, the policy
            sets something else, or there is no state to encode.
        ReshardError: what :func:`reshard.reshard` raises.
    """
    old_grid = getattr(model, "reshard_grid", None)
    if not isinstance(old_grid, Grid):
        raise ArgumentError("relayout needs a model that parallelize has returned")
    _check(model, old_grid, check_grid(grid, "relayout"))
    if optimizer is not None:
        check_state(optimizer, model.named_parameters())
    codec = None if compression is None else compression.check_only("optimizer", "relayout")
    meshes = [item.mesh for item in (old_grid, grid)]
    parameters = _holders(model)
    state = {} if optimizer is None else optimizer.state
    sources: dict[str, torch.Tensor] = {}
    placements: dict[str, list[Any]] = {}
    for number, (parameter, _) in enumerate(parameters):
        for key, value in [("", parameter), *state.get(parameter, {}).items()]:
            if is_on_grid(value):
                sources[f"{number}.{key}"] = value.detach().to_local()
                placements[f"{number}.{key}"] = _placements_on_grid(value)
    of_state = {name for name in sources if not name.endswith(".")}
    if codec is not None and not of_state:
        raise ArgumentError(f"compression={compression} has optimizer=, but there is no optimizer state to move")
    encoded = set() if codec is None else {name for name in of_state if has_variable_size(codec) or is_linear(name)}
    if codec is not None:
        for name in of_state - encoded:
            sources[name] = without_low_bits(sources[name])
    moved: dict[str, torch.Tensor] = {}
    for names, names_codec in (([name for name in sources if name not in encoded], None), (sorted(encoded), codec)):
        if names:
            parts, specs = ({name: values[name] for name in names} for values in (sources, placements))
            moved |= reshard(parts, *meshes, src_spec=specs, dst_spec=specs, compression=names_codec)
    _replace_parameters(parameters, moved, grid, optimizer)
    mark_replaced([parameter for parameter, _ in parameters], "relayout")
    old_grid.replace_with(grid)
    for path, module in reversed(list(model.named_modules())):  # errors give a tied parameter its first path
        if hasattr(module, "declare"):
            module.declare(f"{path}." if path else "")


def _replace_parameters(
    parameters: list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]],
    moved: dict[str, torch.Tensor],
    grid: Grid,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Put the moved shards into the modules and the optimizer. ``moved`` has them by ``NUMBER.`` or ``NUMBER.KEY``."""
    state = {} if optimizer is None else optimizer.state
    replaced: dict[int, nn.Parameter] = {}
    for number, (parameter, holders) in enumerate(parameters):
        made = nn.Parameter(_make_dtensor(moved[f"{number}."], parameter, grid), requires_grad=parameter.requires_grad)
        for module, name in holders:
            setattr(module, name, made)
        replaced[id(parameter)] = made
        if parameter in state:
            old = state.pop(parameter)
            state[made] = {
                key: _make_dtensor(moved[f"{number}.{key}"], value, grid) if is_on_grid(value) else value
                for key, value in old.items()
            }
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(id(item), item) for item in group["params"]]


def _check(model: nn.Module, old_grid: Grid, grid: Grid) -> None:
    ranks, others = (sorted(item.device_mesh.mesh.flatten().tolist()) for item in (old_grid, grid))
    if ranks != others:
        raise ArgumentError(f"relayout moves a model between grids of the same ranks, not from {ranks} to {others}")
    if old_grid.has_open_graph:
        raise ArgumentError(
            "relayout was called between a forward of the model and its backward; call it between steps"
        )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise ArgumentError(f"{name!r} has a gradient; call optimizer.zero_grad() before relayout")
        if not is_on_grid(parameter):
            raise ArgumentError(f"{name!r} is not a parameter on (row, col); relayout cannot move it under FSDP")
    for module in model.modules():
        heads = getattr(module, "heads", None)
        if heads is not None:
            check_heads(heads.num_heads, heads.num_kv_heads, grid.cols)


def _holders(model: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Each parameter once, in the order of the model, with the modules that hold it and its name in each."""
    uses: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            uses.setdefault(id(parameter), (parameter, []))[1].append((module, name))
    return list(uses.values())


def _placements_on_grid(value: Any) -> list[Any]:
    """Placements over (depth, row, col) of a DTensor on (row, col), which is replicated over depth."""
    from torch.distributed.tensor import Replicate

    return [Replicate(), *value.placements]


def _make_dtensor(local: torch.Tensor, like: Any, grid: Grid) -> Any:
    """A DTensor on the new grid, with the placements of ``like``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(like.dtype), grid.weight_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
