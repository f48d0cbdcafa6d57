"""The way of a model's tensors to other models: one plan and its connections, for many versions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from reshard.api.mover import Mover
from reshard.coordination import join
from reshard.coordination.topology_discovery import find_topology
from reshard.cost import find_bound
from reshard.planner import plan_tensors, predict
from reshard.topology import Topology
from reshard.weights.manifest import Manifest
from reshard.weights.pieces import Piece, Specs, match


def find_ranks(sizes: Sequence[int]) -> list[int]:
    """The first rank of each model in a group of several, from their numbers of ranks."""
    firsts = [0]
    for size in sizes[:-1]:
        firsts.append(firsts[-1] + size)
    return firsts


class Route:
    """Connects the ranks of a source model with those of destination models. Used by one thread.

    Args:
        store: a store that all ranks share; the route has a prefix of its own in it.
        source: the source model. Its ranks come first.
        targets: the destination models, by a name for errors.
        place: number of this rank's model; 0 is the source.
        rank: this rank in its model.
        join_seconds: how long to wait for the other ranks.
        timeout_seconds: limit of one transfer.
        staging_bytes: memory for data in transit.
        topology: hosts and links of the ranks; None: by host names.

    Raises:
        ReshardError: the models do not match, or a rank did not come in time; the same on all ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        source: Manifest,
        targets: Mapping[str, Manifest],
        place: int,
        rank: int,
        *,
        join_seconds: float,
        timeout_seconds: float,
        staging_bytes: int,
        topology: Topology | None = None,
    ) -> None:
        models = [source, *targets.values()]
        firsts = find_ranks([model.size for model in models])
        self._rank_in_route, self._timeout_seconds = firsts[place] + rank, timeout_seconds
        self.pieces = {name: match(source, target, name) for name, target in targets.items()}
        gathered = _gather(list(self.pieces.values()), firsts[1:])
        specs = Specs(source, dict(zip(firsts[1:], targets.values(), strict=True)))
        tensors = [specs.spec(*names, f"{number} {names[0]}") for number, names in enumerate(gathered)]
        self._sources = [name for name, _ in gathered]
        self._targets = [names.get(firsts[place], "") if place else "" for _, names in gathered]
        self._group = join(store, self._rank_in_route, sum(model.size for model in models))
        try:
            found = find_topology(self._group, timeout_seconds=join_seconds)
            plan = plan_tensors(tensors, topology=topology or found, staging_bytes=staging_bytes)
            self.device = "cpu" if any(model.device != "cuda" for model in models) else "cuda"
            self._mover = Mover(plan, self._group, timeout_seconds=timeout_seconds, device=self.device)
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
        for spec, name in zip(self.plan.tensors, self._sources, strict=True):
            is_held = self._rank_in_route in spec.src.ranks
            sent[spec.name] = arrays[name].to(self.device) if is_held else None
        return self._mover.start(sent)

    def receive(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Receive into the local shards of the destination model of this rank, given by name."""
        out: dict[str | None, Any] = {}
        landed = []
        for spec, name in zip(self.plan.tensors, self._targets, strict=True):
            if self._rank_in_route not in spec.dst.ranks:
                out[spec.name] = None
                continue
            array = arrays[name]
            buffer = array if array.device.type == self.device else torch.empty_like(array, device=self.device)
            landed.append((array, buffer))
            out[spec.name] = buffer
        self._mover.start(dict.fromkeys(out), out=out).wait(self._timeout_seconds)
        for array, buffer in landed:
            if buffer is not array:
                array.copy_(buffer)

    def close(self) -> None:
        """Close the connections."""
        with contextlib.suppress(Exception):  # the group may have failed
            self._group.close()


def _gather(pieces: Sequence[Sequence[Piece]], firsts: Sequence[int]) -> list[tuple[str, dict[int, str]]]:
    """The tensors of a plan: a name in the source model, and the names in destination models by their first ranks.

    A tensor that goes to several tensors of one model, because only the source ties them, travels once for each.
    """
    found: dict[tuple[str, int], dict[int, str]] = {}
    for first, of_model in zip(firsts, pieces, strict=True):
        count: dict[str, int] = {}
        for piece in of_model:
            number = count[piece.source] = count.get(piece.source, 0) + 1
            found.setdefault((piece.source, number), {})[first] = piece.target
    return [(source, names) for (source, _), names in found.items()]
