"""Gradients that a module asks to be summed over groups of ranks, once per step.

A module says for each of its parameters over which groups the gradient must be summed (:func:`declare_sums`). After the
last backward of a step, the pipeline engine or the user calls :func:`sum_gradients`. Two mistakes are errors that name
the parameter: an optimizer reads a gradient before its sum, or a gradient would be summed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import brief
from reshard.runtime.array_bytes import digest_array
from reshard.runtime.torch_compat import local_of

#: Replicas are compared in the first step, and then once in this many steps.
CHECK_EVERY = 100
#: Largest bucket of gradients that are summed by one collective.
SUM_BUCKET_BYTES = 16 * 2**20


class SumAxis(Protocol):
    """A group of ranks that can sum an array.

    Attributes:
        name: name of the mesh axis.
    """

    name: str

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks."""
        ...

    def all_reduce(self, array: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each."""
        ...

    def max(self, array: torch.Tensor) -> torch.Tensor:
        """The largest of each element over all ranks."""
        ...


@dataclass
class SumState:
    """State of a parameter: whether its gradient was summed, and whether a backward has added to it since.

    Attributes:
        on_gradient: called after a backward has added to the gradient, while sums run during the backward.
        is_early: whether the sum of this step has begun during the backward.
    """

    name: str
    is_pending: bool = False
    summed: Any = None
    on_gradient: Callable[[], None] | None = None
    is_early: bool = False
    handles: list[Any] = field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> None:
        """Return None. The hooks stay at the parameter, so a copy of the parameter needs a new declaration."""


_STATE = "_reshard_gradient_sum"
_REPLACED = "_reshard_replaced_by"
#: Axes of a grid over which every parameter is a DTensor. A wrapper does not sum gradients over these axes.
_WEIGHT_AXES = ("row", "col")
_hooked_optimizers = False


def declare_sums(module: torch.nn.Module, axes_of: Mapping[str, Sequence[SumAxis]], prefix: str = "") -> None:
    """Declare over which groups the gradients of a module's own parameters are summed.

    Args:
        module: the module that holds the parameters.
        axes_of: groups by parameter name. Axes of one rank are left out.
        prefix: path of the module, for errors.
    """
    module.gradient_sums = {  # type: ignore[assignment]
        name: tuple(axis for axis in axes if len(axis.ranks) > 1) for name, axes in axes_of.items()
    }
    for name, parameter in module.named_parameters(recurse=False):
        if module.gradient_sums.get(name):  # type: ignore[operator, union-attr]
            _watch(parameter, f"{prefix}{name}")


def declared_sums(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, tuple[SumAxis, ...]]]:
    """``(name, parameter, groups)`` of all parameters in a module with declared sums, each parameter once."""
    seen: set[int] = set()
    for path, child in module.named_modules():
        for name, axes in getattr(child, "gradient_sums", {}).items():
            parameter = getattr(child, name, None)
            if parameter is None or not axes or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            yield (f"{path}.{name}" if path else name), parameter, axes


def sum_gradients(module: torch.nn.Module, *, check_replicas: bool = False) -> None:
    """Sum the gradients of a module over the groups that its parts declared. Call it once per step, on all ranks.

    A gradient that only some ranks have counts as zero on the others, which get the sum too.

    Args:
        module: the model, or one stage of it.
        check_replicas: compare digests of the sums, and of the parameters, over the groups: one more small exchange.

    Raises:
        ArgumentError: a gradient was summed before in this step, on this rank or another.
        DisagreementError: a sum or a parameter differs between ranks that must agree, or some ranks froze a parameter.
    """
    declared = [(*declared_sum, axes_left(*declared_sum[1:])) for declared_sum in declared_sums(module)]
    _agree_on_gradients(declared)
    buckets: dict[tuple[Any, ...], list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    to_sum: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    axes_by_key: dict[tuple[Any, ...], tuple[SumAxis, ...]] = {}
    for name, parameter, _, left in declared:
        if parameter.grad is None:
            continue
        state = sum_state_of(parameter)
        if left:
            gradient = local_of(parameter.grad)
            key = (tuple(axis.ranks for axis in left), gradient.dtype, gradient.device)
            axes_by_key[key] = left
            buckets.setdefault(key, []).append((name, parameter, gradient))
            if state is None or not state.is_early:
                to_sum.setdefault(key, []).append(gradient)
        if state is not None:
            state.is_pending, state.summed, state.is_early = False, parameter.grad, False
    with torch.no_grad():
        for key, gradients in to_sum.items():
            for bucket in _split(gradients):
                _sum_bucket(bucket, axes_by_key[key])
        if check_replicas:
            # every rank takes part in all comparisons before any raises
            different = [text for key, entries in buckets.items() for text in _compare(entries, axes_by_key[key])]
            if different:
                raise DisagreementError(different[0])


#: States of a gradient on a rank before the sum. The largest value of any rank decides.
_NONE, _GRADIENT, _SUMMED = range(3)


def _agree_on_gradients(declared: Sequence[tuple[str, torch.Tensor, tuple[SumAxis, ...], tuple[SumAxis, ...]]]) -> None:
    """Give each parameter a gradient if any rank has one, so that all ranks sum the same parameters.

    A rank may lack gradients, for example of layers that its rows of the batch do not use.

    Raises:
        ArgumentError: some rank has summed a gradient before in this step; on all ranks.
        DisagreementError: a parameter is trained on some ranks only; on all ranks.
    """
    by_axes: dict[tuple[Any, ...], list[int]] = {}
    for index, (_, parameter, _, left) in enumerate(declared):
        by_axes.setdefault((tuple(axis.ranks for axis in left), local_of(parameter).device), []).append(index)
    forms = [(_NONE, False, False)] * len(declared)
    for (_, device), indices in by_axes.items():
        own = [_form_of(declared[index][1]) for index in indices]
        largest = torch.tensor(own, dtype=torch.int64, device=device).flatten()
        for axis in declared[indices[0]][3]:
            largest = axis.max(largest)
        for index, (form, is_trained, is_frozen) in zip(indices, largest.view(-1, 3).tolist(), strict=True):
            forms[index] = form, is_trained, is_frozen
    for (name, _, axes, _), (form, is_trained, is_frozen) in zip(declared, forms, strict=True):
        if is_trained and is_frozen:
            raise frozen_on_some_ranks(name, axes)
        if form == _SUMMED:
            raise ArgumentError(
                f"the gradient of {name!r} was summed over {_describe(axes)} in this step already; sum once, after "
                "the last backward"
            )
    for (_, parameter, _, _), (form, _, _) in zip(declared, forms, strict=True):
        if form == _GRADIENT and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def frozen_on_some_ranks(name: str, axes: Sequence[SumAxis]) -> DisagreementError:
    """The error to raise if some ranks of ``axes`` train a parameter and others do not."""
    return DisagreementError(
        f"{name!r} is trained on some of {_describe(axes)} and frozen on others; set requires_grad alike on all ranks"
    )


def _form_of(parameter: torch.Tensor) -> tuple[int, bool, bool]:
    """The state of a gradient on this rank, whether the parameter is trained, and whether it is frozen."""
    state = sum_state_of(parameter)
    is_summed = state is not None and not state.is_pending and state.summed is parameter.grad
    form = _NONE if parameter.grad is None else _SUMMED if is_summed else _GRADIENT
    return form, parameter.requires_grad, not parameter.requires_grad


def _sum_bucket(gradients: Sequence[torch.Tensor], axes: Sequence[SumAxis]) -> None:
    flat = torch.cat([item.reshape(-1) for item in gradients])
    for axis in axes:
        flat = axis.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([item.numel() for item in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))


def _compare(entries: Sequence[tuple[str, torch.Tensor, torch.Tensor]], axes: Sequence[SumAxis]) -> Iterator[str]:
    """Compare digests of gradients and parameters over ``axes``. Returns texts that say what differs."""
    digests = torch.stack(
        [digest_local_shard(tensor) for _, parameter, gradient in entries for tensor in (gradient, parameter)]
    )
    for axis in axes:
        high, low = axis.max(digests), -axis.max(-digests)
        for index in (high != low).nonzero().flatten().tolist():
            name, what = entries[index // 2][0], ("gradient", "value")[index % 2]
            yield f"the {what} of {name!r} differs between {_describe([axis])}"


def digest_local_shard(array: Any) -> torch.Tensor:
    """A 63-bit digest of the local elements and their order, on the device of the array."""
    local = local_of(array).detach()
    return torch.tensor(digest_array(local) >> 1, device=local.device)


def _split(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        if bucket and sum(item.nbytes for item in bucket) + gradient.nbytes > SUM_BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def sum_state_of(parameter: torch.Tensor) -> SumState | None:
    """The state of a parameter with a declared sum; None without one."""
    return getattr(parameter, _STATE, None)


def check_interval(steps: int) -> None:
    """Raise ArgumentError unless replicas can be compared every so many steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ArgumentError(f"check_every is {brief(steps)}; it must be a number of steps, or 0")


def axes_left(parameter: Any, axes: Sequence[SumAxis]) -> tuple[SumAxis, ...]:
    """The groups over which no wrapper sums. FSDP sums over the mesh axes on which it shards a parameter."""
    names = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ()
    return tuple(axis for axis in axes if axis.name not in names or axis.name in _WEIGHT_AXES)


def _describe(axes: Sequence[SumAxis]) -> str:
    return " and ".join(f"ranks {list(axis.ranks)}" for axis in axes)


def _watch(parameter: torch.Tensor, name: str) -> None:
    """Note when a backward adds to a gradient, and check optimizers."""
    known = sum_state_of(parameter)
    if known is not None:
        known.name = name
        return
    state = SumState(name)
    setattr(parameter, _STATE, state)

    def before(gradient: torch.Tensor) -> None:
        held = parameter.grad
        if state.is_early:
            raise ArgumentError(
                f"a backward adds to the gradient of {name!r}, whose sum over ranks has begun; only the last backward "
                "of a step may run inside sync_during_backward"
            )
        if held is not None and state.summed is held and not state.is_pending and bool(local_of(held).any()):
            raise ArgumentError(
                f"a backward adds to the gradient of {name!r}, which was summed over ranks already; set the gradients "
                "to None after each step, or sum once after the last backward"
            )

    def after(_: torch.Tensor) -> None:
        state.is_pending = True
        if state.on_gradient is not None:
            state.on_gradient()

    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses hooks of a frozen parameter, which may be trained later
    state.handles = [parameter.register_hook(before), parameter.register_post_accumulate_grad_hook(after)]
    parameter.requires_grad_(is_trained)
    _check_optimizers()


def mark_replaced(parameters: Iterable[torch.Tensor], by: str) -> None:
    """Make optimizers that still hold parameters of a model raise ArgumentError, where they would change nothing.

    Args:
        parameters: no longer in the model.
        by: the function that replaced them, for errors.
    """
    for parameter in parameters:
        setattr(parameter, _REPLACED, by)
    _check_optimizers()


def _check_optimizers() -> None:
    global _hooked_optimizers  # noqa: PLW0603 the hook of torch is global as well
    if not _hooked_optimizers:
        register_optimizer_step_pre_hook(_check_optimizer)
        _hooked_optimizers = True


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before each step of an optimizer: raise ArgumentError if a parameter was replaced, or a sum is missing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            by = getattr(parameter, _REPLACED, None)
            if by is not None:
                raise ArgumentError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that {by} has replaced in its "
                    "model; make the optimizer after parallelize, and pass it to relayout"
                )
            state = sum_state_of(parameter)
            if state is not None and state.is_pending and parameter.grad is not None:
                raise ArgumentError(
                    f"the optimizer reads the gradient of {state.name!r} before it is summed over its ranks; call "
                    "sync_gradients(model) after the last backward"
                )
