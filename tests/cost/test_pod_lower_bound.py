"""Bounds of jobs between pods, worked out by hand; 1,000 bytes of each class."""

from __future__ import annotations

import pytest

from reshard.cost.pod_lower_bound import bound_in_pods
from reshard.topology.model import Port

#: What each class's holders and destinations are, the rates of hosts, their pods, and the rates of uplinks (out and in).
CASES = {
    "what enters a pod": ([((0,), (1, 2))], [100, 100, 100], [0, 1, 1], [(10, 1), (1, 5)], 200, [("down", 1)]),
    "what leaves a pod": ([((0,), (1, 2))], [100, 100, 100], [0, 1, 1], [(4, 1), (1, 5)], 250, [("up", 0)]),
    "what a host sends": ([((0,), (1, 2))], [2, 100, 100], [0, 1, 1], [(1e3, 1), (1, 1e3)], 500, [("host", 0)]),
    "what two hosts send": ([((0,), (2,)), ((1,), (2,))], [30, 40, 1], [0, 0, 1], [(20, 1), (1, 1e3)], 100, [("up", 0)]),
    "inside a pod and from another": (
        [((0, 1), (2, 3))], [5, 10, 100, 100], [0, 1, 0, 1], [(90, 1), (2, 90)], 1000 / 6, [("down", 0), ("host", 0)]
    ),
    "all that hosts send": ([((0,), (1,)), ((1,), (0,))], [4, 5], [0, 1], [(1e3, 1e3)] * 2, 250, [("host", 0)]),
    "each pod once": (
        [((0,), (1, 2, 3, 4))], [100] * 5, [0, 1, 1, 2, 2], [(100, 1), (100, 5), (100, 8)], 200, [("down", 1)]
    ),
    "once from who has it": ([((0,), (1, 2))], [2, 100, 100], [0, 0, 0], [(1, 1)], 500, [("host", 0)]),
    "passed on to an earlier one": (
        [((0,), (1, 2))], [2, 1, 100], [0, 1, 2], [(1e3, 1e3)] * 3, 500, [("host", 0)]
    ),
    "two of the fastest": ([((0, 1), (2,))], [100] * 3, [0] * 3, [(50, 50)], 5, [("host", 0), ("host", 1)]),
    "nothing": ([], [4, 5], [0, 1], [(1, 1)] * 2, 0, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1, 1e6])
def test_bounds_worked_out_by_hand(name, scale):
    classes, rates, pod_of, uplinks, seconds, busy = CASES[name]
    found, links = bound_in_pods(
        dict.fromkeys(classes, 1000),
        {host: Port.of(rate * scale) for host, rate in enumerate(rates)},
        dict(enumerate(pod_of)),
        [Port(out * scale, into * scale) for out, into in uplinks],
    )
    assert found == pytest.approx(seconds / scale, rel=1e-6) and found <= seconds / scale
    assert links == busy
