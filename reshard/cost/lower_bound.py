"""The lower bound on the time of a plan by the rates of links, and the links that set the bound."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reshard.arguments import check_arguments
from reshard.cost.inside_lower_bound import bound_inside
from reshard.cost.pod_lower_bound import bound_in_pods
from reshard.errors import ArgumentError
from reshard.formatting import format_bytes, format_rate
from reshard.plan import HostRates, Plan, RotationPlan, used_nics
from reshard.ragged import NO_RANK
from reshard.sharding import TensorSpec
from reshard.topology import Link, Topology

HostSet = tuple[int, ...]
#: Bytes of regions by ``(holders, destinations)``: the places that hold a region, and the other places that need it.
#: A place is a host or a pod.
Classes = dict[tuple[HostSet, HostSet], int]
#: Bytes and number of the regions by ``(holders, destinations)``.
Demand = dict[tuple[HostSet, HostSet], tuple[int, int]]


@dataclass(frozen=True)
class Bound:
    """A time that no plan without relays can beat, and the links that set it, in words.

    Attributes:
        ports: the same links by name, such as ``host 2 in`` or ``pod 0 up``.
        holds_with_relays: whether relays cannot beat it either.
    """

    seconds: float
    reason: str
    ports: tuple[str, ...] = field(default=(), compare=False)
    holds_with_relays: bool = field(default=False, compare=False)


NOTHING = Bound(0.0, "nothing crosses hosts")


@check_arguments()
def find_bound(problem: Plan | Sequence[TensorSpec], topology: Topology | None = None) -> Bound:
    """The time that no plan without relays can beat, and the links that set it.

    Args:
        problem: a plan, or its tensors.
        topology: omitted, the plan's own.

    The model counts links between hosts. Traffic inside a host is free, except for regions that are held and needed on
    one host only (see :func:`~reshard.cost.inside_lower_bound.bound_inside`). A host sends at most the total rate of
    its NICs and receives at most their total rate, counting NICs that a rank of either layout uses. With pods the same
    holds for each pod and its uplink, and for hosts and pods together (see
    :func:`~reshard.cost.pod_lower_bound.bound_in_pods`); the largest of these bounds counts. Each is the optimum of a
    linear program. For hosts, x[k, h] is the number of bytes of class k (the regions with the same holders A and
    destinations R) that leave host h::

        minimise T    with    sum of x[k, h] over h in A        >= bytes[k]
                              sum of x[k, h] over h in A and R  =  bytes[k] * |R|
                              sum of x[k, h] over k             <= egress[h] * T
                              bytes that host h needs           <= ingress[h] * T

    Schedules without relays reach the bound in the limit. Two values suffice if sources and destinations share no host
    and no receiver sends slower than it receives. The bound is then the larger of the longest arrival and the shortest
    possible time of the busiest sender, both exact.

    Raises:
        ArgumentError: tensors without a topology. TopologyError: the topology lacks a rank.
    """
    if topology is not None:
        for spec in problem.tensors if isinstance(problem, Plan) else problem:
            topology.check_covers((*spec.src.ranks, *spec.dst.ranks))
    if isinstance(problem, RotationPlan) and topology in (None, problem.topology):
        return _bound_of_rotation(problem)
    if isinstance(problem, Plan):
        return _find_bound(problem.tensors, topology or problem.topology)
    if topology is None:
        raise ArgumentError("find_bound needs a plan, or tensors and a topology")
    return _find_bound(problem, topology)


def _find_bound(tensors: Sequence[TensorSpec], topology: Topology) -> Bound:
    used = used_nics(tensors, topology)
    hosts = {host: HostRates.of(nics) for host, nics in used.items()}
    of_hosts = _classes(tensors, topology.host_of_rank.__getitem__)
    partly = {host for host, nics in used.items() if len(nics) < len(topology.host(host).nics)}
    bound = _bound_of_places(of_hosts, hosts.__getitem__, "host", partly)
    if topology.pods:

        def pod_of(rank: int) -> int:
            return topology.host(topology.host_of_rank[rank]).pod or 0

        of_pods = _bound_of_places(_classes(tensors, pod_of), topology.pods.__getitem__, "pod")
        pods = {host: topology.host(host).pod or 0 for host in used}
        seconds, busy = bound_in_pods(of_hosts, hosts, pods, topology.pods)
        ports = tuple(f"host {place} out" if kind == "host" else f"pod {place} {kind}" for kind, place in busy)
        of_both = Bound(seconds, _format_busy_links(seconds, busy, hosts, topology.pods), ports)
        bound = max(bound, of_pods, of_both, key=lambda candidate: round(candidate.seconds, 12))
    seconds, reason = bound_inside(tensors, topology)
    return Bound(seconds, reason) if seconds > bound.seconds else bound


def _bound_of_rotation(plan: RotationPlan) -> Bound:
    """Like :func:`find_bound`, without a list of regions: all senders have equal loads, and so do all receivers."""
    loads = plan.loads
    arrival, leaving = loads.seconds_in(), loads.seconds_held()
    host = int(np.argmax(leaving if leaving.max() > arrival.max() else arrival))
    if leaving.max() > arrival.max():
        held = f"{format_bytes(loads.held[host])}, its share of what it holds,"
        return Bound(
            float(leaving.max()), f"host {host} must send {held} and can send {format_rate(loads.egress[host])}"
        )
    received, rate = format_bytes(loads.into[host]), format_rate(loads.ingress[host])
    return Bound(float(arrival.max()), f"host {host} must receive {received} and can receive {rate}")


def _format_busy_links(
    seconds: float, busy: Sequence[tuple[str, int]], hosts: Mapping[int, HostRates], pods: Sequence[Link]
) -> str:
    """For example ``what host 1 sends and what enters pod 1 is 4 MiB at least, and can be 3.75 GB/s together``."""
    words: list[str] = []
    rate = 0.0
    for link in ("host", "up", "down"):
        places = [place for kind, place in busy if kind == link]
        if link == "host":
            words += [f"what {_format_places('host', places)} send{'s' * (len(places) == 1)}"] * bool(places)
            rate += sum(hosts[place].egress_bytes_per_second for place in places)
        elif places:
            words.append(f"what {'leaves' if link == 'up' else 'enters'} {_format_places('pod', places)}")
            uplinks = [pods[place] for place in places]
            rate += sum(
                uplink.egress_bytes_per_second if link == "up" else uplink.ingress_bytes_per_second
                for uplink in uplinks
            )
    together = " together" if len(busy) > 1 else ""
    return f"{' and '.join(words)} is {format_bytes(seconds * rate)} at least, and can be {format_rate(rate)}{together}"


def _classes(tensors: Sequence[TensorSpec], place_of: Callable[[int], int]) -> Classes:
    """Bytes by holders and destinations, of the regions that some place needs and does not hold."""
    return {key: nbytes for key, (nbytes, _) in find_demand(tensors, place_of).items()}


def find_demand(tensors: Sequence[TensorSpec], place_of: Callable[[int], int]) -> Demand:
    """Bytes and number of regions by holders and destinations, of the regions that some place needs and lacks."""
    demand: Demand = {}
    for spec in tensors:
        tasks = spec.tasks
        src_sets, src_of = _place_sets(spec.src_tiles.ranks, place_of)
        dst_sets, dst_of = _place_sets(spec.dst_tiles.ranks, place_of)
        pair = src_of[tasks.src_tile] * len(dst_sets) + dst_of[tasks.dst_tile]
        pairs, inverse, counts = np.unique(pair, return_inverse=True, return_counts=True)
        nbytes = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(nbytes, inverse.ravel(), tasks.numel * spec.itemsize)
        for number, total, count in zip(pairs.tolist(), nbytes.tolist(), counts.tolist(), strict=True):
            holders = src_sets[number // len(dst_sets)]
            destinations = tuple(place for place in dst_sets[number % len(dst_sets)] if place not in holders)
            if destinations and total:
                before = demand.get((holders, destinations), (0, 0))
                demand[holders, destinations] = (before[0] + total, before[1] + count)
    return demand


def _place_sets(ranks: np.ndarray, place_of: Callable[[int], int]) -> tuple[list[HostSet], np.ndarray]:
    """The distinct sets of places that hold tiles, and the index of each tile's set."""
    number: dict[HostSet, int] = {}
    which = [
        number.setdefault(tuple(sorted({place_of(rank) for rank in members if rank != NO_RANK})), len(number))
        for members in ranks.tolist()
    ]
    return list(number), np.array(which, dtype=np.int64)


def _format_places(kind: str, places: Sequence[int]) -> str:
    """``host 3`` or ``hosts 0, 1 and 2``; empty for no places."""
    numbers = [str(place) for place in sorted(places)]
    if len(numbers) < 2:
        return f"{kind} {numbers[0]}" if numbers else ""
    return f"{kind}s {', '.join(numbers[:-1])} and {numbers[-1]}"


def _bound_of_places(
    classes: Classes, link_of: Callable[[int], Link | HostRates], kind: str, partly: Collection[int] = ()
) -> Bound:
    """The larger of the longest arrival and the longest departure.

    The reason mentions if a place is in ``partly``, whose ranks do not use all NICs.
    """

    def nic_note(places: Sequence[int]) -> str:
        return " by the NICs that its ranks here use" if not set(partly).isdisjoint(places) else ""

    names = ("up", "down") if kind == "pod" else ("out", "in")
    arrives: dict[int, int] = {}
    held: dict[HostSet, int] = {}
    for (holders, destinations), nbytes in classes.items():
        held[holders] = held.get(holders, 0) + nbytes
        for place in destinations:
            arrives[place] = arrives.get(place, 0) + nbytes
    if not arrives:
        return NOTHING
    times = {place: total / link_of(place).ingress_bytes_per_second for place, total in arrives.items()}
    last = max(times, key=lambda place: (times[place], -place))
    rate = link_of(last).ingress_bytes_per_second
    arrival = Bound(
        times[last],
        f"{_format_places(kind, [last])} must receive {format_bytes(arrives[last])} and can receive {format_rate(rate)}"
        f"{nic_note([last])}",
        (f"{kind} {last} {names[1]}",),
        holds_with_relays=True,
    )
    sources = {place for holders in held for place in holders}
    egress = {place: link_of(place).egress_bytes_per_second for place in sources | set(arrives)}
    passes_on = all(egress[place] >= link_of(place).ingress_bytes_per_second for place in arrives)
    if passes_on and sources.isdisjoint(arrives):
        seconds, places = _find_share(held, egress)
        alone = sum(total for key, total in held.items() if set(places).issuperset(key))
        verb = "holds" if len(places) == 1 else "hold"
        words = f"{_format_places(kind, places)} {verb} {format_bytes(alone)} that no other {kind} has and can send "
        held_alone = True
    else:
        seconds, places = _min_egress(classes, egress)
        total = seconds * sum(egress[place] for place in places)
        words = f"{_format_places(kind, places)} must send {format_bytes(total)} and can send "
        held_alone = False
    together = " together" if len(places) > 1 else ""
    leaving = Bound(
        seconds,
        words + format_rate(sum(egress[place] for place in places)) + together + nic_note(places),
        tuple(f"{kind} {place} {names[0]}" for place in places),
        held_alone,
    )
    return leaving if leaving.seconds > arrival.seconds * (1 + 1e-9) else arrival


def min_largest_share(held: Mapping[HostSet, float], egress: Mapping[int, float]) -> float:
    """The least possible time of the slowest place if the bytes of each key are divided among its places.

    Solved as a linear program. Its dual gives the set of places that binds, from which the value is recomputed exactly.
    """
    return _find_share(held, egress)[0]


def _find_share(held: Mapping[HostSet, float], egress: Mapping[int, float]) -> tuple[float, list[int]]:
    """The result of :func:`min_largest_share`, and the places that bind."""
    places = sorted({place for key in held for place in key})
    if not places:
        return 0.0, []
    alone = {key[0]: total / egress[key[0]] for key, total in held.items() if len(key) == 1}
    slowest = max(alone, key=lambda place: (alone[place], -place), default=places[0])
    if len(alone) == len(held):
        return alone[slowest], [slowest]
    if len(held) == 1:
        return sum(held.values()) / sum(egress[place] for place in places), places
    share = [(k, place) for k, key in enumerate(held) for place in key]
    value, duals = _solve(share, places, egress, [(list(held.values()), "=")], [range(len(share))])
    if not value:
        return alone.get(slowest, 0.0), [slowest]
    binding = _binding(places, duals)
    exact = sum(total for key, total in held.items() if set(binding).issuperset(key)) / max(
        sum(egress[place] for place in binding), 1e-300
    )
    return (exact if abs(exact - value) <= 1e-6 * value else value), binding


def _binding(places: Sequence[int], duals: Sequence[float]) -> list[int]:
    """The places whose load constraint has a nonzero dual."""
    tolerance = 1e-9 * max(map(abs, duals))
    return [place for place, dual in zip(places, duals, strict=True) if dual < -tolerance]


def min_egress_seconds(classes: Mapping[tuple[HostSet, HostSet], float], egress: Mapping[int, float]) -> float:
    """The least time for all departures without relays, if receivers may pass data on."""
    return _min_egress(classes, egress)[0]


def _min_egress(
    classes: Mapping[tuple[HostSet, HostSet], float], egress: Mapping[int, float]
) -> tuple[float, list[int]]:
    """The least time for all departures if receivers may pass data on, and the places that bind."""
    places = sorted({place for holders, destinations in classes for place in (*holders, *destinations)})
    share: list[tuple[int, int]] = []
    from_holders: list[int] = []
    for k, (holders, destinations) in enumerate(classes):
        from_holders.extend(range(len(share), len(share) + len(holders)))
        share.extend((k, place) for place in (*holders, *destinations))
    nbytes = list(classes.values())
    arrivals = [total * len(destinations) for (_, destinations), total in classes.items()]
    value, duals = _solve(share, places, egress, [(nbytes, ">="), (arrivals, "=")], [from_holders, range(len(share))])
    return value, _binding(places, duals)


def _solve(
    share: Sequence[tuple[int, int]],
    places: Sequence[int],
    egress: Mapping[int, float],
    wholes: Sequence[tuple[Sequence[float], str]],
    columns_of: Sequence[Sequence[int]],
) -> tuple[float, list[float]]:
    """Minimise the time of the slowest place. Variable i is the bytes of a class at a place, ``share[i]``.

    Constraint set j: for each class, the variables ``columns_of[j]`` sum to ``wholes[j]`` (values and sign).
    Returns the time and the dual of each place's load.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix, csr_matrix, vstack

    scale = float(max(max(nbytes) for nbytes, _ in wholes))
    fastest = max(egress.values())
    number = {place: i for i, place in enumerate(places)}
    classes = np.array([k for k, _ in share], dtype=np.int64)
    numbers = [number[place] for _, place in share]
    count = len(share)
    load = coo_matrix(
        (
            np.concatenate([np.ones(count), [-egress[place] / fastest for place in places]]),
            (numbers + list(range(len(places))), list(range(count)) + [count] * len(places)),
        ),
        shape=(len(places), count + 1),
    )
    upper: list[csr_matrix] = [load]
    upper_values = [np.zeros(len(places))]
    equal: list[csr_matrix] = []
    equal_values: list[np.ndarray] = []
    for (nbytes, sign), columns in zip(wholes, columns_of, strict=True):
        picked = np.array(columns, dtype=np.int64)
        matrix = coo_matrix((np.ones(len(picked)), (classes[picked], picked)), shape=(len(nbytes), count + 1))
        values = np.array(nbytes, dtype=np.float64) / scale
        if sign == "=":
            equal.append(matrix)
            equal_values.append(values)
        else:
            upper.append(-matrix)
            upper_values.append(-values)
    cost = np.zeros(count + 1)
    cost[-1] = 1.0
    solved = linprog(
        cost,
        A_ub=vstack(upper),
        b_ub=np.concatenate(upper_values),
        A_eq=vstack(equal),
        b_eq=np.concatenate(equal_values),
        method="highs",
    )
    if solved.fun is None:  # the solver fails on rates a billion times apart; other bounds still hold
        return 0.0, [0.0] * len(places)
    return float(solved.fun) * scale / fastest, solved.ineqlin.marginals[: len(places)].tolist()
