"""A torch ``DeviceMesh`` whose process groups have a timeout of the caller's choice."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch


def make_device_mesh(ranks: torch.Tensor, axes: Sequence[str], device_type: str, timeout_seconds: float) -> Any:
    """A ``DeviceMesh`` with one process group for each axis. Only its own ranks call, all of them.

    Args:
        ranks: global ranks, one dim for each axis.
        axes: names of the axes. device_type: such as "cpu".
        timeout_seconds: of the process groups.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    (place,) = (ranks == dist.get_rank()).nonzero().tolist()
    lines = [ranks[(*place[:axis], slice(None), *place[axis + 1 :])] for axis in range(ranks.dim())]
    timeout = timedelta(seconds=timeout_seconds)
    groups = [dist.new_group(line.tolist(), timeout, use_local_synchronization=True) for line in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))
