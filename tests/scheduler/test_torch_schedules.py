"""Interoperability with torch: its validator accepts our schedules, and our simulator runs its schedules."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as pipelining

from reshard.scheduler import (
    Pipeline,
    auto_schedule,
    check_schedule,
    eager_1f1b,
    from_torch_csv,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    to_torch_csv,
    zb_h1,
)


def chain(num):
    return Pipeline.of_costs([1.0] * num, [2.0] * num, [0.25] * (num - 1))


def read(text):
    rows = csv.reader(io.StringIO(text))
    return {row: [pipelining._Action.from_str(cell) for cell in cells] for row, cells in enumerate(rows)}


def dry_run(actions, row_of_stage):
    order = {row: list(cells) for row, cells in actions.items()}
    return pipelining._simulate_comms_compute(order, lambda stage: row_of_stage[stage], len(row_of_stage))


BUILDERS = {
    "1f1b": (4, lambda p: one_f_one_b(p, 8)),
    "gpipe": (3, lambda p: gpipe(p, 5)),
    "eager": (4, lambda p: eager_1f1b(p, 8)),
    "interleaved": (8, lambda p: interleaved_1f1b(p, 8, 4)),
    "zero-bubble": (4, lambda p: zb_h1(p, 8)),
    "auto_schedule": (4, lambda p: auto_schedule(p, 8)),
    "auto_schedule on rows": (4, lambda p: auto_schedule(p, 8, row_of_stage=[0, 1, 0, 1])),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_our_schedules_pass_torch_validator_and_dry_run(name):
    num, build = BUILDERS[name]
    schedule = build(chain(num))
    rows = len(schedule.rows)
    computed = read(to_torch_csv(schedule))
    stage_to_rank = pipelining._validate_schedule(computed, rows, num, schedule.num_microbatches)
    assert [stage_to_rank[stage] for stage in range(num)] == list(schedule.row_of_stage)
    lowered = pipelining._add_send_recv({r: list(a) for r, a in computed.items()}, stage_to_rank.__getitem__, num)
    dry_run(lowered, schedule.row_of_stage)
    ours = read(to_torch_csv(schedule, transfers=True))
    steps = dry_run(ours, schedule.row_of_stage)
    assert sum(a is not None for row in steps.values() for a in row) == sum(map(len, schedule.rows))


def torch_schedule(make, rows, per_row, num):
    stages = [
        SimpleNamespace(
            is_first=index == 0,
            is_last=index == rows * per_row - 1,
            stage_index=index,
            stage_index_to_group_rank={s: s % rows for s in range(rows * per_row)},
            num_stages=rows * per_row,
            group_size=rows,
            group_rank=0,
            group=None,
            has_backward=False,
            submod=None,
        )
        for index in range(0, rows * per_row, rows)
    ]
    return make(stages, num)


TORCH_SCHEDULES = {
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 4, 2, 8),
    "looped": (pipelining.ScheduleLoopedBFS, 2, 3, 6),
    "interleaved zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 4, 2, 8),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 4, 2, 8),
}


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_torch_schedules_run_in_our_simulator(name, tmp_path):
    make, rows, per_row, num = TORCH_SCHEDULES[name]
    theirs = torch_schedule(make, rows, per_row, num)
    path = tmp_path / "schedule.csv"
    theirs._dump_csv(str(path), format="compute_only")
    pipeline = chain(rows * per_row)
    schedule = from_torch_csv(path.read_text(), pipeline, name)
    check_schedule(schedule, pipeline)
    timeline = simulate(schedule, pipeline)
    work = per_row * num * 3.0
    assert work <= timeline.makespan_seconds <= 1.8 * work
    again = from_torch_csv(to_torch_csv(schedule), pipeline, name)
    assert sorted(map(str, again.rows[0])) == sorted(map(str, schedule.rows[0]))
    # with the transfers added by torch
    path.write_text("")
    theirs._dump_csv(str(path), format="compute_comms")
    assert "UNSHARD" in path.read_text()
    with_theirs = from_torch_csv(path.read_text(), pipeline, name)
    assert simulate(with_theirs, pipeline).makespan_seconds >= work
