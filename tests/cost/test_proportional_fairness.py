"""The rates of flows that share ports are proportionally fair."""

import math

import pytest
from hypothesis import given, strategies as st

from tests.reference.proportional_fairness import share_ports

PORTS = 8


@st.composite
def shared(draw):
    """Paths of flows that pass one to three ports each, and the capacities of ports."""
    path = st.lists(st.integers(0, PORTS - 1), min_size=1, max_size=3, unique=True)
    capacity = st.lists(st.sampled_from([1e8, 1.01e8, 5e7, 2.5e8, 1e18]), min_size=PORTS, max_size=PORTS)
    return draw(st.lists(path, min_size=1, max_size=20)), draw(capacity)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    ("paths", "capacity", "rates"),
    [
        ([[0], [0], [0]], [6], [2, 2, 2]),
        ([[0, 1], [0, 2]], [6, 1, 9], [1, 5]),  # the second flow takes what the first cannot use
        ([[0, 2], [0, 3], [1, 2], [1, 3]], [6, 6, 6, 6], [3, 3, 3, 3]),
        (
            [[0], [0, 1], [1]],
            [6, 6],
            [4, 2, 4],
        ),  # the second flow has two bottlenecks; max-min fairness would give 3 to each
        ([[0], [0, 1], [0, 1, 2], [1], [2]], [12, 12, 12], [6.4, 3.2, 2.4, 6.4, 9.6]),
    ],
)
def test_rates_equal_those_by_hand(paths, capacity, rates, joint):
    found = share_ports(paths, [float(value) for value in capacity], [0.0] * len(capacity), joint)
    assert found == pytest.approx(rates, rel=1e-5)


@given(shared(), st.lists(shared(), max_size=3), st.booleans())
def test_rates_are_feasible_and_optimal(problem, before, joint):
    """No port is overloaded, and no change of rates increases the product, whatever the initial prices."""
    paths, capacity = problem
    price = [0.0] * PORTS
    for other, _ in before:  # leave prices of other flows
        share_ports(other, capacity, price, joint)
    cold, warm = (share_ports(paths, capacity, start, joint) for start in ([0.0] * PORTS, price))
    assert warm == pytest.approx(cold, rel=0.01)
    for rates in (cold, warm):
        for port in range(PORTS):
            load = sum(rate for rate, path in zip(rates, paths, strict=True) if port in path)
            assert load <= capacity[port] * (1 + 1e-9)
        total = sum(map(math.log, rates))
        for flow in range(len(paths)):
            for part in (0.05, 0.5):  # give one flow more by taking from all flows on its ports
                more = [
                    rate * (1 - part) if set(path) & set(paths[flow]) else rate
                    for rate, path in zip(rates, paths, strict=True)
                ]
                spare = min(
                    capacity[port] - sum(m for m, path in zip(more, paths, strict=True) if port in path)
                    for port in paths[flow]
                )
                more[flow] += spare
                assert sum(map(math.log, more)) <= total + 1e-2


def test_search_starts_from_previous_prices():
    paths, capacity, price = [[0], [0, 1], [1]], [6.0, 6.0], [0.0, 0.0]
    share_ports(paths, capacity, price)
    assert price == pytest.approx([1 / 4, 1 / 4], rel=1e-3)
    share_ports([*paths, [1]], capacity, price)
    assert price[0] < 1 / 4 < price[1]


def test_joint_search_finds_the_rates_of_the_search_by_port():
    """Eight hosts with one port each way exchange data, some pairs with several flows; also with a port free of charge."""
    paths = [[i, 8 + (i + turn) % 8] for turn in range(5) for i in range(8) for _ in range(1 + (i * turn) % 3)]
    capacity = [1e9 + 1e7 * port for port in range(15)] + [1e18]
    one, both = ([0.0] * 16 for _ in range(2))
    by_port, jointly = share_ports(paths, capacity, one), share_ports(paths, capacity, both, joint=True)
    assert jointly == pytest.approx(by_port, rel=1e-5)
    assert jointly != by_port  # it took the other way
