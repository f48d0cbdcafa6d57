"""reshard_local: shapes that it derives, and several tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from reshard import Layout, Mesh, check_plan, make_plan, reshard_local
from reshard.api.one_process import execute_local
from reshard.errors import ArgumentError, LayoutError
from tests.support.strategies_of_cases import cases
from tests.support.tensors import same_bytes, take_shard, whole_tensor

ROWS, COLS = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = np.arange(20, dtype="int32").reshape(5, 4)
HALVES = {0: WHOLE[:3], 1: WHOLE[3:]}


@given(cases())
def test_shape_is_computed_from_the_shards(case):
    shape, src, dst, topology = case
    whole = whole_tensor(shape)
    shards = {rank: take_shard(src, rank, whole) for rank in src.ranks}
    moved = reshard_local(shards, src, dst, topology=topology)
    for rank in dst.ranks:
        assert same_bytes(moved[rank], take_shard(dst, rank, whole))


def test_several_tensors_have_arguments_of_their_own():
    moved = reshard_local(
        {"a": HALVES, "b": {0: torch.ones(1), 1: torch.zeros(1)}},
        ROWS,
        {"a": COLS, "b": ROWS},
        dst_dtype={"a": "int64", "b": "float64"},
    )
    assert moved["a"][3].dtype == np.int64 and (moved["a"][3] == WHOLE[:, 2:]).all()
    assert moved["b"][0].dtype == torch.float64 and moved["b"][0].item() == 1.0


def test_equal_shards_that_may_each_be_the_whole_tensor_warn():
    copies = {0: WHOLE, 1: WHOLE.copy()}
    with pytest.warns(UserWarning, match=r"^the tensor: ranks 0-1 pass shards of shape \[5, 4\] that seem equal"):
        reshard_local(copies, ROWS, COLS)
    inside = WHOLE.repeat(8, axis=0)  # differs where no corner is
    inside[20, 2] = -1
    for shards, shape in (
        (copies, (10, 4)),  # stated
        ({0: np.ones((5, 4)), 1: np.ones((5, 4))}, None),  # constant
        ({0: torch.arange(3.0), 1: torch.arange(3.0) + 1}, None),
        ({0: WHOLE.repeat(8, axis=0), 1: inside}, None),
    ):
        reshard_local(shards, ROWS, ROWS, shape=shape)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: reshard_local({0: WHOLE[:3]}, ROWS, COLS), "the tensor: rank 1 does not know the shape; pass shape="),
        (lambda: reshard_local({0: WHOLE[:1], 1: WHOLE[1:]}, ROWS, COLS), "rank 0 passes 1 element along dim 0, but"),
        (lambda: reshard_local({"a": HALVES, "b": 3}, ROWS, COLS), "tensor 'b': pass shards as"),
        (lambda: reshard_local({"a": HALVES}, ROWS, {"c": COLS}), "dst has no value for tensor 'a'"),
        (lambda: reshard_local({"a": HALVES}, ROWS, COLS, out={2: WHOLE}), "base= and out= are for one tensor"),
        (lambda: reshard_local({"a": {**HALVES, 5: WHOLE}}, ROWS, COLS), "tensor 'a': rank 5 has a shard, but"),
    ],
)
def test_wrong_arguments_are_named(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()


def test_tensors_of_eight_dims_move_and_of_nine_are_refused():
    src = Layout(Mesh.of("2x2"), "R S0 R R R R R S1")
    dst = Layout(Mesh.of("2x2", first_rank=4), "S1 R R S0")
    shape = (2, 3, 1, 2, 1, 2, 1, 5)
    plan = make_plan(src, dst, shape, "int64", strategy="broadcast")
    assert plan.strategy == "broadcast_greedy"
    check_plan(plan)
    whole = whole_tensor(shape)
    out = execute_local(plan, [{rank: take_shard(src, rank, whole) for rank in src.ranks}])[0]
    assert all(same_bytes(out[rank], take_shard(dst, rank, whole)) for rank in dst.ranks)
    with pytest.raises(LayoutError, match="at most 8"):
        make_plan(src, dst, (*shape, 1), "int64")


def test_shard_without_memory_is_refused():
    shard = torch.ones(3, 4)
    shard.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="rank 1 holds a Tensor that has no storage"):
        reshard_local({0: torch.ones(3, 4), 1: shard}, ROWS, COLS)
