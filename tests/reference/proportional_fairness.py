"""How flows share ports: proportional fairness, as connections with equal windows behind queues share links."""

from __future__ import annotations

import math

#: Shares closer than this part of each other are equal.
_EQUAL = 1e-9
#: How far the load of a port may be from what it carries, as a part of that, when the search for prices stops.
_EXACT = 1e-6
_SWEEPS = 200
_STEPS = 20


def share_ports(paths: list[list[int]], capacity: list[float], price: list[float]) -> list[float]:
    """Rates that maximize the sum of their logarithms.

    A connection that keeps a fixed number of bytes on its way, where queues lose none, has a rate of that number over
    its delay, and a queue delays all that pass it alike: then no other rates can last. Where each flow has one
    bottleneck, all flows of a bottleneck get the same. One that is held up at two gets less there than others: of flows
    through A, through A and B, and through B, 2/3, 1/3 and 2/3 of a port.

    Args:
        paths: the ports that each flow passes, at least one.
        capacity: bytes per second of each port.
        price: of each port, where the search begins; prices found are left in it. Zeros do.

    Returns:
        Bytes per second of each flow. No port is given more than its capacity.
    """
    rate = _share_single_bottlenecks(paths, capacity)
    return _search_prices(paths, capacity, price) if rate is None else rate


def _share_single_bottlenecks(paths: list[list[int]], capacity: list[float]) -> list[float] | None:
    """Max-min fair rates, if prices make them those that were asked for; else None."""
    left = list(capacity)
    count = [0] * len(capacity)
    for path in paths:
        for port in path:
            count[port] += 1
    rate = [0.0] * len(paths)
    held: list[tuple[int, float, list[int]]] = []  # a port, what each flow gets that it holds up, those
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
    for port, least, here in reversed(held):  # prices of ports further on in the path of each are known
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
    """A flow's rate is 1 over the sum of its ports' prices; set one port's price after the other until all fit."""
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
    """Make the load of a port its capacity, or its price zero; returns how far off it was."""
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
    lowest = max(1 / capacity - max(others, 0.0), 0.0)  # at less, one flow alone would be too much
    new = max(old, lowest)
    for _ in range(_STEPS):
        # Newton's method on 1 over the load, which is concave in the price: after a step the root is to the right
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
