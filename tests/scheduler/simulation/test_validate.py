"""check_schedule finds missing, repeated and misplaced actions, and deadlocks."""

from __future__ import annotations

import itertools
import random
import re
import time
from dataclasses import replace

import networkx as nx
import pytest

from reshard.errors import ScheduleError
from reshard.scheduler.ir.actions import Action, Kind
from reshard.scheduler.ir.schedule import Schedule
from reshard.scheduler.ir.text import parse_schedule
from reshard.scheduler.passes.transfer_overlap import block_transfers, defer_recvs, overlap_transfers
from reshard.scheduler.pipeline import Edge, Pipeline, Stage
from reshard.scheduler.schedules.classic import eager_1f1b, gpipe, one_f_one_b, zb_h1
from reshard.scheduler.schedules.looped import interleaved_1f1b
from reshard.scheduler.schedules.schedule_search import auto_schedule
from reshard.scheduler.simulation.replay import simulate_schedule
from reshard.scheduler.simulation.validate import check_one_order, check_schedule, show


def chain(*communication, forward=1.0, backward=2.0):
    num = len(communication) + 1
    return Pipeline.of_costs([forward] * num, [backward] * num, communication)


def _without(schedule, pp_rank, place):
    rank_actions = list(schedule.rank_actions)
    rank_actions[pp_rank] = rank_actions[pp_rank][:place] + rank_actions[pp_rank][place + 1 :]
    return replace(schedule, rank_actions=tuple(rank_actions))


def test_missing_repeated_and_swapped_actions_are_found():
    pipeline = Pipeline((Stage(1, 1, 1),) * 3, (Edge(0, 1, 1, 1), Edge(1, 2, 1, 1), Edge(0, 2, 1, 1)))
    rng = random.Random(0)
    for schedule in (one_f_one_b(pipeline, 3), zb_h1(pipeline, 3)):
        for pp_rank, actions in enumerate(schedule.rank_actions):
            for place, action in enumerate(actions):
                with pytest.raises(ScheduleError, match=r"occurs 0 times, not 1"):
                    check_schedule(_without(schedule, pp_rank, place), pipeline)
                rank_actions = list(schedule.rank_actions)
                rank_actions[pp_rank] = (*actions[:place], action, *actions[place:])
                with pytest.raises(ScheduleError, match=r"occurs 2 times, not 1"):
                    check_schedule(replace(schedule, rank_actions=tuple(rank_actions)), pipeline)
        for _ in range(40):
            pp_rank, microbatch = rng.randrange(3), rng.randrange(3)
            of_one = [a for a in schedule.rank_actions[pp_rank] if a.stage == pp_rank and a.microbatch == microbatch]
            order = [a for a in of_one if a.kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
            if len(order) < 2:
                continue
            first, second = order[0], order[-1]
            swapped = [{first: second, second: first}.get(a, a) for a in schedule.rank_actions[pp_rank]]
            rank_actions = list(schedule.rank_actions)
            rank_actions[pp_rank] = tuple(swapped)
            with pytest.raises(ScheduleError, match="comes before"):
                check_schedule(replace(schedule, rank_actions=tuple(rank_actions)), pipeline)


#: Kinds of actions that each kind depends on, for the same stage and microbatch.
NEEDS = {
    Kind.F: (Kind.RECV_F,), Kind.SEND_F: (Kind.F,), Kind.B: (Kind.F, Kind.RECV_B), Kind.I: (Kind.F, Kind.RECV_B),
    Kind.W: (Kind.I,), Kind.SEND_B: (Kind.B, Kind.I),
}  # fmt: skip


@pytest.mark.parametrize("build", [one_f_one_b, zb_h1])
def test_action_before_its_dependency_is_named(build):
    pipeline, num_found = Pipeline((Stage(1, 1, 1),) * 3, (Edge(0, 1, 1, 1), Edge(1, 2, 1, 1), Edge(0, 2, 1, 1))), 0
    schedule = build(pipeline, 2)
    for pp_rank, actions in enumerate(schedule.rank_actions):
        for first, second in itertools.combinations(actions, 2):
            if second.microbatch == first.microbatch and first.kind in NEEDS.get(second.kind, ()):
                rank_actions = list(schedule.rank_actions)
                rank_actions[pp_rank] = tuple({first: second, second: first}.get(action, action) for action in actions)
                with pytest.raises(ScheduleError, match=f"{re.escape(str(second))} comes before "):
                    check_schedule(replace(schedule, rank_actions=tuple(rank_actions)), pipeline)
                num_found += 1
    assert num_found >= 24


def test_deadlock_error_shows_the_blocked_action_of_each_row():
    """Both ends block in a send before they receive."""
    pipeline = chain(1.0)
    text = """\
stuck: 2 microbatches, stages on pp ranks 0 1
0: 0F0 0SEND_F0>1! 0F1 0SEND_F1>1! 0RECV_B0<1! 0B0 0RECV_B1<1! 0B1
1: 1RECV_F0<0! 1F0 1B0 1SEND_B0>0! 1RECV_F1<0! 1F1 1B1 1SEND_B1>0!
"""
    with pytest.raises(
        ScheduleError,
        match=r"deadlocks: no pp rank can do its action in brackets; pp rank 0: .*\[0SEND_F1>1!\].*; pp rank 1: .*\[1SEND_B0>0!\]",
    ):
        check_schedule(parse_schedule(text), pipeline)
    longer = text.replace("1: ", "1: 1RECV_F2<0 1RECV_F3<0 ").replace("0: ", "0: 0F2 0F3 0SEND_F2>1 0SEND_F3>1 ")
    with pytest.raises(ScheduleError, match=r"pp rank 1: 1RECV_F3<0 1RECV_F0<0! 1F0 1B0 \[1SEND_B0>0!\] 1RECV_F1"):
        simulate_schedule(parse_schedule(longer.replace("2 micro", "4 micro")), pipeline)
    fixed = text.replace("0F1 0SEND_F1>1! 0RECV_B0<1!", "0RECV_B0<1 0F1 0SEND_F1>1!").replace(
        "1SEND_B0>0! 1RECV_F1<0!", "1RECV_F1<0 1SEND_B0>0!"
    )
    check_schedule(parse_schedule(fixed), pipeline)


def test_error_shows_six_actions_before_and_after():
    schedule = gpipe(chain(1.0), 8)
    words = [str(action) for action in schedule.rank_actions[0]]
    for place in (0, 3, 9, len(words) - 1):
        around = [*words[max(0, place - 6) : place], f"[{words[place]}]", *words[place + 1 : place + 7]]
        assert show(schedule, 0, place) == f"pp rank 0: {' '.join(around)}"


def test_sends_and_receives_of_a_channel_must_have_the_same_order():
    pipeline = chain(1.0)
    schedule = gpipe(pipeline, 2)
    rank_actions = [list(actions) for actions in schedule.rank_actions]
    at = [i for i, a in enumerate(rank_actions[1]) if a.kind is Kind.RECV_F]
    rank_actions[1][at[0]], rank_actions[1][at[1]] = rank_actions[1][at[1]], rank_actions[1][at[0]]
    with pytest.raises(ScheduleError, match="stage 0 sends microbatch 0 to stage 1, which expects 1 next"):
        check_schedule(replace(schedule, rank_actions=tuple(map(tuple, rank_actions))), pipeline)


def test_invalid_actions_are_rejected_everywhere():
    pipeline = chain(1.0)
    for action in (
        Action(Kind.SEND_F, 0, 0),
        Action(Kind.F, 7, 0),
        Action(Kind.F, -1, 0),
        Action(Kind.RECV_B, 0, 0, 9),
    ):
        schedule = Schedule("x", ((action,), ()), (0, 1), 1)
        for use in (
            simulate_schedule,
            check_schedule,
            overlap_transfers,
            block_transfers,
            defer_recvs,
            Schedule.peak_bytes,
            lambda one, _: one.in_flight,
        ):
            with pytest.raises(ScheduleError):
                use(schedule, pipeline)


def test_schedule_with_many_missing_microbatches_is_rejected_quickly():
    pipeline = chain(0.5, 0.5)
    schedule = one_f_one_b(pipeline, 4)
    begun = time.perf_counter()
    with pytest.raises(ScheduleError, match="occurs 0 times, not 1"):
        check_schedule(replace(schedule, num_microbatches=10**9), pipeline)
    assert time.perf_counter() - begun < 5


def _may_wait_in_a_cycle(schedule):
    """Whether pp ranks that wait in each transfer until it is complete can wait for each other."""
    graph = nx.DiGraph()
    for actions in schedule.rank_actions:
        nx.add_path(graph, [(a.channel, a.microbatch) for a in actions if a.kind.is_transfer])
    return not nx.is_directed_acyclic_graph(graph)


def _random_pipeline(rng, num):
    def seconds():
        return rng.choice((0.0, 0.5, 1.0, rng.uniform(0.1, 2.0)))

    pairs = [(i, j) for i in range(num) for j in range(i + 1, num) if j == i + 1 or rng.random() < 0.2]
    edges = [Edge(i, j, s, s, {"net": s / 2} if rng.random() < 0.3 else ()) for i, j in pairs for s in (seconds(),)]
    return Pipeline(tuple(Stage(seconds(), seconds(), seconds()) for _ in range(num)), tuple(edges))


@pytest.mark.nightly
def test_all_builders_give_rows_one_order_and_other_orders_are_refused():
    rng, num_refused = random.Random(5), 0
    for _ in range(10):
        num_pp_ranks, num = rng.choice((2, 3, 4)), rng.choice((1, 2, 6))
        pipeline, deep = _random_pipeline(rng, num_pp_ranks), _random_pipeline(rng, 2 * num_pp_ranks)
        in_v = [*range(num_pp_ranks), *reversed(range(num_pp_ranks))]
        schedules = [build(pipeline, num) for build in (one_f_one_b, eager_1f1b, gpipe, zb_h1)]
        schedules += [
            auto_schedule(deep, num, pp_rank_of_stage=in_v),
            interleaved_1f1b(deep, num * num_pp_ranks, num_pp_ranks),
        ]
        for schedule in schedules:
            of = pipeline if schedule.num_stages == num_pp_ranks else deep
            check_schedule(schedule, of)
            check_one_order(schedule)
            check_one_order(replace(schedule, rank_actions=tuple(schedule.first(1).rank_actions)))
            for _ in range(15):
                rank_actions = [list(actions) for actions in schedule.rank_actions]
                actions = rng.choice(rank_actions)
                at = rng.randrange(len(actions))
                actions.insert(rng.randrange(len(actions)), actions.pop(at))
                changed = replace(schedule, rank_actions=tuple(map(tuple, rank_actions)))
                try:
                    check_schedule(changed, of)
                except ScheduleError:
                    continue
                if not _may_wait_in_a_cycle(changed):
                    check_one_order(changed)
                    continue
                num_refused += 1
                with pytest.raises(ScheduleError, match=r"in different orders.*\[.*\].*; pp rank .*\[.*\]"):
                    check_one_order(changed)
    assert num_refused > 50


@pytest.mark.parametrize(
    ("remove", "put", "text"),
    [
        (
            Action(Kind.RECV_B, 0, 1, 1),
            None,
            r"pp rank 1 posts a transfer of which pp rank 0 does not post .*\[1SEND_B1>0\]",
        ),
        (
            Action(Kind.RECV_F, 1, 1, 0),
            Action(Kind.RECV_F, 1, 1, 1),
            r"both ends .* on one pp rank: pp rank 1: .*\[1RECV_F1<1\]",
        ),
        (
            Action(Kind.RECV_F, 1, 1, 0),
            Action(Kind.RECV_F, 1, 1, 7),
            r"no stage from 0 to 1: pp rank 1: .*\[1RECV_F1<7\]",
        ),
    ],
)
def test_one_order_of_an_invalid_schedule_is_refused(remove, put, text):
    schedule = one_f_one_b(_random_pipeline(random.Random(0), 2), 2)
    rank_actions = [[put if action == remove else action for action in actions] for actions in schedule.rank_actions]
    changed = replace(
        schedule,
        rank_actions=tuple(tuple(action for action in actions if action is not None) for actions in rank_actions),
    )
    with pytest.raises(ScheduleError, match=text):
        check_one_order(changed)
