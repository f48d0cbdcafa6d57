"""Log records and profiler ranges of a step name the stage or the edge, the direction and the microbatch."""

from __future__ import annotations

import contextlib
import logging
import re

import torch
from torch.profiler import ProfilerActivity, profile

from reshard.scheduler import zb_h1
from reshard.scheduler.ir.actions import StageChannel
from reshard.scheduler.runtime.observe import find_observer
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.testing import run_processes
from tests.scheduler.runtime.test_engine import make_data, make_modules, make_pipeline

NUM = 3


def _train(rank):
    """A step without anything, one under the profiler, and one with debug messages."""
    pipeline = make_pipeline([0, 1, 2])
    data = make_data(torch.float64, [4] * NUM)
    feed = {0: [{"x": x} for x, _ in data], 2: [{"target": y} for _, y in data]}
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.name, record.getMessage()))
    logging.getLogger("reshard").addHandler(handler)
    with ScheduleEngine(zb_h1(pipeline, NUM), pipeline, {rank: make_modules(torch.float64)[rank]}) as engine:
        engine.step(feed)
        quiet = len(records)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            engine.step(feed)
        ranges = {event.key for event in profiler.key_averages() if event.key.startswith("reshard: ")}
        quiet += len(records)
        logging.getLogger("reshard").setLevel(logging.DEBUG)
        engine.step(feed)
    return quiet, ranges, records


def test_ranges_and_records_name_edge_direction_and_microbatch():
    for rank, (quiet, ranges, records) in enumerate(run_processes(_train, 3)):
        assert quiet == 0
        before, after = [(0, rank), (1, rank)][:rank], [(rank, 1), (rank, 2)][rank:]
        expected = set()
        for m in range(NUM):
            expected.add(f"forward of stage {rank}, microbatch {m}")
            for (first, last), direction in [*((e, "forward") for e in before), *((e, "backward") for e in after)]:
                expected |= {
                    f"{what} edge {first} -> {last} {direction}, microbatch {m}"
                    for what in ("receive over", "wait for")
                }
            for (first, last), direction in [*((e, "forward") for e in after), *((e, "backward") for e in before)]:
                expected.add(f"send over edge {first} -> {last} {direction}, microbatch {m}")
        backwards = {text for text in ranges if re.search("backward of|gradients of", text)}
        assert {text.removeprefix("reshard: ") for text in ranges - backwards} == expected
        assert {int(text.rpartition(" ")[2]) for text in backwards} == set(range(NUM))
        assert all(f"of stage {rank}, microbatch " in text for text in backwards)
        assert {name for name, _ in records} == {"reshard.scheduler.runtime.observe"}
        begun = [text.partition(": ")[2] for _, text in records if text.startswith(f"rank {rank} begins: ")]
        assert set(begun) == {text.removeprefix("reshard: ") for text in ranges}
        assert [text for _, text in records if " ended: " in text][-1].startswith(f"rank {rank} ended: ")


def test_an_observer_that_records_nothing_makes_no_text():
    class Silent(StageChannel):
        def __getattribute__(self, name):
            raise AssertionError("read while nothing records")

    observe = find_observer(0)
    with observe("send over", Silent.__new__(Silent), 0) as nothing:
        assert nothing is None
    assert isinstance(observe("send over", 0, 0), contextlib.nullcontext)
