"""Converters, which replace modules by modules on a grid: their registry, and the state of one conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.runtime.torch_compat import held_modules

from .graphs import check_graph
from .grid import Grid

#: ``convert(module, conversion, path) -> module on the grid``.
Converter = Callable[[Any, "Conversion", str], nn.Module]

_CONVERTERS: dict[type, Converter] = {}
#: Converters of classes that this package does not import, by top-level package and class name.
_CONVERTERS_BY_NAME: dict[tuple[str, str], Converter] = {}
#: Modules that compute each element from one element of the input, so they work on any part of a tensor.
_ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Module)


@check_arguments()
def register(module_class: type, convert: Converter) -> None:
    """Tell :func:`parallelize` how to convert modules of a class.

    Args:
        module_class: the class; subclasses need an entry of their own.
        convert: ``convert(module, conversion, path)`` returns the module on the grid. It converts children with
            ``conversion.convert(child, path)``. It may return ``module`` itself if the forward works on any part of
            the batch and of the features.
    """
    _CONVERTERS[module_class] = convert


def register_by_name(package: str, converters: Mapping[str, Converter]) -> None:
    """Like :func:`register`, for classes of a package that may not be installed.

    Args:
        package: its top-level name.
        converters: ``{class name: convert}``.
    """
    for name, convert in converters.items():
        _CONVERTERS_BY_NAME[package, name] = convert


class Conversion:
    """The state of one call of :func:`parallelize`. Every converter gets it.

    Attributes:
        grid: the grid.
        panel: see :class:`~reshard.parallel.Linear`.
        features: global size of the last dim of the latest layer's output. Dropouts and losses need it.
    """

    @check_arguments(panel=(1, 2**40))
    def __init__(self, model: nn.Module, grid: Grid, panel: int) -> None:
        self.grid, self.panel = grid, panel
        self.features: int | None = None
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.ties = [same for same in names.values() if len(same) > 1]
        #: The module, its conversion, and the features after it, by id of the module.
        self._made: dict[int, tuple[Any, nn.Module, int | None]] = {}
        self._tied = {key for key, same in names.items() if len(same) > 1}

    def is_tied(self, parameter: Any) -> bool:
        """Whether several modules of the model share a parameter."""
        return id(parameter) in self._tied

    def convert_children(self, module: nn.Module, path: str) -> nn.Module:
        """Convert the children of a module in place."""
        for name, child in list(held_modules(module).items()):  # under each of its names
            if child is not None:
                setattr(module, name, self.convert(child, f"{path}.{name}" if path else name))
        return module

    def convert(self, module: Any, path: str) -> nn.Module:
        """The module on the grid. Containers are converted in place, and elementwise modules stay as they are.

        A module with several names is converted once, so its names share one module on the grid. Dropouts and losses
        are converted once per name, because their sizes depend on the layer before them.

        Raises:
            ArgumentError: no converter is known for the module, or it cannot be cut.
        """
        if isinstance(module, (nn.Dropout, nn.CrossEntropyLoss)):
            return self._convert(module, path)
        if id(module) not in self._made:
            self._made[id(module)] = (module, self._convert(module, path), self.features)
        _, made, self.features = self._made[id(module)]
        return made

    def _convert(self, module: Any, path: str) -> nn.Module:
        return find_converter(module, path)(module, self, path)


def find_converter(module: Any, path: str) -> Converter:
    """The converter of a module.

    Raises:
        ArgumentError: there is none.
    """
    kind = type(module)
    converter = _CONVERTERS.get(kind) or _CONVERTERS_BY_NAME.get((kind.__module__.partition(".")[0], kind.__name__))
    if converter is not None:
        return converter
    if hasattr(module, "to_grid"):
        return _convert_itself
    if isinstance(module, torch.fx.GraphModule):
        check_graph(module, path)
        return convert_children
    if type(module) in _CONTAINERS:
        return convert_children
    is_activation = type(module).__module__ == "transformers.activations" and not list(module.parameters())
    if type(module) in _ELEMENTWISE or is_activation:
        return _keep
    what = repr(path) if path else "the model"
    raise ArgumentError(
        f"parallelize cannot cut {what}, a {type(module).__module__}.{type(module).__qualname__}, "
        "over a grid; see reshard.parallel.register"
    )


def _convert_itself(module: Any, conversion: Conversion, path: str) -> nn.Module:
    made: nn.Module = module.to_grid(conversion, path)
    return made


def convert_children(module: nn.Module, conversion: Conversion, path: str) -> nn.Module:
    """The converter of containers."""
    return conversion.convert_children(module, path)


def _keep(module: nn.Module, conversion: Conversion, path: str) -> nn.Module:
    return module
