"""The ranks that own boxes of a tensor, found for many boxes at once; and random marks that compare sets of boxes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from reshard.ragged import NO_RANK
from reshard.sharding import Layout, Tiles, axis_of, locate_points

_U64 = np.uint64


class Marks:
    """Random marks of boxes. Two sets of boxes have equal sums if they cover each element equally often.

    The mark of a box is the product over its dims of ``noise(stop) - noise(start)``, where noise maps each coordinate
    of a dim to a random 64-bit number. Expanded, it is a signed sum over the corners of the box. Two sets of boxes
    cover each element equally often if and only if their signed corners are the same; otherwise their sums are equal
    only by chance. Each box has two marks, and each check draws new noise, so the probability is below 2**-80 even for
    a plan made to deceive the checker.
    """

    def __init__(self) -> None:
        self._seeds = [[secrets.randbits(64) for _ in range(2)] for _ in range(2 * 8)]

    def of_side(self, start: np.ndarray, stop: np.ndarray, dim: int) -> np.ndarray:
        """``(sides, 2)`` factors that sides from ``start`` to ``stop`` in one dim contribute to the marks of boxes."""
        return np.stack([self._noise(stop, dim, i) - self._noise(start, dim, i) for i in range(2)], axis=1)

    def of_boxes(self, start: np.ndarray, stop: np.ndarray, ndim: np.ndarray | None = None) -> np.ndarray:
        """``(boxes, 2)`` marks of boxes; only the first ``ndim`` dims of each box count, if given."""
        marks = np.ones((len(start), 2), dtype=_U64)
        for dim in range(start.shape[1]):
            side = self.of_side(start[:, dim], stop[:, dim], dim)
            marks *= side if ndim is None else np.where((dim < ndim)[:, None], side, _U64(1))
        return marks

    def _noise(self, coordinate: np.ndarray, dim: int, which: int) -> np.ndarray:
        first, second = self._seeds[2 * dim + which]
        mixed = coordinate.astype(_U64) + _U64(first)
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = (mixed ^ (mixed >> _U64(30))) * _U64(factor) + _U64(second)
        return mixed ^ (mixed >> _U64(31))


class Owners:
    """The ranks that own boxes of one side of a tensor. An owner is an index into ``ranks``, which ascend."""

    def __init__(self, shards: Tiles) -> None:
        self._shards = shards
        self.ranks = np.array(sorted(shards.layout.ranks), dtype=np.int64)

    def indices_of(self, ranks: np.ndarray) -> np.ndarray:
        """The index of each rank, -1 for ranks outside the layout."""
        at = np.minimum(np.searchsorted(self.ranks, ranks), len(self.ranks) - 1)
        return np.where(self.ranks[at] == ranks, at, -1)

    @property
    def is_grid(self) -> bool:
        """Whether tiles are the product of cuts along each dim."""
        return self._shards.cuts is not None

    def inside(self, owner: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """``(boxes,)`` bool: whether each box lies inside one tile of ``owner``. Owner -1 owns nothing."""
        shards, has_owner = self._shards, owner >= 0
        if shards.cuts is None:
            tile = locate_points(start, shards.start, shards.stop)
            has_owner &= tile >= 0
            has_owner[has_owner] = (stop[has_owner] <= shards.stop[tile[has_owner]]).all(axis=1)
            keys = self._owned_tiles
            wanted = tile * len(self.ranks) + owner
            at = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
            return has_owner & (keys[at] == wanted) if len(keys) else np.zeros(len(owner), dtype=bool)
        for dim, cut in enumerate(shards.cuts):
            at = np.searchsorted(cut.lo, start[:, dim], side="right") - 1
            has_owner &= (stop[:, dim] <= cut.hi[at]) & (cut.coord[at] == self._parts[owner, dim])
        return has_owner

    def meets(self, owner: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """``(boxes,)`` bool: whether each box overlaps a tile of ``owner``; only for grids."""
        assert self._shards.cuts is not None
        has_owner = owner >= 0
        for dim, cut in enumerate(self._shards.cuts):
            count, part = len(cut.lo), self._parts[owner, dim]
            keys = np.sort(cut.coord * count + np.arange(count))
            first = np.searchsorted(cut.hi, start[:, dim], side="right")
            last = np.searchsorted(cut.lo, stop[:, dim], side="left")
            has_owner &= np.searchsorted(keys, part * count + last) > np.searchsorted(keys, part * count + first)
        return has_owner

    def tiles_of(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(tile, owner)`` of each tile that one of ``chosen`` owns, once per owner."""
        tile, owner = np.divmod(self._owned_tiles, len(self.ranks))
        mine = np.isin(owner, chosen)
        return tile[mine], owner[mine]

    def sum_marks(self, marks: Marks) -> np.ndarray:
        """``(ranks, 2)`` the sum of the marks of all tiles of each rank."""
        if self._shards.cuts is None:
            tile, owner = np.divmod(self._owned_tiles, len(self.ranks))
            return add_by(owner, marks.of_boxes(self._shards.start, self._shards.stop)[tile], len(self.ranks))
        total = np.ones((len(self.ranks), 2), dtype=_U64)
        for dim, cut in enumerate(self._shards.cuts):
            sides = add_by(cut.coord, marks.of_side(cut.lo, cut.hi, dim), len(cut.local_size))
            total *= sides[self._parts[:, dim]]
        return total

    @cached_property
    def _parts(self) -> np.ndarray:
        """``(ranks, ndim)`` the part of each dim that each rank owns; only for grids."""
        layout, cuts = self._shards.layout, self._shards.cuts
        assert isinstance(layout, Layout) and cuts is not None
        mesh = layout.mesh
        coords = np.unravel_index(np.arange(len(mesh.ranks)), mesh.sizes) if mesh.sizes else ()
        by_axis = dict(zip(mesh.axes, coords, strict=True))
        parts = np.zeros((len(mesh.ranks), len(cuts)), dtype=np.int64)
        for dim, steps in enumerate(layout.spec[: len(cuts)]):
            for step in steps:
                parts[:, dim] = parts[:, dim] * mesh.axis_size(axis_of(step)) + by_axis[axis_of(step)]
        return parts[np.argsort(np.array(mesh.ranks, dtype=np.int64))]

    @cached_property
    def _owned_tiles(self) -> np.ndarray:
        """``tile * len(ranks) + owner`` for each tile and each of its owners, ascending."""
        tile, replica = np.nonzero(self._shards.ranks != NO_RANK)
        return np.sort(tile * len(self.ranks) + self.indices_of(self._shards.ranks[tile, replica]))


def add_by(group: np.ndarray, values: np.ndarray, num_groups: int) -> np.ndarray:
    """``(groups, columns)`` sums of the rows of each group, modulo 2**64."""
    total = np.zeros((num_groups, values.shape[1]), dtype=_U64)
    for column in range(values.shape[1]):
        np.add.at(total[:, column], group, np.ascontiguousarray(values[:, column]))
    return total


def describe_pieces(shards: Tiles, rank: int, start: Sequence[int], stop: Sequence[int]) -> tuple[int, int]:
    """The number of tiles of a rank that a box overlaps, and the number of elements that they share."""
    tile_start, tile_stop, _ = shards.pieces_of(rank)
    size = np.minimum(tile_stop, np.array(stop)) - np.maximum(tile_start, np.array(start))
    shared = np.maximum(size, 0).prod(axis=1, dtype=np.int64)
    return int((shared > 0).sum()), int(shared.sum())
