"""Calls inside of functions that torch.compile compiles."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # ranks are forked, and importing it takes seconds

import reshard
from reshard import Layout, Mesh
from reshard.testing.processes import run_processes
from tests.support.tensors import whole_tensor


def _call_compiled(rank):
    """Calls inside torch.compile, with layouts and plans made there too."""
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2"), "R S0")
    whole = whole_tensor((8, 6), torch.float32)
    shard, expected = whole[4 * rank : 4 * rank + 4], 3 * whole[:, 3 * rank : 3 * rank + 3]

    def call(tensor):
        return reshard.reshard_async(tensor + 0, Mesh.of("2"), dst, src_spec="S0").wait() * 3

    def move(tensor):
        with reshard.Mover(reshard.make_plan(src, dst, (8, 6), "float32")) as mover:
            return mover(tensor + 0) * 3

    def call_locally(tensor):
        return reshard.reshard_local({0: whole[:4], 1: whole[4:]}, src, dst, shape=(8, 6))[rank] * 3

    return [
        torch.equal(torch.compile(item, backend="eager")(shard), expected)
        for item in (call, move, call_locally)
        for _ in range(2)
    ]


@pytest.mark.nightly
def test_compiled_functions_may_call():
    assert run_processes(_call_compiled, 2) == [[True] * 6] * 2
