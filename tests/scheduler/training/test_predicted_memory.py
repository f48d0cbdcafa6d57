"""Predicted bytes of a training plan against those that its ranks keep. ``microbench.training_plans.memory`` has more of
them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from microbench.training_plans.by_hand import GPT, make_by_hand, parse_stages
from reshard.scheduler.autoparallel import Cluster
from reshard.scheduler.training.loop import TrainingJob
from reshard.scheduler.training.peak_memory import count_peak_bytes, predicted_bytes
from reshard.scheduler.training.plan_search import SearchOptions, make_job_problem
from reshard.testing import run_processes
from reshard.topology import Topology

JOB = TrainingJob("memory", GPT, 2, "")


@pytest.fixture(scope="module")
def problem():
    return make_job_problem(JOB, SearchOptions(2, None, "10GB"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "num_microbatches"),
    [
        ("4:2 tp, 4:1 half", 4),
        ("3:1, 5:2", 4),
        ("3:2 zero, 5:1 half", 8),
        ("4:4 2x1x2, 4:1", 4),
        ("4:2 half, 4:2", 2),
        ("8:4 1x2x2 zero", 4),
        ("2:2, 2:1 half, 2@0 half, 2@1", 4),
    ],
    ids=[
        "tensor parallel and recompute",
        "replicas",
        "zero 3",
        "2.5-D grid",
        "all microbatches in flight",
        "zero 3 on a grid",
        "interleaved",
    ],
)
def test_predicted_memory_is_within_5_percent(problem, text, num_microbatches):
    stages = parse_stages(text)
    cluster = Cluster(Topology.uniform((0,) * max(stage.end_rank for stage in stages)), 1e10)
    _, training_plan = make_by_hand(problem, cluster, stages, num_microbatches)
    counted = run_processes(
        count_peak_bytes, training_plan.num_ranks, replace(JOB, training_plan=training_plan), timeout_seconds=300
    )
    assert counted == pytest.approx(predicted_bytes(training_plan), rel=0.05)
