"""Steps on a virtual clock: planned order as the simulator, ready order as what arrives."""

import pytest

from microbench.training.ready_order_gain import CASES, draw_costs, make_pipeline
from microbench.training.virtual_clock import CLOCK_MESSAGE_SECONDS, simulate_step
from reshard.scheduler import simulate_schedule

RANKS, NUM = 4, 8


@pytest.mark.parametrize("case", CASES)
def test_planned_order_takes_as_long_as_in_the_simulator(case):
    per_rank, build = CASES[case]
    pipeline = make_pipeline([stage % RANKS for stage in range(per_rank * RANKS)], 50 * CLOCK_MESSAGE_SECONDS)
    schedule = build(pipeline, NUM, RANKS)
    took = simulate_step(schedule, pipeline, dict(enumerate(pipeline.stages)), "planned")
    assert took == pytest.approx(simulate_schedule(schedule, pipeline).makespan_seconds, rel=1e-6)


def test_ready_order_is_faster_under_interleaved_zero_bubble_if_times_vary():
    pipeline = make_pipeline([stage % RANKS for stage in range(2 * RANKS)], 0.02)
    schedule = CASES["interleaved zero bubble"][1](pipeline, NUM, RANKS)
    planned, ready = (
        sum(simulate_step(schedule, pipeline, draw_costs(pipeline, 50.0, turn), order) for turn in range(9))
        for order in ("planned", "ready")
    )
    assert ready < 0.98 * planned
