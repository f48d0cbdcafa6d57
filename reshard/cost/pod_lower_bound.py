"""The lower bound on a topology with pods, by host NICs and pod uplinks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reshard.topology import Port


class _Rows:
    """Rows of a linear program in coordinate form, and their right-hand sides."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.right: list[float] = []

    def add(
        self, columns: Sequence[int], right: float, sign: float = 1.0, extra: tuple[int, float] | None = None
    ) -> None:
        """Add a row: ``sign`` times the sum of variables ``columns``, plus ``extra`` as ``(variable, coefficient)``."""
        number = len(self.right)
        self.row.extend([number] * len(columns))
        self.column.extend(columns)
        self.value.extend([sign] * len(columns))
        if extra is not None:
            self.row.append(number)
            self.column.append(extra[0])
            self.value.append(extra[1])
        self.right.append(sign * right if extra is None else right)


def bound_in_pods(
    classes: Mapping[tuple[tuple[int, ...], tuple[int, ...]], int],
    host_port: Mapping[int, Port],
    pod_of: Mapping[int, int],
    pods: Sequence[Port],
) -> tuple[float, list[tuple[str, int]]]:
    """Seconds that no plan without relays can beat, and the links that are busy all that time.

    Links are ``("host", h)`` for the egress of host h, and ``("up", p)`` or ``("down", p)`` for the uplink of pod p.

    The seconds are the optimum T of a linear program. x[k, h, q] is the number of bytes of class k (holders A,
    destinations R) that leave host h for destinations in pod q::

        sum of x[k, h, q] over h                    =  bytes[k] * (destinations in q)
        sum of x[k, h, q] over h outside q          >= bytes[k]                   if q has destinations and no holder
        sum of x[k, h, q] over h in A, q            >= bytes[k]
        sum of x[k, h, q] over h in p, q not p, k   <= up[p] * T
        sum of x[k, h, q] over h not in q, k        <= down[q] * T
        sum of x[k, h, q] over k, q                 <= egress[h] * T
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    if not classes:
        return 0.0, []
    scale = float(max(classes.values()))
    fastest = max(port.egress_bytes_per_second for port in (*host_port.values(), *pods))
    leaving: dict[int, list[int]] = {}
    up: dict[int, list[int]] = {}
    down: dict[int, list[int]] = {}
    equal, least = _Rows(), _Rows()
    count = 0
    for (holders, destinations), nbytes in classes.items():
        share = nbytes / scale
        first: list[int] = []
        needing: dict[int, list[int]] = {}
        for host in destinations:
            needing.setdefault(pod_of[host], []).append(host)
        holding = {pod_of[host] for host in holders}
        for pod, hosts in needing.items():
            every, outside = [], []
            for host in (*holders, *destinations):
                if hosts == [host]:
                    continue
                every.append(count)
                leaving.setdefault(host, []).append(count)
                if host in holders:
                    first.append(count)
                if pod_of[host] != pod:
                    outside.append(count)
                    up.setdefault(pod_of[host], []).append(count)
                    down.setdefault(pod, []).append(count)
                count += 1
            equal.add(every, share * len(hosts))
            if pod not in holding:
                least.add(outside, share, -1.0)
        least.add(first, share, -1.0)
    time = count  # the last variable
    first_load = len(least.right)
    for host, columns in leaving.items():
        least.add(columns, 0.0, extra=(time, -host_port[host].egress_bytes_per_second / fastest))
    for pod, columns in up.items():
        least.add(columns, 0.0, extra=(time, -pods[pod].egress_bytes_per_second / fastest))
    for pod, columns in down.items():
        least.add(columns, 0.0, extra=(time, -pods[pod].ingress_bytes_per_second / fastest))
    cost = np.zeros(count + 1)
    cost[-1] = 1.0

    def matrix(rows: _Rows) -> coo_matrix:
        return coo_matrix((rows.value, (rows.row, rows.column)), shape=(len(rows.right), count + 1))

    solved = linprog(cost, A_ub=matrix(least), b_ub=least.right, A_eq=matrix(equal), b_eq=equal.right, method="highs")
    if solved.fun is None:  # the solver fails on rates a billion times apart; other bounds still hold
        return 0.0, []
    duals = solved.ineqlin.marginals[first_load:]
    busy = duals < -1e-9 * max(abs(duals).max(), 1e-300)
    links = [("host", host) for host in leaving]
    links += [("up", pod) for pod in up] + [("down", pod) for pod in down]
    found = [link for link, binds in zip(links, busy.tolist(), strict=True) if binds]
    return float(solved.fun) * scale / fastest * (1 - 1e-9), sorted(found)
