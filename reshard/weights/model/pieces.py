"""Pieces: regions of a source model that travel, and where they go in a destination model."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reshard.api.arrays.casts import check_cast
from reshard.dtypes import ITEMSIZE
from reshard.errors import ArgumentError
from reshard.formatting import count_of, did_you_mean
from reshard.sharding import Box, RegionLayout, TensorSpec, Tiles, cut_tiles
from reshard.weights.mapping.families import find_lacking, find_misfit, find_rules
from reshard.weights.mapping.parts import PlacedRegion, Region, intersect, pick, positions
from reshard.weights.mapping.rules import Rule, Shapes, find_idle_rules
from reshard.weights.model.holdings import join_dim
from reshard.weights.model.manifest import Manifest, ManifestEntry

#: Number of names that an error lists.
MAX_NAMES = 10

#: Pieces up to this size travel together.
MAX_BUNDLED_BYTES = 1 << 16

Held = tuple[tuple[int, tuple[Box, ...]], ...]


@dataclass(frozen=True)
class Side:
    """A region of one tensor, as the source or the destination of a piece.

    Attributes:
        name: name of the tensor.
        region: region of the tensor.
        dims: the dim of the tensor along which each dim of the piece runs. Along other dims the region has one slice.
    """

    name: str
    region: Region
    dims: tuple[int, ...]

    def held(self, entry: ManifestEntry) -> Held:
        """The parts of the piece that each rank holds, in the order in which :meth:`view` joins them."""
        return _held(entry.held, self.region, self.dims)

    def view(self, array: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
        """The part of the piece in a local array, as a view.

        Args:
            array: the local array.
            boxes: the regions of the tensor that are joined in it.
        """
        join, at = join_dim(boxes), 0
        slices = [slice(0, 0)] * array.ndim
        for box in boxes:
            kept = _overlap(box, self.region)
            if all(kept):
                for dim, indices in enumerate(kept):
                    shift = (at if dim == join else 0) - box[dim][0]
                    begun = slices[dim].stop > 0 and dim == join
                    first = slices[dim].start if begun else indices[0] + shift
                    slices[dim] = slice(first, indices[-1] + shift + 1, self.region[dim].step)
            at += box[join][1] - box[join][0] if box else 1
        if not array.ndim:
            return array
        others = [dim for dim in range(array.ndim) if dim not in self.dims]
        return array[tuple(slices)].permute(*self.dims, *others)[(..., *[0] * len(others))]


def _overlap(box: Box, region: Region) -> Region:
    return tuple(intersect(range(lo, hi), indices) for (lo, hi), indices in zip(box, region, strict=True))


@functools.lru_cache(maxsize=8192)
def _held(held: Held, region: Region, dims: tuple[int, ...]) -> Held:
    overlapping = []
    for rank, boxes in held:
        overlaps = [_overlap(box, region) for box in boxes]
        inside = [
            tuple((at[0], at[-1] + 1) for at in (positions(kept[dim], region[dim]) for dim in dims))
            for kept in overlaps
            if all(kept)
        ]
        if inside:
            overlapping.append((rank, tuple(inside)))
    return tuple(overlapping)


@dataclass(frozen=True)
class RegionPair:
    """A region of the source model and the equal region of the destination model that it becomes.

    Attributes:
        source, target: the region in both models. For tied tensors, under the first name.
        shape: shape of the piece.
        dtype: dtype of the source.
    """

    source: Side
    target: Side
    shape: tuple[int, ...]
    dtype: str

    def cut(self, region: Region, along: Sequence[int]) -> Side:
        """The destination of a region of the source.

        Args:
            region: region of the source, inside the piece.
            along: the dims of the source along which a piece runs.
        """
        of_dim = dict(zip(self.source.dims, self.target.dims, strict=True))
        inside = list(self.target.region)
        for dim, other in of_dim.items():
            inside[other] = pick(self.target.region[other], positions(region[dim], self.source.region[dim]))
        return Side(self.target.name, tuple(inside), tuple(of_dim[dim] for dim in along))

    def slice(self, dim: int, indices: range) -> RegionPair:
        """The piece without all but some slices along a dim."""
        if len(indices) == self.shape[dim]:
            return self
        sides = []
        for side in (self.source, self.target):
            region, at = list(side.region), side.dims[dim]
            region[at] = pick(region[at], indices)
            sides.append(Side(side.name, tuple(region), side.dims))
        shape = (*self.shape[:dim], len(indices), *self.shape[dim + 1 :])
        return RegionPair(sides[0], sides[1], shape, self.dtype)

    def __str__(self) -> str:
        return self.source.name


def match(source: Manifest, target: Manifest, what: str) -> list[RegionPair]:
    """The pieces that give every tensor of the destination its values.

    Args:
        what: the destination model, in errors.

    Raises:
        ArgumentError: a rule does not fit; or a tensor is missing on one side, has another shape, cannot be cast, or is
            tied on the destination to one that differs on the source. The text lists the first names.
    """
    shapes, wanted = ({name: entry.shape for name, entry in side.entries.items()} for side in (source, target))
    rules, made = find_rules(target.rules, shapes, wanted)
    names_of: dict[str, list[str]] = {}
    for name in wanted:
        names_of.setdefault(target.tied.get(name, name), []).append(name)
    pieces: list[RegionPair] = []
    missing, used = [], set()
    for first, names in names_of.items():
        known = [name for name in names if name in made]
        if not known:
            missing.append(first)
            continue
        used.update(known)
        parts = _resolve_ties(made[known[0]].parts, source)
        if any(_resolve_ties(made[name].parts, source) != parts for name in known):
            raise ArgumentError(
                f"{what} ties {' and '.join(map(repr, known))}, which are different tensors of the source"
            )
        if made[known[0]].shape != wanted[first]:
            raise ArgumentError(_describe_shapes(what, first, wanted[first], made[known[0]].shape))
        for part in parts:
            check_cast(source.entries[part.source].dtype, target.entries[first].dtype, repr(first))
            piece = _make_piece(part, first, source)
            if math.prod(piece.shape):
                pieces += _cut_to_views(piece, source.entries[part.source], target.entries[first])
    origins = {part.source for name in used for part in _resolve_ties(made[name].parts, source)}
    extra = [name for name in made if not {part.source for part in _resolve_ties(made[name].parts, source)} <= origins]
    unmatched = [
        f"{_list_names(names)} {text}"
        for names, text in ((missing, "that the source does not have"), (extra, "that only the source has"))
        if names
    ]
    if unmatched:
        if target.rules is None and (misfit := find_misfit(shapes, wanted, missing)) is not None:
            name, shape, rule = misfit
            raise ArgumentError(_describe_shapes(what, name, wanted[name], shape, rule))
        advice = _advise(target, shapes, wanted, missing, extra)
        if not missing:
            remedy = "name them in a weights.Drop of rules= if they are not needed"
        elif not extra:
            remedy = "pass a mapping without them if they keep their values, or say by rules= where they come from"
        else:
            remedy = (
                "if the sides name or divide the same weights in different ways, say how by rules=, for example with "
                "weights.Rename or weights.Drop"
            )
        raise ArgumentError(f"{what}: {', and '.join(unmatched)}{advice}; {remedy}")
    if not pieces:
        raise ArgumentError(f"{what} has no tensors")
    check_pieces(pieces, rules, source, target, what)
    return pieces


def _advise(target: Manifest, shapes: Shapes, wanted: Shapes, missing: Sequence[str], extra: Sequence[str]) -> str:
    """Possible causes of tensors that are missing on one side, each after a semicolon."""
    if target.rules is None:
        lacking = (find_lacking(shapes, wanted, name) for name in missing)
        rule, side, names = next((one for one in lacking if one is not None), (None, "", []))
        if rule is not None:
            return f"; {rule} would join or split them, but the {side} lacks {', '.join(map(repr, names))}"
    advice = did_you_mean(missing[0], extra) if missing else ""
    idle = [] if target.rules is None else find_idle_rules(target.rules, shapes, wanted)
    if idle:
        advice += f"; {count_of(len(idle), 'rule')} changed nothing: {', '.join(map(str, idle[:MAX_NAMES]))}"
    return advice


def _cut_to_views(piece: RegionPair, source: ManifestEntry, target: ManifestEntry) -> list[RegionPair]:
    """The piece, cut so that each rank's slices of it are evenly spaced in its memory.

    A piece is cut only if it takes each n-th slice of a tensor, and a rank joins several regions of that tensor.
    """
    if all(indices.step == 1 for side in (piece.source, piece.target) for indices in side.region):
        return [piece]
    parts = [piece]
    for number, (dim, other) in enumerate(zip(piece.source.dims, piece.target.dims, strict=True)):
        cuts: set[int] = set()
        for entry, indices, at in (
            (source, piece.source.region[dim], dim),
            (target, piece.target.region[other], other),
        ):
            if indices.step > 1:
                edges = {edge for _, boxes in entry.held if len(boxes) > 1 for box in boxes for edge in box[at]}
                cuts |= {-(-(edge - indices.start) // indices.step) for edge in edges}
        size = piece.shape[number]
        edges_of_piece = [0, *sorted(cut for cut in cuts if 0 < cut < size), size]
        parts = [
            part.slice(number, range(begin, end)) for part in parts for begin, end in itertools.pairwise(edges_of_piece)
        ]
    return parts


def check_pieces(
    pieces: Sequence[RegionPair], rules: Sequence[Rule], source: Manifest, target: Manifest, what: str
) -> None:
    """Check that pieces use each element of the source tensors, and write each one of the destination once.

    Rules that add elements may leave out elements of the destination. Rules that drop elements may leave out elements
    of the source.

    Raises:
        ArgumentError: they do not; the text names the tensor.
    """
    for verb, sides, model, may_leave_out in (
        ("write", [piece.target for piece in pieces], target, any(rule.adds_elements for rule in rules)),
        ("use", [piece.source for piece in pieces], source, any(rule.drops_elements for rule in rules)),
    ):
        regions: dict[str, set[Region]] = {}
        counts: dict[str, int] = {}
        for side in sides:
            of_name = regions.setdefault(side.name, set())
            if side.region not in of_name:
                of_name.add(side.region)
                counts[side.name] = counts.get(side.name, 0) + math.prod(map(len, side.region))
            elif verb == "write":
                raise ArgumentError(f"{what}: the rules write a region of {side.name!r} twice")
        for name, count in counts.items():
            size = math.prod(model.entries[name].shape)
            if count > size or (count < size and not may_leave_out):
                raise ArgumentError(f"{what}: the rules {verb} {count} of the {size} elements of {name!r}")


def compose(held: Sequence[RegionPair], wanted: Sequence[RegionPair]) -> list[RegionPair]:
    """The pieces from an engine that holds a version to another one.

    Args:
        held, wanted: the pieces from the trainer to both.
    """
    of_source: dict[str, dict[Region, RegionPair]] = {}
    for piece in held:
        of_source.setdefault(piece.source.name, {}).setdefault(piece.source.region, piece)
    joined = []
    for piece in wanted:
        for other in of_source.get(piece.source.name, {}).values():
            overlap = tuple(map(intersect, piece.source.region, other.source.region))
            if all(overlap):
                along = [dim for dim in piece.source.dims if dim in other.source.dims]
                shape = tuple(len(overlap[dim]) for dim in along)
                joined.append(RegionPair(other.cut(overlap, along), piece.cut(overlap, along), shape, piece.dtype))
    return joined


def _resolve_ties(parts: Sequence[PlacedRegion], source: Manifest) -> tuple[PlacedRegion, ...]:
    if not source.tied:
        return tuple(parts)
    return tuple(replace(part, source=source.tied.get(part.source, part.source)) for part in parts)


def _make_piece(part: PlacedRegion, target: str, source: Manifest) -> RegionPair:
    along = [dim for dim, other in enumerate(part.dims) if other >= 0]
    shape = tuple(len(part.region[dim]) for dim in along)
    return RegionPair(
        Side(part.source, part.region, tuple(along)),
        Side(target, part.place, tuple(part.dims[dim] for dim in along)),
        shape,
        source.entries[part.source].dtype,
    )


def _describe_shapes(
    what: str, name: str, wanted: tuple[int, ...], made: tuple[int, ...], rule: Rule | None = None
) -> str:
    """The error of a tensor whose shape differs on both sides; ``rule`` made it of tensors of the source."""
    maker = "on the source" if rule is None else f"as {rule} makes it of the source"
    text = f"{what}: {name!r} has shape {list(wanted)}, but {list(made)} {maker}"
    pairs = sorted((wanted, made))
    if len(wanted) == len(made) and all(part <= whole for part, whole in zip(*pairs, strict=True)):
        text += (
            "; if a rank holds a part of it, pass a DTensor, or state the part by shards= of Publisher and Subscriber"
        )
    return text


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

    def bundle(self, gathered: Sequence[Mapping[int, RegionPair]]) -> list[list[Mapping[int, RegionPair]]]:
        """Pieces that travel as one tensor: small ones of equal shape, dtype and sharding.

        Args:
            gathered: pieces of one region of the source each, by the first rank of each destination model.
        """
        bundles: dict[Any, list[Mapping[int, RegionPair]]] = {}
        for number, pieces in enumerate(gathered):
            first = next(iter(pieces.values()))
            nbytes = math.prod(first.shape) * ITEMSIZE[first.dtype]
            key: Any = number
            if nbytes <= MAX_BUNDLED_BYTES:
                key = first.shape, first.dtype, *self._held(pieces)
            bundles.setdefault(key, []).append(pieces)
        return list(bundles.values())

    def spec(self, bundle: Sequence[Mapping[int, RegionPair]], name: str) -> TensorSpec:
        """The tensor of a plan for a bundle; several pieces are stacked along a new first dim.

        Args:
            name: name of the tensor in the plan.
        """
        first = next(iter(bundle[0].values()))
        held, wanted = self._held(bundle[0])
        shape, count = first.shape, len(bundle)
        if count > 1:
            shape = (count, *shape)
            held, *others = (_stacked(part, count) for part in (held, *(part for _, part in wanted)))
            wanted = tuple((rank, part) for (rank, _), part in zip(wanted, others, strict=True))
        ndim = len(shape)
        return TensorSpec(shape, first.dtype, self._layout(((0, held),), ndim), self._layout(wanted, ndim), name)

    def _held(self, pieces: Mapping[int, RegionPair]) -> tuple[Held, tuple[tuple[int, Held], ...]]:
        """The regions of a piece that source ranks have, and the regions that the ranks of each destination need."""
        first = next(iter(pieces.values()))
        wanted = tuple(
            (rank, piece.target.held(self._targets[rank].entries[piece.target.name]))
            for rank, piece in sorted(pieces.items())
        )
        return first.source.held(self._source.entries[first.source.name]), wanted


def _stacked(held: Held, count: int) -> Held:
    return tuple((rank, tuple(((0, count), *box) for box in boxes)) for rank, boxes in held)


def gather_pieces(pieces: Mapping[int, Sequence[RegionPair]]) -> list[dict[int, RegionPair]]:
    """The pieces of several destinations, joined where they send the same region of the source.

    A region that goes to several tensors of one model, because only the source ties them, travels once for each.

    Args:
        pieces: pieces by the first rank of each destination model.
    """
    by_source: dict[tuple[Side, int], dict[int, RegionPair]] = {}
    for first, of_model in pieces.items():
        count: dict[Side, int] = {}
        for piece in of_model:
            number = count[piece.source] = count.get(piece.source, 0) + 1
            by_source.setdefault((piece.source, number), {})[first] = piece
    return list(by_source.values())


@functools.lru_cache(maxsize=4096)
def cut_held(held: Held, shape: tuple[int, ...]) -> Tiles:
    """The disjoint regions of a piece, with the ranks of a model that hold each."""
    return cut_tiles(_layout_of(((0, held),), len(shape)), shape)


def _layout_of(held: tuple[tuple[int, Held], ...], ndim: int) -> RegionLayout:
    rows = {first + rank: boxes for first, ranks in held for rank, boxes in ranks}
    return RegionLayout(rows, join_dim=max(map(join_dim, rows.values())), ndim=ndim)
