"""Pieces: the regions of a source model that travel, and where they go in a destination model."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.api.casts import check_cast
from reshard.errors import ArgumentError
from reshard.formatting import count_of
from reshard.sharding import Box, RegionLayout, Shards, TensorSpec, cut_shards
from reshard.weights.manifest import Entry, Manifest

#: Number of names that an error lists.
MAX_NAMES = 10


@dataclass(frozen=True)
class Piece:
    """A tensor of the source model and the tensor of the destination model that it becomes.

    Attributes:
        source, target: names in both models. For tied tensors, the first name.
        shape, dtype: of the whole tensor, in the source's dtype.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    dtype: str


def match(source: Manifest, target: Manifest, what: str) -> list[Piece]:
    """The pieces that give every tensor of the destination its values.

    Args:
        what: the destination model, in errors.

    Raises:
        ArgumentError: a tensor is missing on one side, has another shape, cannot be cast, or is tied on the destination
            to one that differs on the source. The text lists the first names.
    """
    names_of: dict[str, list[str]] = {}
    for name in target.entries:
        names_of.setdefault(target.tied.get(name, name), []).append(name)
    pieces, missing = [], []
    used: set[str] = set()
    for first, names in names_of.items():
        known = [name for name in names if name in source.entries]
        if not known:
            missing.append(first)
            continue
        used.update(known)
        origins = {source.tied.get(name, name) for name in known}
        if len(origins) > 1:
            raise ArgumentError(
                f"{what} ties {' and '.join(map(repr, known))}, which are different tensors of the source"
            )
        piece = _match_tensor(origins.pop(), first, source, target, what)
        if math.prod(piece.shape):
            pieces.append(piece)
    origins = {source.tied.get(name, name) for name in used}
    extra = [name for name in source.entries if source.tied.get(name, name) not in origins]
    for found, text in ((missing, "that the source does not have"), (extra, "only the source has")):
        if found:
            raise ArgumentError(f"{what}: {_list_names(found)} {text}")
    if not pieces:
        raise ArgumentError(f"{what} has no tensors")
    return pieces


def _match_tensor(name: str, target_name: str, source: Manifest, target: Manifest, what: str) -> Piece:
    given, wanted = source.entries[name], target.entries[target_name]
    if given.shape != wanted.shape:
        raise ArgumentError(
            f"{what}: {target_name!r} has shape {list(wanted.shape)}, but {list(given.shape)} on the source"
        )
    check_cast(given.dtype, wanted.dtype, repr(target_name))
    return Piece(name, target_name, given.shape, given.dtype)


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:MAX_NAMES]))
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{count_of(len(names), 'tensor')} ({shown}{rest})"


class Specs:
    """Makes the tensors of a plan. Equal layouts are one object, so that planning treats their tensors at once."""

    def __init__(self, source: Manifest, targets: Mapping[int, Manifest]) -> None:
        """Args:
        source: the source model, whose ranks come first in the plan.
        targets: the destination models by the first of their ranks in the plan.
        """
        self._source, self._targets = source, targets
        self._layout = functools.cache(_layout_of)

    def spec(self, source: str, targets: Mapping[int, str], name: str) -> TensorSpec:
        """The tensor of a plan.

        Args:
            source: its name in the source model.
            targets: its name in each destination model, by the first rank of the model.
            name: of the tensor in the plan.
        """
        entry = self._source.entries[source]
        wanted = tuple((first, self._targets[first].entries[target].held) for first, target in sorted(targets.items()))
        ndim = len(entry.shape)
        return TensorSpec(
            entry.shape, entry.dtype, self._layout(((0, entry.held),), ndim), self._layout(wanted, ndim), name
        )


def _layout_of(held: tuple[tuple[int, tuple[tuple[int, tuple[Box, ...]], ...]], ...], ndim: int) -> RegionLayout:
    rows = {first + rank: boxes for first, ranks in held for rank, boxes in ranks}
    return RegionLayout(rows, join_dim=max(map(_join_dim, rows.values())), ndim=ndim)


def _join_dim(boxes: Sequence[Box]) -> int:
    """The dim along which the regions of a rank are joined in its local array."""
    for dim in range(len(boxes[0])):
        if any(box[dim] != boxes[0][dim] for box in boxes):
            return dim
    return 0


@functools.lru_cache(maxsize=4096)
def cut_entry(entry: Entry) -> Shards:
    """The disjoint regions of a tensor, with the ranks of its model that hold each."""
    return cut_shards(_layout_of(((0, entry.held),), len(entry.shape)), entry.shape)
