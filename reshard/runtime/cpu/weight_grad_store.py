"""Backward in halves: gradients of weights are put off, so that the gradient of what came in can leave earlier.

While a forward runs under :class:`PutOff`, linear layers and convolutions are replaced by versions whose backward
computes the gradient of their input at once and leaves that of their weight in a list, with just the two tensors that
it takes. Gradients of all other parameters (norms, embeddings, biases elsewhere) come with the first half. Source: the
weight gradient store of zero-bubble schedules (Qi et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from reshard.errors import ArgumentError

Tasks = list[Callable[[], None]]
_tasks: ContextVar[Tasks | None] = ContextVar("tasks", default=None)

_F = torch.nn.functional
_CONVOLUTIONS = {_F.conv1d: 1, _F.conv2d: 2, _F.conv3d: 3}


def later_tasks() -> Tasks | None:
    """For an autograd function's forward: where its backward may put what can wait for the second half.

    None where the backward will be done whole. Each task adds to ``.grad`` itself.
    """
    return _tasks.get()


class PutOff(TorchFunctionMode):
    """While it is active, weight gradients of linear layers and convolutions will be left in ``tasks``."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__()
        self.tasks, self.is_active = tasks, False
        #: What tasks will read; nothing may change it before.
        self.held: list[torch.Tensor] = []

    def add(self, task: Callable[[], None], held: Sequence[torch.Tensor] = ()) -> None:
        """Put something off.

        Args:
            held: what it will read.

        Raises:
            ArgumentError: the forward is still running, so what calls is a backward of its own.
        """
        if self.is_active:
            raise ArgumentError(
                "a forward that calls autograd itself cannot have its backward in halves; give its stage whole ones, "
                "as fitted(..., can_split=False) does"
            )
        versions = [each._version for each in held]
        self.held += held

        def checked() -> None:
            if [each._version for each in held] != versions:
                raise ArgumentError(
                    "the input of a layer, or a gradient, was changed in place between the two halves of a backward: "
                    "change a copy, or give the stage whole backwards, as fitted(..., can_split=False) does"
                )
            task()

        self.tasks.append(checked)

    def finish(self) -> None:
        """Do what was put off, and let go of what it took."""
        for task in self.tasks:
            task()
        self.forget()

    def forget(self) -> None:
        """Let go of what was put off."""
        self.tasks.clear()
        self.held.clear()

    def __enter__(self) -> PutOff:
        self._token, self.is_active = _tasks.set(self.tasks), True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _tasks.reset(self._token)
        self.is_active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or _is_saved_elsewhere():  # what is compiled takes the plain way
            return func(*args, **kwargs)
        if func is _F.linear:
            call = _read(args, kwargs, ("input", "weight", "bias"))
            if call is not None and _can_wait(call, 2):
                return _Linear.apply(*_start(call), self)
        elif func in _CONVOLUTIONS:
            call = _read(args, kwargs, ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))
            dims = _CONVOLUTIONS[func]
            if (
                call is not None
                and _can_wait(call, dims + 2)
                and call["input"].dim() == dims + 2
                and not isinstance(call.get("padding"), str)
            ):
                how = [_each(call.get(name, default), dims) for name, default in _CONVOLUTION_DEFAULTS]
                return _Convolution.apply(*_start(call), *how, call.get("groups", 1), self)
        return func(*args, **kwargs)


_CONVOLUTION_DEFAULTS = (("stride", 1), ("padding", 0), ("dilation", 1))


def _read(args: Any, kwargs: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Arguments by name, None if there are some that are not known here."""
    if len(args) > len(names) or not set(kwargs) <= set(names):
        return None
    return dict(zip(names, args, strict=False)) | kwargs


def _can_wait(call: dict[str, Any], weight_dims: int) -> bool:
    """Only the gradient of a leaf can be put off: another's goes on to where it was made from.

    What is rare or odd takes torch's own way, and so do mistakes, which torch names.
    """
    array, weight, bias = call["input"], call["weight"], call.get("bias")
    if not torch.is_grad_enabled() or not weight.requires_grad or not weight.is_leaf:
        return False
    given = [each for each in (array, weight, bias) if each is not None]
    if any(each.layout is not torch.strided or not each.is_floating_point() or _is_transformed(each) for each in given):
        return False
    if any(_has_hooks(each) for each in (weight, bias) if each is not None):
        return False
    dtypes = {each.dtype for each in given}
    if _autocast_dtype(array.device.type) is None:
        alike = len(dtypes) == 1
    else:
        alike = torch.float64 not in dtypes  # which autocast leaves alone
    fits = weight.dim() == weight_dims and weight.numel() > 0 and array.dim() > 0
    return alike and fits and (bias is None or (bias.is_leaf and bias.shape == weight.shape[:1]))


def _is_saved_elsewhere() -> bool:
    """Whether hooks take what a forward saves: an activation checkpoint's give back what torch's own way saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _is_transformed(array: torch.Tensor) -> bool:
    """Whether ``torch.func`` is at work."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(array))


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether something is called with its gradient, once for all that a backward brings it."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _cast(array: torch.Tensor) -> torch.Tensor:
    """As autocast would; the gradient is cast back."""
    dtype = _autocast_dtype(array.device.type)
    return array if dtype is None or not array.is_floating_point() else array.to(dtype)


_Parameters = tuple[torch.Tensor, torch.Tensor | None]


def _start(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None, _Parameters]:
    """The input, something that makes autograd come by if that needs no gradient, and the parameters.

    Those are no inputs of the function, since autograd would call their hooks with the first half already.
    """
    array = _cast(call["input"])
    anchor = None if array.requires_grad else torch.empty(0, requires_grad=True)
    return array, anchor, (call["weight"], call.get("bias"))


def _add_to_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Through autograd, which knows what else adds to it."""
    with torch.enable_grad():
        alias = parameter.view_as(parameter)
    torch.autograd.backward([alias], [gradient.to(parameter.dtype)])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, array: Any, anchor: Any, parameters: _Parameters, put_off: PutOff) -> Any:
        weight, bias = parameters
        used = weight.to(array.dtype)
        ctx.save_for_backward(array, used)
        ctx.weight, ctx.bias, ctx.put_off = weight, bias, put_off
        with torch.autocast(array.device.type, enabled=False):
            return _F.linear(array, used, None if bias is None else bias.to(array.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        array, used = ctx.saved_tensors
        array = array.detach()  # else the task would hold the graph, and the graph the task
        weight, bias, put_off = ctx.weight, ctx.bias, ctx.put_off

        def finish() -> None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            _add_to_gradient(weight, rows.t() @ array.reshape(-1, array.shape[-1]))
            if bias is not None and bias.requires_grad:
                _add_to_gradient(bias, rows.sum(0))

        put_off.add(finish, (gradient, array))
        return (gradient @ used if ctx.needs_input_grad[0] else None), None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        array: Any,
        anchor: Any,
        parameters: _Parameters,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        put_off: PutOff,
    ) -> Any:
        weight, bias = parameters
        used = weight.to(array.dtype)
        ctx.save_for_backward(array, used)
        ctx.weight, ctx.bias, ctx.put_off = weight, bias, put_off
        ctx.how = (stride, padding, dilation, False, [0] * len(stride), groups)
        with torch.autocast(array.device.type, enabled=False):
            own = None if bias is None else bias.to(array.dtype)
            return torch.ops.aten.convolution(array, used, own, *ctx.how)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        array, used = ctx.saved_tensors
        array = array.detach()
        weight, bias, how, put_off = ctx.weight, ctx.bias, ctx.how, ctx.put_off
        sizes = None if bias is None else list(bias.shape)

        def finish() -> None:
            _, of_weight, of_bias = torch.ops.aten.convolution_backward(
                gradient, array, used, sizes, *how, [False, True, bias is not None and bias.requires_grad]
            )
            _add_to_gradient(weight, of_weight)
            if bias is not None and bias.requires_grad:
                _add_to_gradient(bias, of_bias)

        put_off.add(finish, (gradient, array))
        of_array = None
        if ctx.needs_input_grad[0]:
            of_array = torch.ops.aten.convolution_backward(gradient, array, used, sizes, *how, [True, False, False])[0]
        return (of_array, *[None] * 7)
