"""Python values, such as the state of a loader, as JSON and tensors: the same value comes back, or it is an error.

Objects of one key that begins with ``$`` stand for what JSON lacks: ``{"$tuple": [...]}``, ``{"$dict": [[key, value],
...]}``, ``{"$bytes": base64}``, ``{"$float": bits}`` for NaN and infinities, ``{"$tensor": name}``. All other objects
are dicts with string keys.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from reshard.errors import ArgumentError
from reshard.formatting import brief

from .safetensors_dtypes import CODES

#: Greatest depth of lists and dicts inside each other.
MAX_DEPTH = 100
#: Greatest number of bits of an integer: Python reads no more than 4,300 digits.
MAX_BITS = 4096
_PAIRS: Mapping[str, Callable[[Any], Any]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": dict}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON can hold it.

    Args:
        path: its name in errors and in the names of tensors, such as ``loader.0``.
        tensors: the tensors and arrays in the value are added to it, under their path.

    Raises:
        ArgumentError: a part of the value has a type that cannot be saved; the text has its path.
    """
    return _encode(value, path, tensors, 0)


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    kind = type(value)  # a subclass would come back as its base
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        if value.bit_length() > MAX_BITS:
            raise ArgumentError(
                f"{path} is an integer of {value.bit_length()} bits; a checkpoint can hold {MAX_BITS} at most"
            )
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _encode_tensor(value, path, tensors)
    if depth == MAX_DEPTH:
        raise ArgumentError(f"{path[:200]}... is nested deeper than {MAX_DEPTH} levels; a checkpoint cannot hold it")
    if kind in (list, tuple):
        entries = [_encode(item, f"{path}[{number}]", tensors, depth + 1) for number, item in enumerate(value)]
        return entries if kind is list else {"$tuple": entries}
    if kind not in (dict, OrderedDict, Counter):
        raise _refuse(path, value)
    items = {key: _encode(item, f"{path}[{brief(key)}]", tensors, depth + 1) for key, item in value.items()}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in items):
        return items
    tag = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}[kind]
    inside: dict[str, torch.Tensor] = {}
    pairs = [[_encode(key, f"a key of {path}", inside, depth + 1), item] for key, item in items.items()]
    if inside:
        raise ArgumentError(f"{path} has a tensor or a NumPy value in a key, which a checkpoint cannot hold")
    return {tag: pairs}


def _encode_tensor(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.requires_grad
        if not is_plain or value.is_meta or value.dtype not in CODES:
            raise _refuse(path, value)
        return {"$tensor": _add(tensors, path, value)}
    try:
        tensor = torch.from_numpy(np.array(value, order="C"))  # a copy, because an array may be read-only
    except (TypeError, ValueError):
        raise _refuse(path, value) from None
    back = tensor.numpy() if type(value) is np.ndarray else tensor.numpy()[()]
    if type(back) is not type(value) or back.dtype != value.dtype or tensor.dtype not in CODES:
        raise _refuse(path, value)
    return {"$array" if type(value) is np.ndarray else "$scalar": _add(tensors, path, tensor)}


def _add(tensors: dict[str, torch.Tensor], path: str, tensor: torch.Tensor) -> str:
    """Add a tensor under its path. Paths of keys that are long may be equal."""
    while path in tensors:
        path += "'"
    tensors[path] = tensor
    return path


def _refuse(path: str, value: Any) -> ArgumentError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        name += f" of dtype {value.dtype}"
    if isinstance(value, torch.Tensor) and value.requires_grad:
        name += " that requires gradients"
    return ArgumentError(
        f"{path} is a {name}, which a checkpoint cannot hold; it can hold None, bool, int, float, str, bytes, list, "
        "tuple, dict, OrderedDict, Counter, plain tensors and NumPy arrays"
    )


def decode(value: Any, path: str, read_tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value that :func:`encode` has made JSON of.

    Args:
        read_tensor: returns the tensor of a name.

    Raises:
        ValueError: it is not what ``encode`` returns; the text has the path.
    """
    return _decode(value, path, read_tensor, 0)


def _decode(value: Any, path: str, read_tensor: Callable[[str], torch.Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"{path[:200]}... is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_decode(item, f"{path}[{number}]", read_tensor, depth + 1) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: _decode(item, f"{path}[{brief(key)}]", read_tensor, depth + 1) for key, item in value.items()}
    tag = tags[0]
    inside = value[tag]
    wrong = ValueError(f"{path} is {brief(value)}, which stands for no value")
    if len(value) > 1:
        raise wrong
    if tag == "$tuple" and isinstance(inside, list):
        return tuple(_decode(inside, path, read_tensor, depth))
    if tag in _PAIRS and isinstance(inside, list):
        if not all(isinstance(item, list) and len(item) == 2 for item in inside):
            raise wrong
        keys = [_decode(key, f"a key of {path}", read_tensor, depth + 1) for key, _ in inside]
        values = [
            _decode(item, f"{path}[{brief(key)}]", read_tensor, depth + 1)
            for key, (_, item) in zip(keys, inside, strict=True)
        ]
        try:
            made = _PAIRS[tag](zip(keys, values, strict=True))
        except TypeError:  # a key is not hashable
            raise wrong from None
        if len(made) != len(keys):
            raise ValueError(f"{path} has a key twice")
        return Counter(made) if tag == "$counter" else made
    if not isinstance(inside, str):
        raise wrong
    try:
        if tag == "$bytes":
            return base64.b64decode(inside, validate=True)
        if tag == "$float":
            (number,) = struct.unpack(">d", bytes.fromhex(inside))
            return number
    except (ValueError, struct.error):
        raise wrong from None
    if tag == "$tensor":
        return read_tensor(inside)
    if tag in ("$array", "$scalar"):
        tensor = read_tensor(inside)
        if tag == "$scalar" and tensor.dim():
            raise wrong
        try:
            return tensor.numpy() if tag == "$array" else tensor.numpy()[()]
        except TypeError:  # a dtype that NumPy lacks
            raise wrong from None
    raise wrong


def format_json(entries: Mapping[str, Any]) -> str:
    """The text of a JSON object, with a line for each entry."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in entries.items())
    return f"{{\n{lines}\n}}\n"


def parse_json(text: bytes) -> dict[str, Any]:
    """The object in a JSON text.

    Raises:
        ValueError: the text is not JSON, has a key twice, NaN or an infinity, or is nested too deeply.
    """
    try:
        parsed = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"it is JSON of {type(parsed).__name__!r}, not of an object")
    return parsed


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"it has a key twice, among {brief([key for key, _ in pairs])}")
    return values


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it has the number {text}")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {brief(text)}")
    return number
