"""Tensors made of regions of other tensors. A region may take each n-th slice along a dim."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import ArgumentError

#: A region of a tensor: along each dim, the indices of its slices.
Region = tuple[range, ...]


def intersect(first: range, second: range) -> range:
    """The numbers in both ranges, whose steps are positive."""
    if not first or not second:
        return range(0)
    if first.step == second.step == 1:
        return range(max(first.start, second.start), min(first.stop, second.stop))
    shared = math.gcd(first.step, second.step)
    if (second.start - first.start) % shared:
        return range(0)
    step, steps = math.lcm(first.step, second.step), second.step // shared
    turns = (second.start - first.start) // shared * pow(first.step // shared, -1, steps) % steps
    begin = first.start + turns * first.step
    begin += -(-max(0, max(first.start, second.start) - begin) // step) * step
    return range(begin, min(first[-1], second[-1]) + 1, step)


def positions(inner: range, outer: range) -> range:
    """The positions of the numbers of one range in another range that has all of them."""
    if not inner:
        return range(0)
    step = inner.step // outer.step if len(inner) > 1 else 1
    begin = outer.index(inner[0])
    return range(begin, begin + (len(inner) - 1) * step + 1, step)


def pick(outer: range, inner: range) -> range:
    """The numbers of a range at some positions."""
    return outer[inner.start : inner[-1] + 1 : inner.step] if inner else range(0)


@dataclass(frozen=True)
class PlacedRegion:
    """A region of a source tensor, and where it lies in a tensor that rules have made.

    Attributes:
        source: name of the source tensor.
        region: region of the source tensor.
        place: the region of the made tensor.
        dims: the dim of the made tensor along which each dim of the source runs; -1 for a dim of which the region has
            one slice. Other dims of the made tensor have one slice too.
    """

    source: str
    region: Region
    place: Region
    dims: tuple[int, ...]


@dataclass(frozen=True)
class ComposedTensor:
    """A tensor that rules have made, from parts of source tensors."""

    shape: tuple[int, ...]
    parts: tuple[PlacedRegion, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> ComposedTensor:
        """A source tensor itself."""
        whole, dims = _whole(shape)
        return cls(shape, (PlacedRegion(name, whole, whole, dims),))

    def cut(self, dim: int, wanted: range) -> ComposedTensor:
        """The slices at some indices along a dim."""
        parts = []
        for part in self.parts:
            kept = intersect(part.place[dim], wanted)
            if kept:
                region = list(part.region)
                if dim in part.dims:
                    source = part.dims.index(dim)
                    region[source] = pick(region[source], positions(kept, part.place[dim]))
                place = _replace_dim(part.place, dim, positions(kept, wanted))
                parts.append(PlacedRegion(part.source, tuple(region), place, part.dims))
        return ComposedTensor((*self.shape[:dim], len(wanted), *self.shape[dim + 1 :]), tuple(parts))

    def placed(self, dim: int, at: range) -> tuple[PlacedRegion, ...]:
        """The parts, with the slices along a dim moved to other indices."""
        return tuple(
            PlacedRegion(part.source, part.region, _replace_dim(part.place, dim, pick(at, part.place[dim])), part.dims)
            for part in self.parts
        )

    def with_dim(self, dim: int) -> ComposedTensor:
        """The same with a new dim of size 1."""
        parts = tuple(
            PlacedRegion(
                part.source,
                part.region,
                (*part.place[:dim], range(1), *part.place[dim:]),
                tuple([other + (other >= dim) for other in part.dims]),
            )
            for part in self.parts
        )
        return ComposedTensor((*self.shape[:dim], 1, *self.shape[dim:]), parts)

    def without_dim(self, dim: int) -> ComposedTensor:
        """The same without a dim of size 1. That dim of a source gets no dim of the made tensor."""
        parts = []
        for part in self.parts:
            dims = tuple(-1 if other == dim else other - (other > dim) for other in part.dims)
            parts.append(PlacedRegion(part.source, part.region, (*part.place[:dim], *part.place[dim + 1 :]), dims))
        return ComposedTensor((*self.shape[:dim], *self.shape[dim + 1 :]), tuple(parts))

    def transposed(self) -> ComposedTensor:
        """The same with its two dims exchanged."""
        parts = tuple(
            PlacedRegion(
                part.source,
                part.region,
                part.place[::-1],
                tuple(1 - dim if dim >= 0 else dim for dim in part.dims),
            )
            for part in self.parts
        )
        return ComposedTensor(self.shape[::-1], parts)


@functools.lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> tuple[Region, tuple[int, ...]]:
    """All of a tensor, and its dims."""
    return tuple(map(range, shape)), tuple(range(len(shape)))


def _replace_dim(region: Region, dim: int, indices: range) -> Region:
    return (*region[:dim], indices, *region[dim + 1 :])


def join_tensors(tensors: Sequence[ComposedTensor], dim: int, what: str) -> ComposedTensor:
    """Tensors one after the other along a dim.

    Args:
        what: the rule, in errors.

    Raises:
        ArgumentError: their shapes do not fit.
    """
    parts: list[PlacedRegion] = []
    size, first = 0, tensors[0].shape
    for tensor in tensors:
        if len(tensor.shape) <= dim or (
            (*tensor.shape[:dim], *tensor.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :])
        ):
            raise ArgumentError(f"{what}: shapes {list(first)} and {list(tensor.shape)} do not join along dim {dim}")
        parts += tensor.placed(dim, range(size, size + tensor.shape[dim]))
        size += tensor.shape[dim]
    return ComposedTensor((*first[:dim], size, *first[dim + 1 :]), tuple(parts))


def compose_parts(view: ComposedTensor, base: ComposedTensor) -> ComposedTensor:
    """A view of a made tensor, from the parts of that.

    Args:
        view: its parts are regions of the made tensor.
        base: the made tensor.
    """
    parts = []
    for part in view.parts:
        for inner in base.parts:
            overlap = tuple(map(intersect, part.region, inner.place))
            if not all(overlap):
                continue
            region, dims, place = list(inner.region), [-1] * len(inner.dims), list(part.place)
            for dim, place_dim in enumerate(inner.dims):
                if place_dim >= 0:
                    region[dim] = pick(region[dim], positions(overlap[place_dim], inner.place[place_dim]))
                    dims[dim] = part.dims[place_dim]
            for place_dim, dim in enumerate(part.dims):
                if dim >= 0:
                    place[dim] = pick(part.place[dim], positions(overlap[place_dim], part.region[place_dim]))
            parts.append(PlacedRegion(inner.source, tuple(region), tuple(place), tuple(dims)))
    return ComposedTensor(view.shape, tuple(parts))
