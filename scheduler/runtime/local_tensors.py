"""Convert what a module returns to plain local tensors: DTensors, asynchronous collectives, losses of no weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reshard.errors import ArgumentError
from reshard.sharding import Layout, TensorSpec

from .. import torch_compat


class _WaitForCollective(torch.autograd.Function):
    """Wait for an asynchronous collective; the plain result stays in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, array: Any) -> Any:
        return torch_compat.wait_inside(array)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _plain(value: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the awaited result of an asynchronous collective."""
    if not torch_compat.is_async(value):
        return value
    plain: torch.Tensor = _WaitForCollective.apply(value)  # type: ignore[no-untyped-call]
    return plain


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor."""
    return hasattr(value, "placements") and hasattr(value, "redistribute")


def localize(value: Any, spec: TensorSpec) -> torch.Tensor:
    """The local shard. A DTensor is first redistributed to the source layout of ``spec``, which reduces partial sums.

    Raises:
        ArgumentError: the value is not a tensor, or is a DTensor on other ranks than the source layout.
    """
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{spec.name!r} is {type(value).__name__}, not a tensor")
    if not is_dtensor(value):
        return _plain(value)
    mesh = value.device_mesh
    layout = spec.src
    if not isinstance(layout, Layout) or layout.ranks != tuple(mesh.mesh.flatten().tolist()):
        raise ArgumentError(f"{spec.name!r} is a DTensor on {mesh}, but its edge has it on {layout}")
    return _plain(value.redistribute(placements=layout.to_placements()).to_local())


def full(value: Any) -> torch.Tensor | None:
    """The global tensor of a DTensor, or the plain tensor itself; None for None."""
    if is_dtensor(value):
        return _plain(value.full_tensor())
    return None if value is None else _plain(value)


def sample_of_ones(empty: torch.Tensor) -> torch.Tensor:
    """A tensor of ones with the shape of ``empty``, but of size 1 in each dim of size 0."""
    made = torch.ones([size or 1 for size in empty.shape], dtype=empty.dtype, device=empty.device)
    return made.requires_grad_(empty.requires_grad)


def cut_to_no_samples(
    arrays: Mapping[str, torch.Tensor], tensors: Sequence[TensorSpec], rank: int
) -> dict[str, torch.Tensor]:
    """Cut every dim in which the shard of this rank is empty to size 0. Autograd still records the results."""
    made = {}
    for spec in tensors:
        array = arrays[str(spec.name)]
        for dim, size in enumerate(spec.src_tiles.local_shape(rank)[: array.dim()]):
            if size == 0:
                array = array.narrow(dim, 0, 0)
        made[str(spec.name)] = array
    return made


def starts_backward(loss: torch.Tensor, weight: float, others: Sequence[torch.Tensor]) -> bool:
    """Whether a backward starts at a loss too. A loss of weight 0 changes no gradient, even if it is not finite.

    The loss may be NaN, as a mean over no values is. Autograd then multiplies the weight 0 by NaN or inf.

    Args:
        loss: with its autograd graph.
        weight: weight of the loss in the backward.
        others: tensors at which the backward starts anyway. Without them, it runs on zeros, since modules may
            communicate in it.
    """
    if weight or bool(loss.isfinite()):
        return True
    if not others:
        _send_zeros_back(loss)
    return not others


def _send_zeros_back(loss: torch.Tensor) -> None:
    """Make each function in the graph of a loss give gradients of zeros in the backward."""

    def zeros(gradients: Sequence[torch.Tensor | None], _: Any) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)

    waiting, seen = [loss.grad_fn], {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            assert node is not None
            seen.add(node)
            if node.next_functions:  # else it adds to the gradient of a parameter, in the graphs of other losses too
                node.register_hook(zeros)
            waiting += [next_function for next_function, _ in node.next_functions]
