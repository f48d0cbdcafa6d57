"""Multicast: chunks of all regions scheduled to ports, so that the busiest is never idle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reshard.errors import ArgumentError
from reshard.plan.transfers import Transfers
from reshard.planner.multicast.classes import EVEN, Classes, Pieces, cut_pieces
from reshard.planner.multicast.host_classes import HostClasses, count_chunks, is_fast_inside, members_of
from reshard.planner.multicast.native_schedule import Schedule, make_schedule
from reshard.planner.multicast.relay_limits import keep_staging_short
from reshard.planner.multicast.workload import UNITS, Ports, Workload
from reshard.planner.strategies.broadcast import broadcast_in_rotation
from reshard.planner.strategies.direct import send_recv
from reshard.planner.strategies.problem import DIRECT_CHUNK_BYTES, STAGING_PARTS, Problem, Routes
from reshard.ragged import NO_RANK

WINDOW = 8
#: Of messages inside hosts: those that a rank sends at once share its links, and all arrive late.
INSIDE_WINDOW = 4
#: Of what needs no packing, for links so fast that smaller chunks would wait for latencies.
LARGEST_CHUNK_BYTES = 32 * 2**20
#: Ranks of a host that take turns wait for each other at each turn, so where one can serve its port alone it does.
_RUN = 2**20
#: Rates closer together than this part are taken as equal, so that transfers end together.
_ALIKE = 0.04
#: Scheduling more takes longer than some seconds; then regions are broadcast in rotation.
_MOST_STEPS = 2 * 10**9
#: The same, as it keeps a number for each two hosts.
_MOST_HOSTS = 8192
#: A plan with more would take more than four gigabytes.
_MOST_CHUNKS = 10_000_000
#: Regions cut into more chunks than this, besides their first ones, take longer than ten seconds.
_MOST_CUTS = 500_000
#: A holder with less than this part of the rate of another one gains little and comes late.
_SLOW = 0.3
#: Of ranks that exchange a region each: more of them are sent in rotation.
_MOST_PAIRS = 100_000


def multicast(problem: Problem) -> Routes | Transfers:
    """Cut regions into equal chunks and deal them out to ports as those become free.

    Steps: chunks of the busiest port, and a few until the first ones have reached the last host. Bytes between hosts:
    unique. Source: list scheduling by matching free ports, rarest chunk first. Between thousands of hosts regions are
    broadcast in rotation instead, whole; where more than 100,000 pairs of ranks exchange one region each over equal
    links they are sent in rotation, which is at the bound too and planned faster.
    """
    if is_large_exchange(problem):
        return send_recv(problem)
    if has_many_hosts(problem):
        return broadcast_in_rotation(problem)
    return schedule_chunks(problem)


def has_many_hosts(problem: Problem) -> bool:
    """Whether there are too many to schedule chunks to."""
    return problem.topology.num_hosts > _MOST_HOSTS


def schedule_chunks(
    problem: Problem,
    near_first: bool = False,
    keeps_partners: bool = False,
    loaded: tuple[Workload, Pieces] | None = None,
) -> Routes | Transfers:
    """As :func:`multicast`, for any problem; ``loaded`` is what :func:`make_workload` made of it, if it did already.

    The other arguments are those of :class:`Workload`.
    """
    workload, pieces = loaded or make_workload(problem)
    if workload.num_steps > _MOST_STEPS:
        return broadcast_in_rotation(problem)
    made = make_schedule(ports_of(problem), replace(workload, near_first=near_first, keeps_partners=keeps_partners))
    num_ranks = len(problem.topology.host_of_rank)
    return _to_transfers(problem, pieces, keep_staging_short(made, workload, num_ranks, problem.staging_bytes))


def multicast_near(problem: Problem) -> Routes | Transfers:
    """As :func:`multicast`, but NICs pass what ranks at them hold or need rather than what is rarest."""
    return schedule_chunks(problem, near_first=True)


def multicast_from_partners(problem: Problem) -> Routes | Transfers:
    """As :func:`multicast`, but each sender serves one receiver for as long as it can.

    Then receivers that exchange what they get from slow and fast holders each have the senders that fit their rate.
    """
    return schedule_chunks(problem, keeps_partners=True)


def multicast_from_fast(problem: Problem) -> Routes | Transfers:
    """As :func:`multicast`, but what a fast host holds too is not sent from slow ones, whose chunks would come late."""
    return multicast(without_slow_holders(problem) or problem)


def without_slow_holders(problem: Problem) -> Problem | None:
    """The problem where no region is sent from hosts much slower than another that holds it; None if there are none.

    A host that needs the region too keeps it: what it holds must not be sent to it.
    """
    hosts = range(problem.topology.num_hosts)
    rate = np.array([problem.topology.host(h).egress_bytes_per_second for h in hosts] + [0.0])
    host = np.where(problem.holders == NO_RANK, -1, problem.topology.host_by_rank[problem.holders])
    slow = (rate[host] < _SLOW * rate[host].max(axis=1, keepdims=True)) & (problem.holders != NO_RANK)
    for destinations in problem.destinations.T:
        slow &= (host != problem.topology.host_by_rank[destinations][:, None]) | (destinations == NO_RANK)[:, None]
    return replace(problem, holders=np.where(slow, NO_RANK, problem.holders)) if slow.any() else None


def is_large_exchange(problem: Problem) -> bool:
    """Whether so many pairs of ranks exchange one region each, over equal links, that they are sent in rotation."""
    if len(problem) <= _MOST_PAIRS or len(problem.tensors) > 1 or problem.topology.pods:
        return False
    has_one_end = problem.holders.shape[1] == 1 and int((problem.receivers != NO_RANK).sum(axis=1).max()) <= 1
    return has_one_end and ports_of(problem).are_alike


def make_workload(problem: Problem, host_classes: HostClasses | None = None) -> tuple[Workload, Pieces]:
    """The workload of a problem, and the boxes of its pieces; ``host_classes`` are the problem's, if known."""
    host_classes = host_classes or HostClasses.of(Classes.of(problem), problem.topology)
    topology = problem.topology
    largest = _largest_chunks(problem, host_classes)
    fewest = int((-(-host_classes.nbytes // largest)).sum())
    most = min(_MOST_CHUNKS, _MOST_CUTS + len(host_classes))
    if fewest > most:
        raise ArgumentError(
            f"{int(host_classes.nbytes.sum()):,} bytes make at least {fewest:,} chunks; at most {most:,} are planned "
            "at once, so move them in several calls"
        )
    counts, part = count_chunks(topology, host_classes, largest)
    # seconds in which a port of rate 1 passes a chunk of size 1
    fastest = max(
        max(nic.egress_bytes_per_second, nic.ingress_bytes_per_second) for h in topology.hosts for nic in h.nics
    )
    step = float((host_classes.nbytes / counts / part)[host_classes.moves].max(initial=0.0)) / fastest
    pieces = cut_pieces(problem, host_classes.classes, host_classes.host_class, counts, host_classes.moves)
    workload = Workload(
        host_class_holders=host_classes.holders,
        host_class_receivers=host_classes.destinations,
        host_class_size=np.maximum(np.round(part * UNITS), 1).astype(np.int64),
        host_class_of=pieces.host_class_of,
        class_holders=members_of(host_classes.classes.holders),
        class_receivers=members_of(host_classes.classes.receivers),
        piece_at=np.searchsorted(pieces.chunk, np.arange(len(pieces.host_class_of) + 1)),
        piece_class=pieces.class_of,
        piece_bytes=pieces.nbytes,
        run=_RUN if is_fast_inside(topology, host_classes) else 1,
        inside_each=topology.inside_latency_seconds / step if step else 0.0,
        inside_per_byte=1.0 / (topology.inside_bytes_per_second * step)
        if topology.inside_bytes_per_second and step
        else 0.0,
    )
    return workload, pieces


def _largest_chunks(problem: Problem, host_classes: HostClasses) -> np.ndarray:
    """``(host_classes,)`` bytes that no chunk may exceed: of what is packed or staged, several must fit at once."""
    packed = max(min(DIRECT_CHUNK_BYTES, problem.staging_bytes // STAGING_PARTS) * 15 // 16, 1)  # cuts snap to slices
    largest = np.full(len(host_classes), packed, dtype=np.int64)
    if any(len(host.nics) > 1 for host in problem.topology.hosts):
        return largest
    # regions that are cut at whole slices of their first dim lie in one piece wherever they are
    lead = host_classes.classes.task[host_classes.classes.task_at[:-1]]
    size = (problem.stop - problem.start)[lead]
    first = (size > 1).argmax(axis=1)[:, None] if size.shape[1] else np.zeros((len(lead), 0), dtype=np.int64)
    rows = np.take_along_axis(size, first, axis=1).prod(axis=1)
    is_plain = ~problem.is_strided[lead] & (np.diff(host_classes.classes.task_at) == 1)
    is_plain &= problem.nbytes[lead] // rows * EVEN <= packed
    return (
        np.where(np.logical_and.reduceat(is_plain, host_classes.first_class), LARGEST_CHUNK_BYTES, largest)
        if len(host_classes)
        else largest
    )


def ports_of(problem: Problem) -> Ports:
    """One port per NIC; rates over the largest, those that are nearly alike made equal."""
    topology = problem.topology
    ranks = {rank for spec in problem.tensors for rank in (*spec.src.ranks, *spec.dst.ranks)}
    number: dict[tuple[int, int], int] = {}
    host: list[int] = []
    out: list[float] = []
    into: list[float] = []
    for h in range(topology.num_hosts):
        for n, nic in enumerate(topology.host(h).nics):
            number[h, n] = len(host)
            host.append(h)
            out.append(nic.egress_bytes_per_second)
            into.append(nic.ingress_bytes_per_second)
    up = [pod.egress_bytes_per_second for pod in topology.pods]
    down = [pod.ingress_bytes_per_second for pod in topology.pods]
    alike = _make_alike([*out, *into, *up, *down])
    return Ports(
        host=tuple(host),
        out=tuple(alike[rate] for rate in out),
        into=tuple(alike[rate] for rate in into),
        of_rank=tuple(
            number[place] if rank in ranks else -1
            for rank, place in enumerate(zip(topology.host_of_rank, topology.nic_of_rank, strict=True))
        ),
        pod=tuple(topology.host(h).pod or 0 for h in range(topology.num_hosts)) if topology.pods else (),
        up=tuple(alike[rate] for rate in up),
        down=tuple(alike[rate] for rate in down),
    )


def _make_alike(rates: list[float]) -> dict[float, float]:
    """Each rate over the largest, snapped to the largest of those next to it."""
    alike: dict[float, float] = {}
    top = max(rates)
    lead = top
    for rate in sorted(set(rates), reverse=True):
        if rate < lead * (1 - _ALIKE):
            lead = rate
        alike[rate] = lead / top
    return alike


def _to_transfers(problem: Problem, pieces: Pieces, made: Schedule) -> Transfers:
    host = problem.topology.host_by_rank
    return Transfers(
        box_at=pieces.at,
        box_tensor=pieces.tensor,
        box_start=pieces.start,
        box_stop=pieces.stop,
        region=made.piece,
        edge_at=np.arange(len(made.piece) + 1),
        sender=made.sender,
        receiver=made.receiver,
        splits=np.ones((len(made.piece), problem.start.shape[1]), dtype=np.int64),
        window=np.where(host[made.sender] == host[made.receiver], INSIDE_WINDOW, WINDOW),
        after_at=made.after_at,
        after=made.after,
        source=made.source,
    )
