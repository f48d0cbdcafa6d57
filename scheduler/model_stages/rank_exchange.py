"""Exchange errors, and the layouts of shared parameters, among all ranks before they have an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from reshard.coordination import RoundRequest, describe_error, find_call_group, find_group
from reshard.errors import ArgumentError, ReshardError
from reshard.sharding import Layout, Mesh
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout

from .. import torch_compat
from ..gradients.data_parallel import find_parameter
from ..runtime.observe import gather_values


class RankExchange:
    """Lets all ranks of a process group exchange values and errors, and detects ranks that died.

    Args:
        group: process group; None: the world.
        timeout_seconds: time limit for a rank to wait for the others. If it is wrong, the first :meth:`share_error`
            raises on all ranks.
    """

    def __init__(self, group: Any, timeout_seconds: Any) -> None:
        self._group, self._timeout_seconds = find_group(group), DEFAULT_TIMEOUT_SECONDS
        self._failure: ArgumentError | None = None
        try:
            self._timeout_seconds = check_timeout(timeout_seconds)
        except ArgumentError as error:
            self._failure = error
        self._call_group = find_call_group(self._group, tuple(range(torch.distributed.get_world_size(group))))

    def exchange(self, value: Any = None, error: BaseException | None = None) -> dict[int, Any]:
        """Exchange values. All ranks must call this.

        Args:
            value: value of this rank, which JSON can hold.
            error: error of this rank. This rank raises it, and the other ranks raise a ReshardError.

        Returns:
            The values of all ranks, by rank.

        Raises:
            ReshardError: the error of the first rank that passes one.
        """
        failure = None if error is None else describe_error(error)
        request = RoundRequest(self._group.rank, hostname=self._group.hostname, error=failure, payload=value)
        try:
            return dict(self._call_group.agree(request, gather_values, self._timeout_seconds)[1].payloads)
        except ReshardError:
            if error is not None:
                raise error from None  # the local error has a traceback
            raise

    @contextmanager
    def share_error(self) -> Iterator[None]:
        """If a rank raises an error in this context, all ranks raise it. All ranks must enter the context."""
        try:
            if self._failure is not None:
                raise self._failure
            yield
        except Exception as error:  # whatever a user's function raises must reach the other ranks
            self.exchange(error=error)
        else:
            self.exchange()

    def tied_layouts(
        self, ties: Sequence[Mapping[int, str]], modules: Mapping[int, torch.nn.Module], meshes: Sequence[Mesh]
    ) -> list[dict[int, Layout]]:
        """For each shared parameter, ``{stage: layout}`` of the stages that shard it.

        Args:
            ties: for each parameter that several stages share, ``{stage: its name in the stage}``.
            modules: ``{stage: module}`` of this rank, parallelized.
            meshes: meshes of all stages.
        """
        own = []
        for number, tie in enumerate(ties):
            for stage in tie.keys() & modules.keys():
                spec = _spec_of(find_parameter(modules[stage], tie[stage]))
                if spec is not None:
                    own.append([number, stage, spec])
        layouts: list[dict[int, Layout]] = [{} for _ in ties]
        for item in self.exchange(own).values():
            for number, stage, spec in item:
                axes = tuple(None if dim is None else tuple(dim) for dim in spec)
                layouts[number][stage] = Layout(meshes[stage], axes)
        return layouts


def _spec_of(parameter: Any) -> tuple[Any, ...] | None:
    """For each dim of a DTensor, the mesh axes that shard it, major first; None for a plain tensor."""
    if not hasattr(parameter, "placements"):
        return None
    dims: list[Any] = [()] * parameter.dim()
    axes = list(zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True))
    # FSDP shards each tensor-parallel shard. If both shard the same dim, dp has a strided placement and is minor.
    for axis, placement in sorted(axes, key=lambda pair: torch_compat.is_strided_shard(pair[1])):
        if not placement.is_replicate():
            dims[placement.dim] = (*dims[placement.dim], axis)
    return tuple(axes or None for axes in dims)
