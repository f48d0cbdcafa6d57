"""Proof that weights have landed: digests of what an engine holds beside those of what the trainer holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from reshard.errors import VerificationError
from reshard.sharding import Shards, find_overlaps, format_box
from reshard.weights.digests import add_digests, digest_region
from reshard.weights.manifest import Manifest
from reshard.weights.pieces import Piece, cut_entry

#: Digests of regions of each tensor, in the order of the pieces: ``[(number of the region, digest), ...]``.
Digests = list[list[tuple[int, int]]]


class Checker:
    """Computes and compares the digests of one destination model.

    Args:
        source, target: the models.
        pieces: what goes from one to the other.
    """

    def __init__(self, source: Manifest, target: Manifest, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._sources = [cut_entry(source.entries[piece.source]) for piece in pieces]
        self._targets = [cut_entry(target.entries[piece.target]) for piece in pieces]

    def digest_source(self, arrays: Mapping[str, torch.Tensor], rank: int) -> Digests:
        """What one rank of the source adds to the digests. The first holder of a region adds it.

        Args:
            arrays: the local shards of the source by name.
        """
        found: Digests = []
        for piece, source, target in zip(self._pieces, self._sources, self._targets, strict=True):
            tile, replica = np.nonzero((source.ranks == rank) & (source.ranks == source.ranks[:, :1]))
            lows, highs, at = source.start[tile], source.stop[tile], source.local[tile, replica]
            digests: dict[int, int] = {}
            for own, part in zip(*find_overlaps(lows, highs, target.start, target.stop), strict=True):
                lo, hi = np.maximum(lows[own], target.start[part]), np.minimum(highs[own], target.stop[part])
                digest = _digest(arrays[piece.source], piece, lo, hi, lo - lows[own] + at[own])
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
            array = arrays[piece.target] if len(tile) else None
            found.append([])
            for part, at in zip(tile.tolist(), target.local[tile, replica], strict=True):
                assert array is not None
                found[-1].append((part, _digest(array, piece, target.start[part], target.stop[part], at)))
        return found

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
                    f"{piece.target!r} {_format(target, part)} on rank {rank}"
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
            sent: by the trainer's names.
        """
        rows = [
            {part: digest for digests in landed.values() for part, digest in digests[i]}
            for i in range(len(self._pieces))
        ]
        for rank, digests_of_rank in sorted(landed.items()):
            for piece, row, digests in zip(self._pieces, rows, digests_of_rank, strict=True):
                if any(row[part] != digest for part, digest in digests):
                    raise VerificationError(f"{piece.target!r}: replicas differ, among them that of rank {rank}")
        wrong = [
            repr(piece.target)
            for piece, row in zip(self._pieces, rows, strict=True)
            if add_digests(row.values()) != sent.get(piece.source)
        ]
        if wrong:
            raise VerificationError(f"{', '.join(wrong[:5])}: the digest differs from that of what the trainer holds")


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


def add_parts(pieces: Sequence[Piece], digests: Digests) -> dict[str, int]:
    """The digest of each whole tensor of the source, from those of its regions."""
    return {
        piece.source: add_digests(digest for _, digest in rows) for piece, rows in zip(pieces, digests, strict=True)
    }


def _digest(array: torch.Tensor, piece: Piece, lo: np.ndarray, hi: np.ndarray, at: np.ndarray) -> int:
    view = array[tuple(slice(a, a + size) for a, size in zip(at.tolist(), (hi - lo).tolist(), strict=True))]
    return digest_region(view, tuple(zip(lo.tolist(), hi.tolist(), strict=True)), piece.shape)


def _format(shards: Shards, part: int) -> str:
    return format_box(list(zip(shards.start[part].tolist(), shards.stop[part].tolist(), strict=True)))
