"""``auto_schedule`` is near the optimum on small pipelines with unequal costs, skip edges and little memory."""

from __future__ import annotations

import random
import statistics

import pytest

from reshard.scheduler import (
    Edge,
    Pipeline,
    Stage,
    auto_schedule,
    check_schedule,
    find_lower_bound,
    one_f_one_b,
    simulate_schedule,
)

pytest.importorskip("ortools", reason="ortools is not installed: pip install 'reshard[test]'")
from tests.support.schedule_oracle import min_makespan


def make_case(seed):
    """A random pipeline, its number of microbatches, a memory limit, and whether backwards may be split."""
    rng = random.Random(seed)
    num_stages, num_microbatches = rng.randint(2, 4), rng.randint(2, 6)
    times, transfers = [4, 6, 8, 12, 20], [0, 2, 5, 12, 25]
    stages = [
        Stage(rng.choice(times), rng.choice(times), rng.choice([2, *times]), rng.randint(1, 2))
        for _ in range(num_stages)
    ]
    pairs = [(i, i + 1) for i in range(num_stages - 1)]
    pairs += [(i, j) for i in range(num_stages) for j in range(i + 2, num_stages) if rng.random() < 0.4]
    edges = [Edge(i, j, rng.choice(transfers), rng.choice(transfers)) for i, j in pairs]
    pipeline = Pipeline(tuple(stages), tuple(edges))
    peak_of_1f1b = max(one_f_one_b(pipeline, num_microbatches).peak_bytes(pipeline))
    limit = rng.choice([2 * num_microbatches, peak_of_1f1b, peak_of_1f1b + 1, peak_of_1f1b + 2, peak_of_1f1b - 1])
    return pipeline, num_microbatches, max(limit, *(stage.activation_bytes for stage in stages)), rng.random() < 0.8


def ratios_to_optimum(seeds):
    """Makespan over the least makespan that the solver finds in 20 of its units of time per seed. It must prove 98 % of them."""
    ratios, proofs = [], []
    for seed in seeds:
        pipeline, num_microbatches, limit, can_split = make_case(seed)
        schedule = auto_schedule(pipeline, num_microbatches, activation_limit_bytes=limit, can_split=can_split)
        check_schedule(schedule, pipeline, limit)
        makespan = simulate_schedule(schedule, pipeline).makespan_seconds
        best, is_proved = min_makespan(pipeline, num_microbatches, limit, can_split, 20.0)
        assert makespan >= best * (1 - 1e-9) or not is_proved, seed
        bound = find_lower_bound(pipeline, num_microbatches, activation_limit_bytes=limit, can_split=can_split)
        assert bound.seconds <= best * (1 + 1e-9), seed
        ratios.append(makespan / best)
        proofs.append(is_proved)
    assert statistics.mean(proofs) >= 0.98
    return ratios


@pytest.mark.nightly
def test_auto_schedule_is_near_the_optimum():
    ratios = ratios_to_optimum(range(8))
    assert statistics.mean(ratios) <= 1.02
    assert max(ratios) <= 1.10


@pytest.mark.slow
def test_auto_schedule_is_near_the_optimum_on_many_cases():
    ratios = ratios_to_optimum(range(1000, 1300))
    assert statistics.mean(ratios) <= 1.02
    assert max(ratios) <= 1.10
