"""The reference implementation of ``native/fluid/proportional_fairness.h``: rates of flows that share ports."""

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
#: With more ports than this, one price is set after another.
_MAX_JOINT_PORTS = 64
#: Limit on steps of Newton's method for all prices at once.
_ROUNDS = 12
#: A price is not unique if the pivot of its row is below this fraction of the row's diagonal entry.
_SINGULAR = 1e-9
#: Largest fraction of a flow's cost by which one step may reduce it.
_LARGEST_CUT = 0.9


def share_ports(paths: list[list[int]], capacity: list[float], price: list[float], joint: bool = False) -> list[float]:
    """The rates that maximize the sum of their logarithms.

    This models connections with a fixed window over lossless queues. The rate of a connection is its window divided by
    its delay, and a queue delays all its flows equally, so these are the only stable rates. If each flow has one
    bottleneck, all flows of a bottleneck get the same rate. A flow with two bottlenecks gets less: flows through A,
    through A and B, and through B get 2/3, 1/3 and 2/3 of a port.

    Args:
        paths: ports of each flow, at least one per flow.
        capacity: bytes per second of each port.
        price: start value of the price of each port, zero if unknown; overwritten with the prices found.
        joint: whether to try all prices at once first.

    Returns:
        Bytes per second of each flow. The flows of a port do not exceed its capacity.
    """
    rate = _share_single_bottlenecks(paths, capacity)
    return _search_prices(paths, capacity, price, joint) if rate is None else rate


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


def _search_prices(paths: list[list[int]], capacity: list[float], price: list[float], joint: bool) -> list[float]:
    """Adjust prices until all loads fit; a flow's rate is 1 over the sum of its prices."""
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
    used = [port for port, row in enumerate(flows) if row]
    if joint and len(used) <= _MAX_JOINT_PORTS:
        rates = _set_joint_prices(paths, used, capacity, price, cost)
        if rates is not None:
            return rates
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


def _set_joint_prices(
    paths: list[list[int]], used: list[int], capacity: list[float], price: list[float], cost: list[float]
) -> list[float] | None:
    """Newton's method on the dual for all prices at once; None if the loads do not fit after a few rounds."""
    n, number = len(used), {port: i for i, port in enumerate(used)}
    bundle_of, bundles, count, costs = _bundle_flows(paths, number, cost)
    prices = [price[port] for port in used]
    for _ in range(_ROUNDS):
        load = [0.0] * n
        hessian = [[0.0] * n for _ in range(n)]
        for row, amount, item in zip(bundles, count, costs, strict=True):
            part = amount * (1 / item)
            curvature = part * (1 / item)
            for a, i in enumerate(row):
                load[i] += part
                for j in row[: a + 1]:
                    hessian[max(i, j)][min(i, j)] += curvature
        off = [load[i] / capacity[port] - 1 for i, port in enumerate(used)]
        fixed = [prices[i] == 0.0 and off[i] < 0 for i in range(n)]
        if max((abs(off[i]) for i in range(n) if not fixed[i]), default=0.0) <= _EXACT:
            for i, port in enumerate(used):
                price[port] = prices[i]
                load[i] /= capacity[port]
            rates = [1 / (item * max(1.0, *(load[i] for i in row))) for row, item in zip(bundles, costs, strict=True)]
            return [rates[bundle] for bundle in bundle_of]
        move = _solve(hessian, [load[i] - capacity[port] for i, port in enumerate(used)], fixed)
        part = 1.0
        for row, item in zip(bundles, costs, strict=True):
            change = 0.0
            for i in row:
                change += move[i]
            if change < -_LARGEST_CUT * item:
                part = min(part, -_LARGEST_CUT * item / change)
        prices = [max(prices[i] + part * move[i], 0.0) for i in range(n)]
        for bundle, row in enumerate(bundles):
            costs[bundle] = 0.0
            for i in row:
                costs[bundle] += prices[i]
        if min(costs) <= 0:
            return None
    return None


def _bundle_flows(
    paths: list[list[int]], number: dict[int, int], cost: list[float]
) -> tuple[list[int], list[list[int]], list[float], list[float]]:
    """Group flows that have the same path of one or two ports into bundles. Each longer path is a bundle of its own.

    Returns:
        The bundle of each flow; and of each bundle the ports, the number of flows, and the cost of a flow.
    """
    known: dict[tuple[int, ...], int] = {}
    bundle_of, bundles, count, costs = [], [], [], []
    for flow, path in enumerate(paths):
        row = [number[port] for port in path]
        bundle = known.get(tuple(row)) if len(row) <= 2 else None
        if bundle is None:
            bundle = known[tuple(row)] = len(bundles)
            bundles.append(row)
            count.append(0.0)
            costs.append(cost[flow])
        count[bundle] += 1
        bundle_of.append(bundle)
    return bundle_of, bundles, count, costs


def _solve(hessian: list[list[float]], right: list[float], fixed: list[bool]) -> list[float]:
    """Solve ``hessian @ move = right`` for the ports that are not fixed, from its lower half, by LDL decomposition.

    A port whose row depends on earlier rows does not move either.
    """
    n, fixed = len(right), list(fixed)
    move = [0.0] * n
    for i in range(n):
        row = hessian[i]
        if fixed[i]:
            continue
        for j in range(i):
            row[j] = 0.0 if fixed[j] else row[j]
            for k in range(j if not fixed[j] else 0):
                row[j] -= row[k] * hessian[j][k]
        pivot, move[i] = row[i], right[i]
        for j in range(i):
            if not fixed[j]:
                scaled = row[j] / hessian[j][j]
                pivot -= scaled * row[j]
                move[i] -= scaled * move[j]
                row[j] = scaled
        if pivot <= _SINGULAR * row[i]:
            fixed[i], move[i] = True, 0.0
        row[i] = pivot
    for i in range(n):
        if not fixed[i]:
            move[i] /= hessian[i][i]
    for i in reversed(range(n)):
        for j in range(i):
            if not (fixed[i] or fixed[j]):
                move[j] -= hessian[i][j] * move[i]
    return move


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
