"""Initialize a model on the meta device with the values that it would have in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from reshard.errors import ArgumentError

from ... import torch_compat

#: Initializes the parameters and buffers that a module holds itself, as ``module.apply(init)`` would.
Init = Callable[[torch.nn.Module], Any]
#: Replaced tensors of the meta device. The key is the id of the dict that held the tensor, and its name there.
Places = dict[tuple[int, str], torch.Tensor]


def is_on_meta(model: torch.nn.Module) -> bool:
    """Whether the model has no data."""
    return any(tensor.is_meta for tensor in _tensors(model))


def materialize(
    model: torch.nn.Module, stages: Sequence[torch.nn.Module], cut_before: Sequence[str], init: Init | None
) -> None:
    """Initialize the stages of this rank as ``model.apply(init)`` does in one process, with the same random numbers.

    The other parts of the model are initialized too, because they draw from the same generator. They are dropped one by
    one.

    Args:
        model: the whole model, on the meta device.
        stages: modules of this rank, which share their parts with ``model``.
        cut_before: paths at which the model is cut. A module with no such path inside is initialized as a whole.
        init: called with each module, children first; default: ``module.reset_parameters()`` where it exists.

    Raises:
        ArgumentError: ``init`` leaves a tensor uninitialized, or initializes a parameter from a module far above it.
    """
    keep = {id(tensor) for stage in stages for tensor in _tensors(stage)}
    made: dict[int, torch.Tensor] = {}  # by id of the tensor on the meta device
    meta: Places = {}
    shared = _find_shared(model)

    def visit(module: torch.nn.Module, path: str) -> None:
        is_inside = any(cut.startswith(path + ".") for cut in cut_before) or not path
        if is_inside and torch_compat.held_modules(module):
            for name, child in module.named_children():
                visit(child, f"{path}.{name}" if path else name)
            _fill(module, made, meta, recurse=False)
            with _RefuseRandom(path or "the model"):
                _initialize(module, init)
        else:
            _fill(module, made, meta, recurse=True)
            for item in _children_first(module):
                _initialize(item, init)
        _drop(module, made, meta, keep | shared)

    visit(model, "")
    _drop(model, made, meta, keep)
    for stage in stages:  # a stage may hold parameters of the root in its own containers
        _fill(stage, made, meta, recurse=True)
        _check_filled(stage)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _children_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _find_shared(model: torch.nn.Module) -> set[int]:
    """Ids of the parameters that several modules hold. They live until the last of these is initialized."""
    count: dict[int, int] = {}
    for module in model.modules():
        for tensor in (value for held in torch_compat.held_tensors(module) for value in held.values()):
            if tensor is not None:
                count[id(tensor)] = count.get(id(tensor), 0) + 1
    return {key for key, times in count.items() if times > 1}


def _fill(module: torch.nn.Module, made: dict[int, torch.Tensor], meta: Places, *, recurse: bool) -> None:
    """Replace tensors on the meta device by tensors with data, all NaN or a rare integer."""
    for item in module.modules() if recurse else (module,):
        for held in torch_compat.held_tensors(item):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    new: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    new.fill_(_unset(tensor.dtype))
                    if isinstance(tensor, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
                        new.__dict__.update(tensor.__dict__)
                    made[id(tensor)] = new
                meta[id(held), name] = tensor
                held[name] = made[id(tensor)]  # type: ignore[index]


def _drop(module: torch.nn.Module, made: dict[int, torch.Tensor], meta: Places, keep: Collection[int]) -> None:
    """Put the tensors that this rank does not keep back on the meta device, even if ``init`` has replaced them."""
    for submodule in module.modules():
        for held in torch_compat.held_tensors(submodule):
            for name in held:
                earlier = meta.get((id(held), name))
                if earlier is not None and id(earlier) not in keep:
                    held[name] = earlier  # type: ignore[index]
                    made.pop(id(earlier), None)


def _initialize(module: torch.nn.Module, init: Init | None) -> None:
    if init is not None:
        init(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _unset(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max - 1


def _check_filled(stage: torch.nn.Module) -> None:
    for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
        if tensor.dtype is torch.bool or not tensor.numel():
            continue
        unset = (
            tensor.isnan()
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex
            else tensor == _unset(tensor.dtype)
        )
        if bool(unset.all()):
            raise ArgumentError(
                f"init left {name!r} without values; it must initialize every parameter and buffer of a model on the "
                "meta device, also those buffers that the constructor computes"
            )


class _RefuseRandom(torch_compat.TorchDispatchMode):
    """Refuses to draw random numbers for tensors without data, because later numbers would differ from one process."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and any(isinstance(argument, torch.Tensor) and argument.is_meta for argument in args):
            raise ArgumentError(
                f"init draws random numbers for a parameter of another stage when it is called with {self._path}; draw "
                "them when it is called with the module that holds the parameter"
            )
        return func(*args, **(kwargs or {}))
