"""Layouts against golden tables made by JAX and by torch DTensor."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from reshard import Layout, Mesh
from tests.support.tensors import take_shard

GOLDENS = Path(__file__).parents[1] / "goldens"


def _entries(name):
    return json.loads((GOLDENS / name).read_text())["entries"]


def _check(layout, entry):
    whole = torch.arange(math.prod(entry["shape"])).reshape(entry["shape"])
    for rank in layout.ranks:
        shard, expected = take_shard(layout, rank, whole), entry["shards"][str(rank)]
        assert list(shard.shape) == expected["shape"]
        assert shard.reshape(-1).tolist() == expected["values"]


@pytest.mark.parametrize("number", range(60))
def test_layouts_match_jax(number):
    entry = _entries("layouts_jax.json")[number]
    mesh = Mesh(entry["ranks"], dict(zip(entry["axes"], entry["grid"], strict=True)))
    _check(Layout(mesh, tuple(tuple(dim) for dim in entry["spec"])), entry)


@pytest.mark.parametrize("number", range(120))
def test_layouts_match_dtensor(number):
    entry = _entries("layouts_torch.json")[number]
    mesh = Mesh(entry["ranks"], {f"a{i}": size for i, size in enumerate(entry["grid"])})
    placements = [
        Replicate() if p[0] == "R" else Shard(p[1]) if p[2] == 1 else _StridedShard(p[1], split_factor=p[2])
        for p in entry["placements"]
    ]
    _check(Layout(mesh, placements), entry)
