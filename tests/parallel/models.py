"""Small language models, their batches and their training in one process."""

from __future__ import annotations

import importlib

import torch

from reshard.scheduler.training.models.gpt import GPT
from reshard.scheduler.training.models.model_presets import GPTConfig

#: Imported here once, so that forked processes need not import them.
for _name in ("torch.distributed.tensor", "torch.distributed.device_mesh", "torch._dynamo"):
    importlib.import_module(_name)

SEQUENCE = 5


def make_gpt(vocabulary=53, heads=4, head_size=6, is_tied=True, dtype=torch.float64):
    torch.manual_seed(1)
    config = GPTConfig(
        num_layers=2, num_heads=heads, head_size=head_size, sequence=SEQUENCE, vocabulary=vocabulary, is_tied=is_tied
    )
    model = GPT(config)
    model.apply(GPT.initialize)
    return model.to(dtype)


def make_batch(rows, vocabulary=53):
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, vocabulary, (2, rows, SEQUENCE), generator=generator)
    targets[0, 1:3] = -100
    return tokens, targets


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def gradient_errors(model, plain):
    """Errors of whole gradients, relative to the largest element. For key biases, whose gradient is 0, it is absolute."""
    errors = {}
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        actual = parameter.grad.full_tensor()
        scale = 1.0 if name.endswith("k.bias") else expected.grad.abs().max()
        errors[name] = float((actual - expected.grad).abs().max() / scale)
    return errors


def train(model, rows, steps, sync=None, first=0, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(first, first + steps):
        tokens, targets = make_batch(rows)
        loss = model(tokens.roll(step, 0), targets.roll(step, 0))
        loss.backward()
        if sync is not None:
            sync(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
