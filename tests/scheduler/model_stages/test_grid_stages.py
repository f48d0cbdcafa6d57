"""Stages on grids of ``reshard.parallel``, with stages of other kinds: models train as they do in one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import reshard.scheduler as rs
from reshard.errors import ArgumentError
from reshard.testing import run_processes
from tests.parallel.models import SEQUENCE, make_gpt
from tests.support.whole_models import Case, check_equal, pipe_of

VOCABULARY = 53


def make_batch(seed, num_samples=8):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, SEQUENCE + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def make_case(make_model=make_gpt, **options):
    batches = [make_batch(seed, num_samples) for seed, num_samples in enumerate((8, 7, 8))]
    loss = lambda model, batch: (model(**batch), {})  # noqa: E731
    return Case(make_model, batches, make_batch(100, 6), loss, num_microbatches=3, tolerance=1e-10, **options)


def on_grid(rows, cols, depth, **options):
    return rs.Placement(grid=(rows, cols, depth), **options)


def run(stages, cuts, case=None, **options):
    check_equal(case or make_case(), pipe_of(cuts, stages, **options), sum(stage.size for stage in stages))


@pytest.mark.slow
def test_a_grid_feeds_replicas():
    run([on_grid(2, 2, 1), rs.Placement(dp=2)], ["blocks.1"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([on_grid(1, 2, 1), on_grid(2, 1, 2)], id="1d-2.5d"),
        pytest.param([on_grid(2, 2, 2), on_grid(1, 3, 1)], id="2.5d-1d"),
        pytest.param([on_grid(3, 2, 1), on_grid(2, 2, 1)], id="uneven"),
        pytest.param([rs.Placement(tp=2), on_grid(2, 1, 1)], id="tp-2d"),
        pytest.param([on_grid(2, 1, 2, wrap=rs.fsdp), rs.Placement(dp=2, wrap=rs.fsdp)], id="fsdp"),
        pytest.param([on_grid(1, 1, 2, wrap=rs.fsdp), on_grid(1, 2, 1)], id="fsdp-depth-only"),
        pytest.param([on_grid(2, 2, 1, ranks=(1, 5, 3, 7)), on_grid(1, 2, 2, ranks=(0, 4, 2, 6))], id="ranks"),
    ],
)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_grid_stages_beside_other_kinds_equal_one_process(stages, is_tied):
    run(stages, ["blocks.1"], make_case(lambda: make_gpt(is_tied=is_tied)))


@pytest.mark.slow
@pytest.mark.parametrize("build", [rs.one_f_one_b, rs.zb_h1, rs.auto_schedule], ids=["1f1b", "zb_h1", "auto"])
def test_grid_stages_equal_one_process_under_each_schedule(build):
    stages = [on_grid(2, 2, 1, keep_inputs=True), on_grid(1, 2, 2)]
    run(stages, ["blocks.1"], make_case(options={"schedule": build}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
def test_a_compiled_grid_stage_equals_one_process():
    stages = [on_grid(2, 1, 1, prepare=functools.partial(torch.compile, backend="eager")), on_grid(1, 2, 1)]
    run(stages, ["blocks.1"])


@pytest.mark.slow
def test_stages_that_share_a_grid_equal_one_process():
    shared = on_grid(2, 2, 1, ranks=(0, 1, 2, 3))
    check_equal(make_case(), pipe_of(["blocks.0", "blocks.1"], [shared, rs.Placement(ranks=(4,)), shared]), 5)


@pytest.mark.slow
def test_one_grid_without_a_pipeline_equals_one_process():
    run([on_grid(2, 2, 1)], [])


@pytest.mark.slow
def test_batches_with_fewer_rows_than_the_grid_equal_one_process():
    case = make_case()
    case.batches[1:] = [make_batch(7, 1), make_batch(8, 2)]
    run([on_grid(3, 1, 1), on_grid(1, 2, 1)], ["blocks.1"], case)


@pytest.mark.slow
def test_llama_on_grids_equals_one_process():
    models = pytest.importorskip("tests.scheduler.model_stages.test_transformers")
    case = models.make_case(lambda: models.make_llama(tied=True), mask=True, ignored=True)
    run([on_grid(2, 2, 1), on_grid(1, 3, 1)], models.llama_layers(2), case)


@pytest.mark.slow
def test_gpt2_on_grids_equals_one_process():
    models = pytest.importorskip("tests.scheduler.model_stages.test_transformers")
    case = models.make_case(models.make_gpt2, mask=True, ignored=True)
    run([on_grid(1, 3, 1), on_grid(2, 2, 1)], models.gpt2_layers(2), case)


@pytest.mark.slow
def test_autocast_on_grids_is_close_to_one_process():
    case = make_case(lambda: make_gpt(dtype=torch.float32), autocast=torch.bfloat16)
    run([on_grid(2, 2, 1), rs.Placement(dp=2)], ["blocks.1"], replace(case, tolerance=1e-2))


def test_bad_placements_are_refused():
    for options, message in (
        ({"grid": (2, 2)}, r"grid of a placement is \(2, 2\); it must be \(rows, cols, depth\)"),
        ({"grid": (2, 2, 0)}, "three positive integers"),
        ({"grid": (1, 2, 1), "tp": 2}, "takes no dp, tp or tp_plan"),
        ({"grid": (1, 2, 2), "wrap": rs.ddp}, "its wrap must be rs.fsdp, .* or None, not 'ddp'"),
        ({"grid": (1, 2, 2), "ranks": (0, 1, 2)}, "depth=2, row=1, col=2 needs 4 ranks"),
        ({"grid": (1, 2, 1), "ranks": (1, 0)}, r"along col they are \[1, 0\], but they must ascend"),
        ({"grid": (1, 2, 1), "keep_inputs": 1}, "keep_inputs of a placement is 1; it must be True or False"),
        ({"dp": 2, "keep_inputs": True}, "keep_inputs=True needs a grid"),
        ({"tp": 2, "ranks": (1, 0)}, r"along tp they are \[1, 0\]"),
        ({"dp": 2, "wrap": rs.fsdp, "ranks": (1, 0)}, r"along dp they are \[1, 0\]"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rs.Placement(**options)
    assert rs.Placement(dp=2, ranks=(1, 0)).size == 2
    with pytest.raises(ArgumentError, match=r"must be dp x tp of a stage, .* or rows x cols x depth of a grid"):
        rs.Pipe(make_gpt(), ["blocks.1"], stages="1x1x1x1,1x1")


class Scaled(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)
        self.factor, self.scale = torch.nn.Parameter(torch.ones(1)), scale

    def forward(self, x):
        return self.second(self.scale(self, self.first(x))).sum()


def check_untraceable(rank):
    for scale, message in (
        (lambda _, y: y / y.norm(dim=-1, keepdim=True), "calls norm"),
        (lambda model, y: y * model.factor, "reads the parameter 'factor'"),
        (lambda _, y: y / y.size(-1), "calls size"),
        (lambda _, y: y / y.shape[-1], "reads shape of a tensor"),
        (lambda _, y: y + y[0], "reads getitem, elements of a tensor,"),
        (lambda _, y: y + y[:, :1], "reads getitem, elements of a tensor,"),
    ):
        pipe = rs.Pipe(Scaled(scale), ["second"], stages="1x2x1,1x1")  # ranks of both stages raise
        with pytest.raises(ArgumentError, match=f"{message} between its modules, which parallelize cannot cut"):
            pipe.compile({"x": torch.ones(4, 4)}, 2)


@pytest.mark.integration
def test_functions_of_whole_features_are_refused():
    run_processes(check_untraceable, 3)


class Regressor(torch.nn.Module):
    """A model whose first layer is a Linear that reads the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(5, 7).double(), torch.nn.Linear(7, 3).double()

    def forward(self, x, targets):
        return torch.nn.functional.cross_entropy(self.second(torch.relu(self.first(x))), targets)


@pytest.mark.nightly
def test_a_linear_layer_reads_all_features_of_the_batch():
    generator = torch.Generator().manual_seed(0)
    batch = {
        "x": torch.randn(6, 5, dtype=torch.float64, generator=generator),
        "targets": torch.tensor([0, 1, 2, 2, 1, 0]),
    }
    case = Case(Regressor, [batch] * 2, batch, lambda model, b: (model(**b), {}), num_microbatches=2, tolerance=1e-10)
    run([on_grid(2, 2, 1), rs.Placement()], ["second"], case)
