"""The way of a model's tensors to other models: one plan and its connections, for many versions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from reshard.api.mover import Mover
from reshard.api.plan_per_host import plan_in_group
from reshard.coordination import join
from reshard.coordination.topology_discovery import find_topology
from reshard.cost import find_bound
from reshard.errors import ArgumentError
from reshard.planner import predict
from reshard.sharding import check_integer
from reshard.timeouts import check_timeout
from reshard.topology import Topology
from reshard.weights.holdings import synchronize
from reshard.weights.manifest import Manifest
from reshard.weights.pieces import Piece, Side, Specs, gather_pieces
from reshard.weights.verify import view_of


def find_ranks(sizes: Sequence[int]) -> list[int]:
    """The first rank of each model in a group of several, from their numbers of ranks."""
    firsts = [0]
    for size in sizes[:-1]:
        firsts.append(firsts[-1] + size)
    return firsts


@dataclass(frozen=True)
class RouteOptions:
    """What a Publisher or a Subscriber says of its routes.

    Attributes:
        join_seconds: how long to wait for the other ranks.
        timeout_seconds: limit of one transfer.
        memory_bytes: memory for data in transit.
        topology: hosts and links of the ranks; None: by host names.

    Raises:
        ArgumentError: an option is not valid.
    """

    join_seconds: float
    timeout_seconds: float
    memory_bytes: int
    topology: Topology | None

    def __post_init__(self) -> None:
        check_timeout(self.join_seconds)
        check_timeout(self.timeout_seconds)
        check_integer(self.memory_bytes, "memory_bytes", 0, 2**62)
        if self.topology is not None and not isinstance(self.topology, Topology):
            raise ArgumentError(f"topology must be a Topology, not {type(self.topology).__name__}")


class Route:
    """Connects the ranks of a source model with those of destination models. Used by one thread.

    Args:
        store: a store that all ranks share, under a prefix that only this route uses.
        source: the source model. Its ranks come first.
        targets: the destination models.
        pieces: what goes to each of them.
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
        pieces: Sequence[Sequence[Piece]],
        place: int,
        rank: int,
        options: RouteOptions,
    ) -> None:
        models = [source, *targets]
        firsts = find_ranks([model.size for model in models])
        self._rank_in_route, self._timeout_seconds = firsts[place] + rank, options.timeout_seconds
        gathered = gather_pieces(dict(zip(firsts[1:], pieces, strict=True)))
        specs = Specs(source, dict(zip(firsts[1:], targets, strict=True)))
        bundles = specs.bundle(gathered)
        names = (f"{number} {next(iter(bundle[0].values()))}" for number, bundle in enumerate(bundles))
        tensors = [specs.spec(bundle, name) for bundle, name in zip(bundles, names, strict=True)]
        self._sides = [[_side_of(pieces, firsts[place], place == 0) for pieces in bundle] for bundle in bundles]
        self._model, self._rank = models[place], rank
        self._arrays: dict[str, torch.Tensor] = {}
        self._views: list[list[torch.Tensor]] = [[] for _ in bundles]
        self._group = join(store, self._rank_in_route, sum(model.size for model in models))
        try:
            found = find_topology(self._group, timeout_seconds=options.join_seconds)
            self.device = "cpu" if any(model.device != "cuda" for model in models) else "cuda"
            with plan_in_group(
                self._group,
                tensors,
                topology=options.topology or found,
                staging_bytes=options.memory_bytes,
                timeout_seconds=options.join_seconds,
            ) as plan:
                self._mover = Mover(plan, self._group, timeout_seconds=options.timeout_seconds, device=self.device)
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

    def start_sending(self, arrays: Mapping[str, torch.Tensor]) -> Any:
        """Start to send; returns the handle.

        Args:
            arrays: the local shards of the source model by name.
        """
        sent: dict[str | None, Any] = {}
        for spec, views in zip(self.plan.tensors, self._find_views(arrays), strict=True):
            sent[spec.name] = None if not views else _one(views).to(self.device)
        return self._mover.start(sent)

    def receive(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Receive into the local shards of the destination model of this rank, given by name."""
        out: dict[str | None, Any] = {}
        landed = []
        for spec, views in zip(self.plan.tensors, self._find_views(arrays), strict=True):
            if not views:
                out[spec.name] = None
            elif len(views) == 1 and views[0].device.type == self.device:
                out[spec.name] = views[0]
            else:
                like = views[0]
                shape = (len(views), *like.shape) if len(views) > 1 else like.shape
                buffer = out[spec.name] = torch.empty(shape, dtype=like.dtype, device=self.device)
                landed.append((views, buffer))
        self._mover.start(dict.fromkeys(out), out=out).wait(self._timeout_seconds)
        for views, buffer in landed:
            for view, part in zip(views, buffer.unbind() if len(views) > 1 else [buffer], strict=True):
                view.copy_(part)
        synchronize(arrays.values())

    def _find_views(self, arrays: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        """What this rank holds of the pieces of each bundle: all of them or none. Kept for the same arrays."""
        if not _are_same(arrays, self._arrays):
            self._views = []
            for sides in self._sides:
                found = (None if side is None else view_of(side, self._model, arrays, self._rank) for side in sides)
                self._views.append([view for view in found if view is not None])
            self._arrays = dict(arrays)
        return self._views

    def close(self) -> None:
        """Close the connections."""
        with contextlib.suppress(Exception):  # the group may have failed
            self._group.close()


def _side_of(pieces: Mapping[int, Piece], first: int, is_source: bool) -> Side | None:
    """The side of a piece in the model that begins at a rank; None if it needs nothing of it."""
    if is_source:
        return next(iter(pieces.values())).source
    return pieces[first].target if first in pieces else None


def _are_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(array is second[name] for name, array in first.items())


def _one(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of a plan from the views of a bundle."""
    return torch.stack(list(views)) if len(views) > 1 else views[0]
