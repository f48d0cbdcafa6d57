"""Large exchanges in closed form: in slot t, NIC i sends to NIC i + t, so every port passes one message at a time."""

from __future__ import annotations

import numpy as np

from reshard import _native
from reshard.plan import PlanTransfers
from reshard.planner.multicast.chunk_workload import Nics
from reshard.planner.multicast.classes import Classes, cut_pieces
from reshard.planner.multicast.host_classes import HostClasses, busiest_port_seconds, is_fast_inside
from reshard.planner.strategies.chunk_limits import INSIDE_WINDOW, STAGING_PARTS, UNPACKED_CHUNK_BYTES, WINDOW
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.ragged import NO_RANK
from reshard.topology import MAX_NICS

#: Up to this many pairs of a class and a receiver, chunks are scheduled one by one.
MAX_SCHEDULED = 10_000
#: The slots may take this much longer than the busiest port.
_MAX_UNEVEN = 1.005


def rotate_hosts(problem: PlanProblem, host_classes: HostClasses, nics: Nics) -> PlanTransfers | None:
    """Send each class directly to every host that needs it, in rotation over the NICs, and there along a chain.

    Steps: 1 between hosts, then 1 for each rank of a host that needs the class. Bytes between hosts: unique. A message
    between hosts waits for the previous message of its sender's port and for that of its receiver's port. If all pairs
    of NICs exchange equally many bytes over equal links, no order is faster.

    Args:
        problem: the problem.
        host_classes: its classes.
        nics: the NICs.

    Returns:
        None if the problem is small, if links differ, if a class is held on several hosts, or if the slots would take
        longer than the busiest port must. Also None if hosts have several NICs and forward: their ranks then share the
        work better in a schedule.
    """
    classes = host_classes.classes
    if int((classes.receivers != NO_RANK).sum()) <= MAX_SCHEDULED or not host_classes.moves.any():
        return None
    if not nics.have_equal_rates or nics.pod or (np.diff(host_classes.holders[0]) != 1).any():
        return None
    if nics.have_multi_nic_hosts and _has_chains(host_classes):
        return None
    rate = problem.topology.host(int(host_classes.holders[1][0])).nics[0].egress_bytes_per_second
    must = busiest_port_seconds(problem.topology, host_classes) * rate
    rotates = not is_fast_inside(problem.topology, host_classes)
    return _to_transfers(problem, classes, rotates, must * _MAX_UNEVEN)


def _has_chains(host_classes: HostClasses) -> bool:
    """Whether a host has several ranks that need one class, or a class moves inside a host."""
    num_receivers = (host_classes.classes.receivers != NO_RANK).sum(axis=1)
    return bool((np.diff(host_classes.destinations[0])[host_classes.host_class] != num_receivers).any())


def _to_transfers(problem: PlanProblem, classes: Classes, rotates: bool, most_bytes: float) -> PlanTransfers | None:
    """The messages: in the order of slots, each piece of a class passes along the chain of receivers of a host.

    Args:
        problem, classes: what to send.
        rotates: whether chains of successive classes begin at successive ranks of a host, or all at the first one.
        most_bytes: None is returned if the slots, or a port, would pass more bytes one after the other.
    """
    limit = min(UNPACKED_CHUNK_BYTES, problem.staging_bytes // STAGING_PARTS)
    cuts = np.where(classes.nbytes <= limit, 1, -(-classes.nbytes // max(limit * 15 // 16, 1)))  # cuts snap to slices
    alone, topology = np.arange(len(classes)), problem.topology
    pieces = cut_pieces(problem, classes, alone, cuts, np.zeros(len(classes), dtype=bool))
    piece_offsets = np.searchsorted(pieces.class_of, np.arange(len(classes) + 1))
    count = int((np.diff(piece_offsets) * (classes.receivers != NO_RANK).sum(axis=1)).sum())
    region, sender, receiver, window, source = (np.empty(count, dtype=np.int64) for _ in range(5))
    after_offsets, after = np.empty(count + 1, dtype=np.int64), np.empty(2 * count, dtype=np.int64)
    num_after = _native.rotate(
        receivers=np.ascontiguousarray(classes.receivers),
        holder=_pick_holders(classes),
        nbytes=classes.nbytes,
        piece_offsets=piece_offsets,
        host_of=topology.host_array,
        nic_of=topology.host_array * MAX_NICS + topology.nic_array,
        num_nics=topology.num_hosts * MAX_NICS,
        rotates=rotates,
        most_bytes=most_bytes,
        window_across=WINDOW,
        window_inside=INSIDE_WINDOW,
        region=region,
        sender=sender,
        receiver=receiver,
        window=window,
        after_offsets=after_offsets,
        after=after,
        source=source,
    )
    if num_after < 0:
        return None
    return PlanTransfers.unchecked(
        box_offsets=pieces.at,
        box_tensor=pieces.tensor,
        box_start=pieces.start,
        box_stop=pieces.stop,
        region=region,
        edge_offsets=np.arange(count + 1),
        sender=sender,
        receiver=receiver,
        splits=np.broadcast_to(np.int64(1), (count, problem.start.shape[1])),
        window=window,
        after_offsets=after_offsets,
        after=after[:num_after],
        source=source,
    )


def _pick_holders(classes: Classes) -> np.ndarray:
    """``(classes,)`` the rank that sends each class: successive holders for successive classes."""
    if classes.holders.shape[1] == 1:
        return np.ascontiguousarray(classes.holders[:, 0])
    num_holders = (classes.holders != NO_RANK).sum(axis=1)
    real = np.sort(np.where(classes.holders == NO_RANK, np.iinfo(np.int64).max, classes.holders), axis=1)
    return real[np.arange(len(classes)), np.arange(len(classes)) % num_holders]
