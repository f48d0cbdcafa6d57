"""Schedules of all builders: validity, simulated time against published figures, and checks of arguments."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from reshard.errors import ArgumentError, ReshardError, ScheduleError
from reshard.scheduler.gradients.tied_params import TiedParameter
from reshard.scheduler.ir.actions import Action, Kind
from reshard.scheduler.ir.communication import add_transfers
from reshard.scheduler.ir.schedule import Schedule
from reshard.scheduler.ir.text import format_schedule, from_torch_csv, parse_action, parse_schedule, to_torch_csv
from reshard.scheduler.passes.transfer_overlap import apply_passes, block_transfers, defer_recvs, overlap_transfers
from reshard.scheduler.pipeline import Edge, Pipeline, Stage
from reshard.scheduler.schedules.classic import eager_1f1b, from_warmups, gpipe, one_f_one_b, zb_h1, zb_h2
from reshard.scheduler.schedules.known_schedules import KNOWN_SCHEDULES
from reshard.scheduler.schedules.looped import interleaved_1f1b, interleaved_zero_bubble, looped_bfs
from reshard.scheduler.schedules.schedule_search import auto_schedule
from reshard.scheduler.schedules.v_shaped import dualpipe_v, zb_v
from reshard.scheduler.simulation.replay import simulate_schedule
from reshard.scheduler.simulation.validate import check_schedule
from reshard.scheduler.simulation.visualize import to_chrome_trace, to_svg
from tests.campaigns.schedules import draw_case

BUILDERS = [gpipe, one_f_one_b, eager_1f1b, zb_h1, zb_h2]


def test_a_schedule_that_a_command_names_has_the_order_of_the_registry():
    pipeline = chain(1.0, 1.0)
    named = [known for known in KNOWN_SCHEDULES if known.build is not None]
    assert [known.build for known in named] == BUILDERS
    for known in named:
        expected = add_transfers(known.name, known.order(3, 1, 4), pipeline, range(3), 4)
        assert known.build(pipeline, 4) == expected


def chain(*communication, forward=1.0, backward=2.0):
    num = len(communication) + 1
    return Pipeline.of_costs([forward] * num, [backward] * num, communication)


@st.composite
def pipelines(draw, max_stages=4):
    """Random pipelines: a chain of unequal stages with skip edges and shared links."""
    num = draw(st.integers(1, max_stages))
    costs = st.sampled_from([0.5, 1.0, 1.5, 3.0])
    stages = [Stage(draw(costs), draw(costs), draw(costs), draw(st.integers(1, 3))) for _ in range(num)]
    pairs = [(i, i + 1) for i in range(num - 1)]
    pairs += [(i, j) for i in range(num) for j in range(i + 2, num) if draw(st.integers(0, 3)) == 0]
    transfer = st.sampled_from([0.0, 0.25, 1.0, 2.5])
    edges = []
    for i, j in pairs:
        there, back, shares = draw(transfer), draw(transfer), draw(st.sampled_from([0.0, 0.5, 1.0]))
        loads = [(("net", seconds * shares),) if shares else () for seconds in (there, back)]
        edges.append(Edge(i, j, there, back, *loads))
    return Pipeline(tuple(stages), tuple(edges))


@pytest.mark.parametrize(
    ("communication", "num", "build", "ratio"),
    [
        ((0.5,), 32, one_f_one_b, 1.162),
        ((0.5,), 32, eager_1f1b, 1.010),
        ((1.5,), 32, one_f_one_b, 1.485),
        ((1.5,), 32, eager_1f1b, 1.030),
        ((0.1, 2.5, 0.1), 64, one_f_one_b, 1.799),
        ((0.1, 2.5, 0.1), 64, eager_1f1b, 1.230),
        ((2.5, 2.5, 2.5), 64, one_f_one_b, 2.244),
        ((2.5, 2.5, 2.5), 64, eager_1f1b, 1.343),
    ],
)
def test_known_schedules_take_published_times(communication, num, build, ratio):
    """The figures of docs/algorithms.md, computed with another simulator."""
    pipeline = chain(*communication)
    took = simulate_schedule(build(pipeline, num), pipeline).makespan_seconds / pipeline.ideal_seconds(num)
    assert took == pytest.approx(ratio, abs=6e-4)


@pytest.mark.parametrize(
    ("communication", "num", "ratio"),
    [((1.5,), 32, 1.03), ((0.1, 2.5, 0.1), 64, 1.03), ((2.5, 2.5, 2.5), 64, 1.08)],
)
def test_auto_schedule_hides_communication(communication, num, ratio):
    pipeline = chain(*communication)
    schedule = auto_schedule(pipeline, num)
    check_schedule(schedule, pipeline)
    assert simulate_schedule(schedule, pipeline).makespan_seconds <= ratio * pipeline.ideal_seconds(num)


def test_without_a_limit_each_row_may_keep_what_the_fullest_row_of_1f1b_keeps():
    pipeline = chain(0.0, 0.0, 0.0)
    schedule, plain, split = (build(pipeline, 8) for build in (auto_schedule, one_f_one_b, zb_h1))
    assert max(schedule.in_flight) <= 4 == max(plain.in_flight)
    took = simulate_schedule(schedule, pipeline).makespan_seconds
    assert took <= simulate_schedule(split, pipeline).makespan_seconds


@pytest.mark.parametrize("seed", range(6))
def test_more_memory_is_never_slower(seed):
    case = draw_case(seed, most_pp_ranks=4, most_stages=8)
    pipeline, pp_rank_of_stage = case.pipeline, case.pp_rank_of_stage

    def took(limit):
        schedule = auto_schedule(
            pipeline, case.num_microbatches, activation_limit_bytes=limit, pp_rank_of_stage=pp_rank_of_stage
        )
        assert limit is None or max(schedule.peak_bytes(pipeline)) <= limit
        return simulate_schedule(schedule, pipeline).makespan_seconds, max(schedule.peak_bytes(pipeline))

    default, peak = took(None)
    limits = [peak * factor for factor in (1, 1.1, 1.5, 2, 3, math.inf)]
    times = [took(limit)[0] for limit in limits]
    assert all(later <= earlier * (1 + 1e-8) for earlier, later in itertools.pairwise(times)), times
    assert times[-1] <= default * (1 + 1e-8)


@pytest.mark.parametrize("build", [zb_v, dualpipe_v])
@pytest.mark.parametrize("num", [1, 3, 7, 8, 9])
def test_v_shaped_schedules_are_valid_for_any_number_of_microbatches(build, num):
    pipeline = chain(*[0.1] * 7)
    schedule = build(pipeline, num)
    check_schedule(schedule, pipeline)
    assert max(schedule.peak_bytes(pipeline)) <= min(2 * num, 9)
    assert parse_schedule(format_schedule(schedule)) == schedule
    if num > 1:
        csv = to_torch_csv(schedule)
        assert ("OVERLAP_F_B" in csv) == any(action.overlaps for _, action in schedule)
        assert from_torch_csv(csv, pipeline, schedule.name).rank_actions == schedule.rank_actions
        check_schedule(from_torch_csv(to_torch_csv(schedule, transfers=True), pipeline), pipeline)
    with pytest.raises(ArgumentError, match="there are 3 stages"):
        build(chain(1.0, 1.0), num)


def test_a_forward_that_overlaps_no_backward_is_refused_and_yet_exported():
    text = "x: 2 microbatches, stages on pp ranks 0\n0: 0F0& 0F1& 0B0 0B1\n"
    schedule, pipeline = parse_schedule(text), Pipeline.of_costs([1.0], [2.0], [])
    with pytest.raises(ScheduleError, match=r"0F0& overlaps the next computation, which must be a backward, not 0F1&"):
        check_schedule(schedule, pipeline)
    assert to_torch_csv(schedule).strip() == "0F0,(0F1;0B0)OVERLAP_F_B,0B1"


@pytest.mark.parametrize("build", [interleaved_1f1b, interleaved_zero_bubble, looped_bfs])
@pytest.mark.parametrize(("num_pp_ranks", "per_pp_rank"), [(1, 2), (2, 3), (3, 2), (4, 2), (5, 3)])
def test_looped_schedules_are_valid_for_any_number_of_microbatches(build, num_pp_ranks, per_pp_rank):
    pipeline = chain(*[0.1] * (num_pp_ranks * per_pp_rank - 1))
    for num in range(1, 3 * num_pp_ranks + 1):
        check_schedule(build(pipeline, num, num_pp_ranks), pipeline)


def test_only_a_forward_overlaps_the_next_computation():
    assert str(parse_action("0F3&")) == "0F3&"
    for word in ("0B3&", "0SEND_F3>1&", "0F3&!"):
        with pytest.raises(ScheduleError):
            parse_action(word)


@settings(max_examples=20)
@given(pipelines(), st.integers(1, 6), st.data())
def test_all_schedules_are_valid_and_auto_schedule_is_never_slower(pipeline, num, data):
    schedules = [build(pipeline, num) for build in BUILDERS]
    for schedule in schedules:
        check_schedule(schedule, pipeline)
        assert parse_schedule(format_schedule(schedule)) == schedule
    limit = max(data.draw(st.sampled_from(schedules)).peak_bytes(pipeline))
    ours = auto_schedule(pipeline, num, activation_limit_bytes=limit)
    check_schedule(ours, pipeline, limit)
    fit = [schedule for schedule in schedules if max(schedule.peak_bytes(pipeline)) <= limit]
    took = simulate_schedule(ours, pipeline).makespan_seconds
    assert took <= min(simulate_schedule(schedule, pipeline).makespan_seconds for schedule in fit) * (1 + 1e-9)


@given(pipelines(), st.integers(1, 5))
def test_timelines_respect_costs_and_dependencies(pipeline, num):
    """Rows are busy for the cost of their actions, and no action starts before its inputs are ready."""
    for build in (one_f_one_b, zb_h1):
        schedule = build(pipeline, num)
        timeline = simulate_schedule(schedule, pipeline)
        for stage, costs in enumerate(pipeline.stages):
            assert timeline.busy_seconds(stage) == pytest.approx(num * (costs.forward_seconds + costs.backward_seconds))
            assert timeline.exposed_seconds(stage) >= 0
        begins = {(s.action.kind, s.action.stage, s.action.microbatch): s.start for s in timeline.spans}
        for transfer in timeline.transfers:
            edge = pipeline.edge_between[tuple(sorted((transfer.channel.sender, transfer.channel.receiver)))]
            alone = edge.forward_seconds if transfer.channel.is_forward else edge.backward_seconds
            assert transfer.end - transfer.start >= alone * (1 - 1e-9)
            assert transfer.ready <= transfer.start + 1e-12
            kinds = (Kind.F,) if transfer.channel.is_forward else (Kind.B, Kind.I)
            needs = [begins.get((kind, transfer.channel.receiver, transfer.microbatch)) for kind in kinds]
            assert all(begin is None or begin >= transfer.end - 1e-12 for begin in needs)


def test_transfers_share_a_link_equally():
    stages = (Stage(1.0, 1.0, 1.0),) * 3
    edges = (Edge(0, 1, 2.0, 0.0), Edge(0, 2, 4.0, 0.0, (("nic", 4.0),)), Edge(1, 2, 0.0, 0.0))
    alone = simulate_schedule(one_f_one_b(Pipeline(stages, edges), 1), Pipeline(stages, edges))
    shared = replace(edges[0], forward_loads=(("nic", 2.0),))
    pipeline = Pipeline(stages, (shared, *edges[1:]))
    both = simulate_schedule(one_f_one_b(pipeline, 1), pipeline)

    def ends(timeline):
        return {c.channel.receiver: c.end for c in timeline.transfers if c.channel.sender == 0 and c.channel.is_forward}

    assert ends(alone) == {1: pytest.approx(3.0), 2: pytest.approx(5.0)}
    assert ends(both) == {1: pytest.approx(5.0), 2: pytest.approx(7.0)}  # 2 s at half speed each, then one alone


def test_memory_limit_excludes_eager_1f1b():
    pipeline = chain(2.5, 2.5, 2.5)
    limit = 5
    ours = auto_schedule(pipeline, 16, activation_limit_bytes=limit)
    check_schedule(ours, pipeline, limit)
    with pytest.raises(ScheduleError, match=r"pp rank 0 keeps 7 bytes of activations at once; at most 5 are allowed"):
        check_schedule(eager_1f1b(pipeline, 16), pipeline, limit)
    took = simulate_schedule(ours, pipeline).makespan_seconds
    assert took < simulate_schedule(zb_h1(pipeline, 16), pipeline).makespan_seconds
    with pytest.raises(ScheduleError, match="keeps at most 0 bytes of activations; one microbatch takes 1"):
        auto_schedule(pipeline, 4, activation_limit_bytes=0)


@pytest.mark.parametrize("limit", [-1, -0.5, -math.inf, math.nan])
def test_negative_memory_limits_are_refused(limit):
    pipeline = chain(1.0)
    for use in (
        lambda: auto_schedule(pipeline, 2, activation_limit_bytes=limit),
        lambda: check_schedule(gpipe(pipeline, 2), pipeline, limit),
    ):
        with pytest.raises(
            ArgumentError, match=f"activation_limit_bytes is {limit}; it must be a number of at least 0"
        ):
            use()


def test_memory_limits_may_be_infinite_or_fractions():
    pipeline = chain(1.0)
    for limit in (math.inf, 2.5):
        check_schedule(auto_schedule(pipeline, 2, activation_limit_bytes=limit), pipeline, limit)


def test_auto_schedule_is_not_slower_than_interleaved_1f1b():
    pipeline = chain(0.2, 0.2, 0.2)
    known = interleaved_1f1b(pipeline, 8, 2)
    check_schedule(known, pipeline)
    assert known.pp_rank_of_stage == (0, 1, 0, 1)
    limit = max(known.peak_bytes(pipeline))
    ours = auto_schedule(pipeline, 8, pp_rank_of_stage=(0, 1, 0, 1), activation_limit_bytes=limit)
    check_schedule(ours, pipeline, limit)
    assert simulate_schedule(ours, pipeline).makespan_seconds <= simulate_schedule(known, pipeline).makespan_seconds
    with pytest.raises(ArgumentError, match="3 pp ranks must divide 4 stages"):
        interleaved_1f1b(pipeline, 8, 3)


def test_zero_costs_take_zero_time():
    pipeline = Pipeline.of_costs([0.0, 0.0], [0.0, 0.0], [0.0])
    assert simulate_schedule(gpipe(pipeline, 3), pipeline).makespan_seconds == 0


def test_arguments_of_builders_are_checked():
    pipeline = chain(1.0)
    with pytest.raises(ArgumentError, match=r"warmups \[1\]"):
        from_warmups("x", pipeline, 2, [1])
    for wrong in ([1, 0], [2, True], [True, 1], [2, 1.0]):
        with pytest.raises(ArgumentError, match=re.escape(f"warmups {wrong}: each of 2 stages needs an integer")):
            from_warmups("x", pipeline, 2, wrong)
    for build in (*BUILDERS, auto_schedule, lambda pipeline, num: interleaved_1f1b(pipeline, num, 2)):
        for num in (0, True, 1.5):
            with pytest.raises(ArgumentError, match="num_microbatches"):
                build(pipeline, num)
        with pytest.raises(ArgumentError, match="at most 500,000 microbatches"):
            build(pipeline, 10**9)
        with pytest.raises(ArgumentError, match="a Pipeline is needed, not list"):
            build([pipeline], 4)
    with pytest.raises(
        ArgumentError,
        match="stage 1 needs 2 forwards of stage 0 before its first backward, but stage 0 waits for that backward after 1",
    ):
        from_warmups("x", pipeline, 2, [1, 3])
    from_warmups("x", pipeline, 1, [1, 3])


def test_auto_schedule_keeps_stages_on_given_pp_ranks():
    pipeline = chain(0.1, 0.5, 0.1)
    in_order, permuted = auto_schedule(pipeline, 12), auto_schedule(pipeline, 12, pp_rank_of_stage=(2, 0, 3, 1))
    seconds = [simulate_schedule(item, pipeline).makespan_seconds for item in (in_order, permuted)]
    assert seconds[0] == seconds[1] and permuted.pp_rank_of_stage == (2, 0, 3, 1)
    check_schedule(permuted, pipeline)
    in_blocks = auto_schedule(
        pipeline, 4, pp_rank_of_stage=(0, 0, 1, 1), can_split=False
    )  # interleaved stages would be faster
    assert in_blocks.pp_rank_of_stage == (0, 0, 1, 1)
    check_schedule(in_blocks, pipeline)


def test_costs_and_edges_are_checked():
    for value in (5e307, 10**400, float("nan"), True, "1"):
        with pytest.raises(ArgumentError, match="forward_seconds is"):
            Stage(value, 1, 1)
    with pytest.raises(ArgumentError, match="name a link twice"):
        Edge(0, 1, 1.0, 1.0, (("net", 0.5), ("net", 0.5)))
    with pytest.raises(ArgumentError, match="the mesh of a stage must be a Mesh, not list"):
        Stage(1, 1, 1, mesh=[0])
    with pytest.raises(ArgumentError, match="edge 0 -> True must lead forward"):
        Pipeline((Stage(1, 1, 1),) * 2, (Edge(0, True),))
    slow = Pipeline((Stage(1e15, 1e-9, 0), Stage(1e-9, 1e15, 3)), (Edge(0, 1, 1e-9, 1e15),))
    assert simulate_schedule(one_f_one_b(slow, 4), slow).makespan_seconds >= 4e15


def test_receives_follow_the_order_of_sends():
    """Stage 1 computes microbatch 1 first, but stage 0 sends 0 first, so stage 1 must receive 0 first."""
    pipeline = chain(1.0)
    rank_actions = [
        [Action(Kind(word[0]), stage, int(word[1])) for word in text.split()]
        for stage, text in enumerate(("F0 F1 B1 B0", "F1 B1 F0 B0"))
    ]
    schedule = add_transfers("crossed", rank_actions, pipeline, (0, 1), 2)
    assert str(schedule).splitlines()[2] == "1: 1RECV_F0<0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1F0 1B0 1SEND_B0>0"
    check_schedule(schedule, pipeline)
    assert to_torch_csv(schedule, transfers=True).splitlines()[1].startswith("1RECV_F0,1RECV_F1,1F1")
    for change in (overlap_transfers, block_transfers, defer_recvs):
        check_schedule(change(schedule, pipeline), pipeline)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: to_torch_csv("x"),
        lambda p: from_torch_csv(5, p),
        lambda p: from_torch_csv("0F0", None),
        lambda p: from_torch_csv("0F9999999\n1F0", p),
        lambda p: to_chrome_trace(None),
        lambda p: to_svg(None, None),
        lambda p: TiedParameter(None, (3,)),
        lambda p: TiedParameter({0: "a", "b": "c"}, (3,)),
        lambda p: TiedParameter({0: "a", 1: "c"}, 5),
        lambda p: Pipeline.of_costs(None, [1], []),
        lambda p: Pipeline.of_costs("ab", "cd", "e"),
        lambda p: Edge(0, 1, 1, 1, (([], 1),)),
        lambda p: Edge(0, 1, 1, 1, without_gradient=[[1]]),
        lambda p: apply_passes(gpipe(p, 2), p, [lambda *_: None]),
        lambda p: Schedule("x", None, (0, 1), 2),
        lambda p: Schedule("x", (("0F0",), ()), (0, 1), 2),
        lambda p: Schedule("x", ((), ()), (0, 1), "2"),
        lambda p: Action("F", 0, 0),
        lambda p: Action(Kind.F, 0, 0).channel,
        lambda p: auto_schedule(p, 2, can_split="no"),
        lambda p: auto_schedule(p, 2, activation_limit_bytes="10"),
        lambda p: auto_schedule(p, 2, activation_limit_bytes=True),
        lambda p: auto_schedule(p, 2, activation_limit_bytes=float("nan")),
        lambda p: gpipe(p, 2).peak_bytes(None),
        lambda p: gpipe(p, 2).peak_bytes("p"),
    ],
)
def test_wrong_arguments_raise_reshard_errors(use):
    with pytest.raises(ReshardError):
        use(chain(1.0))
