"""Helpers of public names: import on first use, exclusion from torch.compile, warnings at the line of the caller."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from reshard.errors import OptionError
from reshard.formatting import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

#: Requirements that install packages which only parts of ``reshard`` need. CuPy depends on the version of CUDA.
_EXTRAS = {
    "torch": "'reshard[torch]'",
    "safetensors": "'reshard[torch]'",
    "ray": "'reshard[ray]'",
    "cupy": "'reshard[cuda13]', or 'reshard[cuda12]' for CUDA 12",
}


def public_names(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """The names that the ``.pyi`` file of a package imports, and a ``__getattr__`` that imports each on first use.

    Args:
        package: ``__name__`` of the package.
        file: ``__file__`` of the package. The stub is beside it.
    """
    module_of = {
        alias.name: f"{'.' * node.level}{node.module}"
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(module_of[name], package), name)
        except ModuleNotFoundError as error:
            if error.name not in _EXTRAS:
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}: pip install {_EXTRAS[error.name]}", name=error.name
            ) from None
        setattr(sys.modules[package], name, value)
        return value

    return sorted(module_of), import_name


def not_compiled(function: F) -> F:
    """Decorate a function that torch.compile must call instead of trace.

    Such a function exchanges messages with other ranks, or computes with NumPy. When torch.compile traces NumPy, it
    computes with torch instead.
    """
    uncompiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
            return function(*args, **kwargs)
        if not uncompiled:
            uncompiled.append(sys.modules["torch"].compiler.disable(function))
            sys.modules["torch._dynamo"].decorators.skip(call)  # else it compiles this frame again for each function
        return uncompiled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile reads this attribute
    return cast(F, call)


def shows_call(function: F) -> F:
    """Decorate a function: a call that lacks an argument, or has one that it does not take, shows the right call.

    Such a call raises an :class:`~reshard.errors.OptionError`, which is a TypeError too.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as wrong:
                raise _describe_call(function.__name__, signature, str(wrong)) from None
            raise error

    return cast(F, call)


def _describe_call(name: str, signature: inspect.Signature, wrong: str) -> OptionError:
    """The error of a call that does not fit the signature."""
    required = [key for key, item in signature.parameters.items() if item.default is item.empty]
    options = [key for key, item in signature.parameters.items() if item.default is not item.empty]
    quoted = re.search(r"argument '(\w+)'", wrong) if "unexpected" in wrong else None
    hint = did_you_mean(quoted[1], options) if quoted else ""
    return OptionError(f"{name}: {wrong}; call {name}({', '.join(required)}); options: {', '.join(options)}{hint}")


def caller_level() -> int:
    """The ``stacklevel`` of a warning that points to the first caller outside of this package and of torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in ("reshard", "torch"):
        frame, level = frame.f_back, level + 1
    return level
