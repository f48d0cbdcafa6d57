"""State dicts with the names and shapes of the plain model, that is, of the model before ``parallelize``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reshard.api.call import reshard
from reshard.arguments import check_arguments
from reshard.formatting import unwrapped_name
from reshard.sharding import Mesh

from .grid import Grid
from .layers.linear import Linear, multiply


@dataclass(frozen=True)
class PlainForm:
    """A recipe that makes a parameter of the plain model from parameters on a grid.

    Attributes:
        parts: names of the parameters on the grid, which are concatenated along dim 0.
        is_transposed: whether the plain parameter is the transpose of this concatenation.
    """

    parts: tuple[str, ...]
    is_transposed: bool = False


class TransposedLinear(Linear):
    """A Linear whose weight is ``[in_features, out_features]`` in the plain model."""

    @property
    def plain_forms(self) -> dict[str, PlainForm]:
        """The form of each parameter that differs in the plain layer, by its name in that layer."""
        return {"weight": PlainForm(("weight",), is_transposed=True)}


class FusedLinear(nn.Module):
    """Several Linear layers with one input. Their weights are one parameter in the plain model.

    Args:
        linear: the plain layer with the whole weight, ``[parts * out, in]``.
        parts: number of layers, each with ``out`` output features.
        grid, panel: as for :class:`Linear`.
        is_transposed: whether the weight of the plain model is ``[in, parts * out]``.
    """

    def __init__(self, linear: nn.Linear, parts: int, grid: Grid, panel: int, *, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.parts = nn.ModuleList()
        biases = [None] * parts if linear.bias is None else linear.bias.chunk(parts)
        for weight, bias in zip(linear.weight.chunk(parts), biases, strict=True):
            part = nn.Linear(linear.in_features, linear.out_features // parts, bias=bias is not None, device="meta")
            part.weight = nn.Parameter(weight.detach(), requires_grad=linear.weight.requires_grad)
            if bias is not None:
                part.bias = nn.Parameter(bias.detach(), requires_grad=linear.bias.requires_grad)
            self.parts.append(Linear(part, grid, "in", panel))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Map ``[batch, ..., in_j]`` to one ``[batch, ..., out_j]`` per layer."""
        return multiply(list(self.parts), x)  # type: ignore[arg-type]

    @property
    def plain_forms(self) -> dict[str, PlainForm]:
        """The form of each parameter that differs in the plain layer, by its name in that layer."""
        forms = {}
        for key, _ in self.parts[0].named_parameters():
            parts = tuple(f"parts.{number}.{key}" for number in range(len(self.parts)))
            forms[key] = PlainForm(parts, is_transposed=self.is_transposed and key == "weight")
        return forms


def find_plain_forms(model: nn.Module) -> dict[str, PlainForm]:
    """``{name in the plain model: form}`` of all parameters that differ. ``parts`` are names in ``model``."""
    plain_forms = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, form in getattr(module, "plain_forms", {}).items():
            parts = tuple(f"{prefix}{part}" for part in form.parts)
            plain_forms[f"{prefix}{name}"] = PlainForm(parts, form.is_transposed)
    return plain_forms


@check_arguments()
def plain_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the plain model, with whole tensors. Every rank of the grid must call it.

    Tied parameters appear under each of their names, as in torch. Names omit the wrappers of torch.compile and of
    activation checkpointing.

    Raises:
        DisagreementError: a rank called another function of the grid that all ranks must call.
        TransferTimeoutError: a rank did not call it within the time-out of the grid.
        RemoteError: a rank is lost, or an earlier collective of the grid failed.
    """
    grid = next((submodule.reshard_grid for submodule in model.modules() if hasattr(submodule, "reshard_grid")), None)
    if isinstance(grid, Grid):
        grid.await_all_ranks("plain_state_dict")
    whole: dict[int, torch.Tensor] = {}

    def gather(value: Any) -> torch.Tensor:
        if not hasattr(value, "full_tensor"):
            return torch.as_tensor(value)
        if id(value) not in whole:
            whole[id(value)] = _whole(value.detach())
        return whole[id(value)]

    state = {name: gather(value) for name, value in model.state_dict(keep_vars=True).items()}
    for name, form in find_plain_forms(model).items():
        joined = torch.cat([state.pop(part) for part in form.parts])
        state[name] = joined.t() if form.is_transposed else joined
    return {unwrapped_name(name): value for name, value in state.items()}


def _whole(value: Any) -> torch.Tensor:
    """The global tensor of a DTensor on (row, col).

    Torch's ``full_tensor`` returns the shards in the wrong order if the ranks of a mesh do not ascend.
    """
    from torch.distributed.tensor import Replicate

    ranks = value.device_mesh.mesh
    if all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(ranks.dim())):
        result: torch.Tensor = value.full_tensor()
        return result
    mesh = Mesh.from_device_mesh(value.device_mesh)
    whole = reshard(value.to_local(), mesh, mesh, src_spec=value.placements, dst_spec=[Replicate()] * ranks.dim())
    return torch.as_tensor(whole)
