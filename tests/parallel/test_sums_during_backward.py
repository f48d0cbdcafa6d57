"""Sums of gradients that run during the backward: their bits, wrong calls, and failed steps."""

from __future__ import annotations

import pytest
import torch

from reshard.errors import ArgumentError, DisagreementError, RemoteError
from reshard.gradients.declared_sums import sum_state_of as state_of
from reshard.parallel import Grid, gradient_overlap, parallelize, sync_during_backward, sync_gradients
from reshard.testing import run_processes

from .models import make_batch, make_gpt
from .test_gradients import run_backward


def check_sums_during_backward(rank, shape):
    """Whether sums that run during the second of two accumulated backwards equal, bit by bit, sums that run after it."""
    torch.set_num_threads(1)
    gradient_overlap.EARLY_BUCKET_BYTES = 2000
    model = parallelize(make_gpt(), Grid.make(*shape))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    found = []
    for is_overlapped in (False, True, True):
        model(*make_batch(6)).mul(3).backward()
        if is_overlapped:
            with sync_during_backward(model):
                model(*make_batch(6)).backward()
                assert (
                    sum(state_of(parameter).is_early for parameter in model.parameters() if state_of(parameter)) >= 10
                )
        else:
            model(*make_batch(6)).backward()
            sync_gradients(model)
        found.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 2, 2)])
def test_sums_during_the_backward_have_the_bits_of_sums_after_it(shape):
    assert all(run_processes(check_sums_during_backward, shape[0] * shape[1] * shape[2], shape))


def check_misuse_during_backward(rank):
    torch.set_num_threads(1)
    model = parallelize(make_gpt(), Grid.make(1, 1, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(ArgumentError, match=r"gradient of '.*', whose sum over ranks has begun"),
        sync_during_backward(model),
    ):
        run_backward(model)
        run_backward(model)
    with pytest.raises(ArgumentError, match="before it is summed"):  # the failed step left them unsummed
        optimizer.step()
    sync_gradients(model)
    expected = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    with pytest.raises(ArgumentError, match="entered twice"), sync_during_backward(model), sync_during_backward(model):
        pass
    other = parallelize(make_gpt(), model.reshard_grid)
    with pytest.raises(ArgumentError, match="models on one grid"), sync_during_backward(model):
        sync_during_backward(other).__enter__()
    with sync_during_backward(model):
        run_backward(model)
        with pytest.raises(ArgumentError, match="before it is summed"):
            optimizer.step()
    with pytest.raises(ArgumentError, match="summed over ranks"):
        sync_gradients(model)
    return all(
        torch.equal(a, parameter.grad.to_local()) for a, parameter in zip(expected, model.parameters(), strict=True)
    )


def test_misuse_of_sums_during_the_backward_is_named():
    assert run_processes(check_misuse_during_backward, 2) == [True] * 2


def fail(gradient):
    raise ArithmeticError("planted")


def check_steps_after_failures(rank):
    """Steps in which ranks call different functions, pass different models or fail, and the bits of the next one."""
    torch.set_num_threads(1)
    gradient_overlap.EARLY_BUCKET_BYTES = 2000
    model = parallelize(make_gpt(), Grid.make(1, 1, 2, timeout_seconds=20))
    parameters = list(model.parameters())

    def run(planted=None):
        model.zero_grad()
        loss = model(*make_batch(6))
        handle = None if planted is None else planted.register_hook(fail)
        try:
            with sync_during_backward(model):
                loss.backward()
        finally:
            if handle:
                handle.remove()
        return [parameter.grad.to_local().clone() for parameter in parameters]

    expected = run()
    model.zero_grad()
    model(*make_batch(6)).backward()
    with pytest.raises(DisagreementError, match=r"rank 0 entered sync_during_backward, but rank 1 called sync_grad"):
        sync_during_backward(model).__enter__() if rank == 0 else sync_gradients(model)
    with pytest.raises(DisagreementError, match=r"ranks 0-1 sum the gradients of different models"):
        sync_gradients(model if rank == 0 else model.blocks[0])
    # rank 0 has begun fewer sums than rank 1 where it fails
    with pytest.raises(ArithmeticError):
        run(parameters[len(parameters) // 2 if rank == 0 else 2])
    after_both = run()
    with pytest.raises(
        ArithmeticError if rank == 0 else RemoteError,
        match="planted" if rank == 0 else "rank 0 failed inside sync_during",
    ):
        run(parameters[len(parameters) // 2] if rank == 0 else None)
    return all(torch.equal(a, b) for other in (after_both, run()) for a, b in zip(expected, other, strict=True))


def test_a_step_after_a_failed_one_sums_its_own_gradients():
    assert run_processes(check_steps_after_failures, 2) == [True] * 2
