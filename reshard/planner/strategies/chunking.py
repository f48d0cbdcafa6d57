"""Cut routes into transfers of chunks, and bundle small regions."""

from __future__ import annotations

import numpy as np

from reshard.errors import PlanError
from reshard.plan import PlanTransfers
from reshard.ragged import distinct_values, ranges
from reshard.topology import Topology

from .chunk_limits import (
    DIRECT_WINDOW,
    MIN_STAGING_BYTES,
    PACKED_CHUNK_BYTES,
    SMALL_REGION_BYTES,
    STAGING_PARTS,
    TREE_CHUNK_BYTES,
    TREE_WINDOW,
    UNPACKED_CHUNK_BYTES,
)
from .plan_problem import PlanProblem
from .routes import Routes, copy_routes


def routes_to_transfers(
    problem: PlanProblem, chosen: Routes | PlanTransfers, *, is_builtin: bool = True
) -> PlanTransfers:
    """All transfers of a plan: local copies first, then what a strategy chose. Routes are cut into chunks.

    ``is_builtin`` is as in :func:`cut_transfers`.
    """
    if isinstance(chosen, PlanTransfers):
        if not problem.keeps.any():
            _check_staging(problem.staging_bytes)
            return chosen
        copies = cut_transfers(problem, Routes.of(problem, []), problem.staging_bytes)
        return join_transfers(copies, chosen)
    return cut_transfers(problem, chosen, problem.staging_bytes, is_builtin=is_builtin)


def join_transfers(first: PlanTransfers, second: PlanTransfers) -> PlanTransfers:
    """Concatenate transfers."""
    boxes, edges = len(first.box_tensor), len(first.sender)

    def both(name: str) -> np.ndarray:
        return np.concatenate([getattr(first, name), getattr(second, name)])

    return PlanTransfers(
        box_offsets=np.concatenate([first.box_offsets, second.box_offsets[1:] + boxes]),
        box_tensor=both("box_tensor"),
        box_start=both("box_start"),
        box_stop=both("box_stop"),
        edge_offsets=np.concatenate([first.edge_offsets, second.edge_offsets[1:] + edges]),
        sender=both("sender"),
        receiver=both("receiver"),
        splits=both("splits"),
        window=both("window"),
        region=np.concatenate([first.region, second.region + len(first.box_offsets) - 1]),
        after_offsets=np.concatenate([first.after_offsets, second.after_offsets[1:] + len(first.after)]),
        after=np.concatenate([first.after, second.after + len(first)]),
        source=np.concatenate([first.source, np.where(second.source < 0, second.source, second.source + len(first))]),
    )


def cut_transfers(
    problem: PlanProblem, routes: Routes, staging_bytes: int, *, is_builtin: bool = True
) -> PlanTransfers:
    """Cut large routes into chunks, bundle small ones that share a tree, and put local copies first.

    Args:
        problem, routes: the problem, and routes for it.
        staging_bytes: staging memory of each rank in bytes.
        is_builtin: whether a strategy of this package made the routes. Their arrays then need no check and no copy.

    Raises:
        PlanError: ``staging_bytes`` is below 64 KiB.
    """
    _check_staging(staging_bytes)
    if not is_builtin or problem.keeps.any():
        routes = Routes.join([copy_routes(problem), routes])
    itemsize = np.array([spec.itemsize for spec in problem.tensors], dtype=np.int64)[problem.tensor[routes.task]]
    nbytes = (routes.stop - routes.start).prod(axis=1, dtype=np.int64) * itemsize
    is_copy = routes.sender[routes.edge_offsets[:-1]] == routes.receiver[routes.edge_offsets[:-1]]
    has_one_hop, crosses = _classify_routes(routes, problem.topology)
    limit = staging_bytes // STAGING_PARTS
    direct = np.where(problem.is_strided[routes.task], min(PACKED_CHUNK_BYTES, limit), min(UNPACKED_CHUNK_BYTES, limit))
    is_direct = has_one_hop | ~crosses
    chunk_bytes = direct
    if not is_direct.all():
        chunk_bytes = np.where(is_direct, direct, np.minimum(_tree_chunks(problem, routes, nbytes), limit))
    chunk_bytes = np.where(is_copy, np.int64(2**62), chunk_bytes)
    bundle_of = _bundle_small(
        routes, nbytes, itemsize, is_copy, min(SMALL_REGION_BYTES, limit), min(TREE_CHUNK_BYTES, limit)
    )
    task, start, stop = routes.task, routes.start, routes.stop
    lead: np.ndarray | slice = slice(None)
    box_offsets = np.arange(len(routes) + 1)  # a transfer for each route
    if bundle_of is not None:
        order = np.argsort(bundle_of, kind="stable")
        first = np.flatnonzero(np.diff(bundle_of[order], prepend=-1))  # positions in ``order`` where a bundle begins
        lead, box_offsets = order[first], np.concatenate([first, [len(order)]])
        task, start, stop = task[order], start[order], stop[order]
        routes = routes.take(lead)
    make = PlanTransfers.unchecked if is_builtin else PlanTransfers
    return make(
        box_offsets=box_offsets,
        box_tensor=problem.tensor[task],
        box_start=start,
        box_stop=stop,
        edge_offsets=routes.edge_offsets,
        sender=routes.sender,
        receiver=routes.receiver,
        splits=_splits(routes.start, routes.stop, itemsize[lead], chunk_bytes[lead]),
        window=np.where(has_one_hop[lead], DIRECT_WINDOW, TREE_WINDOW),
    )


def _check_staging(staging_bytes: int) -> None:
    if staging_bytes < MIN_STAGING_BYTES:
        raise PlanError(f"staging_bytes is {staging_bytes}; use at least {MIN_STAGING_BYTES}")


def _classify_routes(routes: Routes, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Two bool arrays ``(routes,)``: whether the root sends all edges, and whether an edge crosses hosts."""
    if not len(routes):
        return np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)
    first = routes.edge_offsets[:-1]
    if len(routes.sender) == len(routes):  # each route has an edge
        return np.ones(len(routes), dtype=bool), _crosses(routes, topology)
    from_root = routes.sender == np.repeat(routes.sender[first], np.diff(routes.edge_offsets))
    return np.logical_and.reduceat(from_root, first), np.logical_or.reduceat(_crosses(routes, topology), first)


def _crosses(routes: Routes, topology: Topology) -> np.ndarray:
    return topology.host_array[routes.sender] != topology.host_array[routes.receiver]


def _tree_chunks(problem: PlanProblem, routes: Routes, nbytes: np.ndarray) -> np.ndarray:
    """``(routes,)`` chunk sizes in bytes that minimize the time until the last host of a chain has all data.

    With h hops after the first, n chunks take ``n * latency + (n + h) / n * bytes / rate``, which is smallest for
    ``n = sqrt(h * bytes / (rate * latency))``. ``bytes`` are all bytes that leave the sending host, since its regions
    follow each other through the pipeline.
    """
    chunk = np.full(len(routes), TREE_CHUNK_BYTES)
    topology = problem.topology
    if not topology.latency_seconds or not len(routes):
        return chunk
    hosts, first = topology.host_array, routes.edge_offsets[:-1]
    crosses = hosts[routes.sender] != hosts[routes.receiver]
    home = hosts[routes.sender[first]]
    leaves = np.logical_or.reduceat(crosses, first)
    leaving = np.bincount(home[leaves], weights=nbytes[leaves], minlength=topology.num_hosts)
    slowest = min(nic.egress_bytes_per_second for host in topology.hosts for nic in host.nics)
    hops = np.maximum(np.add.reduceat(crosses, first) - 1, 1)
    best = np.sqrt(leaving[home] * slowest * topology.latency_seconds / hops)
    return np.clip(best, SMALL_REGION_BYTES, TREE_CHUNK_BYTES).astype(np.int64)


def _bundle_small(
    routes: Routes,
    nbytes: np.ndarray,
    itemsize: np.ndarray,
    is_copy: np.ndarray,
    small_bytes: int,
    bundle_bytes: int,
) -> np.ndarray | None:
    """``(routes,)`` the first route of each route's bundle; a route that is not bundled maps to itself.

    Routes of one bundle share a tree, and an itemsize so that every box of a message is aligned. None if there are no
    bundles.
    """
    small = np.flatnonzero((nbytes < small_bytes) & ~is_copy)
    single = small[np.diff(routes.edge_offsets)[small] == 1]
    edge = routes.edge_offsets[single]
    num_ranks = int(routes.receiver.max(initial=0)) + 1
    pair = routes.sender[edge] * num_ranks + routes.receiver[edge]
    num_pairs = int(pair.max(initial=0)) + 1
    if num_pairs <= 8 * len(pair) and (itemsize[single] == itemsize[single[0]]).all():
        is_used = np.zeros(num_pairs, dtype=bool)
        is_used[pair] = True
        if np.count_nonzero(is_used) == len(pair) == len(small):
            return None
        counts = np.bincount(pair)[pair]
    else:
        _, inverse, count = np.unique(pair * 256 + itemsize[single], return_inverse=True, return_counts=True)
        counts = count[inverse.ravel()]
    repeated = single[counts > 1]  # a route with a unique edge cannot be bundled
    several = small[np.diff(routes.edge_offsets)[small] > 1]
    if not len(repeated) + len(several):
        return None
    bundled = np.sort(np.concatenate([repeated, several]))
    tree = _number_trees(routes, bundled)
    key = tree * (int(itemsize.max()) + 1) + itemsize[bundled]
    order = np.argsort(key, kind="stable")
    bundled, key = bundled[order], key[order]
    begins = np.flatnonzero(np.diff(key, prepend=-1))
    upto = np.cumsum(nbytes[bundled])
    before = upto - nbytes[bundled]
    bundle_of = np.arange(len(routes))
    # fill the first bundle of every tree, then the second one, and so on
    ends = np.append(begins[1:], len(bundled))
    while len(begins):
        following = np.searchsorted(upto, before[begins] + bundle_bytes, side="right")
        following = np.minimum(np.maximum(following, begins + 1), ends)
        counts = following - begins
        bundle_of[bundled[ranges(begins, counts)]] = np.repeat(bundled[begins], counts)
        begins, ends = following[following < ends], ends[following < ends]
    return bundle_of


def _number_trees(routes: Routes, chosen: np.ndarray) -> np.ndarray:
    """``(chosen,)`` numbers of the trees of routes; routes with the same edges have the same number."""
    length = np.diff(routes.edge_offsets)[chosen]
    number, count = np.zeros(len(chosen), dtype=np.int64), 0
    for edges in distinct_values(length).tolist():
        indices = np.flatnonzero(length == edges)
        at = routes.edge_offsets[chosen[indices], None] + np.arange(edges)
        if edges == 1:
            pair = routes.sender[at] * (int(routes.receiver.max()) + 1) + routes.receiver[at]
            _, inverse = np.unique(pair, return_inverse=True)
        else:
            table = np.concatenate([routes.sender[at], routes.receiver[at]], axis=1)
            _, inverse = np.unique(table, axis=0, return_inverse=True)
        number[indices] = count + inverse.ravel()
        count += int(inverse.max()) + 1
    return number


def _splits(start: np.ndarray, stop: np.ndarray, itemsize: np.ndarray, chunk_bytes: np.ndarray) -> np.ndarray:
    """``(regions, ndim)`` number of parts per dim, outer dims cut first, so that no part exceeds ``chunk_bytes``."""
    size = stop - start
    splits = np.ones_like(size)
    nbytes = itemsize * size.prod(axis=1, dtype=np.int64)
    if (nbytes <= chunk_bytes).all() and (nbytes > 0).all():
        return splits
    row = nbytes
    for dim in range(size.shape[1]):
        row = row // np.maximum(size[:, dim], 1)
        # once a part holds several rows, a whole row fits a chunk, so inner dims stay whole
        rows_per_part = np.maximum(chunk_bytes // np.maximum(row, 1), 1)
        splits[:, dim] = -(-size[:, dim] // rows_per_part)
    return splits
