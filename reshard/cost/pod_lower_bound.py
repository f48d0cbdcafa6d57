"""The lower bound on a topology with pods, by host NICs and pod uplinks together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from reshard.cost.merged_program import LinearProgram, solve
from reshard.plan import HostRates
from reshard.topology import Link


class _ConstraintRows:
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
    host_links: Mapping[int, Link | HostRates],
    pod_of: Mapping[int, int],
    pods: Sequence[Link],
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
    if not classes:
        return 0.0, []
    scale = float(max(classes.values()))
    fastest = max(link.egress_bytes_per_second for link in (*host_links.values(), *pods))
    program = _Program(pod_of)
    for (holders, destinations), nbytes in classes.items():
        program.add_class(holders, destinations, nbytes / scale)
    rates = {("host", host): host_links[host].egress_bytes_per_second for host in program.leaving}
    rates |= {("up", pod): pods[pod].egress_bytes_per_second for pod in program.up}
    rates |= {("down", pod): pods[pod].ingress_bytes_per_second for pod in program.down}
    seconds, busy = program.solve({link: rate / fastest for link, rate in rates.items()})
    return seconds * scale / fastest * (1 - 1e-9), sorted(busy)


class _Program:
    """The linear program of :func:`bound_in_pods`. Variables are numbered in the order in which classes add them.

    Attributes:
        leaving, up, down: the variables whose bytes leave each host, leave each pod, and enter each pod.
    """

    def __init__(self, pod_of: Mapping[int, int]) -> None:
        self._pod_of, self._count = pod_of, 0
        self.leaving: dict[int, list[int]] = defaultdict(list)
        self.up: dict[int, list[int]] = defaultdict(list)
        self.down: dict[int, list[int]] = defaultdict(list)
        self._equal, self._least = _ConstraintRows(), _ConstraintRows()

    def add_class(self, holders: Sequence[int], destinations: Sequence[int], nbytes: float) -> None:
        """Add the variables of a class, and the rows that make it reach its destinations."""
        pod_of = self._pod_of
        first: list[int] = []
        needing: dict[int, list[int]] = {}
        for host in destinations:
            needing.setdefault(pod_of[host], []).append(host)
        holding = {pod_of[host] for host in holders}
        for pod, hosts in needing.items():
            alone = hosts[0] if len(hosts) == 1 else None
            members = [host for host in (*holders, *destinations) if host != alone]
            every, outside = range(self._count, self._count + len(members)), []
            for variable, host in zip(every, members, strict=True):
                self.leaving[host].append(variable)
                if pod_of[host] != pod:
                    outside.append(variable)
                    self.up[pod_of[host]].append(variable)
            if outside:
                self.down[pod].extend(outside)
            first += every[: len(holders)]  # no destination is a holder
            self._count += len(members)
            self._equal.add(every, nbytes * len(hosts))
            if pod not in holding:
                self._least.add(outside, nbytes, -1.0)
        self._least.add(first, nbytes, -1.0)

    def solve(self, rate_of: Mapping[tuple[str, int], float]) -> tuple[float, list[tuple[str, int]]]:
        """Minimise the time in which all links carry their bytes; ``rate_of`` lists the links.

        Returns:
            The time, and the links that are busy throughout. Without a solution, 0 and no link.
        """
        time = self._count  # the last variable
        first_load = len(self._least.right)
        columns_of = {"host": self.leaving, "up": self.up, "down": self.down}
        for (kind, number), rate in rate_of.items():
            self._least.add(columns_of[kind][number], 0.0, extra=(time, -rate))
        cost = np.zeros(self._count + 1)
        cost[-1] = 1.0
        upper, equal = self._least, self._equal
        num_upper = len(upper.right)
        solved = solve(
            LinearProgram(
                cost=cost,
                constraint=np.concatenate(
                    [np.array(upper.row, dtype=np.int64), np.array(equal.row, np.int64) + num_upper]
                ),
                variable=np.array(upper.column + equal.column, dtype=np.int64),
                value=np.array(upper.value + equal.value),
                right=np.array(upper.right + equal.right),
                is_equal=np.arange(num_upper + len(equal.right)) >= num_upper,
            )
        )
        if solved is None:  # the solver fails on rates a billion times apart; other bounds still hold
            return 0.0, []
        duals = solved[1][first_load:num_upper]
        busy = duals < -1e-9 * max(abs(duals).max(), 1e-300)
        return solved[0], [link for link, binds in zip(rate_of, busy.tolist(), strict=True) if binds]
