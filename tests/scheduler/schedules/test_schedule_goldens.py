"""Golden files of schedules, texts, traces and pictures; merged timelines; in-flight counts."""

from __future__ import annotations

import functools
import importlib.util
import time
from dataclasses import replace
from pathlib import Path

import pytest

from reshard.coordination.call_group import find_call_group
from reshard.coordination.decide import resolve
from reshard.coordination.groups.agreement_messages import RoundRequest
from reshard.coordination.groups.process_group import find_group
from reshard.errors import ArgumentError, ScheduleError
from reshard.scheduler.ir.actions import Action, Kind, StageChannel
from reshard.scheduler.ir.text import format_schedule, parse_schedule
from reshard.scheduler.pipeline import Edge, Pipeline, Stage
from reshard.scheduler.runtime import observe
from reshard.scheduler.runtime.observe import ActionRecord, StepRecord, _merge
from reshard.scheduler.schedules.classic import one_f_one_b, zb_h1
from reshard.scheduler.simulation.replay import simulate_schedule
from reshard.scheduler.simulation.validate import check_schedule
from reshard.scheduler.simulation.visualize import to_chrome_trace, to_svg
from reshard.testing.processes import run_processes

GOLDENS = Path(__file__).parents[2] / "goldens"
SMALL = Pipeline((Stage(1.0, 0.5, 1.5, 2), Stage(2.0, 1.0, 0.5, 3)), (Edge(0, 1, 0.75, 0.25),))


def _maker():
    spec = importlib.util.spec_from_file_location("make_schedules", GOLDENS / "make_schedules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.integration
def test_schedules_equal_the_golden_file():
    """To update the file after an intended change: python -m tests.goldens.make_schedules."""
    kept = (GOLDENS / "schedules.txt").read_text().splitlines()
    for made, line in zip(_maker().make_lines(), kept, strict=True):
        assert made == line


def test_text_trace_and_picture_equal_the_golden_file():
    schedule = zb_h1(SMALL, 2)
    timeline = simulate_schedule(schedule, SMALL)
    made = "\n\n".join((format_schedule(schedule), to_chrome_trace(timeline), to_svg(schedule, timeline)))
    assert made + "\n" == (GOLDENS / "zb_h1_2x2.txt").read_text()


@pytest.mark.parametrize(
    ("edges", "text"),
    [
        ((Edge(1, 1, 0.0, 0.0),), "edge 1 -> 1 must lead forward between stages 0 to 1"),
        ((Edge(1, 0, 0.0, 0.0),), "edge 1 -> 0 must lead forward"),
        ((Edge(0, 2, 0.0, 0.0),), "edge 0 -> 2 must lead forward"),
    ],
)
def test_edges_that_lead_backward_are_refused(edges, text):
    with pytest.raises(ArgumentError, match=text):
        Pipeline((Stage(1.0, 1.0, 1.0),) * 2, edges)


@pytest.mark.parametrize("seconds", [(-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0), (0.0, float("inf"))])
def test_edge_costs_must_be_finite_and_not_negative(seconds):
    with pytest.raises(ArgumentError, match="seconds of edge 0 -> 1"):
        Edge(0, 1, *seconds)


def test_error_shows_the_actions_around_its_position():
    schedule = one_f_one_b(SMALL, 2)
    rank_actions = [list(actions) for actions in schedule.rank_actions]
    first = next(i for i, action in enumerate(rank_actions[1]) if action.kind is Kind.F)
    backward = next(i for i, action in enumerate(rank_actions[1]) if action.kind is Kind.B)
    rank_actions[1][first], rank_actions[1][backward] = rank_actions[1][backward], rank_actions[1][first]
    with pytest.raises(ScheduleError) as caught:
        check_schedule(replace(schedule, rank_actions=tuple(map(tuple, rank_actions))), SMALL)
    shown = str(caught.value).split("pp rank 1: ")[1]
    assert shown.startswith(f"{rank_actions[1][0]} ") and f"[{rank_actions[1][first]}]" in shown
    assert str(caught.value).startswith("1B0 comes before 1F0")


def _measured(pp_rank, machine, clock, actions, transfers):
    return pp_rank, actions, transfers, machine, clock


def test_measurements_of_ranks_are_merged_into_one_timeline():
    """Two pp ranks on one machine share a clock. pp rank 1 waits 3.5 s, of which 3 s are after pp rank 0 computed its input."""
    there, back = StageChannel(0, 1, True), StageChannel(1, 0, False)
    first = [ActionRecord(Action(Kind.F, 0, 0), 10.0, 10.0, 11.0), ActionRecord(Action(Kind.B, 0, 0), 11.0, 16.5, 18.0)]
    second = [
        ActionRecord(Action(Kind.F, 1, 0), 10.5, 14.0, 15.0),
        ActionRecord(Action(Kind.B, 1, 0), 15.0, 15.0, 16.0),
    ]
    measurements = [
        _measured(0, "a", 3.0, first, [(there, 0, True, 11.0, 11.25, 13.5), (back, 0, False, None, 16.25, 16.5)]),
        _measured(1, "a", 9.0, second, [(there, 0, False, None, 10.5, 14.0), (back, 0, True, 16.0, 16.0, 17.25)]),
        _measured(1, "a", 9.0, second, [(there, 0, False, None, 10.75, 13.0), (back, 0, True, 15.5, 16.0, 17.25)]),
    ]
    timeline = _merge(measurements)
    assert [
        (span.pp_rank, str(span.action), span.start, span.end, span.exposed_seconds) for span in timeline.spans
    ] == [
        (0, "0F0", 0.0, 1.0, 0.0),
        (1, "1F0", 4.0, 5.0, 3.0),  # exposed since pp rank 0 computed the input
        (1, "1B0", 5.0, 6.0, 0.0),
        (0, "0B0", 6.5, 8.0, 0.5),
    ]
    assert [(c.channel, c.ready, c.start, c.end) for c in timeline.transfers] == [
        (there, 1.0, 1.25, 4.0),  # from when both ends had posted to the last arrival
        (back, 6.0, 6.25, 6.5),
    ]
    apart = _merge(
        [measurements[0], _measured(1, "b", 3.0, second, measurements[1][2])]
    )  # other machine: aligned clocks
    assert [span.start for span in apart.spans] == [0.0, 4.0, 5.0, 6.5]
    assert [(c.ready, c.start, c.end) for c in apart.transfers] == [(1.0, 1.25, 4.0), (6.0, 6.25, 6.5)]
    assert StepRecord(1).actions == []


def _gather_on_separate_machines(rank):
    observe._boot_id = lambda: str(rank)
    call_group = find_call_group(find_group(None), (0, 1))
    call_group.agree(RoundRequest(rank), lambda requests: resolve(requests, {}), 20)
    now = time.monotonic()
    time.sleep(0.5 * rank)
    own = StepRecord(rank)
    own.actions = [ActionRecord(Action(Kind.F, rank, 0), now, now, now)]
    return [span.start for span in observe.gather_timeline(own, call_group, 20).spans]


def test_clocks_of_machines_are_aligned_even_if_one_rank_is_late():
    for starts in run_processes(_gather_on_separate_machines, 2):
        assert max(starts) - min(starts) < 0.25


def test_activations_are_kept_until_the_weight_gradient_pass():
    text = (
        "by hand: 6 microbatches, stages on pp ranks 0\n0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0B2 0F4 0W1 0F5 0B3 0I4 0B5 0W4"
    )
    schedule, pipeline = parse_schedule(text), Pipeline((Stage(1, 1, 1, 10),), ())
    check_schedule(schedule, pipeline)
    assert schedule.in_flight == (3,) and schedule.peak_bytes(pipeline) == (30,)
    later = parse_schedule(text.replace(" 0F5 0B3", " 0F5").replace("0B5", "0B5 0B3").replace(" 0F4 0W1", " 0F4"))
    later = replace(later, rank_actions=((*later.rank_actions[0], Action(Kind.W, 0, 1)),))
    assert later.in_flight == (4,) and later.peak_bytes(pipeline) == (40,)


def test_texts_with_too_many_actions_are_rejected(monkeypatch):
    text = str(one_f_one_b(SMALL, 2))
    monkeypatch.setattr("reshard.scheduler.ir.text.MAX_ACTIONS", sum(map(len, parse_schedule(text).rank_actions)))
    assert str(parse_schedule(text)) == text
    with pytest.raises(ScheduleError, match="more than 16 actions"):
        parse_schedule(text + " 0F7")


class _Time:
    """The clock of a host that works in no time."""

    def __init__(self):
        self.seconds = 100.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


class _Event:
    """An event of a device that runs half a second behind the host."""

    def __init__(self, clock, enable_timing):
        assert enable_timing
        self.clock = clock

    def record(self):
        self.reached = self.clock.monotonic() + 0.5

    def elapsed_time(self, later):
        return 1e3 * (later.reached - self.reached)

    def synchronize(self):
        self.clock.sleep(max(self.reached - self.clock.monotonic(), 0.0))


def test_times_on_a_gpu_are_those_of_its_stream(monkeypatch):
    clock = _Time()
    monkeypatch.setattr(observe, "time", clock)
    monkeypatch.setattr(observe.torch.cuda, "Event", functools.partial(_Event, clock))
    record = StepRecord(0, "cuda")
    begun = clock.monotonic()
    since = record.clock.now()
    clock.sleep(0.1)
    start = record.clock.now()
    clock.sleep(0.2)
    record.note(Action(Kind.F, 0, 0), since, start)
    record.finish()
    (action,) = record.actions
    assert action.since == pytest.approx(begun + 0.5)
    assert record.waited_seconds == pytest.approx(0.1)
    assert action.end - action.start == pytest.approx(0.2)
