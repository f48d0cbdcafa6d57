"""Write tables of shards computed by JAX or torch DTensor: ``python make_layouts.py jax|torch``.

The tables test our sharding code against independent implementations. Plans and their test oracle share that code, so
they could share its errors. Each entry has, for every rank, the flattened local shard of
``arange(prod(shape)).reshape(shape)``.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
GRIDS = [(4,), (6,), (2, 3), (3, 2), (2, 2, 2), (1, 4), (8,)]


def ranks_of(rng: random.Random, grid: tuple[int, ...]) -> list[int]:
    """The ranks of a grid, in order or shuffled."""
    ranks = list(range(math.prod(grid)))
    if rng.random() < 0.5:
        rng.shuffle(ranks)
    return ranks


def jax_table() -> dict:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    rng = random.Random(11)
    entries = []
    devices = {device.id: device for device in jax.devices()}
    while len(entries) < 60:
        grid = rng.choice(GRIDS)
        axes = [f"a{i}" for i in range(len(grid))]
        ranks = ranks_of(rng, grid)
        ndim = rng.randint(1, 3)
        spec: list[list[str]] = [[] for _ in range(ndim)]
        for axis in rng.sample(axes, len(axes)):
            dim = rng.randint(-1, ndim - 1)
            if dim >= 0:
                spec[dim].append(axis)
        size = dict(zip(axes, grid, strict=True))
        shape = [math.prod(size[a] for a in dim) * rng.randint(1, 3) for dim in spec]
        mesh = Mesh(np.array([devices[r] for r in ranks]).reshape(grid), axes)
        parts = [None if not dim else dim[0] if len(dim) == 1 else tuple(dim) for dim in spec]
        sharding = NamedSharding(mesh, PartitionSpec(*parts))
        whole = np.arange(math.prod(shape)).reshape(shape)
        shards = {}
        for device, index in sharding.devices_indices_map(tuple(shape)).items():
            local = whole[index]
            shards[str(device.id)] = {"shape": list(local.shape), "values": local.ravel().tolist()}
        entries.append({"grid": grid, "axes": axes, "ranks": ranks, "spec": spec, "shape": shape, "shards": shards})
    return {"made_by": f"jax {jax.__version__}", "entries": entries}


def torch_table() -> dict:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rng = random.Random(12)
    entries = []
    for _ in range(120):
        grid = rng.choice(GRIDS)
        ranks = ranks_of(rng, grid)
        ndim = rng.randint(1, 3)
        shape = [rng.choice([0, 1, 2, 3, 5, 7, 8, 11, 12]) for _ in range(ndim)]
        placements = []
        for axis in range(len(grid)):
            dim = rng.randint(-1, ndim - 1)
            if dim < 0:
                placements.append(Replicate())
            elif rng.random() < 0.3:
                placements.append(_StridedShard(dim, split_factor=rng.choice([2, 3, grid[(axis + 1) % len(grid)]])))
            else:
                placements.append(Shard(dim))
        written = [["R"] if p.is_replicate() else ["S", p.dim, getattr(p, "split_factor", 1)] for p in placements]
        shards = {}
        for rank in range(len(ranks)):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(ranks))
            mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(grid), _init_backend=False, _rank=rank)
            whole = torch.arange(math.prod(shape)).reshape(shape)
            local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            shards[str(rank)] = {"shape": list(local.shape), "values": local.reshape(-1).tolist()}
            dist.destroy_process_group()
        entries.append({"grid": grid, "ranks": ranks, "placements": written, "shape": shape, "shards": shards})
    return {"made_by": f"torch {torch.__version__.split('+')[0]}", "entries": entries}


if __name__ == "__main__":
    kind = sys.argv[1]
    table = {"jax": jax_table, "torch": torch_table}[kind]()
    lines = ",\n".join(json.dumps(entry) for entry in table["entries"])
    text = f'{{"made_by": {json.dumps(table["made_by"])}, "entries": [\n{lines}\n]}}\n'
    (HERE / f"layouts_{kind}.json").write_text(text)
