"""Costs of edges from the planner, passes, traces and pictures, and checks of costs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from reshard import Layout, Mesh, Topology, make_plan
from reshard.cost.cost_report import CostReport
from reshard.errors import ArgumentError, ScheduleError
from reshard.scheduler import (
    Edge,
    Pipeline,
    Schedule,
    Stage,
    auto_schedule,
    check_schedule,
    gpipe,
    one_f_one_b,
    overlap_transfers,
    plan_edge,
    simulate_schedule,
    to_chrome_trace,
    to_svg,
    zb_h1,
)
from reshard.scheduler.ir.actions import Action, Kind, StageChannel
from reshard.scheduler.passes.edge_codecs import EdgeCodecs
from reshard.scheduler.passes.transfer_overlap import apply_passes, block_transfers, defer_recvs
from reshard.scheduler.schedules.classic import eager_1f1b
from reshard.sharding.tensor_spec import TensorSpec


def chain(*communication):
    num = len(communication) + 1
    return Pipeline.of_costs([1.0] * num, [2.0] * num, communication)


@pytest.mark.parametrize(("c", "ratio"), [(0.5, 1.167), (1.5, 1.5)])
def test_blocking_1f1b_takes_the_published_time(c, ratio):
    pipeline = chain(c)
    schedule = block_transfers(one_f_one_b(pipeline, 32), pipeline)
    check_schedule(schedule, pipeline)
    took = simulate_schedule(schedule, pipeline).makespan_seconds / pipeline.ideal_seconds(32)
    assert took == pytest.approx(ratio, abs=6e-4)


@pytest.mark.parametrize("build", [gpipe, one_f_one_b, eager_1f1b, zb_h1, auto_schedule])
@pytest.mark.parametrize("change", [block_transfers, defer_recvs])
def test_overlap_transfers_undoes_slower_passes(build, change):
    pipeline = chain(0.5, 2.0, 0.5)
    schedule = build(pipeline, 8)
    before = str(schedule)
    changed, (report,) = apply_passes(schedule, pipeline, [change])
    assert str(schedule) == before
    check_schedule(changed, pipeline)
    assert report.num_moved > 0
    assert report.after_seconds >= report.before_seconds
    back, (again,) = apply_passes(changed, pipeline, [overlap_transfers])
    assert back.rank_actions == schedule.rank_actions
    assert again.before_seconds == report.after_seconds
    assert f"{report.num_moved} transfers moved" in str(report)


def test_report_of_a_pass_gives_the_speed_up():
    pipeline = chain(1.0)
    schedule, (report,) = apply_passes(
        block_transfers(one_f_one_b(pipeline, 4), pipeline), pipeline, [overlap_transfers]
    )
    seconds = [
        simulate_schedule(item, pipeline).makespan_seconds for item in (block_transfers(schedule, pipeline), schedule)
    ]
    assert (report.before_seconds, report.after_seconds) == tuple(seconds) and seconds[0] > seconds[1]
    assert str(report) == (
        f"overlap_transfers: {report.num_moved} transfers moved, {seconds[0]:.6g} s -> {seconds[1]:.6g} s "
        f"({seconds[0] / seconds[1]:.3f} times as fast)"
    )


def test_edge_costs_are_the_predicted_times_of_its_plans():
    """8 MiB over 1 GB/s, from rows on two ranks of host 0 to columns on host 1; gradients move in reverse."""
    topology = Topology.uniform([0, 0, 1, 1], 1e9).without_latency()
    src, dst = Layout(Mesh.of(2), "S0 R"), Layout(Mesh.of(2, first_rank=2), "R S0")
    tensors = [TensorSpec((2048, 1024), "float32", src, dst, "x")]
    edge = plan_edge(0, 1, tensors, topology)
    there = make_plan(src, dst, {"x": (2048, 1024)}, "float32", topology=topology)
    assert edge.forward_seconds == pytest.approx(CostReport(there).predicted_seconds)
    assert edge.backward_seconds == pytest.approx(2**23 / 1e9, rel=0.02)
    assert dict(edge.forward_loads) == {
        "host 0 out": pytest.approx(2**23 / 1e9),
        "host 1 in": pytest.approx(2**23 / 1e9),
    }
    assert {port for port, _ in edge.backward_loads} == {"host 1 out", "host 0 in"}
    with pytest.raises(ArgumentError, match="has no tensors"):
        plan_edge(0, 1, [], topology)


def test_tensors_without_gradient_have_no_backward_cost():
    spec = TensorSpec((2**20,), "int32", Layout(Mesh([0])), Layout(Mesh([1])), "x")
    for tensor, without in ((spec, ()), (replace(spec, dtype="float32"), ("x",))):
        edge = plan_edge(0, 1, [tensor], Topology((0, 1)), without_gradient=without)
        assert edge.forward_seconds > 0 and edge.forward_loads
        assert edge.backward_seconds == 0 and edge.backward_loads == ()
    assert Edge(0, 1).forward_seconds == Edge(0, 1).backward_seconds == 0


def test_edges_of_one_host_share_its_nic():
    """Stages 0 and 1 on host 0 both send to stages on host 1, so the transfers take as long as one of twice the size."""
    topology = Topology.uniform([0, 0, 1, 1], 1e9)
    ranks = [Mesh.of(1, first_rank=rank) for rank in range(4)]
    tensors = [TensorSpec((2**20,), "float32", Layout(ranks[a]), Layout(ranks[b]), "x") for a, b in ((0, 2), (1, 3))]
    edges = (plan_edge(0, 2, tensors[:1], topology), plan_edge(1, 3, tensors[1:], topology))
    pipeline = Pipeline((Stage(0.001, 0.001, 0.001),) * 4, edges)
    timeline = simulate_schedule(one_f_one_b(pipeline, 1), pipeline)
    forward = [c for c in timeline.transfers if c.channel.is_forward]
    assert max(c.end for c in forward) == pytest.approx(0.001 + 2 * 2**22 / 1e9, rel=0.02)


def test_traces_and_pictures_have_every_action():
    pipeline = chain(0.5)
    schedule = zb_h1(pipeline, 3)
    timeline = simulate_schedule(schedule, pipeline)
    events = json.loads(to_chrome_trace(timeline))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["pid"] == 0 for event in spans) == 2 * 3 * 3
    assert sum(event["pid"] == 1 for event in spans) == 2 * 3
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * timeline.makespan_seconds)
    picture = to_svg(schedule, timeline)
    for _, action in schedule:
        if not action.kind.is_transfer:
            assert f"<title>{action}: " in picture


def test_blocking_sends_do_not_deadlock():
    """Schedules with many microbatches in flight need receives posted further ahead."""
    pipeline = chain(2.0, 0.5, 2.0)
    schedule = auto_schedule(pipeline, 11, activation_limit_bytes=11)
    for change in (block_transfers, defer_recvs):
        check_schedule(change(schedule, pipeline), pipeline)
    crossed = gpipe(pipeline, 9)
    check_schedule(block_transfers(crossed, pipeline), pipeline)


TENSOR = TensorSpec((2,), "int8", Layout(Mesh([0])), Layout(Mesh([1])), "x")
WRONG = {
    "forward": (lambda: Pipeline.of_costs([1.0, -2.0], [1.0, 1.0], [0.5]), "forward is -2.0"),
    "backward": (lambda: Pipeline.of_costs([1.0, 1.0], [math.nan, 1.0], [0.5]), "backward is nan"),
    "communication": (lambda: Pipeline.of_costs([1.0, 1.0], [1.0, 1.0], [math.inf]), "communication is inf"),
    "part": (lambda: Pipeline.of_costs([1.0], [1.0], [], weight_grad_part=-0.5), "weight_grad_part is -0.5"),
    "large part": (
        lambda: Pipeline.of_costs([1.0], [1.0], [], weight_grad_part=1.5),
        "weight_grad_part is 1.5; it must be a number from 0 to 1",
    ),
    "backwards": (
        lambda: Pipeline.of_costs([1.0, 1.0], [1.0], [0.5]),
        "2 stages need 2 backward and 1 communication times, but 1 and 1",
    ),
    "boundaries": (
        lambda: Pipeline.of_costs([1.0, 1.0], [1.0, 1.0], []),
        "2 stages need 2 backward and 1 communication times, but 2 and 0",
    ),
    "input": (lambda: Stage(1, -1, 1), "input_grad_seconds is -1"),
    "weight": (lambda: Stage(1, 1, -1), "weight_grad_seconds is -1"),
    "kept": (lambda: Stage(1, 1, 1, -4), "activation_bytes is -4"),
    "whole": (lambda: Stage(1, 1, 1, whole_backward_seconds=-1), "whole_backward_seconds is -1"),
    "name": (lambda: Stage(-1, 1, 1, name="a"), "forward_seconds of stage 'a' is -1"),
    "edge forward": (lambda: Edge(0, 1, -1, 1), "forward_seconds of edge 0 -> 1 is -1"),
    "edge backward": (lambda: Edge(0, 1, 1, -1), "backward_seconds of edge 0 -> 1 is -1"),
    "load": (lambda: Edge(0, 1, 1, 1, {"net": -1}), "the load of link net is -1"),
    "busy": (
        lambda: Edge(0, 1, 1, 1, {"net": 1.01}),
        "link net is busy for 1.01 s, longer than the transfer takes (1 s)",
    ),
    "busy back": (
        lambda: Edge(0, 1, 2, 1, (), {"net": 2}),
        "link net is busy for 2 s, longer than the transfer takes (1 s)",
    ),
    "pairs": (lambda: Edge(0, 1, 1, 1, (("net", 1, 2),)), "forward_loads of edge 0 -> 1 must be "),
    "links": (lambda: Edge(0, 1, 1, 1, ((3, 1),)), "forward_loads of edge 0 -> 1 must be "),
    "twice": (lambda: Edge(0, 1, 1, 1, tensors=(TENSOR, TENSOR)), "each tensor needs a unique name"),
    "nameless": (lambda: Edge(0, 1, 1, 1, tensors=(replace(TENSOR, name=None),)), "each tensor needs a unique name"),
    "no gradient": (
        lambda: Edge(0, 1, 1, 1, tensors=(TENSOR,), without_gradient={"y"}),
        "without_gradient must name some of them",
    ),
    "self": (lambda: Edge(0, 1, 1, 1, tensors=(replace(TENSOR, name="self"),)), "no tensor can be called 'self'"),
    "no stage": (lambda: Pipeline(()), "at least one stage"),
    "back": (lambda: Pipeline((Stage(1, 1, 1),) * 2, (Edge(1, 1),)), "edge 1 -> 1 must lead forward"),
    "unknown stage": (lambda: Pipeline((Stage(1, 1, 1),) * 2, (Edge(0, 2),)), "forward between stages 0 to 1"),
    "before": (lambda: Pipeline((Stage(1, 1, 1),) * 2, (Edge(-1, 1),)), "forward between stages 0 to 1"),
    "joined": (lambda: Pipeline((Stage(1, 1, 1),) * 2, (Edge(0, 1),) * 2), "two edges join the same two stages"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_wrong_cost(name):
    use, error = WRONG[name]
    with pytest.raises(ArgumentError, match=re.escape(error)):
        use()


def test_costs_may_be_zero_and_a_load_the_whole_transfer():
    assert Edge(0, 1, 1, 1, {"net": 1.0}, {"net": 0.0}).forward_loads == (("net", 1.0),)
    assert Stage(0, 0, 0, 0, whole_backward_seconds=0).backward_seconds == 0
    assert Pipeline.of_costs([0.0], [0.0], [], weight_grad_part=0).stages[0].backward_seconds == 0
    assert Pipeline.of_costs([1.0], [3.0], [], weight_grad_part=1).stages[0].weight_grad_seconds == 3


@pytest.mark.parametrize("method", ["busy_seconds", "exposed_seconds"])
def test_timeline_rejects_unknown_rows(method):
    pipeline = chain(1.0)
    timeline = simulate_schedule(gpipe(pipeline, 2), pipeline)
    assert getattr(timeline, method)(1) >= 0
    for pp_rank in (-1, 2):
        with pytest.raises(ArgumentError, match=re.escape(f"the timeline has no pp rank {pp_rank}, only [0, 1]")):
            getattr(timeline, method)(pp_rank)


def test_simulation_rejects_actions_before_their_dependencies():
    """A weight-gradient pass before the input-gradient pass, and a backward before its forward."""
    pipeline = Pipeline((Stage(1, 1, 1),))
    for words in ("F0 W0 I0", "I0 F0 W0", "B0 F0", "F0 I0 W0", "F0 B0"):
        actions = tuple(Action(Kind(word[0]), 0, int(word[1])) for word in words.split())
        schedule = Schedule("by hand", (actions,), (0,), 1)
        if words.startswith("F0") and "W0 I0" not in words:
            assert simulate_schedule(schedule, pipeline).makespan_seconds == 3
        else:
            with pytest.raises(ScheduleError, match="pp rank 0"):
                simulate_schedule(schedule, pipeline)


@pytest.mark.parametrize(
    ("pp_ranks", "error"),
    [([0, 1], "each of 3 stages needs one"), ([0, 1, 1, 0], "each of 3 stages needs one"), ([0, 1, 3], "each of 3"),
     ([0, 2, 2], "numbered from 0"), ([1, 1, 1], "numbered from 0"), ([-1, 0, 1], "numbered from 0"),
     ([0, 1, True], "must be integers"), ([0, 1, 2.0], "must be integers"), (5, "pp_rank_of_stage must be a list")],
)  # fmt: skip
def test_pp_ranks_must_be_consecutive_from_0(pp_ranks, error):
    with pytest.raises(ArgumentError, match=error):
        auto_schedule(chain(1.0, 1.0), 4, pp_rank_of_stage=pp_ranks)


@pytest.mark.parametrize("pp_ranks", [(0, 0, 0), (1, 0, 1), (2, 1, 0)])
def test_stages_may_be_on_any_pp_ranks(pp_ranks):
    schedule = auto_schedule(chain(1.0, 1.0), 4, pp_rank_of_stage=pp_ranks)
    assert schedule.pp_rank_of_stage == pp_ranks and len(schedule.rank_actions) == max(pp_ranks) + 1
    check_schedule(schedule, chain(1.0, 1.0))


def test_a_choice_of_codecs_says_what_coding_each_channel_saves_or_would_save():
    there, back = StageChannel(0, 1, True), StageChannel(1, 0, False)
    schedule = gpipe(Pipeline.of_costs([1.0, 1.0], [2.0, 2.0], [0.5]), 2)
    choice = EdgeCodecs({there: "int8x128"}, schedule, 2.0, 1.5, {there: 0.5, back: -0.001})
    assert str(choice).splitlines()[1:] == [
        "  0 -> 1 activations: int8x128, saves 0.5 s",
        "  1 -> 0 gradients: raw, because coding would save -0.001 s",
    ]
