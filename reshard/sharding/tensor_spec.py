"""One tensor to move: its shape, dtype and both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.errors import ArgumentError, PlanError
from reshard.sharding.dim_cuts import check_sizes
from reshard.sharding.layout import AnyLayout, Layout, RegionLayout
from reshard.sharding.tiles import Shards, cut_shards
from reshard.sharding.unit_tasks import UnitTasks, count_unit_tasks, cut_unit_tasks


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to move: its global shape and dtype, and both layouts.

    ``name`` identifies a tensor among several of one plan; it is None for a single tensor.

    Raises:
        LayoutError: the shape cannot be that of a tensor. ArgumentError: a bad dtype, layout or name.
    """

    shape: tuple[int, ...]
    dtype: str
    src: AnyLayout
    dst: AnyLayout
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_sizes(self.shape))
        for side in (self.src, self.dst):
            if not isinstance(side, (Layout, RegionLayout)):
                raise ArgumentError(f"a layout must be a Layout or a RegionLayout, not {type(side).__name__}")
        if self.name is not None and not isinstance(self.name, str):
            raise ArgumentError(f"the name of a tensor must be a string, not {self.name!r}")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @cached_property
    def src_shards(self) -> Shards:
        """The tiles of the source layout and their holders."""
        return cut_shards(self.src, self.shape)

    @cached_property
    def dst_shards(self) -> Shards:
        """The tiles of the destination layout and the ranks that need them."""
        return cut_shards(self.dst, self.shape)

    @cached_property
    def tasks(self) -> UnitTasks:
        """The unit tasks from the source to the destination layout."""
        return cut_unit_tasks(self.src_shards, self.dst_shards)

    @property
    def num_holdings(self) -> int:
        """Size of the larger of two ``(tasks, replicas)`` arrays, holders and destinations, padding included."""
        count = count_unit_tasks(self.src_shards, self.dst_shards)
        replicas = max(self.src_shards.ranks.shape[1], self.dst_shards.ranks.shape[1])
        return (len(self.tasks) if count is None else count) * replicas

    def __str__(self) -> str:
        name = f"{self.name} " if self.name is not None else ""
        return f"{name}{self.dtype} {list(self.shape)}: {self.src} => {self.dst}"


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Raise PlanError unless there is one tensor, or several with different names."""
    if not tensors:
        raise PlanError("a plan needs at least one tensor")
    names = [spec.name for spec in tensors]
    if len(tensors) > 1 and (None in names or len(set(names)) != len(names)):
        raise PlanError(f"{len(tensors)} tensors need {len(tensors)} different names, not {names}")
