"""Routes: the plan and the connections by which a model's tensors reach other models, for many versions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import torch.distributed as dist

from reshard.api.mover import Mover
from reshard.api.preparation.plan_per_host import plan_in_group
from reshard.api.transfers.handle import Handle
from reshard.coordination import Group, join
from reshard.coordination.topology_discovery import find_topology
from reshard.cost import find_bound
from reshard.errors import ArgumentError
from reshard.planner import MIN_STAGING_BYTES, predict
from reshard.runtime.torch_compat import CopyToMany
from reshard.sharding import check_integer
from reshard.timeouts import check_timeout
from reshard.topology import Topology, topology_from_json, topology_to_json
from reshard.topology.topology import check_topology
from reshard.weights.membership.team import run_collectively
from reshard.weights.model.holdings import synchronize
from reshard.weights.model.manifest import Manifest
from reshard.weights.model.pieces import RegionPair, Side, Specs, gather_pieces
from reshard.weights.model.verify import view_of

#: Equal parts of ``memory_bytes``: buffers, staging of encoded transfers, and staging of raw transfers.
NUM_SHARES = 3
#: Number of sets of arrays whose views a :class:`Route` keeps: two versions of the source.
MAX_VIEWED = 2


def find_first_ranks(sizes: Sequence[int]) -> list[int]:
    """The first rank of each model in a group of several, from their numbers of ranks."""
    firsts = [0]
    for size in sizes[:-1]:
        firsts.append(firsts[-1] + size)
    return firsts


@dataclass(frozen=True)
class RouteOptions:
    """The options of a Publisher or a Subscriber for its routes.

    Attributes:
        join_seconds: how long to wait for the other ranks.
        timeout_seconds: limit of one transfer.
        memory_bytes: memory for data in transit, at least 192 KiB.
        topology: hosts and links of the ranks; None to find them by host names.
        topology_rank: number of this rank in the topology; None for its number among the ranks of a route.
        is_shared: whether the memory also serves encoded transfers.

    Raises:
        ArgumentError: an option is not valid.
    """

    join_seconds: float
    timeout_seconds: float
    memory_bytes: int
    topology: Topology | None
    topology_rank: int | None = None
    is_shared: bool = False

    def __post_init__(self) -> None:
        check_timeout(self.join_seconds)
        check_timeout(self.timeout_seconds)
        check_integer(self.memory_bytes, "memory_bytes", NUM_SHARES * MIN_STAGING_BYTES, 2**62)
        if self.topology is not None:
            check_topology(self.topology)

    @property
    def staging_bytes(self) -> int:
        """The memory of a Mover."""
        return self.memory_bytes // NUM_SHARES if self.is_shared else self.memory_bytes


@dataclass(frozen=True)
class ReceiveBuffers:
    """The arrays in which the tensors of a plan arrive on a rank.

    Attributes:
        arrays: memory for the tensors, by name.
        copies: ``(copy to parts of local shards, tensor)`` pairs: each tensor is copied after it has arrived.
        shards: the local shards.
    """

    arrays: dict[str, torch.Tensor]
    copies: list[tuple[CopyToMany, torch.Tensor]]
    shards: list[torch.Tensor]

    def finish(self) -> None:
        """Write the local shards, after all tensors have arrived."""
        for copy, tensor in self.copies:
            copy(tensor)
        synchronize(self.shards)


@dataclass(frozen=True)
class _Viewed:
    """The parts of the plan's tensors in the local shards of a rank.

    Attributes:
        arrays: the local shards by name.
        views: for each tensor, views of its parts.
    """

    arrays: dict[str, torch.Tensor]
    views: list[list[torch.Tensor]]
    _unstacks: dict[int, CopyToMany] = field(default_factory=dict)

    def unstack(self, number: int) -> CopyToMany:
        """The copy of a tensor to its parts."""
        if number not in self._unstacks:
            self._unstacks[number] = CopyToMany(self.views[number])
        return self._unstacks[number]


def _agree(group: Group, options: RouteOptions) -> tuple[int, Topology]:
    """The smallest staging memory of any rank, and the topology of the group: a stated one, or by host names."""

    def describe() -> dict[str, Any]:
        stated = None if options.topology is None else topology_to_json(options.topology)
        number = group.rank if options.topology_rank is None else options.topology_rank
        return {"staging_bytes": options.staging_bytes, "topology": stated, "number": number}

    reports = run_collectively(group, describe, "agrees on memory and links", options.join_seconds)
    stated = {rank: report["topology"] for rank, report in reports.items() if report["topology"] is not None}
    first = next(iter(stated), group.rank)
    for rank, topology in stated.items():
        if topology != stated[first]:
            raise ArgumentError(f"rank {first} and rank {rank} of trainer and engines pass different topologies")
    staging_bytes = min(report["staging_bytes"] for report in reports.values())
    if stated:
        topology = options.topology or topology_from_json(stated[first])
        return staging_bytes, topology.select(_check_numbers([reports[rank]["number"] for rank in sorted(reports)]))
    return staging_bytes, find_topology(group, timeout_seconds=options.join_seconds)


def _check_numbers(numbers: Sequence[int]) -> Sequence[int]:
    """Raise an ArgumentError if two ranks of a route have the same number in the topology."""
    rank_of: dict[int, int] = {}
    for rank, number in enumerate(numbers):
        other = rank_of.setdefault(number, rank)
        if other != rank:
            raise ArgumentError(
                f"rank {other} and rank {rank} of trainer and engines are both rank {number} of the topology; pass "
                "each engine its own first_rank"
            )
    return numbers


class Route:
    """Connects the ranks of a source model with those of destination models. Only one thread may use it.

    Args:
        store: a store that all ranks share, under a prefix that only this route uses.
        source: the source model. Its ranks come first.
        targets: the destination models.
        pieces: the parts of tensors that go to each destination model.
        place: number of this rank's model; 0 is the source.
        rank: this rank in its model.
        options: limits, and the network.

    Raises:
        ReshardError: a rank did not come in time; the same on all ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        source: Manifest,
        targets: Sequence[Manifest],
        pieces: Sequence[Sequence[RegionPair]],
        place: int,
        rank: int,
        options: RouteOptions,
    ) -> None:
        models = [source, *targets]
        firsts = find_first_ranks([model.size for model in models])
        self.rank, self._timeout_seconds = firsts[place] + rank, options.timeout_seconds
        gathered = gather_pieces(dict(zip(firsts[1:], pieces, strict=True)))
        specs = Specs(source, dict(zip(firsts[1:], targets, strict=True)))
        bundles = specs.bundle(gathered)
        names = (f"{number} {next(iter(bundle[0].values()))}" for number, bundle in enumerate(bundles))
        tensors = [specs.spec(bundle, name) for bundle, name in zip(bundles, names, strict=True)]
        self._sides = [[_side_of(pieces, firsts[place], place == 0) for pieces in bundle] for bundle in bundles]
        self._model, self._rank = models[place], rank
        self._viewed: list[_Viewed] = []
        self.group = join(store, self.rank, sum(model.size for model in models))
        try:
            staging_bytes, self.topology = _agree(self.group, options)
            self.device = "cpu" if any(model.device != "cuda" for model in models) else "cuda"
            with plan_in_group(
                self.group,
                tensors,
                topology=self.topology,
                staging_bytes=staging_bytes,
                timeout_seconds=options.join_seconds,
            ) as plan:
                self._mover = Mover(plan, self.group, timeout_seconds=options.timeout_seconds, device=self.device)
        except BaseException:
            self.close()
            raise
        self.plan = plan
        self._predicted: dict[str, float] | None = None

    def predict(self) -> dict[str, float]:
        """Lower bound and prediction of the time of a transfer, and its bytes."""
        if self._predicted is None:
            nbytes = sum(math.prod(spec.shape) * spec.itemsize for spec in self.plan.tensors)
            bound = find_bound(self.plan).seconds
            seconds = predict(self.plan).seconds
            self._predicted = {"bound_seconds": bound, "predicted_seconds": seconds, "nbytes": nbytes}
        return self._predicted

    def start_sending(self, arrays: Mapping[str, torch.Tensor]) -> Handle:
        """Start to send the local shards of this rank. Returns the handle.

        Args:
            arrays: the local shards of the source model by name.
        """
        sent: dict[str | None, Any] = {spec.name: None for spec in self.plan.tensors}
        for name, tensor in self.gather(arrays).items():
            sent[name] = tensor.to(self.device)
        return self._mover.start(sent)

    def receive(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Receive into the local shards of the destination model of this rank, given by name."""
        buffers = self.find_buffers(arrays)
        out: dict[str | None, Any] = {spec.name: buffers.arrays.get(spec.name or "") for spec in self.plan.tensors}
        self._mover.start(dict.fromkeys(out), out=out).wait(self._timeout_seconds)
        buffers.finish()

    def gather(self, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parts of the plan's tensors that this rank holds, from its local shards by name."""
        pairs = zip(self.plan.tensors, self._find_views(arrays).views, strict=True)
        return {spec.name or "": _stack_views(views) for spec, views in pairs if views}

    def find_buffers(
        self, arrays: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor] | None = None
    ) -> ReceiveBuffers:
        """The arrays in which the plan's tensors arrive for the local shards of a destination model, by name.

        Args:
            base: values that the tensors must hold before the transfer, by the same names; None if any values will do.
        """
        landed: dict[str, torch.Tensor] = {}
        copies = []
        bases, viewed = self._find_views(arrays if base is None else base), self._find_views(arrays)
        for number, (spec, views, old) in enumerate(zip(self.plan.tensors, viewed.views, bases.views, strict=True)):
            if not views:
                continue
            if len(views) == 1 and views[0].device.type == self.device:
                tensor = views[0]
                if base is not None and old[0] is not tensor:
                    tensor.copy_(old[0])
            elif base is not None:
                tensor = _stack_views(old).to(self.device)
                copies.append((viewed.unstack(number), tensor))
            else:
                shape = (len(views), *views[0].shape) if len(views) > 1 else views[0].shape
                tensor = torch.empty(shape, dtype=views[0].dtype, device=self.device)
                copies.append((viewed.unstack(number), tensor))
            landed[spec.name or ""] = tensor
        return ReceiveBuffers(landed, copies, list(arrays.values()))

    def _find_views(self, arrays: Mapping[str, torch.Tensor]) -> _Viewed:
        """The parts of each bundle that this rank holds: all of them or none. Kept for the same arrays."""
        for known in self._viewed:
            if _are_same(arrays, known.arrays):
                return known
        by_bundle = []
        for sides in self._sides:
            of_sides = (None if side is None else view_of(side, self._model, arrays, self._rank) for side in sides)
            by_bundle.append([view for view in of_sides if view is not None])
        viewed = _Viewed(dict(arrays), by_bundle)
        self._viewed = [*self._viewed[1 - MAX_VIEWED :], viewed]
        return viewed

    def close(self) -> None:
        """Close the connections."""
        with contextlib.suppress(Exception):  # the group may have failed
            self.group.close()


def _side_of(pieces: Mapping[int, RegionPair], first: int, is_source: bool) -> Side | None:
    """The regions of a bundle in the source model, or in the destination model whose first rank is ``first``.

    Returns None if that destination needs nothing of the bundle.
    """
    if is_source:
        return next(iter(pieces.values())).source
    return pieces[first].target if first in pieces else None


def _are_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(is_, first.values(), map(second.get, first)))


def _stack_views(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """The views of a bundle as one tensor of the plan: stacked if there are several."""
    return torch.stack(list(views)) if len(views) > 1 else views[0]
