"""Weights in several versions, and their shards on both sides: what tests of lossless transfers send."""

from __future__ import annotations

import torch

from reshard import Layout, Mesh
from tests.support.tensors import take_shard

SHAPES = {"w": (128, 256), "scale": (100,), "odd": (33, 7)}
SRC = {"w": Layout(Mesh.of("2x2"), "S0 R"), "scale": Layout(Mesh.of("4")), "odd": Layout(Mesh.of("4"), "S0")}
DST = {name: Layout(Mesh.of("2", first_rank=3), "R S0" if name == "w" else "") for name in SHAPES}  # rank 3 is in both
DTYPES = {"w": torch.bfloat16, "scale": torch.float32, "odd": torch.float16}


def make_version(number):
    """All tensors of a version: each changes one value in fifty by a small step."""
    generator = torch.Generator().manual_seed(0)
    wholes = {name: torch.randn(shape, generator=generator).to(DTYPES[name]) for name, shape in SHAPES.items()}
    for step in range(1, number + 1):
        for whole in wholes.values():
            whole.view(-1)[step::50] *= 1.01
    return wholes


def shards_of(layouts, rank, number):
    """The shards of a version on a rank; None outside the layouts."""
    shards = {name: take_shard(layouts[name], rank, whole) for name, whole in make_version(number).items()}
    return None if shards["w"] is None else shards
