"""A grid of ranks with axes (depth, row, col), and the collectives along its axes."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import math
import socket
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard.arguments import check_arguments
from reshard.codecs import BlockCodec, parse_codec
from reshard.coordination.device_mesh import end_with, make_device_mesh, new_group
from reshard.errors import ArgumentError, MeshError, ReshardError
from reshard.formatting import brief
from reshard.sharding import MAX_RANK, Mesh, check_integer
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout

from .compressed_axis import CompressedAxis
from .cuts import AXES, Span, batch_spans, chunk_spans, size_of
from .failures import Failures
from .grid_axis import Axis
from .root_cause import RootCauseFinder
from .sum_agreement import SumAgreement


class Grid:
    """The ranks of a tensor-parallel model, as ``depth`` layers of ``rows`` x ``cols``.

    The batch dim of activations is sharded over (depth, row), and their hidden dim over col. Weights are sharded over
    (row, col) and replicated over depth. ``[1, p, 1]`` is 1-D tensor parallelism, a depth of 1 is 2-D (SUMMA), and a
    larger depth is 2.5-D (SUMMA2.5, Tesseract). The constructor is a collective call of all ranks of the mesh.

    Args:
        device_mesh: a ``DeviceMesh`` whose axes are named ``("depth", "row", "col")``, in this order.
        timeout_seconds: timeout of the process groups that the grid creates; default: the backend's. The groups of the
            mesh keep their timeouts.

    Attributes:
        depth, rows, cols: sizes of the axes.
        index: this rank's position on each axis, by axis name.
        weight_mesh: the ``DeviceMesh`` over (row, col) of this rank's layer, on which parameters are DTensors.

    Raises:
        MeshError: the mesh has other axes, or this rank is not in it.
    """

    def __init__(self, device_mesh: Any, *, timeout_seconds: float | None = None) -> None:
        names = tuple(getattr(device_mesh, "mesh_dim_names", None) or ())
        if names != AXES:
            raise MeshError(
                f"a grid needs a DeviceMesh with the axes ('depth', 'row', 'col') in this order, not {names}; "
                'see init_device_mesh(..., mesh_dim_names=("depth", "row", "col"))'
            )
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {dist.get_rank()} is not in the grid of ranks {device_mesh.mesh.flatten().tolist()}")
        self.device_mesh = device_mesh
        self.depth, self.rows, self.cols = device_mesh.shape
        self.index = dict(zip(AXES, coordinate, strict=True))
        self.weight_mesh = device_mesh["row", "col"]
        ranks = device_mesh.mesh
        k, i, j = coordinate
        self._timeout = None if timeout_seconds is None else timedelta(seconds=check_timeout(timeout_seconds))
        of_axis = {"depth": ranks[:, i, j], "row": ranks[k, :, j], "col": ranks[k, i, :]}
        self._finder = RootCauseFinder(ranks.flatten().tolist(), device_mesh.shape)
        self._failures = Failures(self._finder.report)
        self._axes = {
            name: self._make_axis(name, device_mesh.get_group(name), members.tolist(), self.index[name])
            for name, members in of_axis.items()
        }
        self._axes["layer"] = self._make_layer_axis(ranks[k].flatten().tolist())
        self._split_axes_by_host()
        for name in ("row", "col", "layer"):
            self._axes[name].separate_backwards()
        if self.depth > 1:  # made here: if a rank skipped the first sum, ranks would differ in their numbers of groups
            SumAgreement.of(self._axes["depth"], torch.device(device_mesh.device_type))
        #: Compresses the messages of matrix products; None: no compression.
        self.codec: BlockCodec | None = None
        self._batch_rows: tuple[int, ...] | None = None
        self._first_row: int | None = None
        #: Products whose backward has not run; each lives as long as its autograd graph.
        self.open_calls: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def make(
        cls,
        rows: int,
        cols: int,
        depth: int = 1,
        device_type: str = "cpu",
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Grid:
        """A grid of ``rows`` x ``cols`` x ``depth`` ranks: all ranks of the default process group, in order.

        Args:
            rows, cols, depth: shape of the grid.
            device_type: such as "cpu".
            timeout_seconds: timeout of each collective of the grid.

        Raises:
            MeshError: a size is not a positive integer, or the group has another number of ranks.
            ArgumentError: the timeout is not a positive number of seconds.
            DisagreementError: ranks make grids of different shapes.
            TransferTimeoutError: a rank makes no grid.
        """
        seconds = check_timeout(timeout_seconds)
        sizes = {"rows": rows, "cols": cols, "depth": depth}
        rows, cols, depth = (check_integer(size, name, 1, MAX_RANK, MeshError) for name, size in sizes.items())
        check_device_type(device_type)
        world = dist.get_world_size()
        if rows * cols * depth != world:
            raise MeshError(
                f"a grid of {rows} x {cols} x {depth} has {rows * cols * depth} ranks, but the group has {world}"
            )
        ranks = torch.arange(world).view(depth, rows, cols)
        RootCauseFinder(range(world), ranks.shape, seconds)  # ranks that make different groups wait for each other
        return cls(make_device_mesh(ranks, AXES, device_type, seconds), timeout_seconds=seconds)

    def __repr__(self) -> str:
        return f"Grid(rows={self.rows}, cols={self.cols}, depth={self.depth})"

    @property
    def mesh(self) -> Mesh:
        """The ranks as a :class:`reshard.Mesh` with the axes depth, row and col."""
        sizes = dict(zip(AXES, (self.depth, self.rows, self.cols), strict=True))
        return Mesh(self.device_mesh.mesh.flatten().tolist(), sizes)

    @property
    def has_open_graph(self) -> bool:
        """Whether a forward of a model on this grid is waiting for its backward."""
        if self.open_calls:
            gc.collect()  # a graph that only a reference cycle keeps alive will have no backward
        return bool(self.open_calls)

    def copy(self) -> Grid:
        """A grid of the same ranks and groups, for another model."""
        result = copy.copy(self)
        result.open_calls = weakref.WeakSet()
        return result

    def __deepcopy__(self, memo: Any) -> Grid:
        """Like :meth:`copy`, for the copy of a model."""
        return self.copy()

    def replace_with(self, other: Grid) -> None:
        """Take the shape and groups of another grid, but keep the codec. For :func:`~reshard.parallel.relayout`."""
        codec = self.codec
        self.__dict__.update(other.copy().__dict__)
        self.codec = codec

    def await_all_ranks(self, called: str) -> None:
        """Wait until all ranks of the grid call the function of this name, before its first collective.

        Raises:
            DisagreementError: a rank calls another function that all ranks must call.
            TransferTimeoutError: a rank did not call it within the time-out of the grid.
            RemoteError: an earlier collective of this grid failed.
        """
        self._failures.check()
        seconds = DEFAULT_TIMEOUT_SECONDS if self._timeout is None else self._timeout.total_seconds()
        try:
            self._finder.await_all_ranks(called, seconds)
        except ReshardError as error:
            self._failures.add(error)
            raise

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(rows, cols, depth)``."""
        return self.rows, self.cols, self.depth

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rows * self.cols * self.depth

    @property
    def row(self) -> int:
        """The row of the grid that this rank is in."""
        return self.index["row"]

    @property
    def col(self) -> int:
        """The column of the grid that this rank is in."""
        return self.index["col"]

    def along(self, axis: str) -> Axis:
        """The ranks that differ from this one only in their position on ``axis``.

        Args:
            axis: "depth", "row" or "col"; "layer" is all ranks of this depth, row by row.
        """
        if not isinstance(axis, str) or axis not in self._axes:
            raise MeshError(f"a grid has no axis {brief(axis)}; its axes are {', '.join(self._axes)}")
        return self._axes[axis]

    def encoded(self, axis: str) -> Axis | CompressedAxis:
        """Like :meth:`along`, with messages compressed by the codec of the grid."""
        plain = self.along(axis)
        return plain if self.codec is None else CompressedAxis(plain, self.codec)

    def set_codec(self, name: str) -> None:
        """Compress the messages of matrix products. All ranks call it with the same codec.

        Raises:
            ArgumentError: there is no such codec, or the grid is not on the CPU.
        """
        if self.device_mesh.device_type != "cpu":
            raise ArgumentError(f"codec {name} encodes CPU tensors only; the grid is on {self.device_mesh.device_type}")
        self.codec = parse_codec(name)

    @check_arguments(rows=(0, 2**56))
    def local_rows(self, rows: int) -> Span:
        """The interval of a batch of ``rows`` rows that this rank holds."""
        return batch_spans(rows, self.depth, self.rows)[self.index["depth"]][self.row]

    @check_arguments(size=(0, 2**56))
    def local_features(self, size: int) -> Span:
        """The interval of a hidden dim of ``size`` elements that this rank holds."""
        return chunk_spans(size, self.cols)[self.col]

    @contextlib.contextmanager
    @check_arguments(rows=(0, 2**56))
    def batch(self, rows: int) -> Iterator[None]:
        """Inside this context, the whole batch has ``rows`` rows, so ranks need not exchange their numbers of rows."""
        before = self._batch_rows, self._first_row
        self._batch_rows, self._first_row = tuple(self.layer_rows(rows)), self.local_rows(rows)[0]
        try:
            yield
        finally:
            self._batch_rows, self._first_row = before

    @contextlib.contextmanager
    @check_arguments(rows=(0, 2**56))
    def local_batch(self, rows: int, device: torch.device) -> Iterator[None]:
        """Like :meth:`batch`, but ``rows`` is the number of rows of this rank. The ranks of a column exchange them."""
        before = self._batch_rows, self._first_row
        self._batch_rows, self._first_row = self.exchange_count(rows, device), None
        try:
            yield
        finally:
            self._batch_rows, self._first_row = before

    @check_arguments(rows=(0, 2**56))
    def spans_of_batch(self, rows: int) -> tuple[tuple[Span, ...], ...]:
        """The interval of a batch of ``rows`` rows that each position holds: ``[depth][row]``."""
        return batch_spans(rows, self.depth, self.rows)

    @check_arguments(rows=(0, 2**56))
    def layer_rows(self, rows: int) -> list[int]:
        """The number of batch rows, of ``rows`` in all, that each grid row of this rank's layer holds."""
        return [size_of(span) for span in batch_spans(rows, self.depth, self.rows)[self.index["depth"]]]

    def exchange_count(self, count: int, device: torch.device) -> tuple[int, ...]:
        """Gather a count from each rank in this column of the layer. All of these ranks call it."""
        if self.rows == 1:
            return (count,)
        own = torch.tensor([count], device=device)
        return tuple(self._axes["row"].all_gather(own, [1] * self.rows).wait().tolist())

    def first_row(self, count: int, device: torch.device) -> int:
        """The index in the whole batch of the first row of this rank, which has ``count`` rows."""
        if self._first_row is not None:
            return self._first_row
        if self.rows * self.depth == 1:
            return 0
        own = torch.tensor([count], device=device)
        in_layer = self._axes["row"].all_gather(own, [1] * self.rows).wait()
        before = self._axes["depth"].all_gather(in_layer.sum().view(1), [1] * self.depth).wait()
        return int(before[: self.index["depth"]].sum() + in_layer[: self.row].sum())

    def tokens_of(self, x: torch.Tensor) -> tuple[int, ...]:
        """Number of tokens that ``x`` has in each grid row of this rank's layer.

        Args:
            x: ``[batch, ..., features]``; inside :meth:`batch`, its first dim must be the batch.

        Raises:
            ArgumentError: the first dim is not the batch.
        """
        if self.rows == 1 or self._batch_rows is None:
            return self.exchange_count(math.prod(x.shape[:-1]), x.device)
        if x.dim() < 2 or x.shape[0] != self._batch_rows[self.row]:
            raise ArgumentError(
                f"a layer on a grid got an input of shape {list(x.shape)}; its first dim must be the batch, which has "
                f"{self._batch_rows[self.row]} rows on this rank"
            )
        return tuple(rows * math.prod(x.shape[1:-1]) for rows in self._batch_rows)

    def _split_axes_by_host(self) -> None:
        """Tell each axis which of its ranks have the same host name."""
        digest = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7], "big")
        own = torch.tensor([digest], device=self.device_mesh.device_type)
        for name in AXES:
            axis = self._axes[name]
            axis.split_by_host(axis.all_gather(own, [1] * axis.size).wait().tolist())
        layer = self._axes["layer"]
        if layer not in (self._axes["row"], self._axes["col"]):
            hosts = layer.all_gather(own, [1] * layer.size).wait().tolist()
            if len(set(hosts)) == 1:
                layer.share_memory()

    def _make_layer_axis(self, ranks: Sequence[int]) -> Axis:
        if self.rows == 1:
            return self._axes["col"]
        if self.cols == 1:
            return self._axes["row"]
        backend = dist.get_backend(self._axes["col"].group)
        group = new_group(ranks, self._timeout, backend, shares_thread=True)
        axis = self._make_axis("layer", group, ranks, self.row * self.cols + self.col)
        end_with(axis, [group])
        return axis

    def _make_axis(self, name: str, group: Any, ranks: Sequence[int], index: int) -> Axis:
        explain = self._finder.explain
        return Axis(name, group, ranks, index, self._timeout, failures=self._failures, explain=explain)


def check_device_type(device_type: Any) -> None:
    """Raise ArgumentError unless torch knows the device type."""
    try:
        known_type = torch.device(device_type).type if isinstance(device_type, str) else None
    except RuntimeError:
        known_type = None
    if known_type is None or known_type != device_type:
        raise ArgumentError(f'device_type is {brief(device_type)}; it must be one of torch, such as "cpu" or "cuda"')


def check_grid(grid: Any, called: str) -> Grid:
    """The grid, or an ArgumentError if it is something else. ``called`` is the name of the function."""
    if not isinstance(grid, Grid):
        raise ArgumentError(f"{called} needs a reshard.parallel.Grid, not a {type(grid).__name__}; see Grid.make")
    return grid
