"""Calls with grids of tensor parallelism."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from torch import nn

from reshard import Mesh, Topology, parallel
from tests.campaigns.entry_points.samples import Chain, fields_of


def of_parallel():
    grid = parallel.Grid.make(1, 1)
    linear = nn.Linear(4, 4)
    parallel_linear = parallel.Linear(linear, grid)
    embedding = parallel.Embedding(nn.Embedding(7, 4), grid)
    cross_entropy = parallel.CrossEntropy(grid, 4)
    heads = parallel.Heads(grid, 4, 2, 3)
    sizes = parallel.TransformerSizes(8, 2, 4, 2, 2, 16, 1, 32, 8)
    part = torch.ones(1, 4, 2, 3)
    model = parallel.parallelize(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), grid)
    return {
        "Grid": (parallel.Grid, {"device_mesh": grid.device_mesh, "timeout_seconds": 5.0}),
        "Mesh.from_device_mesh": (Mesh.from_device_mesh, {"device_mesh": grid.device_mesh}),
        "Grid.make": (
            parallel.Grid.make,
            {"rows": 1, "cols": 1, "depth": 1, "device_type": "cpu", "timeout_seconds": 5.0},
        ),
        "choose_grid": (
            parallel.choose_grid,
            {"model": sizes, "topology": Topology((0, 0, 1, 1)), "ranks": range(4), "memory_limit_bytes": 1e12}
            | {"rows": 4, "flops_per_second": 1e12, "itemsize": 4, "state_bytes": 16, "panel": 1024}
            | {"keep_inputs": False},
        ),
        "parallelize": (
            lambda model, **options: parallel.parallelize(copy.deepcopy(model), **options),
            {"model": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "grid": grid, "panel": 1024}
            | {"keep_inputs": False, "has_local_input": False, "compression": None},
        ),
        "a parallel model": (model, {"input": torch.ones(2, 4)}),
        "sync_gradients": (parallel.sync_gradients, {"model": model, "check_every": 100}),
        "sync_during_backward": (
            lambda **options: parallel.sync_during_backward(**options).__enter__(),
            {"model": model, "check_every": 100},
        ),
        "plain_state_dict": (parallel.plain_state_dict, {"model": model}),
        "relayout": (
            parallel.relayout,
            {"model": model, "grid": grid, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
            | {"compression": None},
        ),
        "register": (parallel.register, {"module_class": Chain, "convert": lambda *_: None}),
        "TransformerSizes": (parallel.TransformerSizes, fields_of(sizes)),
        "TransformerSizes.of": (
            parallel.TransformerSizes.of,
            {"model": SimpleNamespace(hidden=8, num_heads=2, num_layers=2, vocabulary=32), "sequence": 8},
        ),
        "Heads": (parallel.Heads, {"grid": grid, "num_heads": 4, "num_kv_heads": 2, "head_size": 3}),
        "Heads.query_heads": (heads.query_heads, {"col": 0}),
        "Heads.kv_heads": (heads.kv_heads, {"col": 0}),
        "Heads.split": (heads.split, {"x": torch.ones(1, 2, 12), "is_query": True}),
        "Heads.join": (heads.join, {"x": part}),
        "Heads.attend": (heads.attend, {"q": part, "k": part[:, :2], "v": part[:, :2], "mask": None, "dropout": 0.0}),
        "Dropout": (parallel.Dropout, {"p": 0.1, "grid": grid, "features": 4}),
        "Dropout call": (parallel.Dropout(0.1, grid, 4), {"x": torch.ones(2, 4)}),
        "Linear": (
            parallel.Linear,
            {"linear": linear, "grid": grid, "cut_rows": None, "panel": 1024, "keep_inputs": False},
        ),
        "Linear call": (parallel_linear, {"x": torch.ones(2, 4)}),
        "Embedding": (parallel.Embedding, {"embedding": nn.Embedding(7, 4), "grid": grid, "cut_rows": 0}),
        "Embedding call": (embedding, {"tokens": torch.tensor([[1, 2]])}),
        "PositionEmbedding": (parallel.PositionEmbedding, {"embedding": nn.Embedding(7, 4), "grid": grid}),
        "PositionEmbedding call": (
            parallel.PositionEmbedding(nn.Embedding(7, 4), grid),
            {"positions": torch.tensor([1, 2])},
        ),
        "LayerNorm": (parallel.LayerNorm, {"norm": nn.LayerNorm(4), "grid": grid}),
        "RMSNorm": (parallel.RMSNorm, {"norm": nn.RMSNorm(4), "grid": grid}),
        "LayerNorm call": (parallel.LayerNorm(nn.LayerNorm(4), grid), {"x": torch.ones(2, 4)}),
        "CrossEntropy": (parallel.CrossEntropy, {"grid": grid, "num_classes": 4, "ignore_index": -100}),
        "CrossEntropy call": (
            cross_entropy,
            {"logits": torch.ones(2, 4), "targets": torch.tensor([1, 2]), "count": None},
        ),
        "Grid.local_rows": (grid.local_rows, {"rows": 4}),
        "Grid.local_features": (grid.local_features, {"size": 4}),
        "Grid.along": (grid.along, {"axis": "row"}),
    }
