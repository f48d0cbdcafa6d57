"""Reference implementations of ``native/strategies/exchange.cpp``: equal rows, messages of a rotation, and loads of direct sends."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np

from reshard.planner.multicast.classes import Classes
from reshard.planner.strategies.chunk_limits import INSIDE_WINDOW, WINDOW
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.ragged import NO_RANK
from reshard.topology import Topology

Messages = list[tuple[int, int, int, int, list[int], int]]  # piece, sender, receiver, window, after, source


def number_rows_python(rows: np.ndarray) -> tuple[list[int], list[int]]:
    """The first row of each number, and the number of each row."""
    numbers: dict[tuple[int, ...], int] = {}
    first, given = [], []
    for index, row in enumerate(rows.tolist()):
        given.append(numbers.setdefault(tuple(row), len(numbers)))
        if given[-1] == len(first):
            first.append(index)
    return first, given


def rotate_python(
    classes: Classes, holder: list[int], piece_offsets: list[int], topology: Topology, rotates: bool, most_bytes: float
) -> Messages | None:
    """The messages of a rotation in order; None if its ports are busy for more than ``most_bytes``."""
    host = topology.host_of_rank
    nic = list(zip(host, topology.nic_of_rank, strict=True))
    groups = []
    for k, row in enumerate(classes.receivers.tolist()):
        receivers = sorted((rank for rank in row if rank != NO_RANK), key=lambda rank: host[rank])
        for _, members in itertools.groupby(receivers, key=lambda rank: host[rank]):
            chain = list(members)
            first = k % len(chain) if rotates else 0
            groups.append((k, chain[first:] + chain[:first]))
    senders = sorted({nic[rank] for rank in holder})
    reached = sorted({nic[chain[0]] for _, chain in groups})
    num_slots = max(len(senders), len(reached))
    order = []
    for k, chain in groups:
        i, j = senders.index(nic[holder[k]]), reached.index(nic[chain[0]])
        slot = (j - i) % num_slots if host[holder[k]] != host[chain[0]] else -1
        order.append((slot, i, k, j, chain))
    order.sort()
    pairs: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for slot, i, k, _, _ in order:
        if slot >= 0:
            pairs[slot][i] += int(classes.nbytes[k])
    busiest = max((sum(row.get(i, 0) for row in pairs.values()) for i in range(len(senders))), default=0)
    if max(busiest, sum(max(row.values()) for row in pairs.values())) > most_bytes:
        return None
    messages: Messages = []
    last_sent, last_received = {}, {}
    for slot, i, k, j, chain in order:
        for piece in range(piece_offsets[k], piece_offsets[k + 1]):
            for hop, receiver in enumerate(chain):
                number = len(messages)
                if hop:
                    messages.append((piece, chain[hop - 1], receiver, INSIDE_WINDOW, [number - 1], number - 1))
                    continue
                if slot < 0:
                    messages.append((piece, holder[k], receiver, INSIDE_WINDOW, [], -1))
                    continue
                after = [*dict.fromkeys(last[p] for last, p in ((last_sent, i), (last_received, j)) if p in last)]
                messages.append((piece, holder[k], receiver, WINDOW, after, -1))
                last_sent[i] = last_received[j] = number
    return messages


def direct_loads_python(problem: PlanProblem) -> dict[tuple[str, int, int], int]:
    """Bytes that NICs send and receive, and pairs of a sender at the NIC and a receiver, by what, host and NIC."""
    host, nic = problem.topology.host_of_rank, problem.topology.nic_of_rank
    loads: dict[tuple[str, int, int], int] = defaultdict(int)
    pairs = set()
    for task, row in enumerate(problem.receivers.tolist()):
        sender = int(problem.holders[task, 0])
        for receiver in row:
            if receiver != NO_RANK and host[receiver] != host[sender]:
                for what, rank in (("sent", sender), ("received", receiver)):
                    loads[what, host[rank], nic[rank]] += int(problem.nbytes[task])
                pairs.add((sender, receiver))
    for sender, _ in pairs:
        loads["pairs", host[sender], nic[sender]] += 1
    return loads
