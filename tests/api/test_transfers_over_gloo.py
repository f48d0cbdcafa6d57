"""End-to-end transfers on real processes over Gloo."""

from __future__ import annotations

import pytest
import torch

import reshard
import reshard.api.call
from reshard import Layout, Mesh
from reshard.planner.strategy_registry import STRATEGIES
from reshard.testing.processes import LaunchError, RankFailure, run_processes
from tests.support.tensors import same_bytes, take_shard, whole_tensor

CASES = {
    "rows to cols": ("2", "S0", "2", "R S0", 2, (6, 8)),
    "gather": ("4", "S0", "2x2", "R R", 4, (9, 5)),
    "in place": ("2x2", "S01 R", "2x2", "R S10", 0, (7, 9)),
    "overlapping": ("2x2", "S0 S1", "3", "R S0", 2, (5, 6)),
    "0-d": ("2", "", "2", "", 1, ()),
    "empty dim": ("2", "S0", "2", "R S0", 2, (0, 4)),
    "fewer elements than shards": ("4", "S0", "4", "S0", 2, (3,)),
}


def _move_all(rank):
    failed = []
    for name, (src_mesh, src_spec, dst_mesh, dst_spec, first, shape) in CASES.items():
        src = Layout(Mesh.of(src_mesh), src_spec)
        dst = Layout(Mesh.of(dst_mesh, first_rank=first), dst_spec)
        if rank not in src.ranks + dst.ranks:
            continue
        whole = whole_tensor(shape)
        for strategy in STRATEGIES:
            out = reshard.reshard(take_shard(src, rank, whole), src, dst, strategy=strategy, shape=shape)
            expected = take_shard(dst, rank, whole)
            if expected is None or out is None:
                ok = out is None and expected is None
            else:
                ok = same_bytes(out, expected)
            if not ok:
                failed.append((name, strategy))
    return failed


@pytest.mark.integration
def test_every_case_and_strategy_moves_every_element():
    assert run_processes(_move_all, 8) == [[]] * 8


def _wrong_shape(rank):
    rows = Layout(Mesh.of("2"), "S0")
    cols = Layout(Mesh.of("2", first_rank=2), "R S0")
    tensor = torch.zeros(3 + rank, 4) if rank < 2 else None
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.reshard(tensor, rows, cols, shape=(6, 4))
    good = reshard.reshard(torch.ones(3, 4) if rank < 2 else None, rows, cols, shape=(6, 4))
    return str(caught.value), good is None or bool((good == 1).all())


def test_wrong_shard_shape_raises_one_error_on_every_rank_and_the_next_call_works():
    texts = run_processes(_wrong_shape, 4)
    assert len(set(texts)) == 1
    text, good = texts[0]
    assert "rank 1 passes a shard of shape [4, 4]" in text
    assert "[3, 4]" in text
    assert good


def _async_collective(rank):
    """Passes the result of an unfinished collective, as tensor parallelism returns it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (2,))
    given = DTensor.from_local(torch.full((4, 2), rank + 1.0), mesh, [Partial()])

    def start():
        return given.redistribute(placements=[Replicate()], async_op=True).to_local()

    src, dst = Layout(Mesh.of("2")), Layout(Mesh.of("2"), "S0")
    moved = [reshard.reshard(start(), src, dst)]
    plan = reshard.make_plan(src, dst, (4, 2), "float32")
    with reshard.Mover(plan) as mover:
        moved.append(mover(start()))
    held = torch.full((2, 2), 3.0)
    moved.append(reshard.reshard(start(), src, dst, compression="delta", base=start(), out=held.clone()))
    with reshard.Mover(plan, compression="delta") as mover:
        moved.append(mover(start(), base=start(), out=held.clone()))
    return type(start()).__name__, [item.tolist() for item in moved]


def test_source_from_unfinished_collective_is_waited_for():
    for kind, moved in run_processes(_async_collective, 2):
        assert kind == "AsyncCollectiveTensor"
        assert moved == [[[3.0, 3.0]] * 2] * 4


def test_equal_tracebacks_of_ranks_are_listed_once():
    failures = [RankFailure(rank, None, text) for rank, text in enumerate(("a", "a", "b", "a"))]
    assert str(LaunchError(failures, {})) == "ranks 0-1,3: a\nrank 2: b"
