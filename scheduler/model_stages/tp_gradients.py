"""Compare gradients that tensor-parallel ranks must hold alike, to find a plan that omits a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reshard.errors import ArgumentError
from reshard.sharding import Mesh

from ..gradients.data_parallel import plain_parameters
from ..gradients.gradient_norm import local_gradients
from ..runtime.schedule_engine import ScheduleEngine
from .stage_planner import StagePlanner

#: Largest difference between ranks, relative to the norm of the gradient, and to the largest norm of the stage.
_TOLERANCE, _NEGLIGIBLE = 0.02, 1e-4


class ReplicatedGradients:
    """Checks, after the first step with finite gradients, parameters that the plan of a stage does not shard.

    Every tensor-parallel rank computes the whole gradient of such a parameter, unless the parameter acts on a shard.
    The norm of the features of each head does, behind a column-parallel layer. Then each rank has a part of the
    gradient. Without a style that sums the parts, the copies of the parameter would drift apart.

    Args:
        engine: lets ranks exchange what they find.
        planner: knows the meshes.
        modules: ``{stage: module}`` of this rank.
    """

    def __init__(self, engine: ScheduleEngine, planner: StagePlanner, modules: Mapping[int, torch.nn.Module]) -> None:
        self._engine, self._meshes, self._modules = engine, planner.meshes, modules
        self._is_due = any(map(_num_parts, planner.meshes))

    def check(self, finite: bool) -> None:
        """Check once. Every rank of the pipeline calls this after each step.

        Args:
            finite: whether all gradients are finite, the same on all ranks.

        Raises:
            ArgumentError: tensor-parallel ranks have different gradients of one parameter; on all ranks alike.
        """
        if not self._is_due or not finite:
            return
        self._is_due = False
        divided = [stage for stage in self._modules if _num_parts(self._meshes[stage])]
        own = {str(stage): dict(_digests(self._modules[stage])) for stage in divided}
        firsts: dict[tuple[str, int], int] = {}
        gathered = self._engine.exchange(own)
        for rank, stages in sorted(gathered.items()):
            for stage, digests in stages.items():
                mesh = self._meshes[int(stage)]
                replica = mesh.ranks.index(rank) // _num_parts(mesh)
                first = firsts.setdefault((stage, replica), rank)
                name = _find_unlike(gathered[first][stage], digests)
                if name is not None:
                    raise ArgumentError(
                        f"ranks {first} and {rank} of stage {stage} have different gradients of {name!r}, which the "
                        "tp_plan does not shard: each has a part. Name its module in the tp_plan, with the style "
                        "'replicated_with_grad_allreduce' if it acts on each head, or SequenceParallel()"
                    )


def _num_parts(mesh: Mesh) -> int:
    """The number of tensor-parallel ranks of a replica; 0 if a stage has none."""
    size = dict(zip(mesh.axes, mesh.sizes, strict=True)).get("tp", 1)
    return size if size > 1 else 0


def _digests(module: torch.nn.Module) -> Iterator[tuple[str, list[float]]]:
    """Name, and norm and two projections, of each gradient that is not sharded over tensor-parallel ranks."""
    for name, parameter in plain_parameters(module):
        held: Any = parameter
        if "tp" in (getattr(getattr(held, "device_mesh", None), "mesh_dim_names", None) or ()):
            continue
        for gradient in local_gradients([parameter]):
            if not gradient.is_sparse and gradient.numel():
                flat = gradient.detach().flatten().float()
                waves = torch.arange(flat.numel(), device=flat.device).cos() / flat.numel() ** 0.5
                yield name, [float(flat.norm()), float(flat.sum()) / flat.numel() ** 0.5, float(flat @ waves)]


def _find_unlike(first: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> str | None:
    """The name of a parameter whose gradients differ, if any."""
    largest = max((norm for norm, *_ in first.values()), default=0.0)
    for name, numbers in first.items():
        if name in other:
            max_count = max(numbers[0], other[name][0])
            difference = max(abs(a - b) for a, b in zip(numbers, other[name], strict=True))
            if difference > max(_TOLERANCE * max_count, _NEGLIGIBLE * largest):
                return name
    return None
