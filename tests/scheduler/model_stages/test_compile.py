"""``Pipe.compile`` changes nothing that it does not make, and an error of one rank reaches all ranks."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import reshard.scheduler as rs
from reshard.errors import ReshardError
from reshard.scheduler.model_stages import stage_planner
from reshard.testing import run_processes
from tests.scheduler.model_stages.test_pipe import Chain, make_batch, make_chain
from tests.support.whole_models import Case, check_equal, pipe_of


class Counter(nn.Module):
    """Assigns another tensor to its buffer in each forward, and draws from all global random number generators."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return self.layer(x) + 0 * (random.random() + np.random.rand() + torch.rand(()))


def random_numbers():
    return random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()


def compile_counters(rank):
    torch.set_num_threads(1)
    model = make_chain()
    model.layers[rank] = Counter()
    before = random_numbers()
    with rs.Pipe(model, ["layers.1"], stages="1x1,1x1").compile(make_batch(0), 4) as engine:
        after = random_numbers()
        counts = [float(model.layers[rank].count)]
        engine.step(make_batch(0))
        counts.append(float(model.layers[rank].count))
    assert before[0] == after[0]
    np.testing.assert_equal(before[1], after[1])
    assert torch.equal(before[2], after[2])
    return counts


@pytest.mark.integration
def test_compile_restores_reassigned_buffers_and_all_random_number_generators():
    assert run_processes(compile_counters, 2) == [[0, 4]] * 2


def refuse(module):
    raise ValueError("it does not suit me")


def initialize_all_but_the_head(module):
    if isinstance(module, Chain):
        nn.init.ones_(module.position)
    elif not (isinstance(module, nn.Linear) and module.out_features == 11):
        module.reset_parameters() if hasattr(module, "reset_parameters") else None


def compile_with_an_error_on_one_rank(rank):
    torch.set_num_threads(1)
    with torch.device("meta"):
        empty = Chain()
        empty.head = nn.Linear(8, 11, bias=False)
    stages = [rs.Placement(dp=2), rs.Placement()]
    pipes = [
        rs.Pipe(make_chain(), ["layers.2"], stages=[stages[0], rs.Placement(prepare=refuse)]),
        rs.Pipe(empty, ["layers.2"], stages=stages, init=initialize_all_but_the_head),
        rs.Pipe(make_chain(), ["layers.2"], stages=stages),
    ]
    found = []
    for number, pipe in enumerate(pipes):
        example = None if number == 2 and rank == 2 else make_batch(0)
        with pytest.raises((ReshardError, ValueError)) as caught:
            pipe.compile(example, 4, schedule=rs.one_f_one_b)
        found.append(str(caught.value))
    for name, value in (("device", 0.5), ("num_microbatches", 0), ("timeout_seconds", "x"), ("schedule", "1f1b")):
        options = {"num_microbatches": 4, "schedule": rs.one_f_one_b, **({name: value} if rank == 1 else {})}
        with pytest.raises(ReshardError, match=f"rank 1: {name} is|^{name} is") as caught:
            pipes[2].compile(make_batch(0), **options)
    with pipes[2].compile(make_batch(0), 4, schedule=rs.one_f_one_b) as engine:  # the process group is still usable
        assert engine.step(make_batch(0)).finite
    return found


@pytest.mark.nightly
def test_an_error_of_one_rank_is_raised_on_all():
    for found in run_processes(compile_with_an_error_on_one_rank, 3):
        assert found[0].endswith("it does not suit me")
        assert "init left 'head.weight' without values" in found[1]
        assert found[2].endswith("a batch must be a dict of tensors, a tensor or a tuple of tensors, not NoneType")


def make_frozen(layer=None):
    model = make_chain()
    if layer is not None:
        model.layers[0] = layer
    model.head = nn.Linear(8, 11, bias=False)
    for part in (model.embed, *model.layers[:2]):
        part.requires_grad_(False)
    model.position.requires_grad_(False)
    return model


@pytest.mark.integration
def test_stage_without_trainable_parameters_is_replicated():
    case = Case(
        make_frozen, [make_batch(seed) for seed in range(3)], make_batch(9), lambda model, batch: model(**batch)
    )
    check_equal(case, pipe_of(["layers.2"], "2x1,1x1"), 3)


def train_frozen_counter(rank):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    counter = Counter()  # of unlike values on the replicas
    with rs.Pipe(make_frozen(counter), ["layers.2"], stages="2x1,1x1").compile(make_batch(0), 4) as engine:
        if rank == 1:
            counter.count.fill_(100)
        engine.step(make_batch(0))
        engine.step(make_batch(1))
        return float(counter.count), counter.layer.weight.sum().item()


@pytest.mark.integration
def test_replicas_of_a_frozen_stage_have_the_parameters_and_buffers_of_the_first():
    first, second, _ = run_processes(train_frozen_counter, 3)
    assert first == second
    assert first[0] == 8


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.second(self.first(x) * scale).square().mean()


def step_with_changing_scalars(rank):
    torch.set_num_threads(1)
    batch, num = {"x": torch.ones(4, 4)}, stage_planner.MAX_GRAPHS + 2
    model, losses = Scaled(), []
    with rs.Pipe(model, ["second"], stages="1x1,1x1").compile(batch | {"scale": 0.5}, 2) as engine:
        made = mock.Mock(side_effect=engine._engine.make_program)
        engine._engine.make_program = made
        for number in range(num):
            losses.append(engine.evaluate(batch | {"scale": float(number)}).loss)
        return losses, made.call_count, len(engine._planner._graphs)


@pytest.mark.integration
def test_scalars_that_change_with_each_batch_share_one_program_and_few_graphs():
    for losses, made, graphs in run_processes(step_with_changing_scalars, 2):
        assert len(set(losses)) == len(losses)
        assert (made, graphs) == (0, stage_planner.MAX_GRAPHS)


def compile_in_both_orders(rank):
    torch.set_num_threads(1)
    gradients = []
    for order in ("planned", "ready"):
        torch.manual_seed(1)
        model = make_chain()
        with rs.Pipe(model, ["layers.2"], stages="1x1,1x1").compile(make_batch(0), 4, order=order) as engine:
            for number in range(2):
                engine.step(make_batch(number))
        gradients.append([parameter.grad for parameter in engine.parameters()])
    pipe = rs.Pipe(make_chain(), [], stages="2x1")
    with pytest.raises(ReshardError, match="needs each stage on one rank, but stage 0 is on ranks 0-1"):
        pipe.compile(make_batch(0), 4, order="ready")
    return all(map(torch.equal, *gradients)) and len(gradients[0])


@pytest.mark.integration
def test_both_orders_give_the_same_gradients():
    assert all(run_processes(compile_in_both_orders, 2))
