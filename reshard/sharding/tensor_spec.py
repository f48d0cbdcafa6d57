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

    ``name`` tells tensors of one plan apart in messages to people; it is None for a single tensor.

    Raises:
        LayoutError, ArgumentError: the shape, dtype or a layout does not fit.
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
        """Who holds what."""
        return cut_shards(self.src, self.shape)

    @cached_property
    def dst_shards(self) -> Shards:
        """Who needs what."""
        return cut_shards(self.dst, self.shape)

    @cached_property
    def tasks(self) -> UnitTasks:
        """The unit tasks between the two."""
        return cut_unit_tasks(self.src_shards, self.dst_shards)

    @property
    def num_holdings(self) -> int:
        """How many entries the larger of the holders and the destinations of its tasks has, padding included."""
        count = count_unit_tasks(self.src_shards, self.dst_shards)
        replicas = max(self.src_shards.ranks.shape[1], self.dst_shards.ranks.shape[1])
        return (len(self.tasks) if count is None else count) * replicas

    def __str__(self) -> str:
        name = f"{self.name} " if self.name is not None else ""
        return f"{name}{self.dtype} {list(self.shape)}: {self.src} => {self.dst}"


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Raise PlanError unless names tell several tensors apart."""
    if not tensors:
        raise PlanError("a plan needs at least one tensor")
    names = [spec.name for spec in tensors]
    if len(tensors) > 1 and (None in names or len(set(names)) != len(names)):
        raise PlanError(f"{len(tensors)} tensors need {len(tensors)} different names, not {names}")
