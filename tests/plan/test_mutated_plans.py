"""Randomly mutated plans: plans that the checker accepts deliver on both kinds of transport."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re

import pytest
import torch

from reshard import Layout, Mesh, ReshardError, Topology, check_plan, make_plan
from reshard.errors import PlanError
from reshard.plan import find_waits, parse_plan
from reshard.runtime import build_program
from tests.support.changed import change_plan
from tests.support.memory_transport import run_in_threads
from tests.support.random_problems import random_problem
from tests.support.tensors import same_bytes, take_shard, whole_tensor


def _run(plan, in_rounds):
    spec = plan.tensors[0]
    whole = whole_tensor(spec.shape, torch.int8)
    sources, wanted = ({rank: take_shard(side, rank, whole) for rank in plan.ranks} for side in (spec.src, spec.dst))
    outs = {rank: [None if shard is None else torch.zeros_like(shard)] for rank, shard in wanted.items()}
    run_in_threads(plan, {rank: [shard] for rank, shard in sources.items()}, outs, in_rounds=in_rounds)
    for rank in spec.dst.ranks:
        assert same_bytes(outs[rank][0], wanted[rank])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_mutated_plans_that_the_checker_accepts_deliver(seed):
    rng = random.Random(seed)
    src, dst, shape, topology = random_problem(seed)
    texts = [
        str(make_plan(src, dst, shape, "int8", topology=topology, strategy=strategy))
        for strategy in ("auto", "send_recv", "broadcast_greedy", "gathered_multicast")
    ]
    num_good = num_bad = 0
    for _ in range(60):
        text = change_plan(rng.choice(texts), rng)
        try:
            plan = parse_plan(text)
        except ReshardError:
            continue
        try:
            check_plan(plan)
        except ReshardError:
            num_bad += 1
            for rank in plan.ranks:  # a program is built, or a ReshardError raised
                with contextlib.suppress(ReshardError):
                    build_program(plan, rank)
        else:
            num_good += 1
            if num_good <= 8:
                in_rounds = bool(num_good % 2)
                # In rounds, buffers count too. They may exceed staging_bytes, which the checker does not check.
                room = max(plan.staging_bytes, 2**17) if in_rounds else plan.staging_bytes
                _run(dataclasses.replace(plan, staging_bytes=room), in_rounds)
    assert num_good >= 4 and num_bad >= 1, (num_good, num_bad)


def _of_lines(lines, dst, topology=None):
    text = str(make_plan(Layout(Mesh([0])), dst, (4,), "int8", strategy="send_recv", topology=topology))
    head = [line for line in text.splitlines() if not re.match(r"\d+: ", line)]
    return parse_plan("\n".join([*head, *lines]) + "\n")


@pytest.mark.parametrize(
    "second", ["1: t0 [0:2] 1 -> 2 splits 1 window 4 from 0", "1: t0 [0:4] 1 -> 2 splits 2 window 4 from 0"]
)
def test_ranks_pass_on_the_same_boxes_that_they_received(second):
    plan = _of_lines(["0: t0 [0:4] 0 -> 1 splits 1 window 4", second], Layout(Mesh([1, 2])))
    message = "rank 1 passes on other boxes than message 0 brings"
    for use in (check_plan, lambda plan: build_program(plan, 1)):
        with pytest.raises(PlanError, match=message):
            use(plan)


def test_copies_cause_no_waits():
    lines = ["0: t0 [0:4] 0 -> 0 splits 1 window 4", "1: t0 [0:4] 0 -> 1 splits 1 window 4 after 0"]
    plan = _of_lines(lines, Layout(Mesh([0, 1])), Topology((0, 1)))
    assert len(find_waits(plan).later) == 0
    check_plan(plan)
    _run(plan, in_rounds=False)
