"""Gradients of a whole model: their norm over stages, replicas, shards and ties, and the scale of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import brief

from .. import torch_compat
from .data_parallel import plain_parameters


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of the parameters, as the tensors that this rank holds."""
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def local_power_sum(
    modules: Mapping[int, torch.nn.Module],
    num_ranks: Mapping[int, int],
    tied_elsewhere: Mapping[int, set[str]],
    norm_type: float,
) -> float:
    """The sum of ``|g| ** norm_type`` over the gradients of this rank; for inf, their largest ``|g|``.

    An element that k ranks hold counts 1/k on each of them. So the values of all ranks add up to the value of the whole
    model.

    Args:
        modules: ``{stage: module}`` of this rank.
        num_ranks: ``{stage: number of ranks}``.
        tied_elsewhere: ``{stage: names}`` of tied parameters that an earlier stage counts.
        norm_type: the exponent, or inf.
    """
    total, seen = 0.0, set()
    for stage, module in modules.items():
        for name, parameter in plain_parameters(module):
            gradient = parameter.grad
            if gradient is None or id(parameter) in seen or name in tied_elsewhere.get(stage, ()):
                continue
            seen.add(id(parameter))
            num_shards = _num_shards(gradient)
            local = _local(gradient)
            if local.is_sparse:
                local = local.coalesce().values()
            if not local.numel():
                continue
            norm = float(torch.linalg.vector_norm(local, norm_type, dtype=_accumulate_in(local.dtype)))
            if math.isinf(norm_type):
                total = norm if math.isnan(norm) else max(total, norm)
            else:
                total += norm**norm_type * num_shards / num_ranks[stage]
    return total


def check_clip(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Both arguments of a clip as numbers.

    Raises:
        ArgumentError: ``max_norm`` is negative or NaN, or ``norm_type`` is not above 0.
    """
    clip = []
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last from a tensor without data
            number = math.nan
        if not number >= 0 or (name == "norm_type" and number == 0):
            allowed = "a number above 0" if name == "norm_type" else "a number that is 0 or more"
            raise ArgumentError(f"{name} is {brief(value)}; it must be {allowed}")
        clip.append(number)
    return clip[0], clip[1]


def combine_norm(parts: Mapping[int, Sequence[float]]) -> float:
    """The norm of all gradients, from ``(max_norm, norm_type, local_power_sum)`` of each rank.

    Raises:
        DisagreementError: ranks have different arguments.
    """
    (first, (*expected, _)), *others = sorted(parts.items())
    for rank, (*other, _) in others:
        if other != expected:
            raise DisagreementError(
                f"ranks {first} and {rank} clip gradients with max_norm {expected[0]:g} and {other[0]:g}, and "
                f"norm_type {expected[1]:g} and {other[1]:g}; both must be equal on all ranks"
            )
    sums = [part[2] for part in parts.values()]
    if math.isinf(expected[1]):
        return math.nan if any(map(math.isnan, sums)) else max(sums)
    return math.fsum(sums) ** (1 / expected[1]) if all(map(math.isfinite, sums)) else sum(sums)


def scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply all gradients of this rank in place."""
    gradients = local_gradients(parameters)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    with torch.no_grad():
        for group in by_kind.values():
            torch_compat.multiply_(group, factor)


def are_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether no gradient of this rank has an infinite or NaN element."""
    gradients = [
        gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in local_gradients(parameters)
    ]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return True
    return all(bool(norm.isfinite()) for norm in torch_compat.largest_magnitudes(gradients))


def _accumulate_in(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return torch_compat.wait_inside(local) if torch_compat.is_async(local) else local


def _num_shards(gradient: Any) -> int:
    """Number of different shards of a gradient. After a step, no gradient is a partial sum."""
    if not hasattr(gradient, "placements"):
        return 1
    sizes = gradient.device_mesh.shape
    return math.prod(
        size for size, placement in zip(sizes, gradient.placements, strict=True) if not placement.is_replicate()
    )


@dataclass
class LossScale:
    """A factor of the loss, which halves after a step with a non-finite gradient and doubles after many finite steps.

    The rule and the constants are those of ``torch.amp.GradScaler``. Unlike the user of a GradScaler, the engine itself
    divides the gradients by the factor, within the step.

    Attributes:
        value: the factor.
        growth_interval: number of consecutive finite steps before the factor doubles.
        finite_steps: number of finite steps since the factor last changed.
    """

    value: float = 65536.0
    growth_interval: int = 2000
    finite_steps: int = 0

    def update(self, finite: bool) -> None:
        """Adapt the factor after a step."""
        if not finite:
            self.value, self.finite_steps = self.value / 2, 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_interval:
            self.value, self.finite_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """The factor and the number of finite steps, as plain values."""
        return {"value": self.value, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.value, self.finite_steps = float(state["value"]), int(state["finite_steps"])
