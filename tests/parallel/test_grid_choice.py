"""The choice of a grid: costs against formulas by hand, the order that was measured, limits and errors."""

from __future__ import annotations

import math

import pytest

from reshard.errors import ArgumentError
from reshard.parallel import TransformerSizes, choose_grid
from reshard.topology import Host, Link, Topology


def sizes(hidden, sequence=128, heads=16, vocabulary=1):
    return TransformerSizes(hidden, 1, heads, heads, hidden // heads, 4 * hidden, 1, vocabulary, sequence)


def four_hosts(rate=50e6):
    return Topology.uniform([rank // 4 for rank in range(16)], rate)


def best_of(choice, rows, cols, depth):
    shape = (rows, cols, depth)
    return next(cost for cost in choice.candidates if (cost.rows, cost.cols, cost.depth) == shape)


def test_cost_of_a_one_dimensional_grid_equals_the_one_by_hand():
    """[1,4,1] on four hosts: a move brings in 3/4 of the smaller activation of a layer. No weights move."""
    topology = Topology.uniform(range(4), 1e6)
    choice = choose_grid(sizes(64, sequence=32), topology, range(4), rows=4, flops_per_second=1e18)
    cost = best_of(choice, 1, 4, 1)
    tokens = 128
    # Activations of 64 features move 3 times in a layer that cuts its input, and twice in one that cuts its output.
    moved = tokens * (64 * 3 / 4 * (2 * 3 + 2 * 2) + 1 * 3 * 2) * 4  # the output of one feature lies on one column
    assert cost.product_seconds == pytest.approx(moved / 1e6, rel=0.02)
    assert cost.depth_seconds == 0


def test_grids_are_ordered_by_sizes_of_activations_and_weights():
    """Large activations on slow links favor more depth and fewer columns. Large weights favor few replicas."""
    slow = four_hosts()
    choice = choose_grid(sizes(256), slow, range(16), rows=32, flops_per_second=1e18)
    costs = [best_of(choice, *shape).seconds for shape in ((2, 2, 4), (4, 4, 1), (1, 16, 1))]
    assert costs == sorted(costs)
    choice = choose_grid(sizes(1024, sequence=32), slow, range(16), rows=16, flops_per_second=1e18)
    costs = [best_of(choice, *shape).seconds for shape in ((1, 16, 1), (2, 2, 4), (1, 1, 16))]
    assert costs == sorted(costs)


def test_mapping_keeps_the_busier_axis_inside_hosts():
    choice = choose_grid(sizes(256), four_hosts(), range(16), rows=32, flops_per_second=1e18)
    cost = best_of(choice, 1, 4, 4)
    assert cost.order[-1] == "col"  # activations move more often than gradients
    assert cost.ranks(range(16))[0, 0].tolist() == [0, 1, 2, 3]


def test_slow_uplinks_of_pods_change_the_winner():
    """Two pods of four hosts. A sum over all hosts moves 4 x 4 parts over each uplink, and 7 parts over each NIC."""

    def choose(pods):
        hosts = tuple(Host((Link.of(50e6),), host // 4 if pods else None) for host in range(8))
        topology = Topology(tuple(range(8)), hosts=hosts, pods=pods, latency_seconds=0.0)
        return choose_grid(sizes(256), topology, range(8), rows=16, flops_per_second=1e18)

    flat, fast, slow = choose(()), choose((Link.of(200e6),) * 2), choose((Link.of(10e6),) * 2)
    assert fast.best == flat.best
    assert (fast.best.kind, slow.best.kind) == ("1-D + replicas", "2.5-D")
    assert slow.best.order[0] == "depth"  # each layer is in one pod
    ratio = best_of(slow, 1, 1, 8).depth_seconds / best_of(fast, 1, 1, 8).depth_seconds
    assert ratio == pytest.approx((16 / 10e6) / (7 / 50e6))


def test_kept_inputs_take_memory_for_the_bytes_that_they_save():
    topology = Topology(tuple(range(4)), hosts=(Host((Link.of(50e6),)),) * 4, latency_seconds=0.0)

    def cost(keep_inputs):
        choice = choose_grid(
            sizes(256), topology, range(4), rows=16, flops_per_second=1e18, panel=10**6, keep_inputs=keep_inputs
        )
        return best_of(choice, 1, 4, 1)

    gathered, kept = cost(False), cost(True)
    extra = kept.memory_bytes - gathered.memory_bytes
    assert extra > 0
    assert gathered.seconds - kept.seconds == pytest.approx(extra / 50e6, rel=1e-6)


def test_grids_above_the_memory_limit_are_dropped_and_impossible_requests_refused():
    model = sizes(256)
    everything = choose_grid(model, four_hosts(), range(16), rows=32, flops_per_second=1e12)
    limit = sorted(cost.memory_bytes for cost in everything.candidates)[2]
    choice = choose_grid(model, four_hosts(), range(16), limit, rows=32, flops_per_second=1e12)
    assert all(cost.memory_bytes <= limit for cost in choice.candidates)
    assert len(choice.candidates) + len(choice.too_large) == len(everything.candidates)
    assert "needs" in choice.explain()
    with pytest.raises(
        ArgumentError, match=r"no grid of 16 ranks fits: the smallest needs .* of 1000 bytes on each rank; use"
    ):
        choose_grid(model, four_hosts(), range(16), 1000, rows=32, flops_per_second=1e12)
    few = choose_grid(sizes(256, heads=2), four_hosts(), range(16), rows=8, flops_per_second=1e12)
    reasons = dict(few.refused)
    assert "more columns than the 2 heads" in reasons["[1, 16, 1]"]
    assert reasons["[1, 1, 16]"] == "needs 16 rows in a batch, which has 8"
    with pytest.raises(ArgumentError, match="rows is 0"):
        choose_grid(model, four_hosts(), range(16), rows=0, flops_per_second=1e12)
    with pytest.raises(ArgumentError, match="ranks must be different ranks of the topology, which has 16"):
        choose_grid(model, four_hosts(), [0, 99], rows=4, flops_per_second=1e12)


def test_the_table_says_how_many_shapes_it_omits():
    choice = choose_grid(sizes(256), four_hosts(), range(16), rows=32, flops_per_second=1e12)
    shapes = len({str(cost) for cost in choice.candidates})
    for count, line in ((shapes - 2, "2 slower shapes fit;"), (shapes - 1, "1 slower shape fits;")):
        assert choice.explain(count).splitlines()[1 + count].strip().startswith(line)
    assert "slower" not in choice.explain(shapes)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"rows": 0}, "rows is 0; it must be an integer from 1"),
        ({"rows": 2.5}, "rows is 2.5; it must be an integer from 1"),
        ({"itemsize": 0}, "itemsize is 0; it must be an integer from 1"),
        ({"state_bytes": -16}, "state_bytes is -16; it must be an integer from 1"),
        ({"panel": 0}, "panel is 0; it must be an integer from 1"),
        ({"keep_inputs": "yes"}, "keep_inputs is 'yes'; it must be True or False"),
        ({"memory_limit_bytes": "4GB"}, "memory_limit_bytes is '4GB'; it must be a number"),
        ({"memory_limit_bytes": 0.0}, "memory_limit_bytes is 0.0; it must be a positive number"),
        ({"flops_per_second": math.nan}, "flops_per_second is nan; it must be a number"),
    ],
)
def test_wrong_numbers_are_refused(wrong, rule):
    with pytest.raises(ArgumentError, match=rule):
        choose_grid(sizes(256), four_hosts(), range(16), **({"rows": 32, "flops_per_second": 1e12} | wrong))


def test_choice_is_the_same_every_time():
    first, second = (
        choose_grid(sizes(256), four_hosts(), range(16), rows=32, flops_per_second=math.pi * 1e10) for _ in range(2)
    )
    assert first == second
