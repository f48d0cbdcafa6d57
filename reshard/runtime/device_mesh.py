"""A torch ``DeviceMesh`` whose process groups have a timeout of the caller's choice."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

#: For each default process group, how many groups of the same ranks were made.
_num_made: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def new_group(ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None) -> Any:
    """A process group of some global ranks. Only these ranks call, all of them, in the same order.

    Unlike in ``torch.distributed.new_group(use_local_synchronization=True)``, the ranks may belong to unequal numbers
    of other groups.
    """
    import torch.distributed as dist

    from .torch_compat import named_group

    made = _num_made.setdefault(dist.group.WORLD, Counter())
    made[tuple(sorted(ranks))] += 1
    name = f"reshard group {made[tuple(sorted(ranks))]} of ranks {sorted(ranks)}"
    with named_group(name):
        return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)


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
    groups = [new_group(line.tolist(), timeout) for line in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))
