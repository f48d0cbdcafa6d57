"""One stage of a training plan: its layers, its ranks and the choices of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import ArgumentError
from reshard.formatting import count_of

from .choices import Choice


@dataclass(frozen=True, order=True)
class StagePlan:
    """Layers ``first_layer`` to ``end_layer - 1`` on ranks ``first_rank`` to ``end_rank - 1``.

    ``choices`` has one entry for each of the layers.
    """

    first_layer: int
    end_layer: int
    first_rank: int
    end_rank: int
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(self.choices))
        bounds = (self.first_layer, self.end_layer, self.first_rank, self.end_rank)
        if not all(type(bound) is int for bound in bounds):
            raise ArgumentError(f"layers and ranks of a stage are {bounds}; they must be integers")
        if len(self.choices) != self.end_layer - self.first_layer or not self.choices:
            raise ArgumentError(
                f"a stage of layers {self.first_layer} to {self.end_layer - 1} has {len(self.choices)} choices; it "
                "needs one for each layer"
            )
        for choice in dict.fromkeys(self.choices):
            if not choice.fits(self.num_ranks):
                raise ArgumentError(f"{choice} does not divide the {self.num_ranks} ranks of a stage")
        if len({choice.grid for choice in self.choices}) > 1:
            raise ArgumentError(f"a stage has one grid for all its layers, or none, but {self} mixes them")

    @property
    def num_ranks(self) -> int:
        """Ranks of the stage."""
        return self.end_rank - self.first_rank

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return self.end_layer - self.first_layer

    def sample_shards(self, layer: int) -> int:
        """Parts that the samples of a microbatch are divided into at a layer, counted over the whole model."""
        return self.choices[layer - self.first_layer].sample_shards(self.num_ranks)

    def __str__(self) -> str:
        counts: dict[Choice, int] = {}
        for choice in self.choices:
            counts[choice] = counts.get(choice, 0) + 1
        parts = [c.describe(self.num_ranks) + (f" x{n}" if len(counts) > 1 else "") for c, n in counts.items()]
        first, last = self.first_layer, self.end_layer - 1
        layers = f"layers {first}-{last}" if first < last else f"layer {first}"
        return f"{layers} on {count_of(self.num_ranks, 'rank')} ({'; '.join(parts)})"


def check_stages(stages: Sequence[StagePlan]) -> None:
    """Raise ArgumentError unless stages follow each other in their layers and ranks, from layer 0 and rank 0 on."""
    layer, rank = 0, 0
    for number, stage in enumerate(stages):
        if (stage.first_layer, stage.first_rank) != (layer, rank):
            raise ArgumentError(
                f"stage {number} begins with layer {stage.first_layer} and rank {stage.first_rank}; it must follow the "
                f"one before it, with layer {layer} and rank {rank}"
            )
        layer, rank = stage.end_layer, stage.end_rank
    if not stages:
        raise ArgumentError("a training plan needs at least one stage")
