"""Parts of the search of auto_schedule, with results computed by hand: depths, policies, ranking and limits."""

from __future__ import annotations

import pytest

from reshard.errors import ScheduleError
from reshard.scheduler import Edge, Pipeline, Stage, auto_schedule, check_schedule
from reshard.scheduler.ir.actions import Action, Kind
from reshard.scheduler.schedules.auto import _Candidate, _depths, _join, _known, _link_seconds, _policies, _Search
from reshard.scheduler.schedules.list_scheduling import Policy


def _words(text):
    return [Action(Kind(word[0]), 0, int(word[1])) for word in text.split()]


@pytest.mark.parametrize(
    ("stages", "edges", "exact", "by_rule"),
    [
        # each stage takes 1 forward and 2 backward, so the period is 3; round trips: 3, 3 + 1 + 3 = 7, 3 + 4 + 7 = 14
        ([(1, 2)] * 3, [(0, 1, 2, 2), (1, 2, 0.5, 0.5)], (5, 3, 1), (6, 3, 1)),
        # free transfers: a round trip of 6, with a period of 3
        ([(1, 2)] * 2, [(0, 1, 0, 0)], (2, 1), (2, 1)),
        # the slowest stage sets the period, 6; round trips: 6, 8, 9
        ([(0.5, 0.5), (1, 1), (2, 4)], [(0, 1, 0, 0), (1, 2, 0, 0)], (2, 2, 1), (3, 2, 1)),
        # a link that takes 10 in one direction sets the period; round trip: 2 + 10 + 1 + 2 = 15
        ([(1, 1)] * 2, [(0, 1, 10, 1)], (2, 1), (4, 1)),
        # two paths to the last stage, of which the longer counts: 3, 3 + 8 + 3 = 14, max(14 + 0, 3 + 20) + 3 = 26
        ([(1, 2)] * 3, [(0, 1, 0, 0), (0, 2, 10, 10), (1, 2, 4, 4)], (3, 2, 1), (4, 3, 1)),
        # both transfers use one link, for 8 per microbatch; round trip: 3 + 8 + 3 = 14
        ([(1, 2)] * 2, [(0, 1, 4, 4, {"net": 4}, {"net": 4})], (2, 1), (3, 1)),
        ([(0, 0)] * 2, [(0, 1, 0, 0)], (1, 1), (2, 1)),
    ],
)
def test_in_flight_depth_is_round_trip_over_period(stages, edges, exact, by_rule):
    pipeline = Pipeline(tuple(Stage(f, b / 2, b / 2) for f, b in stages), tuple(Edge(*edge) for edge in edges))
    assert _depths(pipeline) == [exact, by_rule]


def test_link_time_is_the_sum_of_its_loads():
    edges = (Edge(0, 1, 3, 2, {"a": 1, "b": 2}, {"a": 0.5}), Edge(1, 2, 5, 4, {"b": 3}))
    assert sorted(_link_seconds(Pipeline((Stage(1, 1, 1),) * 3, edges))) == sorted([3, 2, 5, 4, 1.5, 5])


def test_every_kind_of_policy_is_tried():
    whole, split = (False, False), (True, True)
    assert list(_policies((2, 1), False)) == [Policy((2, 1), whole), Policy((2, 1), whole, True)]
    tried = list(_policies((2, 1), True))
    assert len(set(tried)) == len(tried) == 14
    assert {(p.forward_first, p.weights_first, p.patience) for p in tried if p.splits == split} == {
        (first, weights, patience) for first in (False, True) for weights in (False, True) for patience in (0, 0.5, 1)
    }


def test_each_policy_change_affects_one_stage():
    search = _Search(Pipeline((Stage(1, 1, 1),) * 3, ()), 4, (0, 1, 2), None, (4, 2, 1))
    policy = Policy((2, 2, 1), (True, False, True), True, True, 0.5)
    changed = list(search.changes(policy))
    assert [(p.max_in_flight, p.splits) for p in changed] == [
        ((1, 2, 1), policy.splits),
        ((3, 2, 1), policy.splits),
        ((2, 2, 1), (False, False, True)),
        ((2, 1, 1), policy.splits),  # stage 1 may not reach 3, stage 2 neither 0 nor 2
        ((2, 2, 1), (True, False, False)),
    ]
    assert all((p.forward_first, p.weights_first, p.patience) == (True, True, 0.5) for p in changed)


def test_candidates_are_ranked_by_time_then_memory_then_actions():
    """The faster one wins. Among equally fast ones, or two within the allowed time: less memory, then fewer actions."""

    def found(seconds, peak, actions):
        return _Candidate(None, None, seconds, peak, actions)

    one = found(10.0, 100, 50)
    assert one.beats(None, 0.0)
    for other, allowed, wins in (
        (found(9.9, 999, 99), 0.0, True),
        (found(10.1, 1, 1), 0.0, False),
        (found(10.1, 99, 99), 10.1, True),
        (found(10.1, 99, 99), 10.05, False),
        (found(9.9, 101, 1), 10.0, False),
        (found(10.0, 100, 49), 0.0, True),
        (found(10.0, 100, 50), 0.0, False),
        (found(10.0, 100, 51), 0.0, False),
        (found(10.0 + 1e-9, 99, 50), 0.0, True),
        (found(10.0 + 1e-7, 99, 50), 0.0, False),
        (found(10.0 - 1e-7, 101, 50), 0.0, True),
    ):
        assert other.beats(one, allowed) == wins, (other, allowed)


def test_adjacent_split_backwards_are_joined():
    actions = _words("F0 F1 I0 W0 I1 F2 W1 I2 W2")
    assert _join(actions, 3) == _words("F0 F1 B0 I1 F2 W1 B2")
    assert _join(actions, 2) == _words("F0 F1 B0 I1 F2 W1 I2 W2")
    assert _join(actions, 0) == actions
    assert _join(_words("I0 W1 W0"), 9) == _words("I0 W1 W0")  # different microbatches


@pytest.mark.parametrize(
    ("pp_ranks", "num", "can_split", "names"),
    [((0, 1), 4, False, ["1f1b", "eager-1f1b", "gpipe"]), ((0, 1), 4, True, ["1f1b", "eager-1f1b", "gpipe", "zero-bubble"]),
     ((1, 0), 3, False, ["1f1b", "eager-1f1b", "gpipe"]), ((0, 1, 0, 1), 4, True, ["interleaved-1f1b"]),
     ((0, 1, 0, 1), 3, True, []), ((0, 1, 0), 4, True, []), ((0, 0, 1, 1), 4, True, []), ((0, 0), 2, True, ["interleaved-1f1b"])],
)  # fmt: skip
def test_known_schedules_that_fit_the_pp_ranks_are_candidates(pp_ranks, num, can_split, names):
    edges = tuple(Edge(i, i + 1, 0.5, 0.5) for i in range(len(pp_ranks) - 1))
    pipeline = Pipeline((Stage(1, 1, 1),) * len(pp_ranks), edges)
    found = list(_known(pipeline, num, pp_ranks, can_split))
    assert [schedule.name for schedule in found] == names
    for schedule in found:
        assert schedule.pp_rank_of_stage == pp_ranks
        check_schedule(schedule, pipeline)


def test_memory_limit_lowers_the_deepest_stages_of_each_pp_rank():
    """Stages 0 and 2 on pp rank 0 keep 10 and 20 bytes per microbatch; stage 1 on pp rank 1 keeps 30."""
    pipeline = Pipeline((Stage(1, 1, 1, 10), Stage(1, 1, 1, 30), Stage(1, 1, 1, 20)), ())

    def lowered(limit, depths):
        return _Search(pipeline, 4, (0, 1, 0), limit, (4, 4, 4)).within_limit(depths)

    assert lowered(None, (4, 3, 4)) == (4, 3, 4)
    assert lowered(90, (4, 3, 2)) == (4, 3, 2)  # 40 + 40 on pp rank 0, 90 on pp rank 1
    assert lowered(89, (4, 3, 2)) == (4, 2, 2)
    assert lowered(79, (4, 3, 2)) == (3, 2, 2)
    assert lowered(60, (4, 3, 3)) == (2, 2, 2)
    assert lowered(9, (2, 2, 2)) == (0, 0, 0)


def test_memory_limit_is_exact():
    pipeline = Pipeline((Stage(1, 1, 1, 10), Stage(1, 1, 1, 10)), (Edge(0, 1, 2.0, 2.0),))
    peaks = [
        max(auto_schedule(pipeline, 6, memory_limit_bytes=limit).peak_bytes(pipeline)) for limit in (10, 19, 20, 60)
    ]
    assert peaks[:3] == [10, 10, 20] and 20 <= peaks[3] <= 60
    with pytest.raises(ScheduleError, match="keeps at most 9 bytes of activations; one microbatch takes 10"):
        auto_schedule(pipeline, 6, memory_limit_bytes=9)
