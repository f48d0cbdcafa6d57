"""Adapt public functions to their callers: exclude them from torch.compile, and let warnings name the caller's line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


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
        return uncompiled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile reads this attribute
    return cast(F, call)


def caller_level() -> int:
    """The ``stacklevel`` of a warning that points to the first caller outside of this package and of torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in ("reshard", "torch"):
        frame, level = frame.f_back, level + 1
    return level
