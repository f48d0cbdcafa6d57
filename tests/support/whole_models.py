"""Train a whole model in one process, and the same model over stages: both give the same numbers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import reshard.scheduler as rs
from reshard.formatting import unwrapped_name
from reshard.parallel import plain_state_dict
from reshard.scheduler.model_stages.partition.batches import name_batch, outline_batch
from reshard.scheduler.model_stages.partition.stage_graph import FakeModel
from reshard.testing import run_processes


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how it is trained.

    Attributes:
        make_model: the model with its values. loss_of: ``(loss, metrics)`` of a batch in one process.
        batches: one for each step. held_out: one to evaluate after each step.
        example: a batch to compile with; default: the first. num_microbatches: of a step.
        options: of ``Pipe.compile``. tolerance: relative.
    """

    make_model: Any
    batches: list[dict[str, Any]]
    held_out: dict[str, Any]
    loss_of: Any = lambda model, batch: (model(**batch).loss, {})
    example: dict[str, Any] | None = None
    num_microbatches: int = 4
    max_norm: float = 0.5
    rate: float = 1e-2
    autocast: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5


def train_alone(case):
    """``[loss, norm, held-out loss]`` of each step, and the parameters at the end."""
    model = case.make_model()
    optimizer = torch.optim.SGD(model.parameters(), case.rate, momentum=0.9)
    results = []
    cast = torch.autocast("cpu", case.autocast) if case.autocast is not None else contextlib.nullcontext()
    for batch in case.batches:
        optimizer.zero_grad()
        model.train()
        with cast:
            loss = case.loss_of(model, batch)[0]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        model.eval()
        with torch.no_grad(), cast:
            held_out = case.loss_of(model, case.held_out)[0]
        results.append([float(loss.detach()), float(norm), float(held_out)])
    return results, model.state_dict()


def train_staged(rank, case, make_pipe, accumulate=1):
    """The same over stages, with the parameters of this rank."""
    torch.set_num_threads(1)
    pipe = make_pipe(case)
    example = case.batches[0] if case.example is None else case.example
    engine = pipe.compile(example, case.num_microbatches, **case.options)
    optimizer = torch.optim.SGD(engine.param_groups(), case.rate, momentum=0.9, foreach=True)  # the default on GPUs
    results = []
    with engine:
        for batch in case.batches:
            optimizer.zero_grad()
            result = engine.step(batch, accumulate=accumulate)
            assert result.finite
            norm = engine.clip_grad_norm_(case.max_norm)
            optimizer.step()
            results.append([result.loss, norm, engine.evaluate(case.held_out).loss])
        values = {}
        for name, parameter in engine.named_parameters():
            values[name] = (
                (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
            )
        for module in engine.modules.values():
            if hasattr(module, "reshard_grid"):
                own = {unwrapped_name(name) for name, _ in module.named_parameters()}
                values = {name: value for name, value in values.items() if name not in own}
                values |= plain_state_dict(module)
    return results, values


def find_shapes(pipe, example):
    """Find the tensors between stages in this process, so that forked ranks inherit what torch has cached of them."""
    outline = outline_batch(name_batch(example, pipe.input_names))
    FakeModel(pipe.model, pipe.cut(outline.names), autocast=pipe.autocast).find(outline)


def check_equal(case, make_pipe, num_ranks, accumulate=1):
    """Compare all ranks with one process: losses, gradient norms, and parameters at the end."""
    expected, parameters = train_alone(case)
    find_shapes(make_pipe(case), case.batches[0] if case.example is None else case.example)
    for results, values in run_processes(train_staged, num_ranks, case, make_pipe, accumulate):
        for own, alone in zip(results, expected, strict=True):
            assert own == pytest.approx(alone, rel=case.tolerance)
        for name, value in values.items():
            torch.testing.assert_close(value, parameters[name], rtol=100 * case.tolerance, atol=10 * case.tolerance)


def pipe_of(cuts, stages, **options):
    """A function that cuts and places the model of a case."""
    return lambda case: rs.Pipe(case.make_model(), cuts, stages=stages, autocast=case.autocast, **options)
