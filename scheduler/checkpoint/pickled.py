"""Read a checkpoint that ``torch.distributed.checkpoint`` wrote in its own format, which is pickled.

Earlier versions of this package wrote checkpoints in this format. Unpickling can run any code.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from reshard.errors import ArgumentError

from .file_digests import check_file
from .index import CheckpointEntry
from .plain_parameters import JoinedTensor, find_pieces

#: Entries that earlier versions pickled before torch did.
_PICKLED_TWICE = ("engine", "lr_scheduler", "loader.", "rng.")


class PickledCheckpoint:
    """A checkpoint in the format of ``torch.distributed.checkpoint``, whose file ``.metadata`` has been unpickled.

    It has the attributes and methods of :class:`~.stored.StoredCheckpoint`.

    Args:
        digests: digests of its files; empty if another program wrote it.

    Raises:
        ArgumentError: a file with a digest has changed, or ``.metadata`` cannot be read.
    """

    def __init__(self, folder: Path, digests: Mapping[str, str]) -> None:
        self.folder, self._digests = folder, digests
        file = folder / ".metadata"
        if digests:
            check_file(file, digests[file.name])
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            known = self._metadata.state_dict_metadata.items()
        except Exception as error:  # pickle raises any kind
            raise ArgumentError(f"cannot read {file}: {type(error).__name__}: {error}") from error
        self.tensors: Mapping[str, CheckpointEntry] = {
            key: CheckpointEntry(item.properties.dtype, tuple(item.size))
            for key, item in known
            if isinstance(item, TensorStorageMetadata)
        }
        self.values: Collection[str] = {key for key, item in known if not isinstance(item, TensorStorageMetadata)}

    def check_files(self, part: int, num_parts: int) -> None:
        """Compare a part of the files that have digests with these."""
        for name, digest in sorted(self._digests.items())[part::num_parts]:
            check_file(self.folder / name, digest)

    def find_reads(self, copies: Sequence[tuple[str, torch.Tensor | JoinedTensor]]) -> Sequence[Any]:
        """The reads that fill some tensors."""
        return copies

    def read(self, reads: Sequence[Any]) -> None:
        """Fill tensors. Raises ArgumentError if a file cannot be read."""
        for key, tensor in reads:
            pieces = find_pieces(tensor)
            chunks = [ChunkStorageMetadata(torch.Size(index), local.shape) for index, local in pieces]
            items = create_read_items_for_chunk_list(key, self._metadata.state_dict_metadata[key], chunks)
            self._read(key, items, _Target([local for _, local in pieces]))

    def read_value(self, key: str) -> Any:
        """The unpickled value of a key. Raises ArgumentError if its file cannot be read."""
        at, nowhere = MetadataIndex(key), torch.Size((0,))
        target = _Target([])
        self._read(key, [ReadItem(LoadItemType.BYTE_IO, at, nowhere, at, nowhere, nowhere)], target)
        return target.value

    def read_tensor(self, key: str) -> torch.Tensor:
        """A whole tensor. Raises ArgumentError if its file cannot be read."""
        tensor = torch.empty(self.tensors[key].shape, dtype=self.tensors[key].dtype, device="cpu")
        self.read([(key, tensor)])
        return tensor

    def file_of(self, _: str) -> Path:
        """The folder, in which a value may be in any file."""
        return self.folder

    def _read(self, key: str, items: list[ReadItem], target: _Target) -> None:
        try:
            self._reader.read_data(LoadPlan(items), target).wait()  # type: ignore[arg-type]
        except Exception as error:  # torch and pickle raise any kind
            raise ArgumentError(f"cannot read {key} in the checkpoint {self.folder}: {error}") from error


class _Target:
    """The targets of torch's reads: the part of its ``LoadPlanner`` that ``read_data`` calls."""

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self._pieces = pieces
        self.value: Any = None

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        """The memory that an item fills."""
        inside = zip(item.dest_offsets, item.lengths, strict=True)
        return self._pieces[item.dest_index.index or 0][tuple(slice(index, index + size) for index, size in inside)]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """The memory is filled."""

    def load_bytes(self, item: ReadItem, value: Any) -> None:
        """Unpickle a value."""
        self.value = torch.load(value, weights_only=False)
        if item.dest_index.fqn.startswith(_PICKLED_TWICE):
            self.value = pickle.loads(self.value)
