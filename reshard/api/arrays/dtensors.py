"""Layouts of DTensors. A DTensor's own mesh, spec and shape are authoritative: other arguments may only repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.coordination import Group
from reshard.errors import ArgumentError
from reshard.sharding import AnyLayout, Layout, Mesh, cut_tiles, find_overlaps


def is_dtensor(value: Any) -> bool:
    """Whether a value is a ``torch.distributed.tensor.DTensor``."""
    return hasattr(value, "device_mesh") and hasattr(value, "placements") and hasattr(value, "to_local")


def is_device_mesh(value: Any) -> bool:
    """Whether a value is a ``torch.distributed.DeviceMesh``."""
    return hasattr(value, "mesh_dim_names") and hasattr(value, "mesh")


def mesh_of(device_mesh: Any, group: Group) -> Mesh:
    """A DeviceMesh as a mesh of the group's ranks; ranks of a DeviceMesh are world ranks."""
    mesh = Mesh.from_device_mesh(device_mesh)
    return mesh.with_ranks({rank: group.translate(rank) for rank in mesh.ranks})


def layout_of(dtensor: Any, group: Group) -> Layout:
    """The layout of a DTensor over the group's ranks.

    Raises:
        PartialError: the DTensor has a pending reduction.
        ArgumentError: a rank of its mesh is outside the group.
    """
    return Layout(mesh_of(dtensor.device_mesh, group), list(dtensor.placements))


def check_same_layout(own: Layout, given: AnyLayout, shape: Sequence[int], rank: int, what: str, source: str) -> None:
    """Raise ArgumentError unless two layouts give a rank the same elements at the same local offsets.

    Args:
        own: the DTensor's layout.
        given: the layout from the caller's arguments or from a plan.
        shape: the global shape.
        what: name of the DTensor in the error.
        source: name of the argument or plan that ``given`` comes from, in the error.
    """
    if own == given:
        return
    if own.ranks == given.ranks or set(own.ranks) == set(given.ranks):
        ours, theirs = (cut_tiles(layout, shape) for layout in (own, given))
        if rank not in own.ranks or (
            ours.local_shape(rank) == theirs.local_shape(rank)
            and _same_elements(ours.pieces_of(rank), theirs.pieces_of(rank))
        ):
            return
    raise ArgumentError(f"{what} is sharded as {own}, but {source} says {given}; they must match")


def _same_elements(ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]) -> bool:
    """Whether two lists of pieces (``start``, ``stop``, local offset) put the same elements at the same offsets."""
    a, b = find_overlaps(*ours[:2], *theirs[:2])
    start, stop = np.maximum(ours[0][a], theirs[0][b]), np.minimum(ours[1][a], theirs[1][b])
    same_offset = (ours[2][a] - ours[0][a] == theirs[2][b] - theirs[0][b]).all(axis=1)
    shared = int((stop - start)[same_offset].prod(axis=1, dtype=np.int64).sum())
    return all(shared == int((side[1] - side[0]).prod(axis=1, dtype=np.int64).sum()) for side in (ours, theirs))
