"""Arguments and fields are checked against their annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from reshard import Layout, Mesh, make_plan
from reshard.arguments import check_arguments, check_fields
from reshard.errors import ArgumentError, OptionError, ReshardError
from tests.test_house import modules_of_package


@check_arguments(count=(1, 8), sizes=(0, 9))
def call(
    count: int = 1,
    *,
    seconds: float | None = None,
    flag: bool = False,
    name: str = "",
    sizes: Sequence[int] = (),
    pair: tuple[int, int] = (0, 0),
    costs: Mapping[str, float] | None = None,
    names: Iterable[str] = (),
    make: Callable[..., Any] | None = None,
    side: Literal["src", "dst"] = "src",
    tensor: torch.Tensor | None = None,
    other: Any = None,
) -> int:
    return count


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"count": "2"}, "call: count is '2'; it must be an integer from 1 to 8"),
        ({"count": True}, "count is True; it must be an integer"),
        ({"count": 9}, "count is 9; it must be an integer from 1 to 8"),
        ({"count": 10**5000}, "count is a huge number; it must be an integer"),
        ({"seconds": float("nan")}, "seconds is nan; it must be a number or None"),
        ({"seconds": 10**5000}, "seconds is a huge number; it must be a number or None"),
        ({"flag": 1}, "flag is 1; it must be True or False"),
        ({"name": b"x"}, "name is b'x'; it must be a string"),
        ({"sizes": "12"}, "sizes is '12'; it must be a sequence"),
        ({"sizes": [1, None]}, r"sizes\[1\] is None; it must be an integer from 0 to 9"),
        ({"sizes": np.array(1)}, r"sizes is array\(1\); it must be a sequence"),
        ({"pair": (1, 2, 3)}, r"pair is \(1, 2, 3\); it must have 2 items"),
        ({"pair": [1, "x"]}, r"pair\[1\] is 'x'; it must be an integer"),
        ({"costs": {"a": "x"}}, r"costs\['a'\] is 'x'; it must be a number"),
        ({"costs": {1: 0.5}}, "a key of costs is 1; it must be a string"),
        ({"costs": []}, r"costs is \[\]; it must be a mapping or None"),
        ({"names": [""[:0], 1]}, r"names\[1\] is 1; it must be a string"),
        ({"make": 3}, "make is 3; it must be a function or None"),
        ({"side": "left"}, "side is 'left'; it must be one of 'src', 'dst'"),
        ({"tensor": np.zeros(2)}, r"tensor is array.*; it must be a Tensor or None"),
    ],
)
def test_an_error_names_the_argument_the_value_and_the_rule(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        call(**arguments)


def test_what_annotations_allow_is_passed_on():
    assert call(np.int64(3), seconds=np.float32(2), sizes=np.arange(3), pair=[1, 2], costs={"a": 1}) == 3
    assert call(8, seconds=float("inf"), flag=np.bool_(True), names={"a"}, make=int, side="dst", other=object()) == 8
    items = iter(["a", "b"])
    call(names=items)
    assert list(items) == ["a", "b"]
    for seconds in (1, 10**5000):  # the type alone does not decide
        if seconds == 1:
            call(seconds=seconds)
        else:
            with pytest.raises(ArgumentError, match="seconds is a huge number"):
                call(seconds=seconds)
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        call(typo=1)
    assert list(inspect.signature(call).parameters)[:2] == ["count", "seconds"]


def test_call_that_lacks_an_argument_shows_the_right_one():
    with pytest.raises(
        OptionError, match=r"^make_plan: missing a required argument: 'dtype'; call make_plan\(src, dst, "
    ):
        make_plan(Layout(Mesh.of(1)), Layout(Mesh.of(1)), "float32")
    with pytest.raises(OptionError, match=r"did you mean 'topology'\?$"):
        make_plan(Layout(Mesh.of(1)), Layout(Mesh.of(1)), (4,), "float32", toplogy=None)


@dataclass(frozen=True)
class _Record:
    kind: ClassVar[str] = "record"
    sizes: tuple[int, ...]
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, sizes=(1, 4))


def test_fields_of_a_dataclass_are_checked():
    assert _Record((1, 2)) == _Record((1, 2), "")
    for value, text in (((0,), r"_Record: sizes\[0\] is 0; it must be an integer from 1 to 4"), (3, "sizes is 3")):
        with pytest.raises(ArgumentError, match=text):
            _Record(value)
    with pytest.raises(ArgumentError, match="name is None; it must be a string"):
        _Record((1,), None)


def _checked_functions():
    """Functions of this package whose arguments are checked."""
    for name in sorted(modules_of_package()):
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            assert error.name in ("vllm", "sglang", "ray", "cupy"), error
            continue
        classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
        for holder in (module, *classes):
            for value in list(vars(holder).values()):
                function = getattr(value, "__func__", value)
                while inspect.isfunction(function) and not hasattr(function, "hints"):
                    function = getattr(function, "__wrapped__", None)
                if inspect.isfunction(function):
                    yield function


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"strategy": 5}, "Plan: strategy is 5; it must be a string"),
        ({"staging_bytes": -1}, "Plan: staging_bytes is -1"),
        ({"transfers": None}, "Plan: transfers is None"),
        ({"tensors": ()}, "at least one tensor"),
    ],
)
def test_fields_of_plans_are_checked(change, text):
    layouts = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(2, first_rank=2), "R")
    with pytest.raises(ReshardError, match=text):
        replace(make_plan(*layouts, (4, 4), "float32"), **change)


def test_annotations_of_checked_functions_can_be_resolved():
    functions = set(_checked_functions())
    assert len(functions) > 80
    for function in functions:
        assert set(function.hints()) <= set(inspect.signature(function).parameters), function
