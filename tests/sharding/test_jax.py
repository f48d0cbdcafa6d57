"""Convert meshes and specs from and to JAX. The test needs the real JAX."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import numpy as np, jax
from jax.sharding import Mesh as JaxMesh, NamedSharding, PartitionSpec as P
from reshard import Layout, Mesh
from reshard.sharding.tiles import cut_tiles
jax_mesh = JaxMesh(np.array(jax.devices()).reshape(2, 4)[::-1], ("dp", "tp"))
for spec in (P("dp", None), P(("tp", "dp")), P(), P(None, "tp", None)):
    layout = Layout(Mesh.from_jax(jax_mesh), spec)
    assert Layout(layout.mesh, layout.to_jax()) == layout
    for device, index in NamedSharding(jax_mesh, layout.to_jax()).devices_indices_map((8, 16, 4)).items():
        (box, _), = cut_tiles(layout, (8, 16, 4)).boxes_of(device.id)
        assert [s.indices(n)[:2] for s, n in zip(index, (8, 16, 4))] == [tuple(b) for b in box]
"""


def test_layouts_match_the_shards_of_the_real_jax():
    pytest.importorskip("jax", reason="jax is not installed: pip install 'reshard[jax]'")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", CODE], check=True, env=environment, timeout=120)
