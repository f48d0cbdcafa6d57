"""The multicast strategy: schedule chunks of all regions on the ports so that the busiest port is never idle."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from reshard.errors import ArgumentError
from reshard.plan import PlanTransfers
from reshard.planner.multicast.chunk_workload import CHUNK_UNITS, ChunkWorkload, Nics
from reshard.planner.multicast.classes import MIN_SLICES, Boxes, Classes, Pieces, cut_pieces
from reshard.planner.multicast.host_classes import HostClasses, count_chunks, is_fast_inside, members_of
from reshard.planner.multicast.native_schedule import ChunkSchedule, interleave, make_schedule
from reshard.planner.multicast.problem_parts import MAX_TOGETHER, ProblemPart, split_by_ports
from reshard.planner.multicast.relay_limits import limit_relay_staging
from reshard.planner.multicast.rotation import rotate_hosts
from reshard.planner.strategies.broadcast import broadcast_in_rotation
from reshard.planner.strategies.chunk_limits import (
    INSIDE_WINDOW,
    MAX_MULTICAST_CHUNK_BYTES,
    STAGING_PARTS,
    UNPACKED_CHUNK_BYTES,
    WINDOW,
)
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes
from reshard.ragged import NO_RANK

#: Value of :attr:`ChunkWorkload.max_lead` if one rank can serve its NIC alone. Ranks in turn wait for each other.
_UNLIMITED_LEAD = 2**20
#: Rates that differ by less than this fraction count as equal. Transfers at equal rates end together.
_RATE_TOLERANCE = 0.04
#: Limit on scheduling steps, which take a few seconds. Above it, regions are broadcast in rotation.
_MAX_STEPS = 2 * 10**9
#: Limit on the steps of the scheduler. Above it, chunks from one host to all others pass in a fixed pattern, which
#: takes up to three slots more. A plan has hundreds of slots.
_MAX_MATCHED = 5 * 10**7
#: Limit on hosts, since the scheduler keeps a counter per pair of hosts. Above it regions are broadcast in rotation.
_MAX_HOSTS = 8192
#: A plan with more chunks takes more than 4 GB.
_MAX_CHUNKS = 10_000_000
#: Limit on chunks beyond the first of each host class; more take longer than 10 s to plan.
_MAX_CUTS = 500_000
#: ``multicast_from_fast`` ignores holders with less than this fraction of the rate of the fastest holder.
_SLOW_HOLDER_RATE = 0.3


def multicast(problem: PlanProblem) -> Routes | PlanTransfers:
    """Cut regions into equal chunks and schedule each chunk on a port as soon as the port is free.

    Steps: the chunks of the busiest port, plus a few until the first chunks reach the last host. Bytes between hosts:
    unique. Source: list scheduling that matches free ports, rarest chunk first. Two cases are planned differently.
    Above 8,192 hosts, whole regions are broadcast in rotation. If all pairs of hosts exchange equally much over
    equal links, large plans are those of :func:`rotate_hosts`, which are as fast and planned faster.

    Raises:
        ArgumentError: the regions make too many chunks for one plan.
    """
    rotated = rotate_hosts(problem, HostClasses.of(Classes.of(problem), problem.topology), nics_of(problem))
    if rotated is not None:
        return rotated
    if has_many_hosts(problem):
        return broadcast_in_rotation(problem)
    return schedule_chunks(problem)


def has_many_hosts(problem: PlanProblem) -> bool:
    """Whether there are too many hosts to schedule chunks."""
    return problem.topology.num_hosts > _MAX_HOSTS


def schedule_chunks(
    problem: PlanProblem,
    near_first: bool = False,
    keeps_partners: bool = False,
    prepared: tuple[ChunkWorkload, Pieces] | None = None,
    max_together: int = MAX_TOGETHER,
) -> Routes | PlanTransfers:
    """Like :func:`multicast`, without its special cases.

    Args:
        problem: the problem.
        near_first, keeps_partners: see :class:`ChunkWorkload`.
        prepared: the result of :func:`make_workload` for ``problem``, if known.
        max_together: see :func:`split_by_ports`.
    """
    if parts := split_by_ports(problem, max_together):
        return _schedule_parts(problem, parts, near_first, keeps_partners)
    workload, pieces = prepared or make_workload(problem)
    nics = nics_of(problem)
    is_plain = nics.have_equal_rates and not nics.have_multi_nic_hosts and not nics.pod
    if workload.num_steps > _MAX_MATCHED and workload.has_one_holder and is_plain:
        workload = replace(workload, is_broadcast=True)
    elif workload.num_steps > _MAX_STEPS:
        return broadcast_in_rotation(problem)
    workload = replace(workload, near_first=near_first, keeps_partners=keeps_partners)
    return _to_transfers(problem, pieces.boxes, _schedule(problem, nics, workload))


def _schedule(problem: PlanProblem, nics: Nics, workload: ChunkWorkload) -> ChunkSchedule:
    return limit_relay_staging(make_schedule(nics, workload), workload, problem.staging_bytes)


def _schedule_parts(
    problem: PlanProblem, parts: Sequence[ProblemPart], near_first: bool, keeps_partners: bool
) -> PlanTransfers:
    """The transfers of all parts; parts with equal workloads have one schedule."""
    known: dict[object, ChunkSchedule] = {}
    schedules, boxes = [], []
    for part in parts:
        workload, pieces = make_workload(part.problem, part.host_classes)
        workload = replace(workload, near_first=near_first, keeps_partners=keeps_partners)
        nics = nics_of(part.problem, range(len(part.ranks)))
        key = nics, workload.key
        if key not in known:
            known[key] = _schedule(part.problem, nics, workload)
        made = known[key]
        schedules.append(replace(made, sender=part.ranks[made.sender], receiver=part.ranks[made.receiver]))
        boxes.append(pieces.boxes)
    return _to_transfers(problem, Boxes.join(boxes), interleave(schedules, [len(part.at) - 1 for part in boxes]))


def multicast_near(problem: PlanProblem) -> Routes | PlanTransfers:
    """Like :func:`multicast`, but each NIC prefers chunks that its own ranks hold or need over the rarest chunks."""
    return schedule_chunks(problem, near_first=True)


def multicast_from_partners(problem: PlanProblem) -> Routes | PlanTransfers:
    """Like :func:`multicast`, but each sender keeps the same receiver for as long as it can.

    This helps if holders have different rates and receivers exchange chunks: each receiver then keeps the senders that
    match its rate.
    """
    return schedule_chunks(problem, keeps_partners=True)


def multicast_in_parts(problem: PlanProblem) -> Routes | PlanTransfers:
    """Like :func:`multicast`, but cut into parts that share no port, however small the problem is."""
    return schedule_chunks(problem, max_together=0)


def multicast_from_fast(problem: PlanProblem) -> Routes | PlanTransfers:
    """Like :func:`multicast`, but slow holders do not send regions that a fast host holds too."""
    return multicast(without_slow_holders(problem) or problem)


def without_slow_holders(problem: PlanProblem) -> PlanProblem | None:
    """The problem without holders on hosts much slower than another holder's host; None if there are none.

    A slow host that also needs the region stays a holder; otherwise the region would be sent to it.
    """
    hosts = range(problem.topology.num_hosts)
    rate = np.array([problem.topology.host(h).egress_bytes_per_second for h in hosts] + [0.0])
    host = np.where(problem.holders == NO_RANK, -1, problem.topology.host_array[problem.holders])
    slow = (rate[host] < _SLOW_HOLDER_RATE * rate[host].max(axis=1, keepdims=True)) & (problem.holders != NO_RANK)
    for destinations in problem.destinations.T:
        slow &= (host != problem.topology.host_array[destinations][:, None]) | (destinations == NO_RANK)[:, None]
    return replace(problem, holders=np.where(slow, NO_RANK, problem.holders)) if slow.any() else None


def make_workload(problem: PlanProblem, host_classes: HostClasses | None = None) -> tuple[ChunkWorkload, Pieces]:
    """The workload of a problem and its pieces; ``host_classes`` are those of the problem, if known.

    Raises:
        ArgumentError: the regions make too many chunks for one plan.
    """
    host_classes = host_classes or HostClasses.of(Classes.of(problem), problem.topology)
    topology = problem.topology
    largest = _largest_chunks(problem, host_classes)
    fewest = int((-(-host_classes.nbytes // largest)).sum())
    limit = min(_MAX_CHUNKS, _MAX_CUTS + len(host_classes))
    if fewest > limit:
        raise ArgumentError(
            f"{int(host_classes.nbytes.sum()):,} bytes make at least {fewest:,} chunks; at most {limit:,} fit in one "
            "plan; move the tensors in several calls"
        )
    largest_piece = min(UNPACKED_CHUNK_BYTES, problem.staging_bytes // STAGING_PARTS)
    counts, relative_size = count_chunks(topology, host_classes, largest, largest_piece)
    # one step of the scheduler's clock: seconds to pass a chunk of size 1 at rate 1
    fastest = max(
        max(nic.egress_bytes_per_second, nic.ingress_bytes_per_second) for h in topology.hosts for nic in h.nics
    )
    step = float((host_classes.nbytes / counts / relative_size)[host_classes.moves].max(initial=0.0)) / fastest
    pieces = cut_pieces(problem, host_classes.classes, host_classes.host_class, counts, host_classes.moves)
    workload = ChunkWorkload(
        host_class_holders=host_classes.holders,
        host_class_receivers=host_classes.destinations,
        host_class_size=np.maximum(np.round(relative_size * CHUNK_UNITS), 1).astype(np.int64),
        host_class_of=pieces.host_class_of,
        class_holders=members_of(host_classes.classes.holders),
        class_receivers=members_of(host_classes.classes.receivers),
        piece_offsets=np.searchsorted(pieces.chunk, np.arange(len(pieces.host_class_of) + 1)),
        piece_class=pieces.class_of,
        piece_bytes=pieces.nbytes,
        max_lead=_UNLIMITED_LEAD if is_fast_inside(topology, host_classes) else 1,
        inside_each=topology.inside_latency_seconds / step if step else 0.0,
        inside_per_byte=1.0 / (topology.inside_bytes_per_second * step)
        if topology.inside_bytes_per_second and step
        else 0.0,
    )
    return workload, pieces


def _largest_chunks(problem: PlanProblem, host_classes: HostClasses) -> np.ndarray:
    """``(host_classes,)`` largest chunk in bytes; several packed or staged chunks must fit the staging at once."""
    packed = max(min(UNPACKED_CHUNK_BYTES, problem.staging_bytes // STAGING_PARTS) * 15 // 16, 1)  # cuts snap to slices
    largest = np.full(len(host_classes), packed, dtype=np.int64)
    if any(len(host.nics) > 1 for host in problem.topology.hosts):
        return largest
    # a region cut at whole slices of its first dim is contiguous in every shard, so it is never packed
    lead = host_classes.classes.task[host_classes.classes.task_offsets[:-1]]
    size = (problem.stop - problem.start)[lead]
    first = (size > 1).argmax(axis=1)[:, None] if size.shape[1] else np.zeros((len(lead), 0), dtype=np.int64)
    rows = np.take_along_axis(size, first, axis=1).prod(axis=1)
    is_plain = ~problem.is_strided[lead] & (np.diff(host_classes.classes.task_offsets) == 1)
    is_plain &= problem.nbytes[lead] // rows * MIN_SLICES <= packed
    return (
        np.where(np.logical_and.reduceat(is_plain, host_classes.first_class), MAX_MULTICAST_CHUNK_BYTES, largest)
        if len(host_classes)
        else largest
    )


def nics_of(problem: PlanProblem, ranks: Collection[int] | None = None) -> Nics:
    """The NICs that ranks use. Rates are relative to the largest, and nearly equal rates are made equal.

    Args:
        problem: the problem.
        ranks: ranks that participate; None: the ranks of all tensors.
    """
    topology = problem.topology
    if ranks is None:
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
    snapped = _snap_rates([*out, *into, *up, *down])
    return Nics(
        host=tuple(host),
        out=tuple(snapped[rate] for rate in out),
        into=tuple(snapped[rate] for rate in into),
        of_rank=tuple(
            number[nic] if rank in ranks else -1
            for rank, nic in enumerate(zip(topology.host_of_rank, topology.nic_of_rank, strict=True))
        ),
        pod=tuple(topology.host(h).pod or 0 for h in range(topology.num_hosts)) if topology.pods else (),
        up=tuple(snapped[rate] for rate in up),
        down=tuple(snapped[rate] for rate in down),
    )


def _snap_rates(rates: list[float]) -> dict[float, float]:
    """Maps each rate to a rate relative to the largest; nearly equal rates map to the largest among them."""
    snapped: dict[float, float] = {}
    top = max(rates)
    lead = top
    for rate in sorted(set(rates), reverse=True):
        if rate < lead * (1 - _RATE_TOLERANCE):
            lead = rate
        snapped[rate] = lead / top
    return snapped


def _to_transfers(problem: PlanProblem, boxes: Boxes, schedule: ChunkSchedule) -> PlanTransfers:
    host = problem.topology.host_array
    return PlanTransfers.unchecked(
        box_offsets=boxes.at,
        box_tensor=boxes.tensor,
        box_start=boxes.start,
        box_stop=boxes.stop,
        region=schedule.piece,
        edge_offsets=np.arange(len(schedule.piece) + 1),
        sender=schedule.sender,
        receiver=schedule.receiver,
        splits=np.broadcast_to(np.int64(1), (len(schedule.piece), problem.start.shape[1])),
        window=np.where(host[schedule.sender] == host[schedule.receiver], INSIDE_WINDOW, WINDOW),
        after_offsets=schedule.after_offsets,
        after=schedule.after,
        source=schedule.source,
    )
