"""States of loaders and schedulers as JSON and tensors: each comes back as it was, or is an error that names it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from reshard.errors import ArgumentError
from reshard.scheduler.checkpoint.values import decode, encode, parse_json

KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.tuples(st.text()))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=9)),
    lambda inside: st.one_of(
        st.lists(inside, max_size=4),
        st.lists(inside, max_size=4).map(tuple),
        st.dictionaries(KEYS, inside, max_size=4),
        st.dictionaries(KEYS, inside, max_size=4).map(OrderedDict),
    ),
)


def pass_through(value):
    """The value after JSON."""
    tensors = {}
    text = json.dumps({"x": encode(value, "x", tensors)})
    return decode(parse_json(text.encode())["x"], "x", tensors.__getitem__)


def types_of(value):
    """The types of a value and of all that is in it, in order."""
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    parts = [types_of(item) for item in inside] if isinstance(inside, (list, tuple)) else []
    return type(value), parts


@given(VALUES)
def test_plain_values_come_back(value):
    back = pass_through(value)
    assert back == value
    assert types_of(back) == types_of(value)
    assert repr(back) == repr(value)  # -0.0, and the order of keys


def test_numbers_that_json_lacks_come_back():
    assert [pass_through(item) for item in (math.inf, -math.inf)] == [math.inf, -math.inf]
    assert math.isnan(pass_through(math.nan))
    assert pass_through(-(2**4095)) == -(2**4095)
    assert repr(pass_through([-0.0, 5e-324, 0.1])) == "[-0.0, 5e-324, 0.1]"


def test_tensors_arrays_and_counters_come_back():
    state = {
        "order": torch.randperm(5),
        "half": [torch.ones(2, 0, dtype=torch.bfloat16), torch.tensor(1.5)],
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        "rate": np.float64(0.1),
        "flag": np.bool_(True),
        "milestones": Counter({30: 1, 80: 2}),
        "python": random.getstate(),
        "$tuple": 1,
    }
    back = pass_through(state)
    assert [*back] == [*state]
    for key in ("array", "rate", "flag"):
        assert type(back[key]) is type(state[key]) and back[key].dtype == state[key].dtype
        assert np.array_equal(back[key], state[key])
    assert torch.equal(back["order"], state["order"])
    assert [(item.dtype, item.shape) for item in back["half"]] == [(torch.bfloat16, (2, 0)), (torch.float32, ())]
    assert type(back["milestones"]) is Counter
    assert (back["milestones"], back["python"], back["$tuple"]) == (state["milestones"], state["python"], 1)
    long = {"a" * 99 + "b": torch.zeros(1), "a" * 99 + "c": torch.ones(1)}  # errors shorten both keys alike
    assert [float(item) for item in pass_through(long).values()] == [0.0, 1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3]),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(step))),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
    ],
    ids=["multi-step", "lambda", "plateau", "one-cycle", "cyclic", "warm restarts", "sequential"],
)
def test_schedulers_of_torch_continue(make):
    def run(steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def make_both():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
        return optimizer, make(optimizer)

    optimizer, scheduler = make_both()
    run(4)
    settings = {key: param_group for key, param_group in optimizer.param_groups[0].items() if key != "params"}
    state, settings = pass_through([scheduler.state_dict(), settings])
    whole = run(4)
    optimizer, scheduler = make_both()
    scheduler.load_state_dict(state)
    optimizer.param_groups[0].update(settings)
    assert run(4) == whole


Point = namedtuple("Point", "x y")
ENDLESS = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"x\['a'\]\[1\] is a set, which a checkpoint cannot hold; it can hold None, bool"),
        ({3: lambda: 0}, r"x\[3\] is a function"),
        ([1j], r"x\[0\] is a complex"),
        (Point(1, 2), r"x is a .*\.Point"),
        (defaultdict(list), r"x is a collections\.defaultdict"),
        (torch.float32, r"x is a torch\.dtype"),
        (torch.nn.Parameter(torch.ones(2)), r"x is a torch\.nn\.parameter\.Parameter"),
        (torch.ones(2, requires_grad=True), r"x is a torch\.Tensor of dtype torch\.float32 that requires gradients"),
        (torch.ones(2, dtype=torch.complex128), r"x is a torch\.Tensor of dtype torch\.complex128"),
        (torch.ones(2, device="meta"), r"x is a torch\.Tensor"),
        (torch.ones(2).to_sparse(), r"x is a torch\.Tensor"),
        (np.array(["a"]), r"x is a numpy\.ndarray of dtype <U1"),
        (np.array([1], dtype=">i4"), r"x is a numpy\.ndarray of dtype >i4"),
        (np.ma.array([1, 2]), r"x is a numpy\.ma.*MaskedArray"),
        ({torch.ones(1): 1}, r"x has a tensor or a NumPy value in a key"),
        ({Point(1, 2): 1}, r"a key of x is a .*\.Point"),
        ([2**5000], r"x\[0\] is an integer of 5001 bits; a checkpoint can hold 4096 at most"),
        (ENDLESS, r"is nested deeper than 100 levels"),
    ],
)
def test_what_would_not_come_back_is_an_error_that_names_it(value, message):
    with pytest.raises(ArgumentError, match=message):
        encode(value, "x", {})


@pytest.mark.parametrize(
    "text",
    [
        '{"$tuple": 1}',
        '{"$tuple": [], "a": 1}',
        '{"$unknown": []}',
        '{"$dict": [[1]]}',
        '{"$dict": [[1, 2], [1, 3]]}',
        '{"$dict": [[[1], 2]]}',
        '{"$counter": 5}',
        '{"$bytes": "?"}',
        '{"$bytes": 3}',
        '{"$float": "00"}',
        '{"$float": null}',
        '{"$tensor": ["a"]}',
        '{"$scalar": "x"}',
        '{"$array": "half"}',
        "[" * 5000 + "]" * 5000,
        "[" * 150 + "]" * 150,
        "NaN",
        "Infinity",
        "1e999",
        "1" * 5000,
        '{"a": 1, "a": 2}',
        "",
        "nul",
        '"\\ud800',
        "\xff",
    ],
)
def test_nonsense_is_a_value_error(text):
    tensors = {"x": torch.ones(2), "half": torch.ones(2, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"."):
        decode(parse_json(f'{{"x": {text}}}'.encode("latin-1"))["x"], "x", tensors.__getitem__)
