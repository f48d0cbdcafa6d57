"""A grid of ranks with named axes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from reshard.errors import ArgumentError, MeshError, ReshardError
from reshard.formatting import brief, count_of, did_you_mean, format_ranks

_AXIS = re.compile(r"[A-Za-z0-9_.]+\Z")
#: Bounds the size of arrays that are indexed by rank.
MAX_RANK = 2**22 - 1
MAX_MESH_RANKS = 2**20
MAX_AXES = 16


def check_integer(value: Any, what: str, low: int, high: int, error: type[ReshardError] = ArgumentError) -> int:
    """The value as an ``int``. Integers of NumPy are accepted, arrays and bools are not.

    Args:
        what: name of the value in the error.
        low, high: its bounds, both included.
        error: the class to raise.
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and low <= value <= high:
        return int(value)
    raise error(f"{what} is {brief(value)}; it must be an integer from {low} to {high:,}")


@dataclass(frozen=True, eq=False)
class Mesh:
    """An n-d grid of distinct ranks with one name per axis.

    Args:
        ranks: the ranks in row-major order, as one list or a nested one such as ``[[0, 1], [2, 3]]``.
        axis_sizes: ``{axis name: size}`` in axis order; the product of the sizes is the number of ranks. Default: the
            axes of the list, named "0", "1", ...

    Ranks are those of the group that is passed to a call, by default the world. They may have gaps and any order, and
    several meshes may share ranks. Two meshes are equal if their sizes, axis names and ranks are equal.

    >>> print(Mesh.of("2x4", first_rank=8))
    Mesh(0=2, 1=4; ranks 8-15)

    Raises:
        MeshError: a repeated or negative rank, an invalid axis name, or sizes whose product is not the number of ranks.
    """

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, ranks: Iterable[int], axis_sizes: Mapping[str, int] | None = None) -> None:
        try:
            ranks = tuple(ranks)
            if any(isinstance(rank, (list, tuple, np.ndarray)) for rank in ranks):
                nested = _as_grid(ranks)
                ranks = tuple(nested.ravel().tolist())
                if axis_sizes is None:
                    axis_sizes = {str(axis): size for axis, size in enumerate(nested.shape)}
            flat = tuple(index(rank) for rank in ranks)
            if axis_sizes is None:
                axis_sizes = {"0": len(flat)}
            if not isinstance(axis_sizes, Mapping):
                raise MeshError(f"axis sizes must be a mapping such as {{'dp': 2, 'tp': 4}}, not {brief(axis_sizes)}")
            sizes = tuple(index(size) for size in axis_sizes.values())
        except (TypeError, ValueError, OverflowError) as error:
            raise MeshError(f"ranks and axis sizes must be integers: {error}") from None
        axes = tuple(axis_sizes)
        if len(axes) > MAX_AXES:
            raise MeshError(f"a mesh has at most {MAX_AXES} axes, not {len(axes)}")
        for axis in axes:
            if not isinstance(axis, str) or not _AXIS.match(axis):
                raise MeshError(f"axis name {brief(axis)} must be letters, digits, '_' or '.'")
        for axis, size in zip(axes, sizes, strict=True):
            if size < 1:
                raise MeshError(f"axis {axis!r} has size {size}; every axis needs at least 1")
        if math.prod(sizes) != len(flat):
            grid = "x".join(map(str, sizes)) or "a single rank"
            raise MeshError(f"axes of {grid} hold {count_of(math.prod(sizes), 'rank')}, but {len(flat)} are given")
        for rank in flat:
            if not 0 <= rank <= MAX_RANK:
                raise MeshError(f"rank {brief(rank)} is outside 0..{MAX_RANK}")
        if len(set(flat)) != len(flat):
            seen: set[int] = set()
            repeated = next(rank for rank in flat if rank in seen or seen.add(rank))  # type: ignore[func-returns-value]
            raise MeshError(f"rank {repeated} appears {flat.count(repeated)} times; a mesh holds each rank once")
        object.__setattr__(self, "ranks", flat)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def of(cls, grid: str | int | Sequence[int], *, first_rank: int = 0, axes: Sequence[str] | None = None) -> Mesh:
        """A mesh of consecutive ranks, such as ``"2x4"``, ``(2, 4)`` or ``8``. By default axes are named ``0, 1, ...``.

        A string may also name the axes: ``"dp=2,tp=4"``.
        """
        if isinstance(grid, str) and axes is None and "=" in grid:
            words = [word.strip().partition("=") for word in grid.split(",")]
            if not all(re.fullmatch("[0-9]{1,9}", size) for _, _, size in words):
                raise MeshError(f"mesh {brief(grid)} is not of the form dp=2,tp=4")
            axes, sizes = [name for name, _, _ in words], [int(size) for _, _, size in words]
        elif isinstance(grid, str):
            if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", grid):
                raise MeshError(f"mesh {brief(grid)} is not of the form 2x4 or dp=2,tp=4")
            sizes = [int(size) for size in grid.split("x")]
        else:
            try:
                sizes = [index(size) for size in ((grid,) if isinstance(grid, (int, np.integer)) else grid)]
            except TypeError:
                raise MeshError(f"mesh {brief(grid)} is not of the form '2x4', 'dp=2,tp=4', (2, 4) or 8") from None
        if math.prod(sizes) > MAX_MESH_RANKS:
            raise MeshError(f"mesh {brief(grid)} has more than {MAX_MESH_RANKS} ranks")
        first_rank = check_integer(first_rank, "first_rank", 0, MAX_RANK, MeshError)
        names = _axis_names(axes, len(sizes))
        return cls(range(first_rank, first_rank + math.prod(sizes)), dict(zip(names, sizes, strict=True)))

    @classmethod
    def from_array(cls, ranks: Any, axes: Sequence[str] | None = None) -> Mesh:
        """A mesh from an n-d array (or nested list) of ranks."""
        grid = _as_grid(ranks)
        names = _axis_names(axes, grid.ndim)
        return cls(grid.ravel().tolist(), dict(zip(names, grid.shape, strict=True)))

    @classmethod
    def from_device_mesh(cls, device_mesh: Any) -> Mesh:
        """A mesh from a ``torch.distributed.DeviceMesh``, which holds global ranks."""
        if not hasattr(device_mesh, "mesh_dim_names"):
            raise MeshError(f"{type(device_mesh).__name__} is not a DeviceMesh")
        names = device_mesh.mesh_dim_names
        return cls.from_array(device_mesh.mesh.tolist(), list(names) if names is not None else None)

    @classmethod
    def from_jax(cls, jax_mesh: Any) -> Mesh:
        """A mesh from a ``jax.sharding.Mesh``; the rank of a device is its ``id``."""
        if not hasattr(jax_mesh, "devices") or not hasattr(jax_mesh, "axis_names"):
            raise MeshError(f"{type(jax_mesh).__name__} is not a jax Mesh")
        devices = np.asarray(jax_mesh.devices)
        ids = np.array([device.id for device in devices.ravel()], dtype=np.int64).reshape(devices.shape)
        return cls.from_array(ids, list(jax_mesh.axis_names))

    @cached_property
    def array(self) -> np.ndarray:
        """The ranks as a read-only int64 array of shape :attr:`sizes`."""
        grid = np.array(self.ranks, dtype=np.int64).reshape(self.sizes)
        grid.setflags(write=False)
        return grid

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def axis_size(self, axis: str) -> int:
        """The size of one axis."""
        if not isinstance(axis, str) or axis not in self.axes:
            meant = did_you_mean(axis, self.axes)
            raise MeshError(f"no axis {brief(axis)} in {self}; its axes are {', '.join(self.axes) or 'none'}{meant}")
        return self.sizes[self.axes.index(axis)]

    def with_ranks(self, rank_of: Mapping[int, int]) -> Mesh:
        """The same grid with each rank ``r`` replaced by ``rank_of[r]``."""
        if not isinstance(rank_of, Mapping):
            raise MeshError(f"rank_of must be {{rank: new rank}}, not {type(rank_of).__name__}")
        missing = [rank for rank in self.ranks if rank not in rank_of]
        if missing:
            raise MeshError(f"no new rank is given for rank {missing[0]}")
        return Mesh([rank_of[rank] for rank in self.ranks], dict(zip(self.axes, self.sizes, strict=True)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self.ranks, self.axes, self.sizes) == (other.ranks, other.axes, other.sizes)

    def __hash__(self) -> int:
        return hash((self.ranks, self.axes, self.sizes))

    def __str__(self) -> str:
        grid = ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))
        return f"Mesh({grid + '; ' if grid else ''}ranks {format_ranks(self.ranks)})"

    __repr__ = __str__


def _as_grid(ranks: Any) -> np.ndarray:
    """Convert nested ranks to an array of integers."""
    try:
        grid = np.asarray(ranks)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # the last from a tensor with a gradient
        raise MeshError(f"ranks must form a full grid: {error}") from None
    if grid.size and grid.dtype.kind not in "iu":
        raise MeshError(f"ranks must be integers, not {grid.dtype}")
    return grid


def _axis_names(axes: Sequence[str] | None, count: int) -> list[str]:
    """Check and return the given names; without any, return ``0, 1, ...``."""
    if axes is None:
        return [str(i) for i in range(count)]
    if isinstance(axes, str) or not isinstance(axes, Sequence) or not all(isinstance(name, str) for name in axes):
        raise MeshError(f"axes must be a sequence of names, not {brief(axes)}")
    if len(axes) != count:
        raise MeshError(f"axes are {brief(axes)}, but the mesh has {count_of(count, 'axis')}; give each one a name")
    for name in axes:
        if list(axes).count(name) > 1:
            raise MeshError(f"axis {name!r} appears {list(axes).count(name)} times; axis names must be distinct")
    return list(axes)


def parse_ranks(text: str) -> list[int]:
    """Parse the text of :func:`format_ranks`, such as ``0-3,8``.

    Raises:
        MeshError: the text is malformed, or names more than 2**20 ranks.
    """
    ranks: list[int] = []
    for run in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})(?:-([0-9]{1,10}))?\s*", run)
        if not match:
            raise MeshError(f"{brief(run)} is not a rank or a range of ranks such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or len(ranks) + last - first >= MAX_MESH_RANKS:
            raise MeshError(f"range of ranks {brief(run)} is empty or too long")
        ranks.extend(range(first, last + 1))
    return ranks
