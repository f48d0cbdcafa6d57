"""Check the arguments of public functions, and the fields of dataclasses, against their annotations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from reshard.errors import ArgumentError
from reshard.formatting import brief

F = TypeVar("F", bound=Callable[..., Any])
#: ``(minimum, maximum)`` of a number, both included.
Bounds = tuple[float, float]

_WORDS: dict[Any, str] = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}
_WORDS |= {type(None): "None", type: "a class", tuple: "a tuple or a list", Mapping: "a mapping"}
_WORDS |= dict.fromkeys((Sequence, Collection, Iterable), "a sequence") | {Callable: "a function"}


def check_arguments(**bounds: Bounds) -> Callable[[F], F]:
    """Decorate a function: it refuses arguments of other types than its annotations say, and numbers out of bounds.

    An ``int`` may be an integer of NumPy, and a ``float`` any number but NaN. A bool is neither. Items of sequences and
    mappings are checked too, but an iterator is not used up.

    Args:
        bounds: ``(minimum, maximum)`` of arguments that are numbers or sequences of numbers, by name.

    Raises:
        ArgumentError: by the decorated function; the text names the function, the argument, the rule and the value.
    """

    def decorate(function: F) -> F:
        names = tuple(inspect.signature(function).parameters)
        # The annotations may name classes that are defined later, and most functions are not called at all.
        hints = functools.cache(lambda: _hints_of_parameters(function))
        right: set[tuple[str, type]] = set()  # of arguments without items, of which only bounds need a second look

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                bound = bounds.get(name)
                if (name, type(value)) in right and (bound is None or bound[0] <= value <= bound[1]):
                    continue
                hint = hints().get(name, Any)
                wrong = find_wrong(value, hint, name, bound)
                if wrong:
                    raise ArgumentError(f"{function.__qualname__.removesuffix('.__init__')}: {wrong}")
                if (bound is None or type(value) is int) and _depends_on_type_only(value, hint):
                    right.add((name, type(value)))
            return function(*args, **kwargs)

        call.hints = hints  # type: ignore[attr-defined]  # a test resolves all annotations
        return cast(F, call)

    return decorate


def _hints_of_parameters(function: Callable[..., Any]) -> dict[str, Any]:
    annotations = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    of_parameters: Any = types.SimpleNamespace(__annotations__=annotations)
    return get_type_hints(of_parameters, function.__globals__)


def check_fields(instance: Any, **bounds: Bounds) -> None:
    """Check the fields of a dataclass against their annotations; for its ``__post_init__``.

    Args:
        instance: the object.
        bounds: as for :func:`check_arguments`.

    Raises:
        ArgumentError: a field has another type, or is out of bounds.
    """
    for name, hint in _hints_of_fields(cast(Hashable, type(instance))).items():
        wrong = find_wrong(getattr(instance, name), hint, name, bounds.get(name))
        if wrong:
            raise ArgumentError(f"{type(instance).__name__}: {wrong}")


@functools.cache
def _hints_of_fields(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def find_wrong(value: Any, hint: Any, name: str, bounds: Bounds | None = None) -> str:
    """The error text of a value: its name, the value and the rule; "" if it is what a type hint says."""
    hint, origin, inner = _parts(hint)
    if origin in (Union, types.UnionType):
        problems = [find_wrong(value, option, name, bounds) for option in inner]
        if "" in problems:
            return ""
        inside = [text for text in problems if not text.startswith(f"{name} is ")]  # an item of the value
        return inside[0] if inside else f"{name} is {brief(value)}; it must be {_words(hint)}"
    if hint is Any or isinstance(hint, TypeVar) or getattr(hint, "_is_protocol", False):
        return ""
    is_bounded = hint in (int, float) and bounds is not None
    if not _is_instance(value, hint, origin) or (bounds and is_bounded and not bounds[0] <= value <= bounds[1]):
        span = f" {_range_of(bounds)}" if bounds and is_bounded else ""
        return f"{name} is {brief(value)}; it must be {_words(hint)}{span}"
    return _find_wrong_item(value, origin, inner, name, bounds) if inner else ""


def _find_wrong_item(value: Any, origin: Any, inner: tuple[Any, ...], name: str, bounds: Bounds | None) -> str:
    """The error text of the first wrong item of a mapping or of a sequence; "" if all items are right."""
    if origin is Mapping or origin is dict:
        for key, item in value.items():
            text = find_wrong(key, inner[0], f"a key of {name}") or find_wrong(
                item, inner[1], f"{name}[{brief(key)}]", bounds
            )
            if text:
                return text
        return ""
    if origin is tuple and inner[-1] is not Ellipsis:
        if len(value) != len(inner):
            return f"{name} is {brief(value)}; it must have {len(inner)} items"
        hints: Iterable[Any] = inner
    elif origin in (Callable, Literal, type) or not isinstance(value, (Sequence, Set, np.ndarray)):
        return ""
    else:
        hints = inner[:1] * len(value)
    texts = (
        find_wrong(item, hint, f"{name}[{number}]", bounds)
        for number, (item, hint) in enumerate(zip(value, hints, strict=True))
    )
    return next(filter(None, texts), "")


def _parts(hint: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """A type hint, its origin, and its arguments."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if hint is None:
        hint = type(None)
    origin = get_origin(hint)
    origin = Callable if origin is get_origin(Callable[..., Any]) else origin
    return hint, origin, get_args(hint)


def _is_instance(value: Any, hint: Any, origin: Any) -> bool:
    if hint is bool:
        return isinstance(value, (bool, np.bool_))
    if hint is int:
        return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if hint is float:
        return _is_number(value)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    kind = origin or hint
    if kind is Callable:
        return callable(value)
    if kind in (Sequence, Collection, Iterable, tuple, list):
        if isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) == 0:  # an array without dims has no items
            return False
        kinds = {tuple: (tuple, list), list: (tuple, list)}.get(kind, (kind, np.ndarray))
        return isinstance(value, kinds)
    return isinstance(value, kind)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer above the largest float
        return False


def _depends_on_type_only(value: Any, hint: Any) -> bool:
    """Whether the type alone decides: if this value is right, so is every value of its type."""
    if isinstance(value, int):
        return hint in (int, bool)  # for a float, an integer may be too large
    return not isinstance(value, (float, np.floating, str, Collection, np.ndarray, type)) and not callable(value)


def _words(hint: Any) -> str:
    """A type in words."""
    hint, origin, inner = _parts(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(option) for option in inner))
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    kind = origin or hint
    if kind in _WORDS:
        return _WORDS[kind]
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def _range_of(bounds: Bounds) -> str:
    low, high = bounds
    if high == math.inf:
        return f"of at least {low:,}"
    return f"from {low:,} to {high:,}"
