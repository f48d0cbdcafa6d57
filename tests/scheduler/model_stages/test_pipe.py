"""``Pipe``: a whole model trains over stages as it does in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reshard.scheduler as rs
from reshard.testing import run_processes

VOCABULARY, WIDTH = 11, 8
#: Samples and sequence length of each batch: usual, odd, fewer samples than microbatches, other lengths.
BATCHES = [(8, 5), (8, 5), (7, 6), (5, 5), (3, 4), (1, 5), (8, 5)]


class Chain(nn.Module):
    """Blocks with a position parameter at the root, a skip that several stages read, and a tied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(16, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, targets, mask=None):
        x = first = self.embed(tokens) + self.position[: tokens.shape[1]]
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number in (1, 3):
                x = x + first
        if mask is not None:
            x = x * mask
        logits = self.head(x).flatten(0, 1)
        accuracy = (logits.argmax(-1) == targets.flatten()).float().mean()
        return nn.functional.cross_entropy(logits, targets.flatten()), {"accuracy": accuracy}


def make_chain():
    torch.manual_seed(0)
    return Chain()


def make_batch(seed, num_samples=8, length=5):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, length + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def train_alone(model):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    results = []
    for number, sizes in enumerate(BATCHES):
        optimizer.zero_grad()
        loss, metrics = model(**make_batch(number, *sizes))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            held_out = model(**make_batch(100 + number, 6))[0]
        results.append([item.detach().item() for item in (loss, metrics["accuracy"], norm, held_out)])
    return results


def train_staged(rank, stages, cuts, accumulate, local):
    torch.set_num_threads(1)
    engine = rs.Pipe(make_chain(), cuts, stages=stages).compile(make_batch(0), 4)
    optimizer = torch.optim.AdamW(engine.parameters(), 1e-2)
    results = []
    with engine:
        for number, sizes in enumerate(BATCHES):
            optimizer.zero_grad()
            batch, parts = make_batch(number, *sizes), min(accumulate, sizes[0])
            if local:
                num_samples = engine.local_samples(sizes[0], parts)
                none = not len(num_samples) and number % 2 == 0
                batch = None if none else {name: item[num_samples] for name, item in batch.items()}
            result = engine.step(batch, accumulate=parts, local_batch=local)
            norm = engine.clip_grad_norm_(0.5)
            optimizer.step()
            assert result.finite
            held_out = engine.evaluate(make_batch(100 + number, 6)).loss
            results.append([result.loss, result.metrics["accuracy"], norm, held_out])
    return results


@pytest.mark.integration
@pytest.mark.parametrize(
    ("stages", "cuts", "accumulate", "local"),
    [
        ("1x1,1x1,1x1", ["layers.1", "layers.3"], 2, False),
        ("2x1,1x1,2x1", ["layers.1", "layers.3"], 1, False),
        ("2x1,1x1", ["layers.2"], 2, True),
    ],
)
def test_training_equals_one_process(stages, cuts, accumulate, local):
    expected = train_alone(make_chain())
    num_ranks = sum(int(stage[0]) for stage in stages.split(","))
    for result in run_processes(train_staged, num_ranks, stages, cuts, accumulate, local):
        for own, alone in zip(result, expected, strict=True):
            assert own == pytest.approx(alone, rel=2e-6)
