"""Which ranks own which boxes of a tensor, for many boxes at once; and marks by which sums of boxes are compared."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from reshard.ragged import NO_RANK
from reshard.sharding.box_search import locate_points
from reshard.sharding.layout import Layout
from reshard.sharding.spec import axis_of
from reshard.sharding.tiles import Shards

_U64 = np.uint64


class Marks:
    """Marks of boxes whose sums are equal where the boxes cover the same elements equally often.

    The mark of a box is the product over its dims of ``noise(stop) - noise(start)``, where noise gives each coordinate
    of a dim a random number of 64 bits. Multiplied out, that is a sum over the corners of the box with signs. Boxes
    cover every element as often as other boxes do exactly if the signed corners of both are the same; sums over other
    corners are equal by chance only. There are two marks per box, and the noise is drawn anew for each check, so that
    chance is less than 2**-80, whoever wrote the plan.
    """

    def __init__(self) -> None:
        self._seeds = [[secrets.randbits(64) for _ in range(2)] for _ in range(2 * 8)]

    def of_side(self, start: np.ndarray, stop: np.ndarray, dim: int) -> np.ndarray:
        """``(sides, 2)`` what a side from ``start`` to ``stop`` in one dim gives to the mark of its box."""
        return np.stack([self._noise(stop, dim, i) - self._noise(start, dim, i) for i in range(2)], axis=1)

    def of_boxes(self, start: np.ndarray, stop: np.ndarray, ndim: np.ndarray | None = None) -> np.ndarray:
        """``(boxes, 2)`` their marks; of a box only the first ``ndim`` dims count, if given."""
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
    """Who owns which boxes of one side of a tensor. Ranks are named by their place in ``ranks``, which ascend."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.ranks = np.array(sorted(shards.layout.ranks), dtype=np.int64)

    def places_of(self, ranks: np.ndarray) -> np.ndarray:
        """The place of each rank, -1 for those that are not of the layout."""
        at = np.minimum(np.searchsorted(self.ranks, ranks), len(self.ranks) - 1)
        return np.where(self.ranks[at] == ranks, at, -1)

    @property
    def is_grid(self) -> bool:
        """Whether tiles are the product of cuts along each dim."""
        return self._shards.cuts is not None

    def inside(self, place: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """``(boxes,)`` whether each box lies inside one tile of its rank; places of -1 own nothing."""
        shards, found = self._shards, place >= 0
        if shards.cuts is None:
            tile = locate_points(start, shards.start, shards.stop)
            found &= tile >= 0
            found[found] = (stop[found] <= shards.stop[tile[found]]).all(axis=1)
            keys = self._owned_tiles
            wanted = tile * len(self.ranks) + place
            at = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
            return found & (keys[at] == wanted) if len(keys) else np.zeros(len(place), dtype=bool)
        for dim, cut in enumerate(shards.cuts):
            at = np.searchsorted(cut.lo, start[:, dim], side="right") - 1
            found &= (stop[:, dim] <= cut.hi[at]) & (cut.coord[at] == self._parts[place, dim])
        return found

    def meets(self, place: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """``(boxes,)`` whether each box shares an element with what its rank owns; of grids only."""
        assert self._shards.cuts is not None
        found = place >= 0
        for dim, cut in enumerate(self._shards.cuts):
            count, part = len(cut.lo), self._parts[place, dim]
            keys = np.sort(cut.coord * count + np.arange(count))
            first = np.searchsorted(cut.hi, start[:, dim], side="right")
            last = np.searchsorted(cut.lo, stop[:, dim], side="left")
            found &= np.searchsorted(keys, part * count + last) > np.searchsorted(keys, part * count + first)
        return found

    def tiles_of(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each tile that one of these owns, once per owner: its number, and the owner's place."""
        tile, place = np.divmod(self._owned_tiles, len(self.ranks))
        mine = np.isin(place, places)
        return tile[mine], place[mine]

    def sum_marks(self, marks: Marks) -> np.ndarray:
        """``(ranks, 2)`` the sum of the marks of all that each rank owns."""
        if self._shards.cuts is None:
            tile, place = np.divmod(self._owned_tiles, len(self.ranks))
            return add_by(place, marks.of_boxes(self._shards.start, self._shards.stop)[tile], len(self.ranks))
        total = np.ones((len(self.ranks), 2), dtype=_U64)
        for dim, cut in enumerate(self._shards.cuts):
            sides = add_by(cut.coord, marks.of_side(cut.lo, cut.hi, dim), len(cut.local_size))
            total *= sides[self._parts[:, dim]]
        return total

    @cached_property
    def _parts(self) -> np.ndarray:
        """``(ranks, ndim)`` which part of each dim of a grid a rank owns."""
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
        """``tile * ranks + place`` for each tile and each rank that owns it, ascending."""
        tile, replica = np.nonzero(self._shards.ranks != NO_RANK)
        return np.sort(tile * len(self.ranks) + self.places_of(self._shards.ranks[tile, replica]))


def add_by(group: np.ndarray, values: np.ndarray, num_groups: int) -> np.ndarray:
    """``(groups, columns)`` the sum of the rows of each group, modulo 2**64."""
    total = np.zeros((num_groups, values.shape[1]), dtype=_U64)
    for column in range(values.shape[1]):
        np.add.at(total[:, column], group, np.ascontiguousarray(values[:, column]))
    return total


def describe_pieces(shards: Shards, rank: int, start: Sequence[int], stop: Sequence[int]) -> tuple[int, int]:
    """How many tiles of a rank a box meets, and in how many elements."""
    tile_start, tile_stop, _ = shards.pieces_of(rank)
    size = np.minimum(tile_stop, np.array(stop)) - np.maximum(tile_start, np.array(start))
    shared = np.maximum(size, 0).prod(axis=1, dtype=np.int64)
    return int((shared > 0).sum()), int(shared.sum())
