"""Multicast: chunks of all regions dealt out to ports, so that the busiest is never idle."""

from __future__ import annotations

import math

import numpy as np

from reshard.chunks import Boxes, Classes, cut_boxes
from reshard.dealer import Ports
from reshard.routes import DIRECT_CHUNK_BYTES, STAGING_PARTS, Problem
from reshard.schedule import Members, Messages, make_schedule
from reshard.shards import NO_RANK, ranges
from reshard.topology import Topology
from reshard.transfers import Transfers

#: Chunks that the busiest port passes where messages cost nothing: so few are lost while the first reach the last host.
SLOTS = 256
WINDOW = 8
#: Rates closer together than this part are taken as equal, so that transfers end together.
_ALIKE = 0.04


def multicast(problem: Problem) -> Transfers:
    """Cut regions into equal chunks and deal them out to ports as those become free.

    Steps: chunks of the busiest port, and a few until the first ones have reached the last host. Bytes between hosts:
    unique. Source: list scheduling by matching free ports, rarest chunk first.
    """
    classes = Classes.of(problem)
    counts = count_chunks(problem.topology, classes)
    largest = max(min(DIRECT_CHUNK_BYTES, problem.staging_bytes // STAGING_PARTS) * 15 // 16, 1)  # cuts snap to slices
    counts = np.minimum(np.maximum(counts, -(-classes.nbytes // largest)), classes.nbytes // classes.itemsize)
    boxes = cut_boxes(problem, classes, counts)
    class_of = np.repeat(np.arange(len(classes)), counts)
    holders, receivers = _members(classes.holders), _members(classes.receivers)
    return _to_transfers(problem, boxes, make_schedule(ports_of(problem), holders, receivers, class_of))


def _members(table: np.ndarray) -> Members:
    real = table != NO_RANK
    return np.concatenate([[0], np.cumsum(real.sum(axis=1))]), table[real]


def _ranks(row: np.ndarray) -> list[int]:
    return [rank for rank in row.tolist() if rank != NO_RANK]


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


def count_chunks(topology: Topology, classes: Classes) -> np.ndarray:
    """``(classes,)`` chunks of each class: the size that wastes least where ports get whole chunks."""
    if not len(classes):
        return np.zeros(0, dtype=np.int64)
    hosts = topology.num_hosts
    host_of = topology.host_by_rank
    into = np.zeros((hosts, len(classes)))
    only = np.zeros((hosts, len(classes)))  # what a host must send, where it alone holds it
    pods = len(topology.pods)
    entering = np.zeros((pods, len(classes)))
    leaving = np.zeros((pods, len(classes)))
    shared = np.zeros(len(classes), dtype=bool)
    for k in range(len(classes)):
        held = set(host_of[_ranks(classes.holders[k])].tolist())
        needed = set(host_of[_ranks(classes.receivers[k])].tolist()) - held
        for host in needed:
            into[host, k] = 1
        if needed and len(held) == 1:
            only[held.pop(), k] = 1
        shared[k] = bool(needed)
        if pods:
            holding = {topology.host(host).pod or 0 for host in host_of[_ranks(classes.holders[k])].tolist()}
            lacking = {topology.host(host).pod or 0 for host in needed} - holding
            entering[list(lacking), k] = 1
            if lacking and len(holding) == 1:
                leaving[holding.pop(), k] = 1
    rate_in = np.array([topology.host(h).ingress_bytes_per_second for h in range(hosts)])
    rate_out = np.array([topology.host(h).egress_bytes_per_second for h in range(hosts)])
    rate_up = np.array([pod.egress_bytes_per_second for pod in topology.pods])
    rate_down = np.array([pod.ingress_bytes_per_second for pod in topology.pods])
    load = np.concatenate(
        [
            into / rate_in[:, None],
            only / rate_out[:, None],
            entering / rate_down[:, None],
            leaving / rate_up[:, None],
        ]
    )
    total_out = rate_out[sorted(set(host_of[classes.holders[classes.holders != NO_RANK]].tolist()))].sum()
    nbytes = classes.nbytes.astype(np.float64)
    least = max(float((load @ nbytes).max()), float(nbytes[shared].sum() / total_out))
    if not least:
        return np.ones(len(classes), dtype=np.int64)
    fastest = float(max(rate_in.max(), rate_out.max()))
    total = classes.nbytes // classes.itemsize
    target = slots(topology, least)
    best, chosen = math.inf, 1.0
    for n in range(target, 2 * target + 1, max(1, target // 64)):
        size = least * fastest / n
        counts = np.ceil(nbytes / size - 1e-9)
        cost = float((load @ counts).max()) * size * (1 + 2 / n)
        if cost < best:
            best, chosen = cost, size
    counts = np.maximum(np.ceil(nbytes / chosen - 1e-9), 1).astype(np.int64)
    return np.minimum(counts, total)


def slots(topology: Topology, seconds: float) -> int:
    """Into how many chunks to cut what the busiest port passes in ``seconds``."""
    if not topology.latency_seconds:
        return SLOTS
    return max(1, min(SLOTS, round(math.sqrt(seconds / topology.latency_seconds))))


def _to_transfers(problem: Problem, boxes: Boxes, made: Messages) -> Transfers:
    counts = np.diff(boxes.at)[made.chunk]
    rows = ranges(boxes.at[made.chunk], counts)
    return Transfers(
        box_at=np.concatenate([[0], np.cumsum(counts)]),
        box_tensor=boxes.tensor[rows],
        box_start=boxes.start[rows],
        box_stop=boxes.stop[rows],
        edge_at=np.arange(len(made.chunk) + 1),
        sender=made.sender,
        receiver=made.receiver,
        splits=np.ones((len(made.chunk), problem.start.shape[1]), dtype=np.int64),
        window=np.full(len(made.chunk), WINDOW, dtype=np.int64),
        after_at=made.after_at,
        after=made.after,
        source=made.source,
    )
