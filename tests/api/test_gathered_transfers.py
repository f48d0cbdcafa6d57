"""Plans that gather regions inside the sending hosts, on real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reshard
from reshard import Layout, Mesh, Topology
from reshard.plan import GATHERED
from reshard.testing.processes import run_processes
from tests.support.tensors import same_bytes, take_shard, whole_tensor

#: Two hosts of two ranks send to two others, or to some of themselves.
TOPOLOGY = replace(Topology.uniform([rank // 2 for rank in range(8)], 1e9), latency_seconds=1e-3)
STRATEGY = "gathered_multicast"
#: Name: source mesh, its first rank and spec; destination mesh, its first rank and spec; shape.
CASES = {
    "columns": ("2x2", 0, "S01 R", "2x2", 4, "R S1", (64, 32)),
    "irregular": ("2x2", 0, "S01 R", "2x2", 4, "R S10", (13, 7)),
    "overlapping": ("2x2", 0, "S01 R", "3x2", 2, "R S1", (24, 10)),
    "in place": ("4x2", 0, "S01 R", "4x2", 0, "R S01", (17, 19)),
    "to all": ("2x2", 0, "S0 S1", "2x2", 4, "R R", (40, 24)),
}
OPTIONS = [
    {},
    {"verify": True},
    {"on_loss": "recover"},
    {"dst_dtype": "bfloat16"},
    {"dst_dtype": "float64", "verify": True},
    {"compression": "int8x32"},
    {"staging_bytes": 2**16},
]


def _move(rank):
    wrong = []
    for name, (src_mesh, src_first, src_spec, dst_mesh, dst_first, dst_spec, shape) in CASES.items():
        src = Layout(Mesh.of(src_mesh, first_rank=src_first), src_spec)
        dst = Layout(Mesh.of(dst_mesh, first_rank=dst_first), dst_spec)
        if rank not in src.ranks + dst.ranks:
            continue
        for options in OPTIONS:
            whole = whole_tensor(shape, torch.float32) / 4
            dtype = getattr(torch, options.get("dst_dtype", "float32"))
            source = take_shard(src, rank, whole)
            out = reshard.reshard(source, src, dst, shape=shape, topology=TOPOLOGY, strategy=STRATEGY, **options)
            expected = take_shard(dst, rank, whole.to(dtype))
            if expected is None or out is None:
                right = expected is None and out is None
            elif "compression" in options:
                right = torch.allclose(out, expected, atol=float(whole.max()) / 100)
            else:
                right = same_bytes(out, expected)
            if not right:
                wrong.append((name, options))
        tensors = {f"w{i}": whole_tensor(shape, torch.int64) + i for i in range(3)}
        sources = {name: take_shard(src, rank, whole) for name, whole in tensors.items()}
        shapes = dict.fromkeys(tensors, shape)
        outs = reshard.reshard(sources, src, dst, shape=shapes, topology=TOPOLOGY, strategy=STRATEGY)
        for key, whole in tensors.items():
            expected = take_shard(dst, rank, whole)
            if expected is not None and not same_bytes(outs[key], expected):
                wrong.append((name, key))
    return wrong


@pytest.mark.integration
def test_gathered_messages_move_every_element():
    for _, (src_mesh, src_first, src, dst_mesh, dst_first, dst, shape) in CASES.items():
        sides = (
            Layout(Mesh.of(src_mesh, first_rank=src_first), src),
            Layout(Mesh.of(dst_mesh, first_rank=dst_first), dst),
        )
        plan = reshard.make_plan(*sides, shape, "float32", topology=TOPOLOGY, strategy=STRATEGY)
        assert (plan.transfers.source == GATHERED).any()
    assert run_processes(_move, 8, timeout_seconds=120) == [[]] * 8
