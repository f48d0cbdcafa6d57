"""Proof that weights have arrived: digests of an engine's weights, compared with digests of the trainer's weights."""

from __future__ import annotations

import base64
import functools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch

from reshard.errors import RemoteError, VerificationError
from reshard.sharding import Tiles, find_overlaps, format_box
from reshard.weights.model.manifest import Manifest
from reshard.weights.model.pieces import RegionPair, Side, cut_held
from reshard.weights.model.region_digests import LocatedRegions, add_digests, flat_strides

#: The ascending numbers of regions of a destination model, and the digests of these regions. Both are the bytes of an
#: array in base 64, which takes a small part of the time of as many numbers in JSON. ``["", ""]`` has no regions.
RegionDigests = list[str]

#: Number of sets of arrays whose regions a :class:`Checker` keeps.
MAX_LOCATED = 4


@dataclass(frozen=True)
class _Region:
    """A region that one rank digests.

    Attributes:
        part: number of the region of the destination that contains it.
        start: its first indices in the piece.
        slices: its slices in the rank's part of the piece.
    """

    part: int
    start: list[int]
    slices: tuple[slice, ...]

    @classmethod
    def of(cls, part: int, lo: np.ndarray, hi: np.ndarray, at: np.ndarray) -> _Region:
        slices = tuple(slice(a, a + size) for a, size in zip(at.tolist(), (hi - lo).tolist(), strict=True))
        return cls(part, lo.tolist(), slices)


@dataclass(frozen=True)
class _Located:
    """The regions in the memory of a rank.

    Attributes:
        arrays, memory: the local shards, and their addresses. A shard may be moved in place, as FSDP does.
        regions: the regions to digest.
        numbers: the numbers of the regions of the destination, ascending.
        where: for each of ``regions``, its index in ``numbers``.
    """

    arrays: dict[str, torch.Tensor]
    memory: list[int]
    regions: LocatedRegions
    numbers: np.ndarray
    where: np.ndarray

    def is_of(self, arrays: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the same tensors in the same memory."""
        own = self.arrays
        if len(own) != len(arrays) or not all(map(is_, own.values(), map(arrays.get, own))):
            return False
        return [array.data_ptr() for array in own.values()] == self.memory


class Checker:
    """Computes and compares the digests of one destination model.

    Args:
        source, target: the models.
        pieces: the pieces that travel from the source to the target.
    """

    def __init__(self, source: Manifest, target: Manifest, pieces: Sequence[RegionPair]) -> None:
        self._pieces, self._source, self._target = pieces, source, target
        self._sources = [
            cut_held(piece.source.held(source.entries[piece.source.name]), piece.shape) for piece in pieces
        ]
        self._targets = [
            cut_held(piece.target.held(target.entries[piece.target.name]), piece.shape) for piece in pieces
        ]
        self._regions: dict[tuple[bool, int], list[list[_Region]]] = {}
        self._located: OrderedDict[Any, _Located] = OrderedDict()
        self._last: dict[tuple[bool, int], _Located] = {}
        #: Number of the first region of each piece; the last entry is the number of regions.
        self._first = np.cumsum([0, *(len(target.start) for target in self._targets)])

    def digest_source(self, arrays: Mapping[str, torch.Tensor], rank: int) -> RegionDigests:
        """The share of one source rank in the digests. The first holder of a region adds the digest of the region.

        Args:
            arrays: the local shards of the source by name.
        """
        return self._digest_side(arrays, rank, is_source=True)

    def digest_target(self, arrays: Mapping[str, torch.Tensor], rank: int) -> RegionDigests:
        """The digests of the regions that one rank of the destination holds.

        Args:
            arrays: the local shards of the destination by name, in the dtypes of the source.
        """
        return self._digest_side(arrays, rank, is_source=False)

    def _digest_side(self, arrays: Mapping[str, torch.Tensor], rank: int, is_source: bool) -> RegionDigests:
        located = self._last.get((is_source, rank))
        if located is None or not located.is_of(arrays):
            located = self._last[is_source, rank] = self._locate(arrays, rank, is_source)
        digests = located.regions.find_digests()
        return _to_text(located.numbers, add_digests(digests, located.where, len(located.numbers)))

    def _locate(self, arrays: Mapping[str, torch.Tensor], rank: int, is_source: bool) -> _Located:
        """The regions in the memory of a rank. Kept for arrays in the same memory."""
        memory = tuple(
            (name, array.data_ptr(), array.dtype, array.shape, array.stride()) for name, array in arrays.items()
        )
        key = is_source, rank, memory
        if key not in self._located:
            if (is_source, rank) not in self._regions:
                self._regions[is_source, rank] = [
                    self._find_regions(n, rank, is_source) for n in range(len(self._pieces))
                ]
            model = self._source if is_source else self._target
            located, numbers = LocatedRegions(), []
            regions_of_pieces = zip(
                self._pieces, self._first[:-1].tolist(), self._regions[is_source, rank], strict=True
            )
            for piece, number, regions in regions_of_pieces:
                view = view_of(piece.source if is_source else piece.target, model, arrays, rank) if regions else None
                strides = flat_strides(self._source.entries[piece.source.name].shape)
                given = piece.source.region
                along = [strides[dim] * given[dim].step for dim in piece.source.dims]
                begin = sum(stride * indices[0] for stride, indices in zip(strides, given, strict=True))
                for region in regions:
                    assert view is not None
                    first = begin + sum(stride * start for stride, start in zip(along, region.start, strict=True))
                    located.add(view[region.slices], first, along)
                    numbers.append(number + region.part)
            ascending, where = np.unique(np.array(numbers, dtype=np.int64), return_inverse=True)
            addresses = [array.data_ptr() for array in arrays.values()]
            self._located[key] = _Located(dict(arrays), addresses, located, ascending, where)
            if len(self._located) > MAX_LOCATED:
                self._located.popitem(last=False)
        return self._located[key]

    def _find_regions(self, number: int, rank: int, is_source: bool) -> list[_Region]:
        """The regions of a piece that a rank digests."""
        target = self._targets[number]
        if not is_source:
            tile, replica = np.nonzero(target.ranks == rank)
            rows = zip(tile.tolist(), target.start[tile], target.stop[tile], target.local[tile, replica], strict=True)
            return [_Region.of(part, lo, hi, at) for part, lo, hi, at in rows]
        source = self._sources[number]
        tile, replica = np.nonzero((source.ranks == rank) & (source.ranks == source.ranks[:, :1]))
        lows, highs, at = source.start[tile], source.stop[tile], source.local[tile, replica]
        regions = []
        for own, part in zip(*find_overlaps(lows, highs, target.start, target.stop), strict=True):
            lo, hi = np.maximum(lows[own], target.start[part]), np.minimum(highs[own], target.stop[part])
            regions.append(_Region.of(int(part), lo, hi, lo - lows[own] + at[own]))
        return regions

    def compare(self, sent: RegionDigests, landed: Mapping[int, RegionDigests]) -> None:
        """Compare digests of the trainer with those of the ranks of an engine.

        Args:
            sent: digests of the whole trainer; see :func:`add_all`.
            landed: digests by rank.

        Raises:
            VerificationError: a region differs; the text names the tensor, the region and the rank.
        """
        known, is_known = self._fill(sent)
        wrong: list[str] = []
        for rank, digests in sorted(landed.items()):
            numbers, values = _to_arrays(digests)
            differs = ~is_known[numbers] | (known[numbers] != values)
            wrong += [f"{self._describe(number)} on rank {rank}" for number in numbers[differs].tolist()]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise VerificationError(
                f"{', '.join(wrong[:5])}{more}: the digest of what landed differs from that of what the trainer holds"
            )

    def compare_whole(self, sent: Mapping[str, int], landed: Mapping[int, RegionDigests]) -> None:
        """Like :meth:`compare`, with the digests of whole tensors of the trainer.

        Args:
            sent: digests by the trainer's names; see :meth:`add_tensors`.

        Raises:
            VerificationError: a tensor differs. RemoteError: a tensor has no digest, or does not travel whole.
        """
        known, is_known = self._fill(["", ""])
        for rank, digests in sorted(landed.items()):
            numbers, values = _to_arrays(digests)
            differs = is_known[numbers] & (known[numbers] != values)
            if differs.any():
                wrong_region = self._describe(int(numbers[differs][0]))
                raise VerificationError(f"{wrong_region}: the replica of rank {rank} differs")
            known[numbers], is_known[numbers] = values, True
        own_digests = self.add_tensors(_to_text(np.flatnonzero(is_known), known[is_known]))
        unknown = [
            piece.source.name for piece in self._pieces if piece.source.name not in own_digests.keys() & sent.keys()
        ]
        if unknown:
            raise RemoteError(f"the digest of {unknown[0]!r} is not known, so only the trainer can prove it")
        wrong = [repr(name) for name, digest in own_digests.items() if digest != sent[name]]
        if wrong:
            raise VerificationError(f"{', '.join(wrong[:5])}: the digest differs from that of what the trainer holds")

    def add_tensors(self, digests: RegionDigests) -> dict[str, int]:
        """The digest of each tensor of the source that travels whole, by name: the sum over its regions."""
        numbers, values = _to_arrays(digests)
        tensor, names = self._tensors
        of_tensor = tensor[numbers]
        sums = add_digests(values[of_tensor >= 0], of_tensor[of_tensor >= 0], len(names))
        return {name: digest for name, digest in zip(names, sums.tolist(), strict=True) if name is not None}

    @functools.cached_property
    def _tensors(self) -> tuple[np.ndarray, list[str | None]]:
        """The number of the source tensor of each region, and their names; None if it does not travel whole.

        A region that travels several times counts once; the other times its number is -1.
        """
        numel: dict[str, int] = {}
        number: dict[str, int] = {}
        seen: set[Side] = set()
        tensor = np.full(self._first[-1], -1)
        ends = zip(self._pieces, self._targets, self._first[:-1], self._first[1:], strict=True)
        for piece, target, begin, end in ends:
            if piece.source not in seen:
                seen.add(piece.source)
                name = piece.source.name
                # An engine may hold only a part of a piece. Then there are digests of that part alone.
                numel[name] = numel.get(name, 0) + int((target.stop - target.start).prod(axis=1).sum())
                tensor[begin:end] = number.setdefault(name, len(number))
        shapes = {name: self._source.entries[name].shape for name in numel}
        return tensor, [name if numel[name] == math.prod(shapes[name]) else None for name in numel]

    def _fill(self, digests: RegionDigests) -> tuple[np.ndarray, np.ndarray]:
        """The digest of each region, and whether there is one."""
        known, is_known = np.zeros(self._first[-1], dtype=np.uint64), np.zeros(self._first[-1], dtype=bool)
        numbers, values = _to_arrays(digests)
        known[numbers], is_known[numbers] = values, True
        return known, is_known

    def _describe(self, number: int) -> str:
        """The name of a tensor of the destination, and a region of its piece."""
        piece = int(np.searchsorted(self._first, number, side="right")) - 1
        return f"{self._pieces[piece].target.name!r} {_format(self._targets[piece], number - int(self._first[piece]))}"


def add_all(digests: Sequence[RegionDigests]) -> RegionDigests:
    """The digests of a whole model from those of its ranks."""
    arrays = [_to_arrays(of_rank) for of_rank in digests]
    numbers, where = np.unique(np.concatenate([names for names, _ in arrays]), return_inverse=True)
    sums = add_digests(np.concatenate([values for _, values in arrays]), where, len(numbers))
    return _to_text(numbers, sums)


def _to_text(numbers: np.ndarray, values: np.ndarray) -> RegionDigests:
    arrays = numbers.astype("<i4"), values.astype("<u8")
    return [base64.b64encode(array.tobytes()).decode() for array in arrays]


def _to_arrays(digests: RegionDigests) -> tuple[np.ndarray, np.ndarray]:
    numbers, values = (base64.b64decode(text, validate=True) for text in digests)
    return np.frombuffer(numbers, "<i4").astype(np.int64), np.frombuffer(values, "<u8").astype(np.uint64)


def view_of(side: Side, model: Manifest, arrays: Mapping[str, torch.Tensor], rank: int) -> torch.Tensor | None:
    """The part of one side of a piece that a rank holds, as a view; None if it holds no part.

    Args:
        model: the source or the destination.
        arrays: the local shards of the rank by name.
    """
    entry = model.entries[side.name]
    if rank not in dict(side.held(entry)):
        return None
    return side.view(arrays[side.name], dict(entry.held)[rank])


def _format(shards: Tiles, part: int) -> str:
    return format_box(list(zip(shards.start[part].tolist(), shards.stop[part].tolist(), strict=True)))
