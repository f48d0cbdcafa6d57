"""Models as vLLM 0.33 states them: a ``ParamMeta`` with ranks, mesh and placements for each tensor."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from reshard.coordination import find_group
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, ReshardError
from reshard.sharding import Box, Layout, Mesh, check_shape
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS
from reshard.weights.membership.team import run_collectively
from reshard.weights.model.holdings import read_state
from reshard.weights.model.manifest import Manifest, ManifestEntry, merge_states, state_of_rank

_Held = tuple[tuple[int, tuple[Box, ...]], ...]


def param_metas(
    model: Any, make: Callable[..., Any], group: Any = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> list[Any]:
    """The tensors of a model, and the ranks that hold them, for ``metadata()`` of vLLM's ``WeightSource``.

    Every rank of a group calls it.

    Args:
        model: a module, or a mapping of tensors; each rank has its own shards.
        make: vLLM's ``ParamMeta``, or anything that takes ``name``, ``dtype`` (of torch), ``shape``, ``owners`` (ranks
            in the order of the mesh), ``mesh_shape`` and ``placements`` (of torch). ``mesh_shape`` and ``placements``
            are None if no mesh of one or two dims has such shards, for example strided shards.
        group: the process group. Default: the world.
        timeout_seconds: how long to wait for the other ranks.

    Raises:
        ReshardError: the model of a rank cannot be read; on all ranks alike.
    """

    def describe() -> dict[str, Any]:
        return {"state": state_of_rank(read_state(model))}

    states = run_collectively(find_group(group), describe, "describes its model", timeout_seconds)
    return write_metas(merge_states({rank: report["state"] for rank, report in states.items()}, "the model"), make)


def write_metas(manifest: Manifest, make: Callable[..., Any]) -> list[Any]:
    """A ``ParamMeta`` for each tensor of a manifest; see :func:`param_metas`."""
    metas = []
    for name, entry in manifest.entries.items():
        mesh_shape, placements = _find_placements(entry.held, entry.shape)
        metas.append(
            make(
                name=name,
                dtype=getattr(torch, entry.dtype),
                shape=entry.shape,
                owners=tuple(rank for rank, _ in entry.held),
                mesh_shape=mesh_shape,
                placements=placements,
            )
        )
    return metas


def read_metas(metas: Sequence[Any]) -> Manifest:
    """The manifest of a model, from a ``ParamMeta`` for each tensor.

    Without placements, each owner holds the whole tensor.

    Raises:
        ArgumentError: an entry lacks a field, or its fields do not fit; the text names it.
    """
    entries: dict[str, ManifestEntry] = {}
    for meta in metas:
        try:
            name, shape, owners = meta.name, check_shape(meta.shape), tuple(int(rank) for rank in meta.owners)
            if not isinstance(name, str) or name in entries or not owners:
                raise ArgumentError("each name must be a different string, and some rank must own the tensor")
            mesh_shape = (len(owners),) if meta.mesh_shape is None else tuple(meta.mesh_shape)
            placements = [Replicate()] * len(mesh_shape) if meta.placements is None else list(meta.placements)
            mesh = Mesh(owners, {str(axis): size for axis, size in enumerate(mesh_shape)})
            entries[name] = ManifestEntry(
                shape, dtype_name(meta.dtype), _boxes_of_ranks(Layout(mesh, placements), shape)
            )
        except (AttributeError, TypeError, ValueError, ReshardError) as error:
            raise ArgumentError(f"{getattr(meta, 'name', meta)!r:.80} is no ParamMeta: {error}") from error
    ranks = [rank for entry in entries.values() for rank, _ in entry.held]
    return Manifest(1 + max(ranks, default=0), entries, {}, {}, "cpu")


def _boxes_of_ranks(layout: Layout, shape: tuple[int, ...]) -> _Held:
    regions = ((rank, tuple(layout.regions(shape, rank))) for rank in sorted(layout.ranks))
    return tuple((rank, boxes) for rank, boxes in regions if boxes)


@functools.lru_cache(maxsize=1024)
def _find_placements(held: _Held, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A mesh and placements with which ranks hold these regions; None and None if there are none."""
    for mesh_shape in _mesh_shapes(len(held)):
        mesh = Mesh([rank for rank, _ in held], {str(axis): size for axis, size in enumerate(mesh_shape)})
        kinds = [Replicate(), *map(Shard, range(len(shape)))]
        for placements in itertools.product(kinds, repeat=len(mesh_shape)):
            if _boxes_of_ranks(Layout(mesh, list(placements)), shape) == held:
                return mesh_shape, placements
    return None, None


def _mesh_shapes(count: int) -> Iterator[tuple[int, ...]]:
    """The shapes of the meshes of one and two dims with this number of ranks."""
    if count:
        yield (count,)
    yield from ((rows, count // rows) for rows in range(2, count // 2 + 1) if count % rows == 0)
