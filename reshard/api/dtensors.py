"""What a DTensor says of itself. Arguments beside it may repeat that, and never overrule it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.coordination.process_group import Group
from reshard.errors import ArgumentError
from reshard.sharding.layout import AnyLayout, Layout
from reshard.sharding.mesh import Mesh
from reshard.sharding.tiles import cut_shards, find_overlaps


def is_dtensor(value: Any) -> bool:
    """Whether a value is a ``torch.distributed.tensor.DTensor``."""
    return hasattr(value, "device_mesh") and hasattr(value, "placements") and hasattr(value, "to_local")


def is_device_mesh(value: Any) -> bool:
    """Whether a value is a ``torch.distributed.DeviceMesh``."""
    return hasattr(value, "mesh_dim_names") and hasattr(value, "mesh")


def mesh_of(device_mesh: Any, group: Group) -> Mesh:
    """A DeviceMesh, whose ranks are ranks of the world, as a mesh of ranks of a group."""
    mesh = Mesh.from_device_mesh(device_mesh)
    return mesh.with_ranks({rank: group.translate(rank) for rank in mesh.ranks})


def layout_of(dtensor: Any, group: Group) -> Layout:
    """The layout of a DTensor in ranks of a group.

    Raises:
        PartialError: it has a pending reduction. ArgumentError: a rank of its mesh is outside the group.
    """
    return Layout(mesh_of(dtensor.device_mesh, group), list(dtensor.placements))


def check_same_layout(own: Layout, given: AnyLayout, shape: Sequence[int], rank: int, what: str, source: str) -> None:
    """Raise ArgumentError unless two layouts give a rank the same elements in the same places.

    Args:
        own: of the DTensor. given: what the caller or a plan says. shape: the global shape.
        what: names the DTensor; source: what says ``given``.
    """
    if own == given:
        return
    if own.ranks == given.ranks or set(own.ranks) == set(given.ranks):
        ours, theirs = (cut_shards(layout, shape) for layout in (own, given))
        if rank not in own.ranks or (
            ours.local_shape(rank) == theirs.local_shape(rank)
            and _share_all(ours.pieces_of(rank), theirs.pieces_of(rank))
        ):
            return
    raise ArgumentError(f"{what} is sharded as {own}, but {source} says {given}; both must be the same")


def _share_all(ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]) -> bool:
    """Whether two lists of pieces, ``start``, ``stop`` and place in the local array, hold the same elements alike."""
    a, b = find_overlaps(*ours[:2], *theirs[:2])
    start, stop = np.maximum(ours[0][a], theirs[0][b]), np.minimum(ours[1][a], theirs[1][b])
    alike = (ours[2][a] - ours[0][a] == theirs[2][b] - theirs[0][b]).all(axis=1)
    shared = int((stop - start)[alike].prod(axis=1, dtype=np.int64).sum())
    return all(shared == int((side[1] - side[0]).prod(axis=1, dtype=np.int64).sum()) for side in (ours, theirs))
