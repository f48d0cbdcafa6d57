"""FSDP2, tensor parallelism and both inside stages: whole models train as they do in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import reshard.scheduler as rs
from reshard.errors import ArgumentError
from tests.support.whole_models import Case, check_equal, pipe_of

VOCABULARY, WIDTH = 12, 8

#: Shards each layer, and the embedding that is tied to the head, by its vocabulary.
PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Mixer(nn.Module):
    """Residual layers with a tied head."""

    def __init__(self, vocabulary=VOCABULARY, tied=True):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make_mixer(vocabulary=VOCABULARY, tied=True):
    torch.manual_seed(0)
    return Mixer(vocabulary, tied)


def make_batch(seed, num_samples):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, 5), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def make_case(make_model=make_mixer):
    batches = [make_batch(seed, num_samples) for seed, num_samples in enumerate((8, 7, 1, 8))]
    return Case(make_model, batches, make_batch(100, 6), lambda model, batch: (model(**batch), {}))


def fsdp(dp):
    return rs.Placement(dp=dp, wrap=rs.fsdp)


def grid(dp, tp, **options):
    return rs.Placement(dp=dp, tp=tp, **options)


def run(stages, cuts, make_model=make_mixer, **options):
    num_ranks = sum(stage.dp * stage.tp for stage in stages)
    check_equal(make_case(make_model), pipe_of(cuts, stages, tp_plan=PLAN, **options), num_ranks)


@pytest.mark.slow
def test_fsdp_before_tensor_parallelism_equals_one_process():
    run([fsdp(2), grid(1, 2)], ["layers.1"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "cuts"),
    [
        pytest.param([fsdp(2), grid(1, 1)], ["layers.1"], id="fsdp"),
        pytest.param([grid(1, 1), fsdp(2)], ["layers.1"], id="fsdp-last"),
        pytest.param([grid(1, 2), grid(1, 1)], ["layers.1"], id="tp"),
        pytest.param([grid(2, 2), grid(1, 1)], ["layers.2"], id="fsdp-tp"),
        pytest.param([grid(2, 2), grid(2, 2)], ["layers.1"], id="2x2-2x2"),
        pytest.param([grid(1, 2), grid(2, 2), grid(1, 4)], ["layers.1", "layers.2"], id="unlike"),
        pytest.param([grid(2, 2)], [], id="one-stage"),
        pytest.param([fsdp(2)], [], id="one-stage-fsdp"),
    ],
)
@pytest.mark.parametrize("model", ["tied", "untied", "uneven"])
def test_parallel_stages_equal_one_process(stages, cuts, model):
    vocabulary = 13 if model == "uneven" else VOCABULARY
    run(stages, cuts, lambda: make_mixer(vocabulary, model != "untied"))


@pytest.mark.slow
def test_llama_uses_its_own_tensor_parallel_plan():
    from tests.scheduler.model_stages import test_transformers as models

    case = models.make_case(lambda: models.make_llama(tied=True), mask=True, ignored=True)
    stages = [grid(1, 2), grid(2, 2)]
    check_equal(case, pipe_of(models.llama_layers(2), stages), 6)


def test_tensor_parallelism_needs_a_plan():
    with pytest.raises(
        ArgumentError, match=r"stage 1 has tp=2, but no plan says how to shard its modules; pass tp_plan"
    ):
        rs.Pipe(make_mixer(), ["layers.1"], stages="1x1,1x2")
    with pytest.raises(ArgumentError, match=r"the tp_plan names 'layer.\*', but Mixer has no such module"):
        rs.Pipe(make_mixer(), ["layers.1"], stages="1x1,1x2", tp_plan={"layer.*": ColwiseParallel()})


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_interleaved_stages_equal_one_process(tp):
    places = [grid(1, tp, ranks=tuple(range(row * tp, (row + 1) * tp))) for row in (0, 1, 0, 1)]
    case = make_case()
    check_equal(case, pipe_of(["layers.0", "layers.1", "layers.2"], places, tp_plan=PLAN), 2 * tp)


@pytest.mark.slow
@pytest.mark.parametrize(
    "inside", [{}, {"dp": 2}, {"dp": 2, "wrap": rs.fsdp}, {"tp": 2}], ids=["one", "ddp", "fsdp", "tp"]
)
def test_stages_of_a_rank_share_a_parameter(inside):
    size = 1 + bool(inside)
    shared = rs.Placement(ranks=tuple(range(size)), **inside)
    places = [shared, rs.Placement(ranks=(size,)), shared]
    check_equal(make_case(), pipe_of(["layers.1", "layers.2"], places, tp_plan=PLAN), size + 1)


@pytest.mark.slow
def test_blocks_of_a_rank_share_a_parameter():
    models = pytest.importorskip("tests.scheduler.model_stages.test_transformers")
    places = [rs.Placement(ranks=(0,)), rs.Placement(ranks=(1,)), rs.Placement(ranks=(0,))]
    check_equal(models.make_case(models.make_gpt2, mask=True), pipe_of(models.gpt2_layers(1, 3), places), 2)
