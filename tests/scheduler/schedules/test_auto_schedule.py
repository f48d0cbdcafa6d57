"""Parts of the search of auto_schedule, with results computed by hand: depths, ranking, known schedules and limits."""

from __future__ import annotations

import pytest

from reshard.errors import ArgumentError, ScheduleError
from reshard.scheduler import Edge, Pipeline, Stage, auto_schedule, check_schedule
from reshard.scheduler.ir.communication import add_transfers
from reshard.scheduler.schedules.known_schedules import known_orders
from reshard.scheduler.schedules.schedule_search import SimulatedOrder, best, find_depths, join, link_seconds


def _words(text):
    return [int(word[1]) * 4 + "FBIW".index(word[0]) for word in text.split()]


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
    assert find_depths(pipeline) == [exact, by_rule]


def test_link_time_is_the_sum_of_its_loads():
    edges = (Edge(0, 1, 3, 2, {"a": 1, "b": 2}, {"a": 0.5}), Edge(1, 2, 5, 4, {"b": 3}))
    assert sorted(link_seconds(Pipeline((Stage(1, 1, 1),) * 3, edges))) == sorted([3, 2, 5, 4, 1.5, 5])


def test_candidates_are_ranked_by_time_then_memory_then_actions():
    def found(seconds, peak, actions):
        return SimulatedOrder([], None, seconds, peak, actions)

    one = found(10.0, 100, 50)
    assert best([]) is None and best([one]) is one
    for other, wins in (
        (found(9.9, 999, 99), True),
        (found(10.1, 1, 1), False),
        (found(10.0, 100, 49), True),
        (found(10.0, 100, 50), False),
        (found(10.0, 100, 51), False),
        (found(10.0 + 1e-9, 99, 50), True),
        (found(10.0 + 1e-7, 99, 50), False),
        (found(10.0 - 1e-7, 101, 50), True),
    ):
        assert (best([one, other]) is other) == wins, other


def test_adjacent_split_backwards_are_joined():
    actions = _words("F0 F1 I0 W0 I1 F2 W1 I2 W2")
    assert join(actions, 3, 1) == _words("F0 F1 B0 I1 F2 W1 B2")
    assert join(actions, 2, 1) == _words("F0 F1 B0 I1 F2 W1 I2 W2")
    assert join(actions, 0, 1) == actions
    assert join(_words("I0 W1 W0"), 9, 1) == _words("I0 W1 W0")  # different microbatches


@pytest.mark.parametrize(
    ("pp_ranks", "num", "can_split", "names"),
    [((0, 1), 4, False, "gpipe 1f1b eager_1f1b looped_bfs interleaved_1f1b"),
     ((1, 0), 3, True, "gpipe 1f1b eager_1f1b zb_h1 zb_h2 looped_bfs interleaved_1f1b interleaved_zero_bubble"),
     ((0, 1, 0, 1), 3, True, "looped_bfs interleaved_1f1b interleaved_zero_bubble"), ((1, 0, 0, 1), 4, True, "zb_v dualpipe_v"),
     ((0, 1, 1, 0), 2, False, ""), ((0, 1, 0), 4, True, ""), ((0, 0, 1, 1), 4, True, "")],
)  # fmt: skip
def test_known_schedules_that_fit_the_pp_ranks_are_candidates(pp_ranks, num, can_split, names):
    edges = tuple(Edge(i, i + 1, 0.5, 0.5) for i in range(len(pp_ranks) - 1))
    pipeline = Pipeline((Stage(1, 1, 1),) * len(pp_ranks), edges)
    found = dict(known_orders(pp_ranks, num, can_split=can_split))
    assert list(found) == names.split()
    for name, order in found.items():
        check_schedule(add_transfers(name, order, pipeline, pp_ranks, num), pipeline)


def test_limits_of_pp_ranks_may_differ():
    """The first of two pp ranks has room for three microbatches, the second for one."""
    pipeline = Pipeline((Stage(1, 1, 1, 10), Stage(1, 1, 1, 10)), (Edge(0, 1, 2.0, 2.0),))
    assert auto_schedule(pipeline, 6, activation_limit_bytes=[30, 10]).peak_bytes(pipeline) == (30, 10)
    with pytest.raises(ArgumentError, match="activation_limit_bytes has 1 limits; each of 2 pp ranks needs one"):
        auto_schedule(pipeline, 6, activation_limit_bytes=[30])
    with pytest.raises(ArgumentError, match="activation_limit_bytes is -1"):
        auto_schedule(pipeline, 6, activation_limit_bytes=[30, -1])


def test_stages_of_a_row_share_its_memory_over_time():
    """A pp rank keeps at most four microbatches of its two stages together, but up to four of the first one."""
    pipeline = Pipeline.of_costs([1.0] * 4, [2.0] * 4, [0.1] * 3)
    schedule = auto_schedule(pipeline, 8, activation_limit_bytes=4, pp_rank_of_stage=[0, 1, 0, 1])
    check_schedule(schedule, pipeline, 4)
    assert sum(schedule.in_flight[::2]) > 4


def test_memory_limit_is_exact():
    pipeline = Pipeline((Stage(1, 1, 1, 10), Stage(1, 1, 1, 10)), (Edge(0, 1, 2.0, 2.0),))
    peaks = [
        max(auto_schedule(pipeline, 6, activation_limit_bytes=limit).peak_bytes(pipeline)) for limit in (10, 19, 20, 60)
    ]
    assert peaks[:3] == [10, 10, 20] and 20 <= peaks[3] <= 60
    with pytest.raises(ScheduleError, match="keeps at most 9 bytes of activations; one microbatch takes 10"):
        auto_schedule(pipeline, 6, activation_limit_bytes=9)
