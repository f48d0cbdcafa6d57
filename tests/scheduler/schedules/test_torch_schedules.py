"""Torch accepts the schedules of this package, and this package simulates the schedules of torch."""

from __future__ import annotations

import csv
import inspect
import io
import re

import pytest
import torch.distributed.pipelining.schedules as pipelining

from reshard.scheduler import (
    Pipeline,
    auto_schedule,
    check_schedule,
    dualpipe_v,
    from_torch_csv,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    simulate_schedule,
    to_torch_csv,
    zb_h1,
    zb_v,
)
from reshard.scheduler.schedules.classic import eager_1f1b
from tests.support.torch_schedules import make_torch_schedule, torch_csv


def chain(num_stages):
    return Pipeline.of_costs([1.0] * num_stages, [2.0] * num_stages, [0.25] * (num_stages - 1))


def read_actions(text):
    lines = csv.reader(io.StringIO(text))
    return {pp_rank: [pipelining._Action.from_str(cell) for cell in cells] for pp_rank, cells in enumerate(lines)}


def dry_run(actions, pp_rank_of_stage):
    order = {pp_rank: list(cells) for pp_rank, cells in actions.items()}
    return pipelining._simulate_comms_compute(order, lambda stage: pp_rank_of_stage[stage], len(pp_rank_of_stage))


#: Number of stages, and a function that makes the schedule of a pipeline.
BUILDERS = {
    "1f1b": (4, lambda p: one_f_one_b(p, 8)),
    "gpipe": (3, lambda p: gpipe(p, 5)),
    "eager_1f1b": (4, lambda p: eager_1f1b(p, 8)),
    "interleaved": (8, lambda p: interleaved_1f1b(p, 8, 4)),
    "zb_h1": (4, lambda p: zb_h1(p, 8)),
    "auto_schedule": (4, lambda p: auto_schedule(p, 8)),
    "auto_schedule on pp ranks": (4, lambda p: auto_schedule(p, 8, pp_rank_of_stage=[0, 1, 0, 1])),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_our_schedules_pass_torch_validator_and_dry_run(name):
    num_stages, build = BUILDERS[name]
    schedule = build(chain(num_stages))
    num_pp_ranks = len(schedule.rank_actions)
    compute_only = read_actions(to_torch_csv(schedule))
    stage_to_rank = pipelining._validate_schedule(compute_only, num_pp_ranks, num_stages, schedule.num_microbatches)
    assert [stage_to_rank[stage] for stage in range(num_stages)] == list(schedule.pp_rank_of_stage)
    copies = {pp_rank: list(cells) for pp_rank, cells in compute_only.items()}
    lowered = pipelining._add_send_recv(copies, stage_to_rank.__getitem__, num_stages)
    dry_run(lowered, schedule.pp_rank_of_stage)
    with_transfers = read_actions(to_torch_csv(schedule, transfers=True))
    steps = dry_run(with_transfers, schedule.pp_rank_of_stage)
    assert sum(a is not None for actions in steps.values() for a in actions) == sum(map(len, schedule.rank_actions))


#: Class, pp ranks, stages per pp rank, microbatches.
TORCH_SCHEDULES = {
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 4, 2, 8),
    "looped": (pipelining.ScheduleLoopedBFS, 2, 3, 6),
    "interleaved zb_h1": (pipelining.ScheduleInterleavedZeroBubble, 4, 2, 8),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 4, 2, 8),
    "dualpipev": (pipelining.ScheduleDualPipeV, 4, 2, 10),
}


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_torch_schedules_run_in_our_simulator(name, tmp_path):
    make, num_pp_ranks, stages_per_pp_rank, num_microbatches = TORCH_SCHEDULES[name]
    original = make_torch_schedule(make, num_pp_ranks, stages_per_pp_rank, num_microbatches)
    path = tmp_path / "schedule.csv"
    writes_transfers = "format" in inspect.signature(original._dump_csv).parameters  # not in torch 2.9
    original._dump_csv(str(path), **({"format": "compute_only"} if writes_transfers else {}))
    pipeline = chain(num_pp_ranks * stages_per_pp_rank)
    schedule = from_torch_csv(path.read_text(), pipeline, name)
    check_schedule(schedule, pipeline)
    timeline = simulate_schedule(schedule, pipeline)
    work = stages_per_pp_rank * num_microbatches * 3.0  # of each pp rank: a forward takes 1, a backward 2
    assert work <= timeline.makespan_seconds <= 1.8 * work
    again = from_torch_csv(to_torch_csv(schedule), pipeline, name)
    assert sorted(map(str, again.rank_actions[0])) == sorted(map(str, schedule.rank_actions[0]))
    if not writes_transfers:
        return
    # the same schedule, with the sends and receives that torch adds
    path.write_text("")
    original._dump_csv(str(path), format="compute_comms")
    assert "UNSHARD" in path.read_text()
    with_transfers = from_torch_csv(path.read_text(), pipeline, name)
    assert simulate_schedule(with_transfers, pipeline).makespan_seconds >= work


#: Class, builder, and the pp ranks, stages per pp rank and microbatches to compare.
SAME = [
    (pipelining.ScheduleGPipe, lambda p, m, _: gpipe(p, m), [(3, 1, 5)]),
    (pipelining.ScheduleLoopedBFS, looped_bfs, [(2, 3, 6), (3, 2, 4)]),
    (pipelining.ScheduleInterleaved1F1B, interleaved_1f1b, [(4, 2, 8), (4, 2, 10), (2, 3, 2), (4, 3, 3)]),
    (pipelining.ScheduleInterleavedZeroBubble, interleaved_zero_bubble, [(4, 2, 8), (4, 2, 10), (2, 3, 2), (3, 2, 9)]),
    (pipelining.ScheduleZBVZeroBubble, lambda p, m, _: zb_v(p, m), [(4, 2, 8), (3, 2, 2), (2, 2, 9)]),
    (pipelining.ScheduleDualPipeV, lambda p, m, _: dualpipe_v(p, m), [(4, 2, 10), (3, 2, 6), (2, 2, 9), (1, 2, 4)]),
]


@pytest.mark.parametrize(("make", "build", "sizes"), SAME, ids=lambda value: getattr(value, "__name__", ""))
def test_builders_equal_the_classes_of_torch(make, build, sizes):
    for num_pp_ranks, stages_per_pp_rank, num_microbatches in sizes:
        torchs = torch_csv(make_torch_schedule(make, num_pp_ranks, stages_per_pp_rank, num_microbatches))
        ours = build(chain(num_pp_ranks * stages_per_pp_rank), num_microbatches, num_pp_ranks)
        assert to_torch_csv(ours) == re.sub(r",\d(WAIT_)?REDUCE_GRAD", "", torchs)


def test_waits_for_sends_and_for_sums_of_gradients_are_skipped():
    # in the CSV of torch 2.15
    plain = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    waits = "0F0,0SEND_F0,0RECV_B0,0WAIT_SEND_F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    waits += "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n"
    assert from_torch_csv(waits, chain(2)) == from_torch_csv(plain, chain(2))
