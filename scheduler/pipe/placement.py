"""Where each stage runs, and how torch parallelizes it there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reshard.errors import ArgumentError
from reshard.formatting import describe_ranks
from reshard.sharding import Mesh

from ..ir.schedule import Schedule

#: Wraps the module of a stage for data parallelism: ``wrap(module, device_mesh)`` with a one-dimensional mesh.
Wrap = Callable[[Any, Any], Any]


def ddp(module: Any, device_mesh: Any) -> Any:
    """Replicate a stage over ``device_mesh`` with ``DistributedDataParallel``."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(module, process_group=device_mesh.get_group())


def fsdp(module: Any, device_mesh: Any) -> Any:
    """Shard the parameters of a stage over ``device_mesh`` with ``fully_shard`` (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=device_mesh)


def make_device_mesh(mesh: Mesh, device: Any, group: Any) -> Any:
    """The device mesh of a stage of this rank, with process groups for its lines of replicas and of TP ranks.

    The ranks of ``mesh`` are those of ``group``. Only they take part, so that other ranks of the world need not call.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    array = torch.tensor(dist.get_process_group_ranks(group))[torch.tensor(mesh.array)]
    ((replica, place),) = (array == dist.get_rank()).nonzero().tolist()
    lines = (array[:, place], array[replica])
    groups = [dist.new_group(line.tolist(), use_local_synchronization=True) for line in lines]
    return DeviceMesh.from_group(groups, device.type, mesh=array, mesh_dim_names=("dp", "tp"))


@dataclass(frozen=True)
class Placement:
    """The devices of one stage and the parallelism inside it.

    Args:
        dp: number of data-parallel replicas, which see different rows of a microbatch.
        tp: number of tensor-parallel ranks of each replica. More than one needs a plan.
        tp_plan: ``{module path: ParallelStyle}`` for ``torch.distributed.tensor.parallel.parallelize_module``. Paths
            are those of the whole model and may contain ``*``. Default: the model's own ``_tp_plan``.
        wrap: :func:`ddp`, :func:`fsdp`, or a function with their signature; default: :func:`ddp`, and :func:`fsdp` if
            ``tp`` is more than one. Used if ``dp`` is more than one.
        prepare: called with the module of the stage before ``wrap``; returns the module to run. Use it for
            ``torch.compile`` or activation checkpointing.
        ranks: ranks of the stage; replica ``i`` is on ``tp`` consecutive ones. Default: the ranks that follow those of
            the stage before. Two stages with the same ranks share them, as interleaved schedules require.

    Raises:
        ArgumentError: a size is not a positive integer, or ``ranks`` has another number of ranks.
    """

    dp: int = 1
    tp: int = 1
    tp_plan: Mapping[str, Any] | None = None
    wrap: Wrap | None = None
    prepare: Callable[[Any], Any] | None = None
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} of a placement is {value!r}; it must be a positive integer")
        if self.ranks is not None:
            object.__setattr__(self, "ranks", tuple(self.ranks))
            if len(self.ranks) != self.dp * self.tp:
                raise ArgumentError(
                    f"a placement of dp={self.dp} and tp={self.tp} needs {self.dp * self.tp} ranks, not {self.ranks}"
                )


class Strategy(Protocol):
    """What a search has chosen for a model: its cuts, and how its stages run."""

    microbatches: int

    @property
    def cut_before(self) -> tuple[str, ...]:
        """Paths of the modules that begin the second and each further stage."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of ``microbatches`` microbatches."""

    def placements(self) -> Sequence[Placement]:
        """The placement of each stage."""


def parse_placements(stages: str | Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements from ``"1x2,2x2"``, which is dp x tp of each stage, or from a list of them.

    Raises:
        ArgumentError: the text or the list is malformed.
    """
    if not isinstance(stages, str):
        if (
            not isinstance(stages, (list, tuple))
            or not stages
            or not all(isinstance(each, Placement) for each in stages)
        ):
            raise ArgumentError(f'stages must be a list of Placements or a text such as "1x2,2x2", not {stages!r}')
        return tuple(stages)
    placements = []
    for text in stages.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+)\s*", text)
        if match is None:
            raise ArgumentError(f'stages {stages!r}: {text!r} must be dp x tp of a stage, such as "2x1"')
        placements.append(Placement(dp=int(match[1]), tp=int(match[2])))
    return tuple(placements)


def find_meshes(placements: Sequence[Placement]) -> list[Mesh]:
    """The mesh of each stage, with axes "dp" and "tp".

    Raises:
        ArgumentError: placements of two stages share some ranks, but not all in the same order with the same dp and tp.
    """
    meshes: list[Mesh] = []
    following = 0
    for stage, placement in enumerate(placements):
        size = placement.dp * placement.tp
        ranks = placement.ranks if placement.ranks is not None else tuple(range(following, following + size))
        following = max(following, *(rank + 1 for rank in ranks))
        mesh = Mesh(ranks, {"dp": placement.dp, "tp": placement.tp})
        for other, earlier in enumerate(meshes):
            if mesh != earlier and set(mesh.ranks) & set(earlier.ranks):
                raise ArgumentError(
                    f"stage {other} is on {_describe(earlier)} and stage {stage} on {_describe(mesh)}; two stages must "
                    "have no rank in common, or the same ranks in the same order, with the same dp and tp"
                )
        meshes.append(mesh)
    return meshes


def _describe(mesh: Mesh) -> str:
    return f"{describe_ranks(mesh.ranks)} as dp={mesh.axis_size('dp')}, tp={mesh.axis_size('tp')}"


def check_world(meshes: Sequence[Mesh], num_ranks: int) -> None:
    """Raise ArgumentError, on all ranks alike, unless each rank of the process group is in a stage."""
    used = {rank for mesh in meshes for rank in mesh.ranks}
    if used != set(range(num_ranks)):
        raise ArgumentError(
            f"the stages are on {describe_ranks(sorted(used))}, but the process group has {num_ranks} "
            f"rank{'s' * (num_ranks != 1)}; each of its ranks must be in a stage, and there must be no others"
        )


def find_rows(meshes: Sequence[Mesh]) -> list[int]:
    """The row of each stage: stages on the same ranks share a row."""
    rows: dict[tuple[int, ...], int] = {}
    return [rows.setdefault(tuple(sorted(mesh.ranks)), len(rows)) for mesh in meshes]
