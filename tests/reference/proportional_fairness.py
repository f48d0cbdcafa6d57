"""The twin of ``native/proportional_fairness.h``: rates of flows that share ports by proportional fairness."""

from __future__ import annotations

import math

#: Shares with a smaller relative difference are equal.
_EQUAL = 1e-9
#: The search for prices stops when every port's load is within this fraction of its capacity.
_EXACT = 1e-6
#: Limit on sweeps over all ports.
_SWEEPS = 200
#: Limit on steps of Newton's method per port and sweep.
_STEPS = 20


def share_ports(paths: list[list[int]], capacity: list[float], price: list[float]) -> list[float]:
    """The rates that maximize the sum of their logarithms.

    This models connections with a fixed window over lossless queues. The rate of a connection is its window divided by
    its delay, and a queue delays all its flows equally, so these are the only stable rates. If each flow has one
    bottleneck, all flows of a bottleneck get the same rate. A flow with two bottlenecks gets less: flows through A,
    through A and B, and through B get 2/3, 1/3 and 2/3 of a port.

    Args:
        paths: ports of each flow, at least one per flow.
        capacity: bytes per second of each port.
        price: start value of the price of each port, zero if unknown; overwritten with the prices found.

    Returns:
        Bytes per second of each flow. The flows of a port do not exceed its capacity.
    """
    rate = _share_single_bottlenecks(paths, capacity)
    return _search_prices(paths, capacity, price) if rate is None else rate


def _share_single_bottlenecks(paths: list[list[int]], capacity: list[float]) -> list[float] | None:
    """Max-min fair rates if they are also proportionally fair, which prices prove; else None."""
    left = list(capacity)
    count = [0] * len(capacity)
    for path in paths:
        for port in path:
            count[port] += 1
    rate = [0.0] * len(paths)
    held: list[tuple[int, float, list[int]]] = []  # (port, rate of each flow it limits, those flows)
    open_ = list(range(len(paths)))
    while open_:
        least, tightest = min((left[port] / count[port], port) for port in range(len(count)) if count[port])
        here, rest = [], []
        for flow in open_:
            if tightest in paths[flow]:
                here.append(flow)
                rate[flow] = least
                for port in paths[flow]:
                    left[port] = max(left[port] - least, 0.0)
                    count[port] -= 1
            else:
                rest.append(flow)
        held.append((tightest, least, here))
        open_ = rest
    price = [0.0] * len(capacity)
    for port, least, here in reversed(held):  # the prices of later bottlenecks on each path are known
        cheapest, dearest = math.inf, 0.0
        for flow in here:
            others = 0.0
            for other in paths[flow]:
                others += price[other]
            cheapest, dearest = min(cheapest, others), max(dearest, others)
        if (dearest - cheapest) * least > _EQUAL or dearest * least > 1 + _EQUAL:
            return None
        price[port] = max(1 / least - dearest, 0.0)
    return rate


def _search_prices(paths: list[list[int]], capacity: list[float], price: list[float]) -> list[float]:
    """Adjust one port's price after another until all loads fit; a flow's rate is 1 over the sum of its prices."""
    flows: list[list[int]] = [[] for _ in capacity]
    cost = [0.0] * len(paths)
    for flow, path in enumerate(paths):
        for port in path:
            flows[port].append(flow)
            cost[flow] += price[port]
    for flow, path in enumerate(paths):
        if cost[flow] == 0.0:
            price[path[0]] = len(flows[path[0]]) / capacity[path[0]]
            for other in flows[path[0]]:
                cost[other] += price[path[0]]
    for _ in range(_SWEEPS):
        worst = 0.0
        for port, row in enumerate(flows):
            if row:
                worst = max(worst, _set_price(port, row, cost, capacity[port], price))
        if worst <= _EXACT:
            break
    over = [0.0] * len(capacity)
    for port, row in enumerate(flows):
        for flow in row:
            over[port] += 1 / cost[flow]
        over[port] /= capacity[port]
    rate = []
    for flow, path in enumerate(paths):
        most = 1.0
        for port in path:
            most = max(most, over[port])
        rate.append(1 / (cost[flow] * most))
    return rate


def _set_price(port: int, row: list[int], cost: list[float], capacity: float, price: list[float]) -> float:
    """Set a port's price so that its load is its capacity, or to zero; return the relative error before."""
    old = price[port]
    load = 0.0
    others = math.inf
    for flow in row:
        load += 1 / cost[flow]
        others = min(others, cost[flow] - old)
    off = load / capacity - 1
    if off < 0 and old == 0.0:
        return 0.0
    if abs(off) <= _EXACT / 4:
        return abs(off)
    lowest = max(1 / capacity - max(others, 0.0), 0.0)  # below this, a single flow would exceed the capacity
    new = max(old, lowest)
    for _ in range(_STEPS):
        # Newton's method on 1 / load, which is concave in the price, so after a step the root lies to the right
        load = slope = 0.0
        for flow in row:
            part = 1 / (cost[flow] - old + new)
            load += part
            slope += part * part
        following = max(new + (load / capacity - 1) * load / slope, lowest)
        close = abs(following - new) <= _EXACT / 8 * following
        new = following
        if close:
            break
    price[port] = new
    for flow in row:
        cost[flow] += new - old
    return abs(off)
