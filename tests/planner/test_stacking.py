"""Tensors of equal shape, itemsize and layouts are planned as one tensor."""

from __future__ import annotations

import numpy as np
import pytest

from reshard import Layout, Mesh, Topology, check_plan, find_bound, make_plan, parse_plan, simulate
from reshard.planner import STRATEGIES, plan_tensors
from reshard.planner.stacking import Stacks
from reshard.sharding import TensorSpec
from tests.support.random_problems import random_problem


@pytest.mark.parametrize("seed", range(24))
def test_every_strategy_moves_stacks_and_single_tensors(seed):
    src, dst, shape, topology = random_problem(seed)
    kinds = [(shape, "float32"), (shape, "int32"), ((*shape[:-1], 3), "float32"), (shape, "int8")]
    specs = [TensorSpec(*kinds[number % 7 % 4], src, dst, f"w{number}") for number in range(11)]
    name = [None, *STRATEGIES][seed % (1 + len(STRATEGIES))]
    plan = plan_tensors(specs, strategy=name, topology=topology, staging_bytes=2 ** (16 + seed % 3 * 5))
    check_plan(plan)
    assert parse_plan(str(plan)) == plan


def test_stacks_hold_tensors_of_equal_itemsize_and_layouts():
    here, there = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(2, first_rank=2), "S0")
    given = [
        ((4,), "float32", here),
        ((4,), "int32", Layout(Mesh.of(2), "S0")),
        ((4,), "int8", here),
        ((4,), "float32", there),
    ]
    stacks = Stacks.of([TensorSpec(shape, dtype, src, there, str(i)) for i, (shape, dtype, src) in enumerate(given)])
    assert stacks.at.tolist() == [0, 2, 3, 4] and stacks.tensor.tolist() == [0, 1, 2, 3]


def test_a_strategy_function_sees_each_tensor():
    seen = []

    def spy(problem):
        seen.append(problem)
        return STRATEGIES["send_recv"](problem)

    layouts = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(2, first_rank=2), "S0")
    plan = make_plan(*layouts, {"a": (4,), "b": (4,)}, "int8", strategy=spy)
    check_plan(plan)
    assert seen[0].tensor.tolist() == [0, 0, 1, 1] and seen[0].start.shape == (4, 1)


def test_pipeline_stages_send_at_the_same_time():
    """Tensors of one stage follow each other by name, so a plan in the order of names would use one source host."""
    topology = Topology.uniform([rank // 4 for rank in range(32)])
    stages = [Layout(Mesh.of(4, first_rank=4 * stage), "S0 R") for stage in range(4)]
    dst = Layout(Mesh.of("4x4", first_rank=16), "S1 R")
    names = [f"{stage}.{layer}" for stage in range(4) for layer in range(6)]
    plan = make_plan(
        {name: stages[int(name[0])] for name in names}, dst, dict.fromkeys(names, (2048, 2048)), "float32",
        topology=topology,
    )  # fmt: skip
    check_plan(plan)
    assert simulate(plan).makespan_seconds <= 1.05 * find_bound(plan).seconds


def test_regions_of_one_stack_share_messages():
    layouts = Layout(Mesh([0])), Layout(Mesh([1]))
    specs = [TensorSpec((1000,), "int8", *layouts, str(number)) for number in range(300)]
    plan = plan_tensors(specs, topology=Topology((0, 1)))
    assert len(plan.transfers) <= 4 and plan.num_messages == 300
    assert sorted(plan.transfers.box_tensor.tolist()) == list(np.arange(300))
