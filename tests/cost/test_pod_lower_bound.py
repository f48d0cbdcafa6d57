"""Lower bounds of transfers between pods match values computed by hand. Each class has 1,000 bytes."""

from __future__ import annotations

import random
from functools import partial

import pytest

from reshard.cost import merged_program, pod_lower_bound
from reshard.cost.pod_lower_bound import bound_in_pods
from reshard.topology.topology import Link

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


@pytest.fixture(params=[False, True], ids=["whole", "merged"])
def is_merged(request, monkeypatch):
    """Lets the linear programs be solved with equal variables merged, however small they are."""
    if request.param:
        monkeypatch.setattr(pod_lower_bound, "solve", partial(merged_program.solve, min_variables=0))


@pytest.mark.usefixtures("is_merged")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1, 1e6])
def test_bounds_equal_those_by_hand(name, scale):
    classes, rates, pod_of, uplinks, seconds, busy = CASES[name]
    bound, busy_links = bound_in_pods(
        dict.fromkeys(classes, 1000),
        {host: Link.of(rate * scale) for host, rate in enumerate(rates)},
        dict(enumerate(pod_of)),
        [Link(out * scale, into * scale) for out, into in uplinks],
    )
    assert bound == pytest.approx(seconds / scale, rel=1e-6) and bound <= seconds / scale
    assert busy_links == busy


@pytest.mark.parametrize("seed", range(30))
def test_merged_programs_have_the_same_optimum(seed, monkeypatch):
    chance = random.Random(seed)
    num_hosts, num_pods = chance.choice((4, 8, 12)), chance.choice((1, 2, 4))
    classes = {}
    for _ in range(chance.randint(1, 12)):
        hosts = chance.sample(range(num_hosts), chance.randint(2, 4))
        at = chance.randint(1, len(hosts) - 1)
        classes[tuple(sorted(hosts[:at])), tuple(sorted(hosts[at:]))] = chance.choice((1000, 1000, 500))
    hosts = {host: Link.of(chance.choice((100.0, 100.0, 40.0))) for host in range(num_hosts)}
    pods = [Link.of(chance.choice((150.0, 50.0))) for _ in range(num_pods)]
    pod_of = {host: host * num_pods // num_hosts for host in range(num_hosts)}
    whole = bound_in_pods(classes, hosts, pod_of, pods)[0]
    monkeypatch.setattr(pod_lower_bound, "solve", partial(merged_program.solve, min_variables=0))
    assert bound_in_pods(classes, hosts, pod_of, pods)[0] == pytest.approx(whole, rel=1e-7)


def test_equal_variables_and_rows_are_merged(monkeypatch):
    sizes = []
    solve_whole = merged_program._solve_whole
    monkeypatch.setattr(
        merged_program, "_solve_whole", lambda program: sizes.append(len(program.cost)) or solve_whole(program)
    )
    # 64 hosts of 8 pods: host h sends to one host of each other pod
    classes = {((host,), tuple((host + 8 * pod) % 64 for pod in range(1, 8))): 1000 for host in range(64)}
    pod_of = {host: host // 8 for host in range(64)}
    seconds, busy = bound_in_pods(classes, dict.fromkeys(range(64), Link.of(100.0)), pod_of, [Link.of(200.0)] * 8)
    assert len(classes) * 7 * 8 > merged_program.MIN_VARIABLES > 100 > sizes[0]
    assert seconds == pytest.approx(280)  # a pod's uplink carries 56 times 1,000 bytes
    assert [kind for kind, _ in busy].count("up") in (0, 8)
