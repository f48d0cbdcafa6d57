"""Large exchanges in closed form: in slot t, host i sends to host i + t, so every port passes one message at a time."""

from __future__ import annotations

import numpy as np

from reshard.plan import Transfers
from reshard.planner.multicast.classes import Classes, cut_pieces
from reshard.planner.multicast.host_classes import HostClasses, busiest_port_seconds, is_fast_inside
from reshard.planner.multicast.workload import Ports
from reshard.planner.strategies.problem import DIRECT_CHUNK_BYTES, INSIDE_WINDOW, STAGING_PARTS, WINDOW, PlanProblem
from reshard.ragged import NO_RANK, number_values, ranges

#: Up to this many pairs of a class and a receiver, chunks are scheduled one by one.
MAX_SCHEDULED = 10_000
#: The slots may take this much longer than the busiest port.
_MAX_UNEVEN = 1.005


def rotate_hosts(problem: PlanProblem, host_classes: HostClasses, ports: Ports) -> Transfers | None:
    """Send each class directly to every host that needs it, in rotation over the hosts, and there along a chain.

    Steps: 1, and the ranks of a host that need a class. Bytes between hosts: unique. A message between hosts comes
    after the last ones of its two ports. If all pairs of hosts exchange equally much over equal links, no order is
    faster.

    Args:
        problem: the problem. host_classes: its classes. ports: one for each NIC.

    Returns:
        None if the problem is small, if links differ, if a class is held on several hosts, or if the slots would take
        longer than the busiest port must.
    """
    classes = host_classes.classes
    if int((classes.receivers != NO_RANK).sum()) <= MAX_SCHEDULED or not host_classes.moves.any():
        return None
    if not ports.have_equal_rates or ports.have_multi_port_hosts or ports.pod:
        return None
    if (np.diff(host_classes.holders[0]) != 1).any():
        return None
    groups = _Groups.of(problem, classes)
    crosses = groups.slot >= 0
    i, j, nbytes = groups.sender_port[crosses], groups.receiver_port[crosses], classes.nbytes[groups.class_of[crosses]]
    num_senders, num_receivers = int(i.max()) + 1, int(j.max()) + 1
    pairs = np.bincount(i * num_receivers + j, weights=nbytes, minlength=num_senders * num_receivers)
    table = pairs.reshape(num_senders, num_receivers)
    slot = (np.arange(num_receivers) - np.arange(num_senders)[:, None]) % max(num_senders, num_receivers)
    longest = np.zeros(max(num_senders, num_receivers))
    np.maximum.at(longest, slot.ravel(), pairs)
    host = problem.topology.host(int(host_classes.holders[1][0]))
    rate = max(nic.egress_bytes_per_second for nic in host.nics)
    must = busiest_port_seconds(problem.topology, host_classes) * rate
    if max(float(longest.sum()), float(table.sum(axis=1).max())) > must * _MAX_UNEVEN:
        return None
    return _to_transfers(problem, host_classes, groups)


class _Groups:
    """Pairs of a class and a host that needs it, in the order of their slots. All arrays ``(groups,)`` unless noted.

    Attributes:
        class_of: the class. slot: when the host gets it, -1 if the host holds it.
        sender_port, receiver_port: number of the holder's host among senders, and of the host among receivers.
        holder: the rank that sends.
        receiver_at, receivers: group g has receivers ``receivers[receiver_at[g]:receiver_at[g + 1]]``.
    """

    def __init__(self, **arrays: np.ndarray) -> None:
        self.class_of, self.slot, self.holder = arrays["class_of"], arrays["slot"], arrays["holder"]
        self.sender_port, self.receiver_port = arrays["sender_port"], arrays["receiver_port"]
        self.receiver_at, self.receivers = arrays["receiver_at"], arrays["receivers"]

    @classmethod
    def of(cls, problem: PlanProblem, classes: Classes) -> _Groups:
        """The groups of a problem whose classes have one holder host each."""
        host, num_hosts = problem.topology.host_by_rank, problem.topology.num_hosts
        of, column = np.nonzero(classes.receivers != NO_RANK)
        receiver = classes.receivers[of, column]
        key = of * num_hosts + host[receiver]
        order = np.argsort(key, kind="stable")
        key, receiver = key[order], receiver[order]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        count = np.diff(np.append(first, len(key)))
        class_of, to = key[first] // num_hosts, key[first] % num_hosts
        num_holders = (classes.holders != NO_RANK).sum(axis=1)
        real = np.sort(np.where(classes.holders == NO_RANK, np.iinfo(np.int64).max, classes.holders), axis=1)
        holder = real[np.arange(len(classes)), np.arange(len(classes)) % num_holders][class_of]
        (senders, i), (receivers, j) = number_values(host[holder]), number_values(to)
        slot = np.where(host[holder] != to, (j - i) % max(len(senders), len(receivers)), -1)
        order = np.lexsort((class_of, i, slot))
        return cls(
            class_of=class_of[order],
            slot=slot[order],
            holder=holder[order],
            sender_port=i[order],
            receiver_port=j[order],
            receiver_at=np.concatenate([[0], np.cumsum(count[order])]),
            receivers=receiver[ranges(first[order], count[order])],
        )


def _to_transfers(problem: PlanProblem, host_classes: HostClasses, groups: _Groups) -> Transfers:
    classes = host_classes.classes
    limit = min(DIRECT_CHUNK_BYTES, problem.staging_bytes // STAGING_PARTS)
    cuts = np.where(classes.nbytes <= limit, 1, -(-classes.nbytes // max(limit * 15 // 16, 1)))  # cuts snap to slices
    alone = np.arange(len(classes))
    pieces = cut_pieces(problem, classes, alone, cuts, np.zeros(len(classes), dtype=bool))
    piece_at = np.searchsorted(pieces.class_of, np.arange(len(classes) + 1))
    # messages: each piece of each group along the chain of the group's receivers
    num_pieces = np.diff(piece_at)[groups.class_of]
    group = np.repeat(np.arange(len(groups.class_of)), num_pieces)
    piece = ranges(piece_at[groups.class_of], num_pieces)
    length = np.diff(groups.receiver_at)[group]
    hop = ranges(np.zeros_like(length), length)
    chain = np.repeat(np.arange(len(group)), length)
    first_receiver = 0 if is_fast_inside(problem.topology, host_classes) else groups.class_of[group]
    at = (np.broadcast_to(first_receiver, group.shape)[chain] + hop) % length[chain]
    receiver = groups.receivers[groups.receiver_at[group[chain]] + at]
    is_first = hop == 0
    sender = np.where(is_first, groups.holder[group[chain]], np.roll(receiver, 1))
    crosses = is_first & (groups.slot[group[chain]] >= 0)
    moving = np.flatnonzero(crosses)
    after = np.full((len(chain), 2), -1, dtype=np.int64)
    after[:, 0] = np.where(is_first, -1, np.arange(len(chain)) - 1)
    source = after[:, 0].copy()
    port = groups.sender_port[group[chain[moving]]], groups.receiver_port[group[chain[moving]]]
    before = np.stack([_previous(item, moving) for item in port], axis=1)
    before[before[:, 0] == before[:, 1], 1] = -1  # the same message, which is named once
    after[moving] = before
    return Transfers.unchecked(
        box_at=pieces.at,
        box_tensor=pieces.tensor,
        box_start=pieces.start,
        box_stop=pieces.stop,
        region=piece[chain],
        edge_at=np.arange(len(chain) + 1),
        sender=sender,
        receiver=receiver,
        splits=np.ones((len(chain), problem.start.shape[1]), dtype=np.int64),
        window=np.where(crosses, WINDOW, INSIDE_WINDOW),
        after_at=np.concatenate([[0], np.cumsum((after >= 0).sum(axis=1))]),
        after=after[after >= 0],
        source=source,
    )


def _previous(port: np.ndarray, message: np.ndarray) -> np.ndarray:
    """``(messages,)`` for each message the one before it at its port, -1 for the first; both in order."""
    order = np.argsort(port, kind="stable")
    before = np.full(len(port), -1, dtype=np.int64)
    follows = port[order[1:]] == port[order[:-1]]
    before[order[1:][follows]] = message[order[:-1][follows]]
    return before
