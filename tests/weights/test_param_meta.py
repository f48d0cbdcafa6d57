"""Manifests as vLLM's ParamMeta, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from reshard.errors import ArgumentError
from reshard.testing.processes import run_processes
from reshard.weights import param_metas
from reshard.weights.param_meta import read_metas, write_metas
from tests.support.sharded_state import ShardedState, chunks, whole


@dataclass(frozen=True)
class ParamMeta:
    """The fields of vLLM 0.33's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...]
    mesh_shape: tuple[int, ...] | None
    placements: tuple[Any, ...] | None


@pytest.mark.parametrize(
    ("size", "regions", "mesh_shape", "placements"),
    [
        (1, whole, (1,), (Replicate(),)),
        (4, whole, (4,), (Replicate(),)),
        (3, chunks(0, 3), (3,), (Shard(0),)),
        (4, chunks(1, 4), (3,), (Shard(1),)),  # the last rank of four holds none of nine columns
        (4, lambda name, shape, rank: chunks(0, 2)(name, shape, rank // 2), (2, 2), (Shard(0), Replicate())),
        (4, lambda name, shape, rank: chunks(1, 2)(name, shape, rank % 2), (2, 2), (Replicate(), Shard(1))),
        (
            6,
            lambda name, shape, rank: [
                (*chunks(0, 2)(name, shape, rank // 3)[0][:1], *chunks(1, 3)(name, shape, rank % 3)[0][1:])
            ],
            (2, 3),
            (Shard(0), Shard(1)),
        ),
        (
            2,
            lambda name, shape, rank: [
                ((rank, rank + 1), (0, 9)),
                ((5 - rank, 6 - rank), (0, 9)),
                ((2 + rank, 3 + rank), (0, 9)),
            ],
            None,
            None,
        ),
    ],
)
def test_layouts_are_written_and_read(size, regions, mesh_shape, placements):
    manifest = ShardedState({"w": torch.zeros(6, 9, dtype=torch.bfloat16)}, size, regions).manifest
    (meta,) = write_metas(manifest, ParamMeta)
    owners = tuple(range(math.prod(mesh_shape or (size,))))
    assert meta == ParamMeta("w", torch.bfloat16, (6, 9), owners, mesh_shape, placements)
    if placements is not None:
        assert read_metas([meta]).entries == manifest.entries


def test_a_tensor_without_placements_is_whole_on_its_owners():
    (entry,) = read_metas([ParamMeta("w", torch.float32, (4,), (1, 3), None, None)]).entries.values()
    assert entry.held == ((1, (((0, 4),),)), (3, (((0, 4),),)))


@pytest.mark.parametrize(
    "change",
    [
        {"owners": ()},
        {"owners": (0, 0)},
        {"mesh_shape": (3,)},
        {"placements": (Shard(2),)},
        {"placements": (Shard(0), Shard(0))},
        {"dtype": "w"},
        {"shape": (-1, 2)},
        {"name": 3},
    ],
)
def test_a_wrong_meta_is_named(change):
    meta = replace(ParamMeta("w", torch.float32, (4, 2), (0, 1), (2,), (Shard(0),)), **change)
    with pytest.raises(ArgumentError, match=r"('w'|3) is no ParamMeta"):
        read_metas([meta])
    with pytest.raises(ArgumentError, match="'w' is no ParamMeta: 'str' object has no attribute"):
        read_metas(["w"])


def _collect(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = {"a": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]), "b": torch.zeros(3)}
    if rank == 1:
        model["c"] = torch.zeros(2, dtype=torch.int8)
    return [(each.name, each.owners, each.placements) for each in param_metas(model, ParamMeta)]


def test_all_ranks_state_what_they_hold_together():
    expected = [("a", (0, 1), (Shard(0),)), ("b", (0, 1), (Replicate(),)), ("c", (1,), (Replicate(),))]
    assert run_processes(_collect, 2) == [expected, expected]
