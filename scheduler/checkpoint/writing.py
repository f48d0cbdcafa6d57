"""The plan of writing a checkpoint: the share of each rank, the same on all ranks, from outlines of their tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from reshard.errors import ArgumentError, DisagreementError

from .file_digests import digest_parts, write_synced
from .index import CheckpointEntry, Index, StoredShard, check_shards
from .plain_parameters import JoinedTensor, find_pieces
from .safetensors_dtypes import CODES, DTYPES
from .values import encode, format_json

#: Size from which on a rank begins another file. A file may need its size in memory while it is written.
FILE_BYTES = 2**32
#: A box of a tensor: its offsets and its sizes.
ShardBox = tuple[tuple[int, ...], tuple[int, ...]]


class Entries:
    """The entries of a checkpoint that one rank has."""

    def __init__(self) -> None:
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.pieces: dict[str, dict[ShardBox, torch.Tensor]] = {}
        self.values: dict[str, Any] = {}
        self._inside: dict[str, list[str]] = {}

    def add(self, key: str, tensor: torch.Tensor | JoinedTensor) -> None:
        """Add a tensor, of which this rank may have a part.

        Raises:
            ArgumentError: its dtype cannot be saved.
        """
        if tensor.dtype not in CODES:
            raise ArgumentError(f"{key} has the dtype {tensor.dtype}, which a checkpoint cannot hold")
        self._dtypes[key], self._shapes[key] = tensor.dtype, tuple(tensor.shape)
        self.pieces[key] = {(offsets, tuple(local.shape)): local for offsets, local in find_pieces(tensor)}

    def add_value(self, key: str, value: Any) -> None:
        """Add a value that is no tensor, but may contain some.

        Raises:
            ArgumentError: it cannot be saved.
        """
        tensors: dict[str, torch.Tensor] = {}
        self.values[key] = encode(value, key, tensors)
        self._inside[key] = [*tensors]
        for name, tensor in tensors.items():
            if name in self.pieces:
                raise ArgumentError(f"there are two tensors {name} to save; rename one")
            self.add(name, tensor)

    def outline(self) -> Any:
        """Names, dtypes, shapes and boxes, as JSON can hold them."""
        tensors = {key: [CODES[self._dtypes[key]], self._shapes[key], [*pieces]] for key, pieces in self.pieces.items()}
        return {"tensors": tensors, "values": self._inside}


@dataclass(frozen=True)
class WritePlan:
    """The share of each rank in a checkpoint.

    Attributes:
        tensors: ``{key: entry}`` without shards.
        pieces: ``{rank: [(key, box), ...]}``.
        values: ``{rank: [key, ...]}``.
    """

    tensors: Mapping[str, CheckpointEntry]
    pieces: Mapping[int, Sequence[tuple[str, ShardBox]]]
    values: Mapping[int, Sequence[str]]

    def make_index(self, written: Mapping[int, Sequence[Any]]) -> Index:
        """The index, from what :func:`write_entries` returned on each rank."""
        shards: dict[str, list[StoredShard]] = {key: [] for key in self.tensors}
        for rank, item in written.items():
            for (key, (offsets, shape)), (file, start, stop, digest) in zip(self.pieces[rank], item, strict=True):
                shards[key].append(StoredShard(file, offsets, shape, start, stop, digest))
        tensors = {
            key: CheckpointEntry(tensor.dtype, tensor.shape, tuple(shards[key])) for key, tensor in self.tensors.items()
        }
        return Index(tensors, {key: values_file(rank) for rank, keys in self.values.items() for key in keys})


def plan_writes(outlines: Mapping[int, Any]) -> WritePlan:
    """Choose a rank for each box of each tensor, and for each value.

    The first rank that has a value writes the value. Of the ranks that have a box, the rank with the fewest bytes so
    far writes the box.

    Raises:
        DisagreementError: ranks have different shapes or dtypes of a tensor, or their boxes are not the whole tensor.
    """
    owners: dict[str, int] = {}
    for rank, outline in outlines.items():
        for key in outline["values"]:
            owners.setdefault(key, rank)
    first: dict[str, tuple[int, CheckpointEntry]] = {}
    holders: dict[tuple[str, ShardBox], list[int]] = {}
    for rank, outline in outlines.items():
        dropped = {name for key, names in outline["values"].items() if owners[key] != rank for name in names}
        for key, (code, shape, boxes) in outline["tensors"].items():
            if key in dropped:
                continue
            entry = CheckpointEntry(DTYPES[code], tuple(shape))
            other, known = first.setdefault(key, (rank, entry))
            if known != entry:
                raise DisagreementError(
                    f"ranks {other} and {rank} save {key} as {known.dtype} of shape {list(known.shape)} and as "
                    f"{entry.dtype} of {list(entry.shape)}"
                )
            for offsets, sizes in boxes:
                holders.setdefault((key, (tuple(offsets), tuple(sizes))), []).append(rank)
    tensors = {key: entry for key, (_, entry) in first.items()}
    _check_boxes(tensors, holders)
    pieces: dict[int, list[tuple[str, ShardBox]]] = {rank: [] for rank in outlines}
    num_bytes = dict.fromkeys(outlines, 0)
    for (key, box), ranks in holders.items():
        chosen = min(ranks, key=lambda rank: (num_bytes[rank], rank))
        pieces[chosen].append((key, box))
        num_bytes[chosen] += math.prod(box[1]) * tensors[key].dtype.itemsize
    values = {rank: [key for key, owner in owners.items() if owner == rank] for rank in outlines}
    return WritePlan(tensors, pieces, values)


def _check_boxes(tensors: Mapping[str, CheckpointEntry], holders: Mapping[tuple[str, ShardBox], Sequence[int]]) -> None:
    boxes: dict[str, list[ShardBox]] = {key: [] for key in tensors}
    for key, box in holders:
        boxes[key].append(box)
    for key, entry in tensors.items():
        try:
            check_shards(
                key,
                CheckpointEntry(entry.dtype, entry.shape, tuple(StoredShard("", *box, 0, 0, "") for box in boxes[key])),
            )
        except ValueError as error:
            raise DisagreementError(f"the ranks do not save a whole tensor: {error}") from error


def values_file(rank: int) -> str:
    """The name of a rank's file of values."""
    return f"rank-{rank:05d}.json"


def write_entries(
    folder: Path, rank: int, entries: Entries, pieces: Sequence[tuple[str, ShardBox]], values: Sequence[str]
) -> tuple[dict[str, str], list[tuple[str, int, int, str]]]:
    """Write the files of this rank.

    Returns:
        ``{file name: SHA-256 digest}``, and ``(file name, start, stop, digest)`` of the bytes of each piece.

    Raises:
        ArgumentError: a file cannot be written. OSError: the same.
    """
    digests: dict[str, str] = {}
    shards: dict[tuple[str, ShardBox], tuple[str, int, int, str]] = {}
    for number, group in enumerate(_divide(pieces, entries)):
        name = f"rank-{rank:05d}-{number:03d}.safetensors"
        _write_tensors(folder / name, {key: (box[0], entries.pieces[key][box]) for key, box in group})
        boxes, places = dict(group), _find_places(folder / name)
        order = sorted(places, key=places.__getitem__)
        digests[name], parts = digest_parts(folder / name, [places[key] for key in order])
        for key, digest in zip(order, parts, strict=True):
            shards[key, boxes[key]] = (name, *places[key], digest)
    if values:
        name = values_file(rank)
        write_synced(folder / name, format_json({key: entries.values[key] for key in values}))
        digests[name], _ = digest_parts(folder / name)
    return digests, [shards[piece] for piece in pieces]


def _divide(pieces: Sequence[tuple[str, ShardBox]], entries: Entries) -> Iterator[list[tuple[str, ShardBox]]]:
    """The pieces of each file, in which a key occurs once, as torch's reader of safetensors expects it."""
    rest = list(pieces)
    while rest:
        group: dict[str, ShardBox] = {}
        later, num_bytes = [], 0
        for key, box in rest:
            if key in group or num_bytes >= FILE_BYTES:
                later.append((key, box))
            else:
                group[key] = box
                num_bytes += entries.pieces[key][box].nbytes
        yield [*group.items()]
        rest = later


def _write_tensors(file: Path, pieces: Mapping[str, tuple[tuple[int, ...], torch.Tensor]]) -> None:
    """Write ``{key: (offsets, tensor)}``, with the offsets where ``HuggingFaceStorageReader`` looks for them."""
    tensors, seen = {}, set()
    for key, (_, tensor) in pieces.items():
        tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[key] = tensor.clone() if storage in seen else tensor  # safetensors refuses shared memory
        seen.add(storage)
    offsets = {key: {"saved_offsets": index} for key, (index, _) in pieces.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        raise ArgumentError(f"cannot write {file}: {error}") from error
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _find_places(file: Path) -> dict[str, tuple[int, int]]:
    """The place of each tensor in a safetensors file that was just written: ``(start, stop)`` in bytes."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    starts = {key: value["data_offsets"] for key, value in header.items() if key != "__metadata__"}
    return {key: (8 + size + start, 8 + size + stop) for key, (start, stop) in starts.items()}
