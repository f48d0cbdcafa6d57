"""Read a checkpoint: tensors from safetensors files, values from JSON files, both under the keys of its index."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from reshard.errors import ArgumentError
from reshard.formatting import compare_names, format_names

from .file_digests import DIGESTS_FILE, check_file, digest_parts, explain_difference
from .index import INDEX_FILE, CheckpointEntry, Index, StoredShard, parse_index
from .plain_parameters import JoinedTensor, find_pieces
from .safetensors_dtypes import CODES
from .values import decode, parse_json


@dataclass(frozen=True)
class ShardRead:
    """A part of a shard, and the memory that it fills.

    Attributes:
        key: key of the tensor.
        shard: the shard to read from.
        slices: the part of the shard, one for each dim.
        target: a view of the same shape.
    """

    key: str
    shard: StoredShard
    slices: tuple[slice, ...]
    target: torch.Tensor


class StoredCheckpoint:
    """A checkpoint whose index has been read.

    Attributes:
        folder: folder of the checkpoint.
        tensors: ``{key: entry}``.
        values: keys of the other entries.

    Raises:
        ArgumentError: the index is damaged, or the file of digests lists other files than the index.
    """

    def __init__(self, folder: Path, digests: Mapping[str, str]) -> None:
        self.folder, self._digests = folder, digests
        file = folder / INDEX_FILE
        if INDEX_FILE not in digests:
            raise ArgumentError(f"{folder / DIGESTS_FILE} is damaged: it has no digest of {INDEX_FILE}")
        check_file(file, digests[INDEX_FILE])
        try:
            self._index: Index = parse_index(file.read_bytes())
        except (OSError, ValueError) as error:
            raise ArgumentError(f"cannot read {file}: {error}") from error
        if set(digests) != self._index.files | {INDEX_FILE}:
            difference = compare_names(digests, self._index.files | {INDEX_FILE})
            raise ArgumentError(f"{folder / DIGESTS_FILE}, compared with {INDEX_FILE}, {difference}")
        self.tensors: Mapping[str, CheckpointEntry] = self._index.tensors
        self.values: Collection[str] = self._index.values.keys()
        self._parsed: dict[str, dict[str, Any]] = {}

    def check_files(self, part: int, num_parts: int) -> None:
        """Compare a part of the files with their digests. Together, the parts are all files.

        Raises:
            ArgumentError: a file is missing, cannot be read, or has other bytes than at the save. The text names the
                tensors that have.
        """
        for name in sorted(self._index.files)[part::num_parts]:
            file, shards = self.folder / name, self._index.shards.get(name, [])
            actual, parts = digest_parts(file, [(shard.start, shard.stop) for _, shard in shards])
            changed = [key for (key, item), digest in zip(shards, parts, strict=True) if item.digest != digest]
            if changed:
                raise ArgumentError(
                    f"{file} is damaged: of its {len(shards)} tensors, these have other bytes than when saved: "
                    f"{format_names(changed)}"
                )
            if actual != self._digests[name]:
                raise ArgumentError(explain_difference(file, actual, self._digests[name]))

    def find_reads(self, copies: Sequence[tuple[str, torch.Tensor | JoinedTensor]]) -> list[ShardRead]:
        """The reads that fill tensors, each of the shape of its key. Compares the headers of the files with the index.

        Raises:
            ArgumentError: a file is not what the index says.
        """
        reads = []
        for key, tensor in copies:
            for offsets, local in find_pieces(tensor):
                for shard in self.tensors[key].shards:
                    overlap = [
                        (max(a, b), min(a + size, b + other))
                        for a, size, b, other in zip(offsets, local.shape, shard.offsets, shard.shape, strict=True)
                    ]
                    if all(low < high for low, high in overlap):
                        pairs = list(zip(overlap, offsets, shard.offsets, strict=True))
                        target = local[tuple(slice(low - index, high - index) for (low, high), index, _ in pairs)]
                        inside = tuple(slice(low - index, high - index) for (low, high), _, index in pairs)
                        reads.append(ShardRead(key, shard, inside, target))
        for file, reads_of_file in self._by_file(reads).items():
            with self._open(file) as opened:
                for read in reads_of_file:
                    stored = opened.get_slice(read.key)
                    dtype = CODES[self.tensors[read.key].dtype]
                    if tuple(stored.get_shape()) != read.shard.shape or stored.get_dtype() != dtype:
                        raise ArgumentError(
                            f"{self.folder / file} has {read.key} as {stored.get_dtype()} of shape "
                            f"{list(stored.get_shape())}, but {INDEX_FILE} as {dtype} of {list(read.shard.shape)}"
                        )
        return reads

    def read(self, reads: Sequence[ShardRead]) -> None:
        """Fill the memory of each read.

        Raises:
            ArgumentError: a file cannot be read.
        """
        for file, reads_of_file in self._by_file(reads).items():
            with self._open(file) as opened:
                for item in reads_of_file:
                    stored = opened.get_slice(item.key)[item.slices] if item.slices else opened.get_tensor(item.key)
                    item.target.copy_(stored)

    def read_value(self, key: str) -> Any:
        """The value of a key.

        Raises:
            ArgumentError: the file is no JSON of values; the text names the file and the key.
        """
        file = self.file_of(key)
        name = file.name
        try:
            if name not in self._parsed:
                parsed = parse_json(file.read_bytes())
                keys = {value for value, other in self._index.values.items() if other == name}
                if set(parsed) != keys:
                    raise ValueError(f"it {compare_names(parsed, keys)}")
                self._parsed[name] = parsed
            return decode(self._parsed[name][key], key, self.read_tensor)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"cannot read {file}: {error}") from error

    def read_tensor(self, key: str) -> torch.Tensor:
        """A whole tensor.

        Raises:
            ArgumentError: there is no tensor of this key, or its file cannot be read.
        """
        if key not in self.tensors:
            raise ArgumentError(f"{self.folder / INDEX_FILE} has no tensor {key}, to which a value refers")
        entry = self.tensors[key]
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read(self.find_reads([(key, tensor)]))
        return tensor

    def file_of(self, key: str) -> Path:
        """The file that holds a value; the index file if no value has the key."""
        return self.folder / self._index.values.get(key, INDEX_FILE)

    def _by_file(self, reads: Sequence[ShardRead]) -> dict[str, list[ShardRead]]:
        by_file: dict[str, list[ShardRead]] = {}
        for read in reads:
            by_file.setdefault(read.shard.file, []).append(read)
        return by_file

    @contextlib.contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        try:
            with safe_open(self.folder / file, framework="pt", device="cpu") as opened:
                yield opened
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ArgumentError(f"cannot read {self.folder / file}: {error}") from error
