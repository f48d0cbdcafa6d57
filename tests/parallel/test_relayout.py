"""A model that moves from grid to grid trains as if it had stayed on the first one."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from reshard.errors import ArgumentError, ReshardError
from reshard.gradients.weight_grad_store import WeightGradStore
from reshard.parallel import Grid, parallelize, plain_state_dict, relayout, sync_gradients
from reshard.testing import run_processes

from .models import make_batch, make_gpt, train

#: (rows, cols, depth): 1-D, 2-D and 2.5-D; then replicas over depth, with two rows and with one.
SHAPES = [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4)]


def check_training(rank, num_grids):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    grids = [Grid.make(*shape) for shape in SHAPES[:num_grids]]
    model = parallelize(make_gpt(heads=5), grids[0])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, is_exact = [], True
    for number, grid in enumerate(grids):
        before = plain_state_dict(model)
        relayout(model, grid, optimizer)
        after = plain_state_dict(model)
        is_exact &= all(torch.equal(before[name], after[name]) for name in before)
        losses += train(model, 5, 2, sync_gradients, 2 * number, optimizer)
    again = parallelize(make_gpt(heads=5), grids[0])
    optimizer = torch.optim.AdamW(again.parameters(), 1e-2)
    expected = train(again, 5, 2 * num_grids, sync_gradients, 0, optimizer)
    return is_exact, max(abs(a - b) for a, b in zip(losses, expected, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("num_grids", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_training_is_the_same_over_several_grids(num_grids):
    for is_exact, error in run_processes(check_training, 4, num_grids):
        assert is_exact
        assert error < 1e-10


def check_skipped_state(rank):
    """Rank 3 goes on without ``plain_state_dict``. Returns the error of each call."""
    torch.set_num_threads(1)
    model = parallelize(make_gpt(heads=2), Grid.make(2, 2, 1, timeout_seconds=3))
    tokens, labels = make_batch(4)
    errors = []
    for call in (
        lambda: rank == 3 or plain_state_dict(model),
        lambda: model(tokens, labels),
        lambda: plain_state_dict(model),
    ):
        try:
            call()
        except ReshardError as error:
            errors.append(str(error))
    return errors


@pytest.mark.integration
def test_a_rank_that_skips_plain_state_dict_is_named():
    *others, skipping = run_processes(check_skipped_state, 4)
    for state, forward, again in others:
        assert "rank 3" in state
        assert "an earlier collective of this grid failed" in forward
        assert "an earlier collective of this grid failed" in again
    assert len(skipping) == 2


def check_misuse(rank):
    torch.set_num_threads(1)
    grids = [Grid.make(1, 2, 1), Grid.make(2, 1, 1)]
    model = make_gpt(heads=2)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    model = parallelize(model, grids[0])
    optimizers.append(torch.optim.SGD(model.parameters(), 0.1))
    loss = model(*make_batch(2))
    with pytest.raises(ArgumentError, match="between a forward of the model and its backward"):
        relayout(model, grids[1])
    loss.backward()
    with pytest.raises(ArgumentError, match=r"'embed.tokens.weight' has a gradient"):
        relayout(model, grids[1])
    model.zero_grad()
    relayout(model, grids[1])
    for optimizer, name in zip(optimizers, ("parallelize", "relayout"), strict=True):
        with pytest.raises(ArgumentError, match=rf"a parameter of shape \[.*\] that {name} has replaced in its model"):
            optimizer.step()
    model(*make_batch(2))
    relayout(model, grids[0])  # allowed: the graph of the forward is freed
    model = parallelize(make_gpt(heads=1), grids[1])
    with pytest.raises(ArgumentError, match="1 heads cannot be cut over 2 columns"):
        relayout(model, grids[0])
    with pytest.raises(ArgumentError, match="needs a model that parallelize has returned"):
        relayout(make_gpt(), grids[0])


@pytest.mark.nightly
def test_wrong_arguments_of_relayout_are_refused():
    run_processes(check_misuse, 2)


def check_late_backward(rank):
    torch.set_num_threads(1)
    grids = [Grid.make(1, 2, 1), Grid.make(2, 1, 1)]
    model = parallelize(make_gpt(), grids[0])
    with WeightGradStore([]) as store:
        loss = model(*make_batch(2))
    loss.backward(retain_graph=True)
    model.zero_grad()
    relayout(model, grids[1])
    for late in (loss.backward, store.finish):
        with pytest.raises(ArgumentError, match=r"before the model moved to Grid\(rows=2, cols=1, depth=1\)"):
            late()
    loss = model(*make_batch(2))
    loss.backward()
    return loss.item()


def test_a_backward_after_relayout_is_refused():
    first, second = run_processes(check_late_backward, 2)
    assert first == second


def check_order(rank):
    torch.set_num_threads(1)
    ranks = torch.tensor([[[5, 1], [2, 0]], [[3, 4], [6, 7]]])
    grid = Grid(DeviceMesh("cpu", ranks, mesh_dim_names=("depth", "row", "col")))
    state = plain_state_dict(parallelize(make_gpt(), grid))
    for name, value in make_gpt().state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.nightly
def test_ranks_in_any_order_give_the_plain_state():
    run_processes(check_order, 8)


class ListState(torch.optim.SGD):
    """Keeps earlier values of each parameter in a list."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [parameter.detach().clone()]


def check_optimizers(rank):
    torch.set_num_threads(1)
    grids = [Grid.make(1, 2, 1), Grid.make(2, 1, 1)]
    model = parallelize(make_gpt(), grids[0])
    before = plain_state_dict(model)
    model(*make_batch(2)).backward()
    for make, name in (
        (torch.optim.Adafactor, "Adafactor"),
        (torch.optim.Rprop, "Rprop"),
        (lambda parameters: torch.optim.SGD(parameters, 0.1, fused=True), "SGD with fused=True"),
    ):
        optimizer = make(model.parameters())
        with pytest.raises(ArgumentError, match=rf"torch\.optim\.{name} does not work on DTensors"):
            optimizer.step()
    model.zero_grad()
    with pytest.raises(ArgumentError, match=r"SGD with fused=True does not work on DTensors"):
        relayout(model, grids[1], optimizer)
    optimizer = ListState(model.parameters(), 0.1)
    optimizer.step()
    with pytest.raises(ArgumentError, match="cannot move the state 'history' of ListState for"):
        relayout(model, grids[1], optimizer)
    assert model.reshard_grid.shape == (1, 2, 1)
    assert all(torch.equal(before[name], value) for name, value in plain_state_dict(model).items())


def test_optimizers_that_cannot_run_or_move_are_refused():
    run_processes(check_optimizers, 2)
