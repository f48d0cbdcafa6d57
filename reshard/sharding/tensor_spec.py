"""One tensor to move: its shape, dtype and both layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from reshard.codecs import CustomCodec, ElementCodec, find_block_codec, find_custom_codec
from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.errors import ArgumentError, PlanError
from reshard.formatting import brief
from reshard.sharding.dim_cuts import check_sizes
from reshard.sharding.layout import AnyLayout, Layout, RegionLayout
from reshard.sharding.tiles import Tiles, cut_tiles
from reshard.sharding.unit_tasks import UnitTasks, count_unit_tasks, cut_unit_tasks


@dataclass(frozen=True)
class Coding:
    """Shape and dtype of the tensor that the elements of a block codec encode.

    ``codec`` is the codec if the caller implements it. Plans compare its name and sizes only, which are also the dtype
    of the elements.
    """

    shape: tuple[int, ...]
    dtype: str
    codec: CustomCodec | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to move: its global shape and dtype, and both layouts.

    Attributes:
        shape: global shape, in elements.
        dtype: name of the dtype, or of a block codec's elements, such as ``"int8x128"``.
        src, dst: source and destination layout.
        name: identifies the tensor in a plan of several; None if the plan has only one.
        coding: the tensor that the elements of a block codec encode; None if the plan only moves such elements.
        raw_because: why a requested codec does not encode this tensor; else empty.
        encoded_because: why ``compression="auto"`` chose the codec; else empty.

    Raises:
        LayoutError: the shape is not valid. ArgumentError: a dtype, layout, name or coding is not valid.
    """

    shape: tuple[int, ...]
    dtype: str
    src: AnyLayout
    dst: AnyLayout
    name: str | None = None
    coding: Coding | None = None
    raw_because: str = field(default="", compare=False)
    encoded_because: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_sizes(self.shape))
        for side in (self.src, self.dst):
            if not isinstance(side, (Layout, RegionLayout)):
                raise ArgumentError(f"a layout must be a Layout or a RegionLayout, not {type(side).__name__}")
        if self.name is not None and not isinstance(self.name, str):
            raise ArgumentError(f"the name of a tensor must be a string, not {brief(self.name)}")
        if self.codec is None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.coding is not None:
            if not isinstance(self.coding, Coding):
                raise ArgumentError(f"coding must be a Coding or None, not {brief(self.coding)}")
            self._check_coding(self.coding)

    def _check_coding(self, coding: Coding) -> None:
        object.__setattr__(
            self, "coding", replace(coding, shape=check_sizes(coding.shape), dtype=dtype_name(coding.dtype))
        )
        rows, values = self.shape[:-1], 0 if self.codec is None else self.codec.values
        if not values or not self.shape or len(rows) >= len(coding.shape) or coding.shape[: len(rows)] != rows:
            raise ArgumentError(f"{self.dtype} {list(self.shape)} does not encode {coding}")
        if self.shape[-1] != -(-math.prod(coding.shape[len(rows) :]) // values):
            raise ArgumentError(f"{self.shape[-1]} elements of {values} values do not compress the rows of {coding}")

    @cached_property
    def codec(self) -> ElementCodec | None:
        """The codec whose elements the tensor consists of; None if its elements are plain values."""
        if not isinstance(self.dtype, str):
            return None
        custom = find_custom_codec(self.dtype)
        if custom is not None and self.coding is not None and custom == self.coding.codec:
            return self.coding.codec
        return custom or find_block_codec(self.dtype)

    @cached_property
    def plain(self) -> TensorSpec:
        """The tensor that ``coding`` describes, with layouts in its own elements; ``self`` if there is no coding."""
        if self.coding is None or self.codec is None:
            return self
        values, size = self.codec.values, self.coding.shape[-1]

        def in_values(layout: AnyLayout) -> AnyLayout:
            if isinstance(layout, Layout):  # a Layout has no sizes
                return layout
            return layout.with_last_dim(lambda lo, hi: (lo * values, min(hi * values, size)))

        return TensorSpec(self.coding.shape, self.coding.dtype, in_values(self.src), in_values(self.dst), self.name)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype] if self.codec is None else self.codec.element[1]

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @cached_property
    def src_tiles(self) -> Tiles:
        """The tiles of the source layout, and the ranks that hold them."""
        return cut_tiles(self.src, self.shape)

    @cached_property
    def dst_tiles(self) -> Tiles:
        """The tiles of the destination layout, and the ranks that need them."""
        return cut_tiles(self.dst, self.shape)

    @cached_property
    def tasks(self) -> UnitTasks:
        """The unit tasks from the source to the destination layout."""
        return cut_unit_tasks(self.src_tiles, self.dst_tiles)

    @property
    def num_holdings(self) -> int:
        """Number of entries, with padding, of the larger of the two ``(tasks, replicas)`` arrays of ranks.

        One array has the holders of each unit task, and the other its destinations.
        """
        return self.num_tasks * max(self.src_tiles.ranks.shape[1], self.dst_tiles.ranks.shape[1])

    @cached_property
    def num_tasks(self) -> int:
        """Number of unit tasks."""
        count = count_unit_tasks(self.src_tiles, self.dst_tiles)
        return len(self.tasks) if count is None else count

    def __str__(self) -> str:
        name = f"{self.name} " if self.name is not None else ""
        coding = f" of {self.coding}" if self.coding is not None else ""
        return f"{name}{self.dtype} {list(self.shape)}{coding}: {self.src} => {self.dst}"


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Raise PlanError unless there is one tensor, or several with different names; ArgumentError for another type."""
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(spec, TensorSpec) for spec in tensors):
        raise ArgumentError(f"tensors must be a list of TensorSpec, not {brief(tensors)}")
    if not tensors:
        raise PlanError("a plan needs at least one tensor")
    names = [spec.name for spec in tensors]
    if len(tensors) > 1 and (None in names or len(set(names)) != len(names)):
        raise PlanError(f"{len(tensors)} tensors need {len(tensors)} different names, not {names}")
