"""Exceptions that end a call before the ranks know that this rank has left it, such as KeyboardInterrupt."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def is_published(error: BaseException) -> bool:
    """Whether the other ranks know of this error, or need not know of it."""
    return bool(getattr(error, "is_published_by_reshard", False))


def mark_published(error: BaseException) -> None:
    """Mark an error so that :func:`is_published` returns True."""
    with contextlib.suppress(Exception):  # an exception with slots, or with its own __setattr__
        error.is_published_by_reshard = True  # type: ignore[attr-defined]


def _passed(error: BaseException, code: CodeType) -> bool:
    """Whether an exception passed through a function with this code."""
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def publish_exceptions(
    publish: Callable[[BaseException, tuple[Any, ...], dict[str, Any]], None],
) -> Callable[[F], F]:
    """Decorate a public function so that no exception ends it unnoticed by the other ranks.

    Args:
        publish: called with the exception, and with the positional and the named arguments of the call, after an
            exception that is not published yet. Its own exceptions are ignored. A TypeError because of the arguments
            is not passed: the call has not begun.
    """

    def decorate(function: F) -> F:
        code = inspect.unwrap(function).__code__

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if not is_published(error) and (not isinstance(error, TypeError) or _passed(error, code)):
                    mark_published(error)
                    with contextlib.suppress(Exception):
                        publish(error, args, kwargs)
                raise

        return cast(F, call)

    return decorate


def keep_exceptions_local(function: F) -> F:
    """Decorate a function whose interruption other ranks need not know of, such as ``wait()``.

    An exception that ends the context counts as published. An enclosing :func:`publish_exceptions` then ignores it.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            mark_published(error)
            raise

    return cast(F, call)
