"""Process groups and ``DeviceMesh`` objects with a timeout of the caller's choice, which end with their owners."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

#: For each default process group, how many groups of the same ranks were made.
_num_made: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
#: Process groups whose owners were collected.
_without_owner: list[Any] = []


def new_group(
    ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None, *, shares_thread: bool = False
) -> Any:
    """A process group of some global ranks. Only these ranks call, all of them, in the same order.

    Unlike in ``torch.distributed.new_group(use_local_synchronization=True)``, the ranks may belong to unequal numbers
    of other groups.

    Args:
        ranks: ranks of the group.
        timeout: timeout of its collectives.
        backend: as in ``torch.distributed.new_group``.
        shares_thread: whether a Gloo group uses the network thread of the default process group. Many groups then use
            little CPU time while they are idle, but no more than one core for network traffic.
    """
    import torch.distributed as dist

    from reshard.runtime.torch_compat import gloo_devices, gloo_groups_on, named_group

    _destroy_groups_without_owner()
    made = _num_made.setdefault(dist.group.WORLD, Counter())
    made[tuple(sorted(ranks))] += 1
    name = f"reshard group {made[tuple(sorted(ranks))]} of ranks {sorted(ranks)}"
    devices = gloo_devices(dist.group.WORLD) if shares_thread else []
    with named_group(name), gloo_groups_on(devices) if devices else contextlib.nullcontext():
        return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)


def end_with(owner: Any, groups: Sequence[Any]) -> None:
    """Destroy process groups after their owner: when this process makes the next group by :func:`new_group`.

    They are not destroyed at once, because the garbage collector may run in any thread, inside any call.
    """
    weakref.finalize(owner, _without_owner.extend, groups).atexit = False


def _destroy_groups_without_owner() -> None:
    import torch.distributed as dist

    from reshard.runtime.torch_compat import is_alive

    while _without_owner:
        group = _without_owner.pop()
        if is_alive(group):
            dist.destroy_process_group(group)


def make_device_mesh(ranks: torch.Tensor, axes: Sequence[str], device_type: str, timeout_seconds: float) -> Any:
    """A ``DeviceMesh`` with one process group for each axis, which end with it. Only its own ranks call, all of them.

    Args:
        ranks: global ranks, one dim for each axis.
        axes: names of the axes.
        device_type: such as "cpu".
        timeout_seconds: timeout of the process groups.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    (place,) = (ranks == dist.get_rank()).nonzero().tolist()
    lines = [ranks[(*place[:axis], slice(None), *place[axis + 1 :])] for axis in range(ranks.dim())]
    timeout = timedelta(seconds=timeout_seconds)
    groups = [new_group(line.tolist(), timeout, shares_thread=True) for line in lines]
    mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))
    end_with(mesh, groups)
    return mesh
