"""The axes of a stage's mesh that divide the samples of a batch, and the axis that divides features.

The mesh of a stage has the axes (dp, tp), or (depth, row, col) of a grid of :mod:`reshard.parallel`. Ranks that differ
on the last axis only hold the same samples.
"""

from __future__ import annotations

import math

from reshard.errors import ArgumentError
from reshard.sharding import Layout, Mesh

STAGE_AXES = ("dp", "tp")
GRID_AXES = ("depth", "row", "col")


def is_grid(mesh: Mesh) -> bool:
    """Whether the stage runs on a grid of :mod:`reshard.parallel`."""
    return mesh.axes == GRID_AXES


def num_sample_shards(mesh: Mesh) -> int:
    """Number of parts that the samples of a microbatch are divided into."""
    return math.prod(mesh.sizes[:-1])


def ranks_with_own_samples(mesh: Mesh) -> tuple[int, ...]:
    """One rank for each part of the samples, in the order of the samples."""
    return mesh.ranks[:: mesh.sizes[-1]]


def ranks_with_own_loss(mesh: Mesh) -> tuple[int, ...]:
    """Ranks whose losses add up to that of the stage. On a grid, every rank has the loss of all samples."""
    return mesh.ranks[:1] if is_grid(mesh) else ranks_with_own_samples(mesh)


def num_samples_of_loss(mesh: Mesh, num_samples: int, own_samples: int) -> int:
    """Number of samples over which the loss of a rank is a mean.

    Args:
        mesh: mesh of the stage.
        num_samples: number of samples of the microbatch.
        own_samples: number of its samples on this rank.
    """
    return num_samples if is_grid(mesh) else own_samples


def layout_of_samples(mesh: Mesh) -> Layout:
    """The layout of a tensor whose first dim is the samples of a microbatch."""
    return Layout(mesh, (mesh.axes[:-1],))


def layout_of_tensor(mesh: Mesh, num_dims: int, sample_dim: int | None, *, has_features: bool) -> Layout:
    """The layout of a tensor between stages.

    Args:
        mesh: mesh of the stage.
        num_dims: number of dims.
        sample_dim: the dim that grows with the samples of a batch; None: there is none.
        has_features: whether the last dim is one of features, which a grid divides over its columns.

    Raises:
        ArgumentError: the samples are not the first dim of a tensor on a grid.
    """
    if is_grid(mesh) and sample_dim:
        raise ArgumentError(
            f"a tensor between stages has the samples of the batch in dim {sample_dim}; on a grid, they must be its "
            "first dim"
        )
    axes: list[tuple[str, ...]] = [() for _ in range(num_dims)]
    if sample_dim is not None:
        axes[sample_dim] = mesh.axes[:-1]
    if has_features and is_grid(mesh) and num_dims and sample_dim != num_dims - 1:
        axes[-1] = mesh.axes[-1:]
    return Layout(mesh, tuple(axes))
