"""The options of a transfer: declared once, and refused by name where a function cannot use them."""

import inspect
import operator
import re
from typing import get_type_hints

import numpy as np
import pytest

import reshard
import reshard.ray
from reshard import Layout, Mesh, TransferOptions, reshard_local
from reshard.errors import OptionError
from reshard.plan import DEFAULT_STAGING_BYTES

DEFAULTS = {
    "strategy": None, "topology": None, "staging_bytes": DEFAULT_STAGING_BYTES, "timeout_seconds": 300.0,
    "verify": False, "on_loss": "raise", "compression": None, "max_error": None, "on_error": "raw",
}  # fmt: skip
ROWS = Layout(Mesh.of("2"), "S0")


def _defaults(function):
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("name", ["reshard", "reshard_async", "ray.reshard"])
def test_signatures_show_every_option_and_its_default(name):
    if name.startswith("ray."):
        pytest.importorskip("ray", reason="ray is not installed: pip install 'reshard[ray]'")
    function = operator.attrgetter(name)(reshard)
    described = re.findall(r"^ {4}(\w+): ", inspect.cleandoc(TransferOptions.__doc__), flags=re.M)
    assert set(get_type_hints(TransferOptions)) == set(described) == set(DEFAULTS)
    shown = _defaults(function)
    assert DEFAULTS.items() <= shown.items() and "options" not in shown


def test_signatures_show_only_options_that_the_function_can_use():
    shown = _defaults(reshard_local)
    assert {name for name in DEFAULTS if name in shown} == {"strategy", "topology", "compression", "max_error"}


@pytest.mark.parametrize("kind", [TypeError, reshard.errors.ArgumentError, OptionError])
def test_an_option_that_a_function_cannot_use_is_an_error_that_names_it(kind):
    shards = {0: np.zeros(2), 1: np.zeros(2)}
    with pytest.raises(kind, match="reshard_local cannot use the option 'verify'; its options are compression, max_"):
        reshard_local(shards, ROWS, ROWS, shape=(4,), verify=True)
    with pytest.raises(kind, match=r"reshard_async has no argument 'stagging_bytes'; its options are compression, .*"):
        reshard.reshard_async(None, ROWS, ROWS, stagging_bytes=1)
    with pytest.raises(kind, match=r"reshard has no argument 'dest_spec'; .*; did you mean 'dst_spec'\?"):
        reshard.reshard(None, ROWS, ROWS, dest_spec="R")
    pytest.importorskip("ray", reason="ray is not installed: pip install 'reshard[ray]'")
    with pytest.raises(kind, match=r"reshard\.ray\.reshard has no argument 'shape'; its options are compression, .*"):
        reshard.ray.reshard(None, None, None, shape=(4,))


def test_an_option_that_is_given_twice_is_an_error_that_names_it():
    with pytest.raises(TypeError, match="'verify'"):
        reshard.reshard(None, ROWS, ROWS, verify=True, **dict.fromkeys(["verify"], False))
