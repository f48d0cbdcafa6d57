"""Layouts, the sharding of a tensor: by a spec over a mesh, or by explicit regions per rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from reshard.arguments import check_arguments
from reshard.drawing import Drawn
from reshard.errors import LayoutError
from reshard.formatting import brief, count_of, format_ranks
from reshard.sharding.dim_cuts import MAX_NDIM, DimCuts, check_sizes, cut_dim
from reshard.sharding.mesh import MAX_RANK, Mesh, check_integer
from reshard.sharding.spec import Spec, axis_of, read_spec, write_2023, write_axis_names, write_jax, write_placements

#: A half-open interval per tensor dim.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout(Drawn):
    """The sharding of a tensor over a mesh.

    Args:
        mesh: the ranks.
        spec: the mesh axes that shard each tensor dim, major first. Axes that are not named hold replicas, and dims
            past the end of the spec are not sharded. Any notation of :mod:`reshard.sharding.spec` is accepted:
            ``("dp", None)``, ``"S0 R"``, ``[Shard(0)]``, ``PartitionSpec("dp")``. Omitted: every rank of the mesh
            holds the whole tensor.
        ndim: the number of tensor dims, needed only for placements that count from the end, such as ``Shard(-1)``.

    A layout has no shape. Uneven sizes follow the rule of ``torch.chunk``: of n elements over k ranks, each rank gets
    ``ceil(n / k)`` until none are left. The next axis of the dim cuts each of these chunks in turn, as in DTensor.

    Raises:
        LayoutError: an unknown or repeated axis, or a malformed spec. PartialError: a pending reduction.
    """

    mesh: Mesh
    spec: Spec

    def __init__(self, mesh: Mesh, spec: Any = None, *, ndim: int | None = None) -> None:
        if not isinstance(mesh, Mesh):
            raise LayoutError(f"a Layout needs a Mesh, not {type(mesh).__name__}")
        if ndim is not None:
            ndim = check_integer(ndim, "ndim", 0, MAX_NDIM, LayoutError)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "spec", read_spec(mesh, spec, ndim))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh, in mesh order."""
        return self.mesh.ranks

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard of a tensor of global ``shape``.

        Raises:
            LayoutError: the shape does not fit the layout, or the rank is not in it.
        """
        cuts = self.cut_dims(shape)
        parts = self.parts_of(rank, len(cuts))
        return tuple(int(cut.local_size[part]) for cut, part in zip(cuts, parts, strict=True))

    def regions(self, shape: Sequence[int], rank: int) -> list[Box]:
        """The boxes of the global tensor that a rank holds, in the order of its shard, without empty ones.

        Only :class:`~reshard.sharding.spec.Strided` steps give several boxes. Raises as :meth:`local_shape`.
        """
        cuts = self.cut_dims(shape)
        intervals = []
        for cut, part in zip(cuts, self.parts_of(rank, len(cuts)), strict=True):
            own = np.flatnonzero(cut.coord == part)
            own = own[np.argsort(cut.local[own], kind="stable")]
            intervals.append(list(zip(cut.lo[own].tolist(), cut.hi[own].tolist(), strict=True)))
        return list(itertools.product(*intervals))

    @check_arguments(rank=(0, MAX_RANK), ndim=(0, MAX_NDIM))
    def parts_of(self, rank: int, ndim: int) -> tuple[int, ...]:
        """The index of a rank's part of each tensor dim, counted major first over the dim's axes."""
        if check_integer(rank, "rank", 0, MAX_RANK) not in self.mesh.ranks:
            raise LayoutError(f"rank {rank} is not in {self}")
        coords = np.unravel_index(self.mesh.ranks.index(rank), self.mesh.sizes) if self.mesh.sizes else ()
        at = dict(zip(self.mesh.axes, map(int, coords), strict=True))
        parts = []
        for dim in range(ndim):
            part = 0
            for step in self.spec[dim] if dim < len(self.spec) else ():
                part = part * self.mesh.axis_size(axis_of(step)) + at[axis_of(step)]
            parts.append(part)
        return tuple(parts)

    def cut_dims(self, shape: Sequence[int]) -> tuple[DimCuts, ...]:
        """The cuts of each dim of a tensor of ``shape``. Raises as :meth:`local_shape`."""
        shape = check_sizes(shape)
        if len(self.spec) > len(shape):
            raise LayoutError(
                f"layout {self} shards dim {len(self.spec) - 1}, but the tensor of shape {list(shape)} has "
                f"{count_of(len(shape), 'dim')}"
            )
        spec = self.spec + ((),) * (len(shape) - len(self.spec))
        return tuple(
            cut_dim(size, steps, [self.mesh.axis_size(axis_of(step)) for step in steps])
            for size, steps in zip(shape, spec, strict=True)
        )

    def with_ranks(self, rank_of: Mapping[int, int]) -> Layout:
        """The same layout with each rank ``r`` replaced by ``rank_of[r]``."""
        return Layout(self.mesh.with_ranks(rank_of), self.spec)

    def to_2023(self, ndim: int | None = None) -> str:
        """The spec in the notation of the 2023 study, for example ``S01 R R``; padded to ``ndim`` dims."""
        if ndim is not None:
            ndim = check_integer(ndim, "ndim", 0, MAX_NDIM)
        return write_2023(self.mesh, self.spec, ndim)

    def to_placements(self) -> list[Any]:
        """The spec as torch placements, one per mesh axis."""
        return write_placements(self.mesh, self.spec)

    def to_jax(self) -> Any:
        """The spec as a ``jax.sharding.PartitionSpec``."""
        return write_jax(self.spec)

    def __str__(self) -> str:
        return f"{write_axis_names(self.spec)} on {self.mesh}"


@dataclass(frozen=True)
class RegionLayout:
    """The regions of a tensor that each rank holds, for shardings that no spec can express.

    Args:
        regions: ``{rank: [box, ...]}``; a box is a ``(start, stop)`` pair per tensor dim. A rank's local array
            is its boxes joined along ``join_dim`` in the given order, so their sizes must agree in every other dim.
            The local array of a rank without boxes is empty.
        join_dim: the dim along which a rank's boxes are joined, 0 by default.
        ndim: the number of tensor dims; needed only if no rank holds a box.

    Boxes of one rank must not overlap. Boxes of different ranks may; the elements that they share are replicated.

    >>> qkv = RegionLayout({0: [[(0, 4), (0, 8)], [(8, 12), (0, 8)]], 1: [[(4, 8), (0, 8)], [(12, 16), (0, 8)]]})

    Raises:
        LayoutError: a malformed box, a bad rank, or boxes of one rank that cannot be joined.
    """

    boxes: tuple[tuple[int, tuple[Box, ...]], ...]
    join_dim: int
    ndim: int

    def __init__(
        self,
        regions: Mapping[int, Iterable[Sequence[Sequence[int]]]],
        *,
        join_dim: int = 0,
        ndim: int | None = None,
    ) -> None:
        boxes_by_rank: list[tuple[int, tuple[Box, ...]]] = []
        join_dim = check_integer(join_dim, "join_dim", 0, MAX_NDIM, LayoutError)
        if ndim is not None:
            ndim = check_integer(ndim, "ndim", 0, MAX_NDIM, LayoutError)
        if not isinstance(regions, Mapping) or not regions:
            raise LayoutError("regions must be a mapping {rank: [box, ...]} with at least one rank")
        for rank, boxes in regions.items():
            rank = check_integer(rank, "a rank", 0, MAX_RANK, LayoutError)
            try:
                boxes_by_rank.append((rank, tuple(tuple((index(lo), index(hi)) for lo, hi in box) for box in boxes)))
            except (TypeError, ValueError, OverflowError):
                raise LayoutError(
                    f"rank {rank}: a box is a (start, stop) pair per tensor dim, not {brief(boxes)}"
                ) from None
        boxes_by_rank.sort()
        dims = {len(box) for _, rank_boxes in boxes_by_rank for box in rank_boxes} | (set() if ndim is None else {ndim})
        if len(dims) != 1:
            raise LayoutError(
                f"boxes have {sorted(dims)} dims; all must have the same number" if dims else "no boxes: give ndim"
            )
        count = dims.pop()
        if not 0 <= count <= MAX_NDIM:
            raise LayoutError(f"boxes have {count} dims; at most {MAX_NDIM} are supported")
        if not 0 <= join_dim < max(count, 1):
            raise LayoutError(f"join_dim {join_dim} is outside 0..{max(count, 1) - 1}")
        for rank, rank_boxes in boxes_by_rank:
            for box in rank_boxes:
                for lo, hi in box:
                    if not 0 <= lo <= hi < 2**62:
                        raise LayoutError(f"rank {rank}: {format_box(box)} needs 0 <= start <= stop in every dim")
            for box in rank_boxes[1:]:
                for dim in range(count):
                    size, first = box[dim][1] - box[dim][0], rank_boxes[0][dim][1] - rank_boxes[0][dim][0]
                    if dim != join_dim and size != first:
                        raise LayoutError(
                            f"rank {rank}: {format_box(rank_boxes[0])} and {format_box(box)} cannot be joined along "
                            f"dim {join_dim}: dim {dim} has {first} and {size} elements"
                        )
            if count == 0 and len(rank_boxes) != 1:
                raise LayoutError(f"rank {rank}: a 0-d tensor has one box, [], not {len(rank_boxes)}")
        object.__setattr__(self, "boxes", tuple(boxes_by_rank))
        object.__setattr__(self, "join_dim", join_dim)
        object.__setattr__(self, "ndim", count)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the layout, ascending."""
        return tuple(rank for rank, _ in self.boxes)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard of a tensor of global ``shape``.

        Raises:
            LayoutError: a region reaches past the shape, or the rank is not in the layout.
        """
        self.check_fits(check_sizes(shape))
        return self.joined_shape(rank)

    def regions(self, shape: Sequence[int], rank: int) -> list[Box]:
        """The boxes that a rank holds, in the order of its shard, without empty ones; raises as :meth:`local_shape`."""
        self.check_fits(check_sizes(shape))
        return [box for box in self._boxes_of(rank) if all(hi > lo for lo, hi in box)]

    def _boxes_of(self, rank: int) -> tuple[Box, ...]:
        rank = check_integer(rank, "rank", 0, MAX_RANK)
        for holder, boxes in self.boxes:
            if holder == rank:
                return boxes
        raise LayoutError(f"rank {rank} is not in the layout, whose ranks are {format_ranks(self.ranks)}")

    def joined_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's local array: its boxes joined along ``join_dim``."""
        boxes = self._boxes_of(rank)
        if not boxes:
            return (0,) * self.ndim
        shape = [hi - lo for lo, hi in boxes[0]]
        if shape:
            shape[self.join_dim] = sum(box[self.join_dim][1] - box[self.join_dim][0] for box in boxes)
        return tuple(shape)

    def check_fits(self, shape: Sequence[int]) -> None:
        """Raise LayoutError unless all regions lie inside the global ``shape``."""
        shape = check_sizes(shape)
        if self.ndim != len(shape):
            raise LayoutError(f"regions have {self.ndim} dims, but the tensor of shape {list(shape)} has {len(shape)}")
        for rank, boxes in self.boxes:
            for box in boxes:
                for (_, hi), size in zip(box, shape, strict=True):
                    if hi > size:
                        raise LayoutError(f"rank {rank}: region {format_box(box)} reaches past shape {list(shape)}")

    def with_ranks(self, rank_of: Mapping[int, int]) -> RegionLayout:
        """The same layout with each rank ``r`` replaced by ``rank_of[r]``.

        Raises:
            LayoutError: a rank has no new rank, or two ranks have the same one.
        """
        if not isinstance(rank_of, Mapping):
            raise LayoutError(f"rank_of must be {{rank: new rank}}, not {type(rank_of).__name__}")
        missing = [rank for rank in self.ranks if rank not in rank_of]
        if missing:
            raise LayoutError(f"no new rank is given for rank {missing[0]}")
        old_of: dict[int, int] = {}
        for rank in self.ranks:
            other = old_of.setdefault(rank_of[rank], rank)
            if other != rank:
                raise LayoutError(f"ranks {other} and {rank} both become rank {rank_of[rank]}; each needs its own")
        return RegionLayout(
            {rank_of[rank]: boxes for rank, boxes in self.boxes}, join_dim=self.join_dim, ndim=self.ndim
        )

    def with_last_dim(self, change: Callable[[int, int], tuple[int, int]]) -> RegionLayout:
        """The same regions with the bounds ``lo, hi`` of the last dim replaced by ``change(lo, hi)``."""
        regions = {rank: [(*box[:-1], change(*box[-1])) for box in boxes] for rank, boxes in self.boxes}
        return RegionLayout(regions, join_dim=self.join_dim, ndim=self.ndim)

    def __str__(self) -> str:
        texts = "; ".join(f"{rank}: {' '.join(map(format_box, boxes)) or 'none'}" for rank, boxes in self.boxes)
        return f"Regions(ndim={self.ndim} join={self.join_dim}; {texts})"


AnyLayout = Layout | RegionLayout


def format_box(box: Sequence[Sequence[int]]) -> str:
    """``[0:4, 0:1]``."""
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in box) + "]"
