"""Dropout, large vocabularies, short dtypes and activation checkpointing on grids."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from reshard.errors import ArgumentError
from reshard.parallel import CrossEntropy, Grid, LayerNorm, Linear, RMSNorm, parallelize, sync_gradients
from reshard.testing import run_processes

from .models import make_batch, make_gpt, relative_error


def make_dropout_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=53, n_positions=8, n_embd=24, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )  # dropout of 0.1 on embeddings, residuals and attention weights
    return GPT2LMHeadModel(config).train()


def check_modes(rank):
    model = make_dropout_model()
    model.eval().transformer.h[1].train()
    model = parallelize(model, Grid.make(1, 2))
    for path, module in model.named_modules():
        assert module.training == path.startswith("transformer.h.1"), path


def test_training_and_evaluation_modes_are_kept():
    pytest.importorskip("transformers")
    make_dropout_model()  # imports the model once
    run_processes(check_modes, 2)


def check_dropout(rank, grid_shape, has_checkpoints):
    torch.set_num_threads(1)
    model = parallelize(make_dropout_model(), Grid.make(*grid_shape))
    if has_checkpoints:
        for block in model.transformer.h:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    torch.manual_seed(5)
    tokens, labels = make_batch(4)
    losses = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        losses.append(float(loss.detach()))
    sync_gradients(model)
    norms = [float(parameter.grad.full_tensor().norm()) for parameter in model.parameters()]
    return losses, norms


@pytest.mark.slow
def test_dropout_is_the_same_on_every_grid_and_when_recomputed():
    make_dropout_model()  # imports the model once
    expected, norms = run_processes(check_dropout, 1, (1, 1, 1), False)[0]
    assert abs(expected[0] - expected[1]) > 1e-4  # masks change from step to step
    for shape, has_checkpoints in (((2, 2, 1), False), ((1, 2, 2), True)):
        for losses, found in run_processes(check_dropout, 4, shape, has_checkpoints):
            assert losses == pytest.approx(expected, abs=2e-6)
            assert found == pytest.approx(norms, rel=1e-4, abs=1e-6)


def check_vocabulary(rank):
    torch.set_num_threads(1)
    grid, classes = Grid.make(2, 3, 1), 50257
    torch.manual_seed(0)
    logits = torch.randn(3, 4, classes, dtype=torch.float64) * 20
    targets = torch.randint(classes, (3, 4))
    targets[1, 2:] = -100
    whole = logits.clone().requires_grad_()
    expected = nn.functional.cross_entropy(whole.flatten(0, 1), targets.flatten())
    expected.backward()
    rows, columns = slice(*grid.local_rows(3)), slice(*grid.local_features(classes))
    local = logits[rows, :, columns].clone().requires_grad_()
    loss = CrossEntropy(grid, classes)(local, targets[rows])
    loss.backward()
    return float((loss - expected).detach().abs()), relative_error(local.grad, whole.grad[rows, :, columns])


@pytest.mark.integration
def test_cross_entropy_of_50257_classes_on_three_columns_equals_one_process():
    for loss, gradient in run_processes(check_vocabulary, 6):
        assert loss < 1e-12
        assert gradient < 1e-12


def check_dtype(rank, dtype):
    torch.set_num_threads(1)
    grid = Grid.make(2, 2, 2)
    torch.manual_seed(0)
    plain = nn.Linear(45, 70).to(dtype)
    layer = Linear(plain, grid, panel=16)
    exact = nn.Linear(45, 70).double()
    exact.load_state_dict({name: value.double() for name, value in plain.state_dict().items()})
    x, g = torch.randn(13, 45).to(dtype), torch.randn(13, 70).to(dtype)
    whole = x.double().detach().clone().requires_grad_()
    y = exact(whole)
    y.backward(g.double())
    rows, columns, outs = (
        slice(*item) for item in (grid.local_rows(13), grid.local_features(45), grid.local_features(70))
    )
    local = x[rows, columns].detach().clone().requires_grad_()
    found = layer(local)
    found.backward(g[rows, outs])
    sync_gradients(layer)
    pairs = [
        (found.detach(), y.detach()[rows, outs]),
        (local.grad, whole.grad[rows, columns]),
        (layer.weight.grad.full_tensor(), exact.weight.grad),
        (layer.bias.grad.full_tensor(), exact.bias.grad),
    ]
    return max(relative_error(a.double(), b) for a, b in pairs)


@pytest.mark.integration
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_linear_is_accurate_in_each_dtype(dtype, bound):
    assert max(run_processes(check_dtype, 8, dtype)) < bound


def check_many_panels(rank):
    torch.manual_seed(0)
    plain, x = nn.Linear(301, 40, bias=False).bfloat16(), torch.randn(301, 301).bfloat16()
    found = Linear(plain, Grid.make(1, 1), "in", panel=5)(x).detach()
    assert found.dtype == torch.bfloat16
    return relative_error(found.double(), x.double() @ plain.weight.detach().double().t())


def test_panels_of_bfloat16_are_added_in_float32():
    (error,) = run_processes(check_many_panels, 1)
    assert error < 5e-3


def check_autocast(rank):
    torch.set_num_threads(1)
    model, plain = (make_gpt(dtype=torch.float32) for _ in range(2))
    model = parallelize(model, Grid.make(2, 2, 1))
    losses = []
    for item in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = item(*make_batch(4))
        loss.backward()
        losses.append(float(loss.detach()))
    sync_gradients(model)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    errors = [
        relative_error(a.grad.full_tensor(), b.grad)
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True)
        if "k.bias" not in name
    ]
    return abs(losses[0] - losses[1]), max(errors)


@pytest.mark.nightly
def test_autocast_to_bfloat16_is_close_to_one_process():
    for loss, gradient in run_processes(check_autocast, 4):
        assert loss < 1e-2
        assert gradient < 5e-2  # both sides round


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 14), nn.GELU(), nn.Dropout(0.5), nn.Linear(14, 7))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, targets):
        return self.loss(self.body(x), targets)

    def to_grid(self, conversion, path):
        return conversion.convert_children(self, path)


def check_classifier(rank, shape):
    torch.manual_seed(2)
    model = parallelize(Classifier().double(), Grid.make(*shape))
    x, targets = torch.randn(5, 6, dtype=torch.float64), torch.tensor([0, 6, -100, 3, 3])
    lo, hi = (0, 6) if shape[1] == 1 else ((0, 3), (3, 6))[rank % 2]
    loss = model(x[:, lo:hi], targets)
    with pytest.raises(ArgumentError, match=r"a Dropout of 14 features got shape .* on column"):
        model.body[2](torch.ones(2, 5))
    return float(loss.detach())


def test_dropout_and_loss_take_their_sizes_from_the_layer_before():
    (expected,) = run_processes(check_classifier, 1, (1, 1, 1))
    assert run_processes(check_classifier, 4, (2, 2, 1)) == pytest.approx([expected] * 4, abs=1e-12)


class Repeated(torch.nn.Module):
    """A block, a dropout and a norm without parameters, each under several names."""

    def __init__(self):
        super().__init__()
        norm, dropout, linear = torch.nn.LayerNorm(6, elementwise_affine=False), torch.nn.Dropout(0.5), nn_linear(6, 6)
        block = torch.nn.Sequential(nn_linear(6, 14), torch.nn.GELU(), dropout, nn_linear(14, 6), dropout)
        self.embed = torch.nn.Embedding(9, 6)
        self.body = torch.nn.Sequential(norm, linear, norm, linear, block, torch.nn.Sequential(norm, block), norm)
        self.head, self.loss = nn_linear(6, 9), torch.nn.CrossEntropyLoss()

    def forward(self, tokens, targets):
        return self.loss(self.head(self.body(self.embed(tokens))), targets)

    def to_grid(self, conversion, path):
        return conversion.convert_children(self, path)


def nn_linear(inputs, outputs):
    return torch.nn.Linear(inputs, outputs, dtype=torch.float64)


def check_repeated(rank, shape):
    torch.manual_seed(2)
    model = parallelize(Repeated().double(), Grid.make(*shape))
    tokens = torch.arange(5)
    loss = model(tokens[:, None], tokens[:, None])
    loss.backward()
    sync_gradients(model)
    return float(loss.detach()), model.body[1].weight.grad.full_tensor()


@pytest.mark.nightly
def test_modules_with_several_names_are_cut_under_each():
    ((expected, gradient),) = run_processes(check_repeated, 1, (1, 1, 1))
    for loss, actual in run_processes(check_repeated, 4, (2, 2, 1)):
        assert loss == pytest.approx(expected, abs=1e-12)
        assert relative_error(actual, gradient) < 1e-12


def check_norms(rank):
    grid = Grid.make(1, 2, 1)
    x = torch.arange(12.0).view(2, 6)
    lo, hi = grid.local_features(6)
    for eps in (None, 0.0, 0.1):
        for affine in (False, True):
            norm = torch.nn.RMSNorm(6, eps, elementwise_affine=affine)
            torch.testing.assert_close(RMSNorm(norm, grid)(x[:, lo:hi] * 1e-4), norm(x * 1e-4)[:, lo:hi])
    for affine in (False, True):
        with pytest.raises(
            ArgumentError, match=r"a norm of 2 features got .* \[2, 2\] on column . of .* with 1 features"
        ):
            LayerNorm(torch.nn.LayerNorm(2, elementwise_affine=affine), grid)(x[:, :2])


def test_norms_without_parameters_equal_torch_and_refuse_whole_inputs():
    run_processes(check_norms, 2)
