"""Wrong arguments and batches are errors of all ranks, which need not wait for each other."""

from __future__ import annotations

import time

import pytest
import torch

from reshard.errors import ArgumentError, DisagreementError, MeshError, TransferTimeoutError
from reshard.parallel import Grid, Linear, parallelize, relayout
from reshard.testing import run_processes

from .models import make_batch, make_gpt


def check_shapes_that_differ(rank):
    with pytest.raises(DisagreementError, match="the shape of a grid"):
        Grid.make(*((2, 1) if rank else (1, 2)))
    if rank == 0:
        with pytest.raises(TransferTimeoutError, match="rank 1"):
            Grid.make(1, 2, timeout_seconds=1)
    else:
        time.sleep(2)


@pytest.mark.integration
def test_ranks_that_make_different_grids_do_not_wait_for_each_other():
    run_processes(check_shapes_that_differ, 2, timeout_seconds=60)


def check_types(rank):
    grid = Grid.make(1, 1)
    for size in (1.0, "1", True, 0, None):
        with pytest.raises(MeshError, match=r"cols is .*; it must be an integer"):
            Grid.make(1, size)
    with pytest.raises(MeshError, match=r"in this order, not \(\)"):
        Grid(None)
    for value in ("no", 0, None):
        with pytest.raises(ArgumentError, match=r"keep_inputs is .*; it must be True or False"):
            Linear(torch.nn.Linear(2, 2), grid, keep_inputs=value)
        for name in ("keep_inputs", "has_local_input"):
            with pytest.raises(ArgumentError, match=rf"{name} is .*; it must be True or False"):
                parallelize(make_gpt(), grid, **{name: value})
    with pytest.raises(ArgumentError, match=r"parallelize: grid is DeviceMesh.*; it must be a Grid"):
        parallelize(make_gpt(), grid.device_mesh)
    for x in (torch.ones(2), torch.ones(1, 2, dtype=torch.int64)):
        with pytest.raises(ArgumentError, match=r"of shape \[.*\] and torch.*; it must be \[batch, ..., features\]"):
            Linear(torch.nn.Linear(2, 2), grid)(x)
    model = parallelize(make_gpt(), grid)
    with pytest.raises(ArgumentError, match=r"relayout: grid is DeviceMesh.*; it must be a Grid"):
        relayout(model, grid.device_mesh)
    tokens, targets = make_batch(1)
    with pytest.raises(ArgumentError, match=r"tokens of torch.float32; they must be integers"):
        model(tokens.float(), targets)


def test_arguments_of_wrong_types_are_refused():
    run_processes(check_types, 1)


def check_batches(rank, shape):
    torch.set_num_threads(1)
    model = parallelize(make_gpt(), Grid.make(*shape, timeout_seconds=20))
    tokens, targets = make_batch(4)
    expected = model(tokens, targets).item()
    begun, bad = time.monotonic(), tokens.clone()
    bad[3, 0] = -2  # in the last rank's part
    with pytest.raises(ArgumentError, match=r"tokens from -2 to \d+ do not fit"):
        model(bad, targets)
    bad = targets.clone()
    bad[3, 0] = 53
    which = "target 53" if rank else "a target of another rank"
    with pytest.raises(ArgumentError, match=f"{which} is not one of the 53 classes"):
        model(tokens, bad)
    assert time.monotonic() - begun < 15
    assert model(tokens, targets).item() == expected


@pytest.mark.integration
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 1, 2)])
def test_a_bad_element_of_one_rank_is_an_error_of_all_ranks(shape):
    run_processes(check_batches, 2, shape)


def check_idle(rank):
    model = parallelize(make_gpt(), Grid.make(1, 1, 4))
    with pytest.warns(UserWarning, match=r"a batch of 5 rows leaves 1 of the 4 ranks .*; use a multiple of 4 rows"):
        model(*make_batch(5))


@pytest.mark.integration
def test_ranks_without_rows_are_counted():
    run_processes(check_idle, 4)
