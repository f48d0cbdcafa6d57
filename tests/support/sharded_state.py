"""States of several ranks in one process, to execute pieces by torch alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from reshard.sharding import Box
from reshard.weights.mapping.rules import Rule
from reshard.weights.model.holdings import Holding, ModelState, join_dim
from reshard.weights.model.manifest import Manifest, merge_states, state_of_rank
from reshard.weights.model.pieces import RegionPair, Side

#: The regions that a rank holds of a tensor, from its name, its shape and the rank.
Regions = Callable[[str, torch.Size, int], Sequence[Box]]


def whole(name: str, shape: torch.Size, rank: int) -> Sequence[Box]:
    """Each rank holds all."""
    return [tuple((0, size) for size in shape)]


def chunks(dim: int, size: int) -> Regions:
    """Ranks hold chunks along a dim, or along the last one of a tensor with fewer dims; unequal ones where needed."""

    def find(name: str, shape: torch.Size, rank: int) -> Sequence[Box]:
        at = min(dim, len(shape) - 1)
        step = -(-shape[at] // size)
        lo, hi = min(rank * step, shape[at]), min((rank + 1) * step, shape[at])
        box = tuple((lo, hi) if each == at else (0, length) for each, length in enumerate(shape))
        return [box] if lo < hi else []

    return find


class ShardedState:
    """A state on several ranks.

    Attributes:
        manifest: of the state.
        arrays: of each rank, by name.
    """

    def __init__(
        self, state: Mapping[str, torch.Tensor], size: int, regions: Regions, rules: Sequence[Rule] | None = None
    ) -> None:
        self.arrays: list[dict[str, torch.Tensor]] = []
        states = {}
        for rank in range(size):
            holdings = {}
            for name, value in state.items():
                boxes = tuple(map(tuple, regions(name, value.shape, rank)))
                parts = [value[tuple(slice(*pair) for pair in box)] for box in boxes]
                if parts:
                    array = torch.cat(parts, join_dim(boxes)) if len(parts) > 1 else parts[0].clone()
                    holdings[name] = Holding(array, tuple(value.shape), boxes)
            self.arrays.append({name: holding.array for name, holding in holdings.items()})
            states[rank] = state_of_rank(ModelState(holdings, {}, {}))
        merged: Manifest = merge_states(states, "it")
        self.manifest = replace(merged, rules=None if rules is None else tuple(rules))
        self._regions, self._shapes = regions, {name: value.shape for name, value in state.items()}

    def read(self, side: Side, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A piece, from all ranks."""
        found = torch.empty(tuple(shape), dtype=dtype)
        for place, view in self._views(side):
            found[place] = view
        return found

    def write(self, side: Side, piece: torch.Tensor) -> None:
        """Write a piece on all ranks that hold parts of it."""
        for place, view in self._views(side):
            view.copy_(piece[place])

    def _views(self, side: Side):
        entry = self.manifest.entries[side.name]
        for rank, boxes in side.held(entry):
            view = side.view(self.arrays[rank][side.name], dict(entry.held)[rank])
            dim, at = join_dim(boxes), 0
            for box in boxes:
                size = box[dim][1] - box[dim][0] if box else 0
                yield tuple(slice(*pair) for pair in box), view.narrow(dim, at, size) if box else view
                at += size

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Assert that each rank holds its regions of a state."""
        expected = ShardedState(state, len(self.arrays), self._regions)
        for rank, arrays in enumerate(self.arrays):
            for name, array in arrays.items():
                assert torch.equal(array, expected.arrays[rank][name]), (name, rank)


def execute(pieces: Sequence[RegionPair], source: ShardedState, target: ShardedState) -> None:
    """Copy pieces."""
    for piece in pieces:
        target.write(piece.target, source.read(piece.source, piece.shape, getattr(torch, piece.dtype)))
