"""Schedules as text: names, our notation and torch's CSV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reshard.errors import ScheduleError
from reshard.scheduler import (
    Edge,
    Pipeline,
    Stage,
    from_torch_csv,
    gpipe,
    one_f_one_b,
    overlap_transfers,
    parse_schedule,
    to_torch_csv,
    zb_h1,
)
from reshard.scheduler.ir.actions import Action, Kind
from reshard.scheduler.passes.transfer_overlap import block_transfers, defer_recvs
from reshard.scheduler.schedules.classic import eager_1f1b


@pytest.mark.parametrize("name", ["", "x" * 101, " x", "x ", "a:b", "a\nb", "a: b\n"])
def test_schedule_names_are_one_short_line(name):
    schedule = gpipe(Pipeline((Stage(1, 1, 1),)), 2)
    assert parse_schedule(str(replace(schedule, name="x" * 100))).name == "x" * 100
    with pytest.raises(ScheduleError, match="up to 100 characters on one line without a colon"):
        replace(schedule, name=name)


def test_passes_keep_names_short():
    pipeline = Pipeline((Stage(1, 1, 1),) * 2, (Edge(0, 1, 1.0, 1.0),))
    long = replace(gpipe(pipeline, 2), name="x" * 100)
    for change in (block_transfers, defer_recvs):
        name = change(long, pipeline).name
        assert len(name) <= 100 and name.startswith("xxx") and ", " in name


@pytest.mark.parametrize(
    "bad",
    ["", "0F0", "x: 2 microbatches, stages on pp ranks 0\n1: 0F0", "x: 1 microbatches, stages on pp ranks 0\n0: 0X0",
     "x: 1 microbatches, stages on pp ranks 0\n0: 0F0>1", "x: 1 microbatches, stages on pp ranks 0\n0: 0SEND_F0",
     "x: 1 microbatches, stages on pp ranks 0\n0: 0SEND_F0<1", "x: 1 microbatches, stages on pp ranks 0\n0: 0F0!",
     "x: 1 microbatches, stages on pp ranks 0\n0: 0F99999999"],
)  # fmt: skip
def test_invalid_texts_are_rejected(bad):
    with pytest.raises(ScheduleError):
        parse_schedule(bad)


def test_text_of_a_blocking_send_ends_with_an_exclamation_mark():
    assert str(Action(Kind.SEND_B, 2, 7, 0, blocks=True)) == "2SEND_B7>0!"


def test_schedules_round_trip_in_the_csv_of_torch():
    pipeline = Pipeline((Stage(1, 1, 1),) * 3, (Edge(0, 1, 1.0, 1.0), Edge(1, 2, 1.0, 1.0)))
    for build in (gpipe, one_f_one_b, eager_1f1b, zb_h1):
        schedule = build(pipeline, 4)
        again = from_torch_csv(to_torch_csv(schedule, transfers=True), pipeline, schedule.name)
        assert overlap_transfers(again, pipeline) == schedule  # torch's text has each receive right before its use
        computed = from_torch_csv(to_torch_csv(schedule), pipeline, schedule.name)
        assert computed == schedule
    skips = Pipeline(pipeline.stages, (*pipeline.edges, Edge(0, 2, 1.0, 1.0)))
    with pytest.raises(ScheduleError, match="neighbours only"):
        to_torch_csv(gpipe(skips, 2))
    for bad in ("0F0,0Q1\n", "0F0\n0B0\n", "1F0\n", "0UNSHARD\n", "0F0\n1F0\n2UNSHARD\n"):
        with pytest.raises(ScheduleError):
            from_torch_csv(bad, pipeline)
