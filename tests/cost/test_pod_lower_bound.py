"""Lower bounds of transfers between pods match values computed by hand. Each class has 1,000 bytes."""

from __future__ import annotations

import pytest

from reshard.cost.pod_lower_bound import bound_in_pods
from reshard.topology.model import Port

#: Input: (holder hosts, destination hosts) of each class, rate of each host, pod of each host, (out, in) rates of each
#: pod's uplink. Expected: the bound in seconds, and the links that are busy all of that time.
CASES = {
    "downlink of a pod": ([((0,), (1, 2))], [100, 100, 100], [0, 1, 1], [(10, 1), (1, 5)], 200, [("down", 1)]),
    "uplink of a pod": ([((0,), (1, 2))], [100, 100, 100], [0, 1, 1], [(4, 1), (1, 5)], 250, [("up", 0)]),
    "egress of one host": ([((0,), (1, 2))], [2, 100, 100], [0, 1, 1], [(1e3, 1), (1, 1e3)], 500, [("host", 0)]),
    "uplink for two hosts": ([((0,), (2,)), ((1,), (2,))], [30, 40, 1], [0, 0, 1], [(20, 1), (1, 1e3)], 100, [("up", 0)]),
    "egress of a host and a downlink": (
        [((0, 1), (2, 3))], [5, 10, 100, 100], [0, 1, 0, 1], [(90, 1), (2, 90)], 1000 / 6, [("down", 0), ("host", 0)]
    ),
    "hosts that swap data": ([((0,), (1,)), ((1,), (0,))], [4, 5], [0, 1], [(1e3, 1e3)] * 2, 250, [("host", 0)]),
    "each pod is entered once": (
        [((0,), (1, 2, 3, 4))], [100] * 5, [0, 1, 1, 2, 2], [(100, 1), (100, 5), (100, 8)], 200, [("down", 1)]
    ),
    "the holder sends once": ([((0,), (1, 2))], [2, 100, 100], [0, 0, 0], [(1, 1)], 500, [("host", 0)]),
    "a receiver forwards": (
        [((0,), (1, 2))], [2, 1, 100], [0, 1, 2], [(1e3, 1e3)] * 3, 500, [("host", 0)]
    ),
    "two equal senders": ([((0, 1), (2,))], [100] * 3, [0] * 3, [(50, 50)], 5, [("host", 0), ("host", 1)]),
    "no data": ([], [4, 5], [0, 1], [(1, 1)] * 2, 0, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1, 1e6])
def test_bounds_equal_those_by_hand(name, scale):
    classes, rates, pod_of, uplinks, seconds, busy = CASES[name]
    bound, busy_links = bound_in_pods(
        dict.fromkeys(classes, 1000),
        {host: Port.of(rate * scale) for host, rate in enumerate(rates)},
        dict(enumerate(pod_of)),
        [Port(out * scale, into * scale) for out, into in uplinks],
    )
    assert bound == pytest.approx(seconds / scale, rel=1e-6) and bound <= seconds / scale
    assert busy_links == busy
