"""``index.json``: the tensors of a checkpoint, with file, place and digest of each shard, and the files of values."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reshard.formatting import brief, compare_names, count_of
from reshard.sharding import find_overlaps

from .safetensors_dtypes import CODES, DTYPES
from .values import format_json, parse_json

INDEX_FILE = "index.json"
_FORMAT, _VERSION = "reshard checkpoint", 1
_TENSORS = re.compile(r"rank-\d{5,}-\d{3,}\.safetensors")
_VALUES = re.compile(r"rank-\d{5,}\.json")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX, _MAX_DIMS = 2**62, 64


@dataclass(frozen=True)
class StoredShard:
    """A box of a tensor in a file.

    Attributes:
        file: name of the safetensors file; there, the shard has the key of the tensor.
        offsets, shape: where the box begins in the tensor, and its sizes.
        start, stop: its bytes in the file.
        digest: XXH3 of 128 bits of these bytes, in hexadecimal.
    """

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str


@dataclass(frozen=True)
class CheckpointEntry:
    """A tensor of a checkpoint.

    Attributes:
        dtype, shape: dtype and shape of the whole tensor.
        shards: boxes that together are the whole tensor, none of them twice.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...] = ()


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint.

    Attributes:
        tensors: tensors by key.
        values: ``{key: name of the JSON file}``.
    """

    tensors: Mapping[str, CheckpointEntry]
    values: Mapping[str, str]

    @property
    def files(self) -> set[str]:
        """Names of the files."""
        return {*self.shards, *self.values.values()}

    @functools.cached_property
    def shards(self) -> dict[str, list[tuple[str, StoredShard]]]:
        """Keys and shards in each safetensors file, in the order of their bytes."""
        by_file: dict[str, list[tuple[str, StoredShard]]] = {}
        for key, entry in self.tensors.items():
            for shard in entry.shards:
                by_file.setdefault(shard.file, []).append((key, shard))
        return {file: sorted(pairs, key=lambda pair: (pair[1].start, pair[1].stop)) for file, pairs in by_file.items()}

    def to_json(self) -> str:
        """The text of the file."""
        tensors = {
            key: {
                "dtype": CODES[entry.dtype],
                "shape": entry.shape,
                "shards": [
                    {
                        "file": shard.file,
                        "offsets": shard.offsets,
                        "shape": shard.shape,
                        "bytes": [shard.start, shard.stop],
                        "xxh3_128": shard.digest,
                    }
                    for shard in entry.shards
                ],
            }
            for key, entry in self.tensors.items()
        }
        start = f'{{\n"format": {json.dumps(_FORMAT)},\n"version": {_VERSION},\n'
        return f'{start}"tensors": {format_json(tensors)},\n"values": {format_json(self.values)}}}\n'


def parse_index(text: bytes) -> Index:
    """Read and check the text of an index.

    Raises:
        ValueError: it is not the JSON of an index; the text names the key.
    """
    whole = _check_keys(parse_json(text), {"format", "version", "tensors", "values"}, "it")
    if whole["format"] != _FORMAT or type(whole["version"]) is not int:
        raise ValueError(
            f"its format is {brief(whole['format'])} {brief(whole['version'])}, not {_FORMAT!r} {_VERSION}"
        )
    if whole["version"] != _VERSION:
        raise ValueError(f"its version is {brief(whole['version'])}; this package reads version {_VERSION}")
    tensors = {key: _parse_entry(value, f"tensor {brief(key)}") for key, value in _object(whole, "tensors").items()}
    values = _object(whole, "values")
    for key, file in values.items():
        _check_name(file, _VALUES, f"the file of {brief(key)}")
    index = Index(tensors, values)
    for file, shards in index.shards.items():
        if len({key for key, _ in shards}) < len(shards):
            raise ValueError(f"{file} has a tensor twice")
        for (key, shard), (other, following) in itertools.pairwise(shards):
            if following.start < shard.stop:
                raise ValueError(f"{brief(key)} and {brief(other)} share bytes of {file}")
    return index


def check_shards(key: str, entry: CheckpointEntry) -> None:
    """Raise ValueError unless the shards lie inside a tensor, and each element is in exactly one of them."""
    for shard in entry.shards:
        if len(shard.offsets) != len(entry.shape) or len(shard.shape) != len(entry.shape):
            raise ValueError(f"{key} has {count_of(len(entry.shape), 'dim')}, but a shard of it has {len(shard.shape)}")
        if any(
            index + size > whole for index, size, whole in zip(shard.offsets, shard.shape, entry.shape, strict=True)
        ):
            raise ValueError(f"{key} has shape {list(entry.shape)}, but a shard of it reaches past that")
    filled = [shard for shard in entry.shards if math.prod(shard.shape)]
    covered, whole = sum(math.prod(item.shape) for item in filled), math.prod(entry.shape)
    if covered != whole:
        raise ValueError(f"{key} has {whole} elements, but its shards have {covered}")
    if len(filled) > 1:
        start = np.array([item.offsets for item in filled], dtype=np.int64)
        stop = start + np.array([item.shape for item in filled], dtype=np.int64)
        if len(find_overlaps(start, stop, start, stop)[0]) > len(filled):
            raise ValueError(f"two shards of {key} overlap")


def _parse_entry(value: Any, what: str) -> CheckpointEntry:
    fields = _check_keys(value, {"dtype", "shape", "shards"}, what)
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in DTYPES:
        raise ValueError(f"{what} has the dtype {brief(fields['dtype'])}; it must be one of {', '.join(DTYPES)}")
    if not isinstance(fields["shards"], list):
        raise ValueError(f"the shards of {what} are {brief(fields['shards'])}, not a list")
    dtype = DTYPES[fields["dtype"]]
    shards = tuple(_parse_shard(item, f"a shard of {what}", dtype.itemsize) for item in fields["shards"])
    entry = CheckpointEntry(dtype, _integers(fields["shape"], f"the shape of {what}"), shards)
    if math.prod(max(1, item) for item in entry.shape) * dtype.itemsize >= _MAX:
        raise ValueError(f"{what} has the shape {brief(list(entry.shape))}, which no tensor has")
    check_shards(what, entry)
    return entry


def _parse_shard(value: Any, what: str, itemsize: int) -> StoredShard:
    fields = _check_keys(value, {"file", "offsets", "shape", "bytes", "xxh3_128"}, what)
    _check_name(fields["file"], _TENSORS, f"the file of {what}")
    shape = _integers(fields["shape"], f"the shape of {what}")
    span = _integers(fields["bytes"], f"the bytes of {what}")
    if len(span) != 2 or span[1] - span[0] != math.prod(shape) * itemsize:
        raise ValueError(f"the bytes of {what} are {brief(list(span))}, but its shape is {brief(list(shape))}")
    if not isinstance(fields["xxh3_128"], str) or not _DIGEST.fullmatch(fields["xxh3_128"]):
        raise ValueError(f"the digest of {what} is {brief(fields['xxh3_128'])}, not 32 hexadecimal digits")
    return StoredShard(
        fields["file"], _integers(fields["offsets"], f"the offsets of {what}"), shape, *span, fields["xxh3_128"]
    )


def _check_keys(value: Any, keys: Iterable[str], what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {brief(value)}, not an object")
    if set(value) != set(keys):
        raise ValueError(f"{what} {compare_names(value, keys)}")
    return value


def _object(whole: Mapping[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(whole[key], dict):
        raise ValueError(f"{key} is {brief(whole[key])}, not an object")
    return dict(whole[key])


def _check_name(value: Any, pattern: re.Pattern[str], what: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{what} is {brief(value)}, which is no name of a file in a checkpoint")


def _integers(value: Any, what: str) -> tuple[int, ...]:
    is_short = isinstance(value, list) and len(value) <= _MAX_DIMS
    if not is_short or not all(type(item) is int and 0 <= item < _MAX for item in value):
        raise ValueError(f"{what} is {brief(value)}, not a list of at most {_MAX_DIMS} integers from 0 to 2**62 - 1")
    return tuple(value)
