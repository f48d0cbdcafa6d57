"""Proof that weights have landed: digests of what an engine holds beside those of what the trainer holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from reshard.errors import VerificationError
from reshard.sharding import Shards, find_overlaps, format_box
from reshard.weights.digests import add_digests, digest_region, flat_strides
from reshard.weights.manifest import Manifest
from reshard.weights.pieces import Piece, Side, cut_held

#: Digests of regions of each tensor, in the order of the pieces: ``[(number of the region, digest), ...]``.
Digests = list[list[tuple[int, int]]]


class Checker:
    """Computes and compares the digests of one destination model.

    Args:
        source, target: the models.
        pieces: what goes from one to the other.
    """

    def __init__(self, source: Manifest, target: Manifest, pieces: Sequence[Piece]) -> None:
        self._pieces, self._source, self._target = pieces, source, target
        self._sources = [cut_held(each.source.held(source.entries[each.source.name]), each.shape) for each in pieces]
        self._targets = [cut_held(each.target.held(target.entries[each.target.name]), each.shape) for each in pieces]

    def digest_source(self, arrays: Mapping[str, torch.Tensor], rank: int) -> Digests:
        """What one rank of the source adds to the digests. The first holder of a region adds it.

        Args:
            arrays: the local shards of the source by name.
        """
        found: Digests = []
        for piece, source, target in zip(self._pieces, self._sources, self._targets, strict=True):
            tile, replica = np.nonzero((source.ranks == rank) & (source.ranks == source.ranks[:, :1]))
            lows, highs, at = source.start[tile], source.stop[tile], source.local[tile, replica]
            view = view_of(piece.source, self._source, arrays, rank)
            digests: dict[int, int] = {}
            for own, part in zip(*find_overlaps(lows, highs, target.start, target.stop), strict=True):
                lo, hi = np.maximum(lows[own], target.start[part]), np.minimum(highs[own], target.stop[part])
                digest = self._digest(view, piece, lo, hi, lo - lows[own] + at[own])
                digests[int(part)] = add_digests((digest, digests.get(int(part), 0)))
            found.append(list(digests.items()))
        return found

    def digest_target(self, arrays: Mapping[str, torch.Tensor], rank: int) -> Digests:
        """The digests of what one rank of the destination holds.

        Args:
            arrays: the local shards of the destination by name, in the dtypes of the source.
        """
        found: Digests = []
        for piece, target in zip(self._pieces, self._targets, strict=True):
            tile, replica = np.nonzero(target.ranks == rank)
            view = view_of(piece.target, self._target, arrays, rank)
            found.append([])
            for part, at in zip(tile.tolist(), target.local[tile, replica], strict=True):
                found[-1].append((part, self._digest(view, piece, target.start[part], target.stop[part], at)))
        return found

    def _digest(self, view: torch.Tensor | None, piece: Piece, lo: np.ndarray, hi: np.ndarray, at: np.ndarray) -> int:
        """The digest of the region ``lo`` to ``hi`` of a piece, which lies at ``at`` in the view of it."""
        assert view is not None
        strides = flat_strides(self._source.entries[piece.source.name].shape)
        along = [strides[dim] for dim in piece.source.dims]
        first = sum(stride * start for stride, (start, _) in zip(strides, piece.source.box, strict=True))
        first += sum(stride * start for stride, start in zip(along, lo.tolist(), strict=True))
        slices = tuple(slice(a, a + size) for a, size in zip(at.tolist(), (hi - lo).tolist(), strict=True))
        return digest_region(view[slices], first, along)

    def compare(self, sent: Digests, landed: Mapping[int, Digests]) -> None:
        """Compare digests of the trainer with those of the ranks of an engine.

        Args:
            sent: of the whole trainer; see :func:`add_all`.
            landed: by rank.

        Raises:
            VerificationError: a region differs; the text names the tensor, the region and the rank.
        """
        expected = [dict(digests) for digests in sent]
        wrong: list[str] = []
        for rank, digests_of_rank in sorted(landed.items()):
            for piece, target, known, digests in zip(
                self._pieces, self._targets, expected, digests_of_rank, strict=True
            ):
                wrong += [
                    f"{piece.target.name!r} {_format(target, part)} on rank {rank}"
                    for part, digest in digests
                    if known.get(part) != digest
                ]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise VerificationError(
                f"{', '.join(wrong[:5])}{more}: the digest of what landed differs from that of what the trainer holds"
            )

    def compare_whole(self, sent: Mapping[str, int], landed: Mapping[int, Digests]) -> None:
        """As :meth:`compare`, with the digests of whole tensors of the trainer.

        Args:
            sent: by the trainer's names; see :meth:`add_tensors`.
        """
        rows: list[dict[int, int]] = [{} for _ in self._pieces]
        for rank, digests_of_rank in sorted(landed.items()):
            for piece, row, digests in zip(self._pieces, rows, digests_of_rank, strict=True):
                for part, digest in digests:
                    if row.setdefault(part, digest) != digest:
                        raise VerificationError(f"{piece.target.name!r}: the replica of rank {rank} differs")
        found = self.add_tensors([list(row.items()) for row in rows])
        wrong = [repr(name) for name, digest in found.items() if digest != sent.get(name, digest)]
        if wrong:
            raise VerificationError(f"{', '.join(wrong[:5])}: the digest differs from that of what the trainer holds")

    def add_tensors(self, digests: Digests) -> dict[str, int]:
        """The digest of each tensor of the source that travels whole, by name, from those of its regions."""
        of_side = {piece.source: row for piece, row in zip(self._pieces, digests, strict=True)}
        parts: dict[str, list[int]] = {}
        numel: dict[str, int] = {}
        for side, row in of_side.items():
            parts.setdefault(side.name, []).extend(digest for _, digest in row)
            numel[side.name] = numel.get(side.name, 0) + math.prod(hi - lo for lo, hi in side.box)
        shapes = {name: self._source.entries[name].shape for name in parts}
        return {name: add_digests(found) for name, found in parts.items() if numel[name] == math.prod(shapes[name])}


def add_all(digests: Sequence[Digests]) -> Digests:
    """The digests of a whole model from those of its ranks."""
    added: Digests = []
    for rows in zip(*digests, strict=True):
        of_part: dict[int, list[int]] = {}
        for row in rows:
            for part, digest in row:
                of_part.setdefault(part, []).append(digest)
        added.append([(part, add_digests(found)) for part, found in sorted(of_part.items())])
    return added


def view_of(side: Side, model: Manifest, arrays: Mapping[str, torch.Tensor], rank: int) -> torch.Tensor | None:
    """What a rank holds of one side of a piece; None if it holds nothing of it.

    Args:
        model: the source or the destination. arrays: the local shards of the rank by name.
    """
    entry = model.entries[side.name]
    if rank not in dict(side.held(entry)):
        return None
    return side.view(arrays[side.name], dict(entry.held)[rank])


def _format(shards: Shards, part: int) -> str:
    return format_box(list(zip(shards.start[part].tolist(), shards.stop[part].tolist(), strict=True)))
