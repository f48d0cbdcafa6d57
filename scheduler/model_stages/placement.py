"""Placements: the ranks of each stage, and the parallelism inside the stage."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from reshard.arguments import check_fields
from reshard.errors import ArgumentError
from reshard.formatting import brief, describe_ranks
from reshard.sharding import Mesh

from ..ir.schedule import Schedule
from .partition.stage_mesh import GRID_AXES, STAGE_AXES

if TYPE_CHECKING:
    from reshard.compression import Policy

#: Wraps the module of a stage for data parallelism: ``wrap(module, device_mesh)`` with a one-dimensional mesh.
Wrap = Callable[[Any, Any], Any]


def ddp(module: Any, device_mesh: Any) -> Any:
    """Replicate a stage over ``device_mesh`` with ``DistributedDataParallel``, or :class:`FrozenReplicas` if frozen."""
    from torch.nn.parallel import DistributedDataParallel

    from ..gradients.data_parallel import FrozenReplicas

    if not any(parameter.requires_grad for parameter in module.parameters()):
        return FrozenReplicas(module, device_mesh.get_group())
    return DistributedDataParallel(module, process_group=device_mesh.get_group())


def fsdp(module: Any, device_mesh: Any) -> Any:
    """Shard the parameters of a stage over ``device_mesh`` with ``fully_shard`` (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=device_mesh)


#: A wrap with this attribute may shard the parameters of a stage on a grid over its depth.
fsdp.shards_parameters = True  # type: ignore[attr-defined]


def make_device_mesh(mesh: Mesh, device: Any, group: Any, timeout_seconds: float) -> Any:
    """The device mesh of a stage of this rank, with a process group for each axis.

    Only the ranks of ``mesh`` call this.

    Args:
        mesh: mesh of the stage, with ranks of ``group``.
        device: device of the stage.
        group: process group; None: the world.
        timeout_seconds: time limit of each collective of the new process groups.
    """
    import torch
    import torch.distributed as dist

    from reshard.coordination import device_mesh

    ranks = torch.tensor(dist.get_process_group_ranks(group))[torch.tensor(mesh.array)]
    return device_mesh.make_device_mesh(ranks, mesh.axes, device.type, timeout_seconds)


@dataclass(frozen=True)
class Placement:
    """The devices of one stage and the parallelism inside it.

    Args:
        dp: number of data-parallel replicas, which see different samples of a microbatch.
        tp: number of tensor-parallel ranks of each replica. More than one needs a plan.
        grid: ``(rows, cols, depth)`` of a grid of :mod:`reshard.parallel`, which cuts the stage instead of dp and tp.
            Replicas are its depth. A tensor with a gradient that another stage sends or receives must have its features
            in its last dim, which the columns divide.
        keep_inputs: on a grid, as in :func:`reshard.parallel.parallelize`: fewer bytes for more memory.
        tp_plan: ``{module path: ParallelStyle}`` for ``torch.distributed.tensor.parallel.parallelize_module``. Paths
            are those of the whole model and may contain ``*``. Default: the model's own ``_tp_plan``.
        wrap: :func:`ddp`, :func:`fsdp`, or a function with their signature; default: :func:`ddp`, and :func:`fsdp` if
            ``tp`` is more than one. Used if ``dp`` is more than one. On a grid: :func:`fsdp` over its depth, or None.
        prepare: called with the module of the stage before ``wrap``; returns the module to run. Use it for
            ``torch.compile`` or activation checkpointing.
        ranks: ranks of the stage; replica ``i`` is on ``tp`` consecutive ones, and a layer of a grid on ``rows * cols``
            ones, row by row. Default: the ranks that follow those of the stage before. Two stages with the same ranks
            share them, as interleaved schedules require.

    Raises:
        ArgumentError: a size is not a positive integer, ``ranks`` has another number of ranks, or an option does not
            apply to a grid.
    """

    dp: int = 1
    tp: int = 1
    grid: tuple[int, int, int] | None = None
    tp_plan: Mapping[str, Any] | None = None
    wrap: Wrap | None = None
    prepare: Callable[[Any], Any] | None = None
    ranks: tuple[int, ...] | None = None
    keep_inputs: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp"):
            if not _is_size(getattr(self, name)):
                raise ArgumentError(
                    f"{name} of a placement is {brief(getattr(self, name))}; it must be a positive integer"
                )
        if not isinstance(self.keep_inputs, bool):
            raise ArgumentError(f"keep_inputs of a placement is {brief(self.keep_inputs)}; it must be True or False")
        if self.grid is not None:
            self._check_grid(self.grid)
        elif self.keep_inputs:
            raise ArgumentError("a placement with keep_inputs=True needs a grid")
        check_fields(self)
        if self.ranks is not None:
            object.__setattr__(self, "ranks", tuple(self.ranks))
            if len(self.ranks) != self.size:
                raise ArgumentError(f"a placement of {self} needs {self.size} ranks, not {self.ranks}")
            self._check_order(Mesh(self.ranks, self.axis_sizes))

    def _check_order(self, mesh: Mesh) -> None:
        """Torch sorts the ranks of a process group, so a DTensor on a mesh in another order has its shards mixed up."""
        for axis, name in enumerate(mesh.axes):
            if name == "dp" and (self.wrap is ddp or (self.wrap is None and self.tp == 1)):
                continue
            lines = np.moveaxis(mesh.array, axis, -1).reshape(-1, mesh.sizes[axis])
            for line in lines.tolist():
                if line != sorted(line):
                    raise ArgumentError(
                        f"ranks of a placement of {self} are {self.ranks}; along {name} they are {line}, but they must "
                        "ascend where torch shards parameters"
                    )

    def _check_grid(self, grid: Any) -> None:
        if not isinstance(grid, (list, tuple)) or len(grid) != 3 or not all(map(_is_size, grid)):
            raise ArgumentError(
                f"grid of a placement is {brief(grid)}; it must be (rows, cols, depth), three positive integers"
            )
        object.__setattr__(self, "grid", tuple(grid))
        if self.dp != 1 or self.tp != 1 or self.tp_plan is not None:
            raise ArgumentError(
                "a placement on a grid takes no dp, tp or tp_plan; the depth of the grid is its replicas"
            )
        if self.wrap is not None and not getattr(getattr(self.wrap, "func", self.wrap), "shards_parameters", False):
            raise ArgumentError(
                "a placement on a grid sums its gradients itself; its wrap must be rs.fsdp, which shards parameters "
                f"over the depth, or None, not {getattr(self.wrap, '__name__', self.wrap)!r}"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axis_sizes.values())

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The axes of the mesh of the stage."""
        if self.grid is None:
            return dict(zip(STAGE_AXES, (self.dp, self.tp), strict=True))
        rows, cols, depth = self.grid
        return dict(zip(GRID_AXES, (depth, rows, cols), strict=True))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axis_sizes.items())


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


class PlacedStages(Protocol):
    """The result of a strategy search for a model: its cuts, and the placements and the schedule of its stages."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""

    @property
    def cut_before(self) -> tuple[str, ...]:
        """Paths of the modules that begin the second and each further stage."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of ``num_microbatches`` microbatches."""

    @property
    def compression(self) -> Policy | None:
        """Codecs of edges and of sums of gradients; None: nothing is encoded."""

    def placements(self) -> Sequence[Placement]:
        """The placement of each stage."""


def parse_placements(stages: str | Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements from ``"1x2,2x2x1"`` or from a list of them.

    Two numbers are dp x tp of a stage, three are rows x cols x depth of a grid.

    Raises:
        ArgumentError: the text or the list is malformed.
    """
    if not isinstance(stages, str):
        if (
            not isinstance(stages, (list, tuple))
            or not stages
            or not all(isinstance(stage, Placement) for stage in stages)
        ):
            raise ArgumentError(f'stages must be a list of Placements or a text such as "1x2,2x2", not {brief(stages)}')
        return tuple(stages)
    placements = []
    for text in stages.split(","):
        if not re.fullmatch(r"\s*\d+(x\d+){1,2}\s*", text):
            raise ArgumentError(
                f'stages {stages!r}: {text!r} must be dp x tp of a stage, such as "2x1", or rows x cols x depth of a '
                'grid, such as "2x2x1"'
            )
        sizes = [int(size) for size in text.split("x")]
        if len(sizes) == 2:
            placements.append(Placement(dp=sizes[0], tp=sizes[1]))
        else:
            placements.append(Placement(grid=(sizes[0], sizes[1], sizes[2])))
    return tuple(placements)


def find_meshes(placements: Sequence[Placement]) -> list[Mesh]:
    """The mesh of each stage, with axes "dp" and "tp", or "depth", "sample" and "col" of a grid.

    Raises:
        ArgumentError: placements of two stages share some ranks, but not all in the same order with the same axes.
    """
    meshes: list[Mesh] = []
    following = 0
    for stage, placement in enumerate(placements):
        first = tuple(range(following, following + placement.size))
        ranks = placement.ranks if placement.ranks is not None else first
        following = max(following, *(rank + 1 for rank in ranks))
        mesh = Mesh(ranks, placement.axis_sizes)
        for other, earlier in enumerate(meshes):
            if mesh != earlier and set(mesh.ranks) & set(earlier.ranks):
                raise ArgumentError(
                    f"stage {other} is on {_describe(earlier)} and stage {stage} on {_describe(mesh)}; two stages must "
                    "have no rank in common, or the same ranks in the same order, with the same axes"
                )
        meshes.append(mesh)
    return meshes


def _describe(mesh: Mesh) -> str:
    sizes = ", ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
    return f"{describe_ranks(mesh.ranks)} as {sizes}"


def check_world(meshes: Sequence[Mesh], num_ranks: int) -> None:
    """Raise ArgumentError, on all ranks alike, unless each rank of the process group is in a stage."""
    used = {rank for mesh in meshes for rank in mesh.ranks}
    if used != set(range(num_ranks)):
        raise ArgumentError(
            f"the stages are on {describe_ranks(sorted(used))}, but the process group has {num_ranks} "
            f"rank{'s' * (num_ranks != 1)}; each of its ranks must be in a stage, and there must be no others; a "
            'search with fixed={"idle": False} uses all ranks'
        )


def find_pp_ranks(meshes: Sequence[Mesh]) -> list[int]:
    """The pp rank of each stage: stages on the same ranks share one."""
    pp_ranks: dict[tuple[int, ...], int] = {}
    return [pp_ranks.setdefault(tuple(sorted(mesh.ranks)), len(pp_ranks)) for mesh in meshes]
