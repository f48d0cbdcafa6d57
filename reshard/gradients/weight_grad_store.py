"""Split backward: weight gradients are deferred, so that the input gradient can be sent earlier.

A forward under :class:`WeightGradStore` uses other versions of linear layers and convolutions. Their backward computes
the input gradient at once, and stores a task for the weight gradient. The task holds only the two tensors that it
needs. All other gradients (norms, embeddings, other biases) are computed in the input-gradient pass. Source: the weight
gradient store of zero-bubble schedules (Qi et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from reshard.errors import ArgumentError
from reshard.runtime import torch_compat

Tasks = list[Callable[[], None]]
_Gradients = list[tuple[torch.Tensor, torch.Tensor]]
_store: ContextVar[WeightGradStore | None] = ContextVar("store", default=None)

#: Gradients of parameters that are added in one call, unless one is larger.
_ADDED_BYTES = 2**20

_F = torch.nn.functional
_CONVOLUTIONS = {_F.conv1d: 1, _F.conv2d: 2, _F.conv3d: 3}


def later_tasks() -> Tasks | None:
    """The list of tasks for the weight-gradient pass; None if the backward is not split.

    Call it in the forward of a custom autograd function. Its backward may append tasks, each of which must add its
    gradient to ``.grad`` itself.
    """
    store = _store.get()
    return None if store is None else store.tasks


def weight_grad_store() -> WeightGradStore | None:
    """The store that collects the tasks of :func:`later_tasks`, and checks that the tensors they read do not change."""
    return _store.get()


class WeightGradStore(TorchFunctionMode):
    """Defers the weight gradients of linear layers and convolutions whose forward runs inside it.

    Attributes:
        tasks: one deferred weight gradient each.
        held: tensors that the tasks will read; they must not change before.
    """

    def __init__(self, tasks: Tasks) -> None:
        super().__init__()
        self.tasks, self.is_active = tasks, False
        self.held: list[torch.Tensor] = []

    def add(self, task: Callable[[], _Gradients | None], held: Sequence[torch.Tensor] = ()) -> None:
        """Defer a task.

        Args:
            task: adds to ``.grad`` itself, or returns pairs of a parameter and a gradient to add.
            held: the tensors that it will read.

        Raises:
            ArgumentError: the forward is still running, so the caller is a backward inside it.
        """
        if self.is_active:
            raise ArgumentError(
                "the backward of a forward that calls autograd cannot be split; do not split that stage's backward, as "
                "auto_schedule(..., can_split=False) does"
            )
        self.held += held
        self.tasks.append(_Task(task, held))

    def finish(self) -> None:
        """Run all tasks, then drop them and the tensors that they held."""
        waiting: dict[torch.Tensor, torch.Tensor] = {}  # by parameter, gradients that are not added yet
        num_bytes = 0
        for task in self.tasks:
            gradients = task.run() if isinstance(task, _Task) else task()
            for parameter, gradient in gradients or ():
                if parameter in waiting or num_bytes + gradient.nbytes > _ADDED_BYTES:
                    _add_to_gradients(waiting)
                    waiting, num_bytes = {}, 0
                waiting[parameter] = gradient
                num_bytes += gradient.nbytes
        _add_to_gradients(waiting)
        self.forget()

    def forget(self) -> None:
        """Drop all tasks and the tensors that they hold."""
        self.tasks.clear()
        self.held.clear()

    def __enter__(self) -> WeightGradStore:
        self._token, self.is_active = _store.set(self), True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _store.reset(self._token)
        self.is_active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not _F.linear and func not in _CONVOLUTIONS:
            return func(*args, **kwargs)
        # an activation checkpoint, which sets such hooks, expects the tensors that torch itself saves
        if torch.compiler.is_compiling() or torch_compat.has_saved_tensor_hooks():
            return func(*args, **kwargs)
        if func is _F.linear:
            call = _read(args, kwargs, ("input", "weight", "bias"))
            if call is not None and _can_defer(call, 2):
                return _Linear.apply(*_start(call), self)
        else:
            call = _read(args, kwargs, ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))
            dims = _CONVOLUTIONS[func]
            if (
                call is not None
                and _can_defer(call, dims + 2)
                and call["input"].dim() == dims + 2
                and not isinstance(call.get("padding"), str)
            ):
                how = [_per_dim(call.get(name, default), dims) for name, default in _CONVOLUTION_DEFAULTS]
                return _Convolution.apply(*_start(call), (*how, call.get("groups", 1)), self)
        return func(*args, **kwargs)


class _Task:
    """A deferred task. It first checks that its input tensors have not changed."""

    __slots__ = ("_held", "_task", "_versions")

    def __init__(self, task: Callable[[], _Gradients | None], held: Sequence[torch.Tensor]) -> None:
        self._task, self._held = task, held
        self._versions = [torch_compat.version_of(item) for item in held]

    def run(self) -> _Gradients | None:
        """Check the tensors and run the task. Returns the gradients that it does not add itself."""
        if [torch_compat.version_of(item) for item in self._held] != self._versions:
            raise ArgumentError(
                "the input of a layer, or a gradient, was changed in place between the input-gradient and the "
                "weight-gradient pass; change a copy, or do not split that stage's backward, as "
                "auto_schedule(..., can_split=False) does"
            )
        return self._task()

    def __call__(self) -> None:
        _add_to_gradients(dict(self.run() or ()))


_CONVOLUTION_DEFAULTS = (("stride", 1), ("padding", 0), ("dilation", 1))


def _read(args: Any, kwargs: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Arguments by name; None if there are unknown ones, which torch reports."""
    if len(args) > len(names) or not set(kwargs) <= set(names):
        return None
    return dict(zip(names, args, strict=False)) | kwargs


def _can_defer(call: dict[str, Any], weight_dims: int) -> bool:
    """Whether a call's weight gradient can be deferred. The weight must be a leaf: no other gradient depends on it.

    Rare cases and wrong arguments run as in torch, which reports the error.
    """
    array, weight, bias = call["input"], call["weight"], call.get("bias")
    if not torch.is_grad_enabled() or not weight.requires_grad or not weight.is_leaf:
        return False
    given = (array, weight) if bias is None else (array, weight, bias)
    for item in given:
        if item.layout is not torch.strided or not item.is_floating_point() or torch_compat.is_transformed(item):
            return False
    if torch_compat.has_hooks(weight) or (bias is not None and torch_compat.has_hooks(bias)):
        return False
    dtypes = {item.dtype for item in given}
    if _autocast_dtype(array.device.type) is None:
        has_one_dtype = len(dtypes) == 1
    else:
        has_one_dtype = torch.float64 not in dtypes  # autocast does not cast float64
    has_valid_shapes = weight.dim() == weight_dims and weight.numel() > 0 and array.dim() > 0
    return has_one_dtype and has_valid_shapes and (bias is None or (bias.is_leaf and bias.shape == weight.shape[:1]))


def _per_dim(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _cast(array: torch.Tensor) -> torch.Tensor:
    """Cast as autocast does. Autograd casts the gradient back."""
    dtype = _autocast_dtype(array.device.type)
    return array if dtype is None or not array.is_floating_point() else array.to(dtype)


_Parameters = tuple[torch.Tensor, torch.Tensor | None]


def _start(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None, _Parameters]:
    """The leading arguments of the autograd function: input, anchor, parameters.

    The anchor requires a gradient, so that autograd calls the backward even if the input requires none. The parameters
    are wrapped in a tuple, which hides them from autograd: it would call their hooks in the input-gradient pass.
    """
    array = _cast(call["input"])
    anchor = None if array.requires_grad else torch.empty(0, requires_grad=True)
    return array, anchor, (call["weight"], call.get("bias"))


def _add_to_gradients(gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Accumulate the gradients of parameters through autograd, so that other uses of a parameter add up correctly."""
    if not gradients:
        return
    with torch.enable_grad():
        aliases = [parameter.view_as(parameter) for parameter in gradients]
    torch_compat.run_backward(aliases, [gradient.to(parameter.dtype) for parameter, gradient in gradients.items()])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, array: Any, anchor: Any, parameters: _Parameters, store: WeightGradStore) -> Any:
        weight, bias = parameters
        used = weight.to(array.dtype)
        ctx.save_for_backward(array, used)
        ctx.weight, ctx.bias, ctx.store = weight, bias, store
        bias = None if bias is None else bias.to(array.dtype)
        if _autocast_dtype(array.device.type) is None:
            return _F.linear(array, used, bias)
        with torch.autocast(array.device.type, enabled=False):
            return _F.linear(array, used, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        array, used = ctx.saved_tensors
        array = array.detach()  # otherwise the task and the graph would keep each other alive
        weight, bias, store = ctx.weight, ctx.bias, ctx.store

        def finish() -> _Gradients:
            rows = gradient.reshape(-1, gradient.shape[-1])
            gradients = [(weight, rows.t() @ array.reshape(-1, array.shape[-1]))]
            if bias is not None and bias.requires_grad:
                gradients.append((bias, rows.sum(0)))
            return gradients

        store.add(finish, (gradient, array))
        return (gradient @ used if ctx.needs_input_grad[0] else None), None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        array: Any,
        anchor: Any,
        parameters: _Parameters,
        how: tuple[Any, Any, Any, int],
        store: WeightGradStore,
    ) -> Any:
        weight, bias = parameters
        stride, padding, dilation, groups = how
        used = weight.to(array.dtype)
        ctx.save_for_backward(array, used)
        ctx.weight, ctx.bias, ctx.store = weight, bias, store
        ctx.how = (stride, padding, dilation, False, [0] * len(stride), groups)
        with torch.autocast(array.device.type, enabled=False):
            cast_bias = None if bias is None else bias.to(array.dtype)
            return torch.ops.aten.convolution(array, used, cast_bias, *ctx.how)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        array, used = ctx.saved_tensors
        array = array.detach()
        weight, bias, how, store = ctx.weight, ctx.bias, ctx.how, ctx.store
        sizes = None if bias is None else list(bias.shape)

        def finish() -> _Gradients:
            _, weight_grad, bias_grad = torch.ops.aten.convolution_backward(
                gradient, array, used, sizes, *how, [False, True, bias is not None and bias.requires_grad]
            )
            gradients = [(weight, weight_grad)]
            if bias is not None and bias.requires_grad:
                gradients.append((bias, bias_grad))
            return gradients

        store.add(finish, (gradient, array))
        input_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = torch.ops.aten.convolution_backward(gradient, array, used, sizes, *how, [True, False, False])[
                0
            ]
        return (input_grad, *[None] * 4)
