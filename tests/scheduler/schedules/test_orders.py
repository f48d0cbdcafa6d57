"""The native loops over orders of computations equal their reference implementations to the last bit."""

from __future__ import annotations

import random

import pytest

from reshard.scheduler import Pipeline, Stage, simulate_schedule
from reshard.scheduler.ir.communication import add_transfers
from reshard.scheduler.schedules.classic import eager_warmups
from reshard.scheduler.schedules.known_schedules import known_orders
from reshard.scheduler.schedules.list_scheduling import DispatchRule
from reshard.scheduler.schedules.orders import OrderModel, order_of_warmups
from tests.campaigns.schedules import draw_case
from tests.reference.list_scheduling import order_greedily


def draw_policy(chance, case):
    """A policy that some cases do not complete."""
    num, count = len(case.pp_rank_of_stage), case.num_microbatches
    split = chance.random() < 0.8
    limits = [chance.randint(4, 12 * count) for _ in range(max(case.pp_rank_of_stage) + 1)]
    return DispatchRule(
        tuple(chance.randint(1, count) for _ in range(num)),
        tuple(limits),
        tuple(split and chance.random() < 0.9 for _ in range(num)),
        chance.random() < 0.5,
        chance.random() < 0.5,
        chance.choice([0.0, 0.3, 1.0]),
        chance.choice([0, 0, 1, 2, 3]),
    )


@pytest.mark.parametrize("seed", range(24))
def test_list_scheduling_equals_its_reference(seed):
    chance, case = random.Random(seed), draw_case(seed, most_pp_ranks=5, most_stages=9)
    policy = draw_policy(chance, case)
    model = OrderModel(case.pipeline, case.pp_rank_of_stage, case.num_microbatches)
    expected = order_greedily(case.pipeline, case.num_microbatches, case.pp_rank_of_stage, policy)
    num_computations = sum(3 if split else 2 for split in policy.splits) * case.num_microbatches
    order = model.order(policy)
    if sum(map(len, expected)) < num_computations:
        assert order is None
        return
    assert model.actions(order) == expected
    schedule = add_transfers("listed", expected, case.pipeline, case.pp_rank_of_stage, case.num_microbatches)
    assert model.makespan_seconds(order) == simulate_schedule(schedule, case.pipeline).makespan_seconds
    assert tuple(model.peak_bytes(order)) == schedule.peak_bytes(case.pipeline)
    assert all(peak <= limit for peak, limit in zip(model.peak_bytes(order), policy.max_bytes, strict=True))


@pytest.mark.parametrize("seed", range(100, 112))
def test_makespans_of_known_schedules_equal_the_simulation(seed):
    case = draw_case(seed, most_pp_ranks=5, most_stages=9)
    model = OrderModel(case.pipeline, case.pp_rank_of_stage, case.num_microbatches)
    for name, rank_actions in known_orders(case.pp_rank_of_stage, case.num_microbatches):
        schedule = add_transfers(name, rank_actions, case.pipeline, case.pp_rank_of_stage, case.num_microbatches)
        order = model.numbers(rank_actions)
        timeline = simulate_schedule(schedule, case.pipeline)
        assert model.makespan_seconds(order) == timeline.makespan_seconds, name
        ends = {span.action.stage: span.end for span in sorted(timeline.spans, key=lambda span: span.end)}
        assert model.end_seconds(order) == [ends[stage] for stage in range(len(ends))], name
        assert model.actions(order) == [[a.__class__(a.kind, a.stage, a.microbatch) for a in r] for r in rank_actions]


def test_an_order_that_deadlocks_takes_forever():
    case = draw_case(0, most_pp_ranks=2, most_stages=2)
    model = OrderModel(case.pipeline, (0, 1), case.num_microbatches)
    order = model.numbers(next(known_orders((0, 1), case.num_microbatches))[1])
    order[1].reverse()
    assert model.makespan_seconds(order) == float("inf")


@pytest.mark.parametrize(("num", "count"), [(1, 1), (2, 3), (4, 2), (3, 7)])
def test_orders_of_warmups_are_those_of_the_known_schedules(num, count):
    model = OrderModel(Pipeline((Stage(1.0, 1.0, 1.0),) * num, ()), range(num), count)
    known = dict(known_orders(range(num), count))
    assert model.actions(order_of_warmups(range(num, 0, -1), count)) == known["1f1b"]
    assert model.actions(order_of_warmups(range(num, 0, -1), count, range(num))) == known["zb_h1"]
    assert model.actions(order_of_warmups(eager_warmups(num), count)) == known["eager_1f1b"]
    assert model.actions(order_of_warmups(eager_warmups(num), count, range(0, 2 * num, 2))) == known["zb_h2"]
