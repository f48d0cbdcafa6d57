"""One stage of a training plan: its layers, its ranks and the choices of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import ArgumentError
from reshard.formatting import count_of

from .layer_choices import LayerChoice


@dataclass(frozen=True, order=True)
class StagePlan:
    """Layers ``first_layer`` to ``end_layer - 1`` on ranks ``first_rank`` to ``end_rank - 1``.

    ``choices`` has one entry for each of the layers.
    """

    first_layer: int
    end_layer: int
    first_rank: int
    end_rank: int
    choices: tuple[LayerChoice, ...]

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
        counts: dict[LayerChoice, int] = {}
        for choice in self.choices:
            counts[choice] = counts.get(choice, 0) + 1
        parts = [c.describe(self.num_ranks) + (f" x{n}" if len(counts) > 1 else "") for c, n in counts.items()]
        first, last = self.first_layer, self.end_layer - 1
        layers = f"layers {first}-{last}" if first < last else f"layer {first}"
        return f"{layers} on {count_of(self.num_ranks, 'rank')} ({'; '.join(parts)})"


def pp_ranks_of(stages: Sequence[StagePlan]) -> tuple[int, ...]:
    """The pp rank of each stage: stages on the same ranks share one."""
    numbers: dict[tuple[int, int], int] = {}
    return tuple(numbers.setdefault((stage.first_rank, stage.end_rank), len(numbers)) for stage in stages)


def describe_stages(stages: Sequence[StagePlan]) -> str:
    """A text of stages, which also says which of them share ranks."""
    pp_ranks = pp_ranks_of(stages)
    shared = f"; stages on meshes {', '.join(map(str, pp_ranks))}" if len(set(pp_ranks)) < len(stages) else ""
    return ", ".join(map(str, stages)) + shared


def check_stages(stages: Sequence[StagePlan]) -> None:
    """Raise ArgumentError unless stages follow each other in their layers and ranks, from 0 on.

    A stage may instead have all the ranks of an earlier one, if both divide a layer over these ranks alike.
    """
    if not stages:
        raise ArgumentError("a training plan needs at least one stage")
    layer, rank = 0, 0
    earlier: dict[tuple[int, int], int] = {}
    for number, stage in enumerate(stages):
        ranks = (stage.first_rank, stage.end_rank)
        if stage.first_layer != layer or (stage.first_rank != rank and ranks not in earlier):
            raise ArgumentError(
                f"stage {number} begins with layer {stage.first_layer} and rank {stage.first_rank}; it must follow the "
                f"one before it, with layer {layer} and rank {rank}, or have the ranks of an earlier stage"
            )
        other = stages[earlier.setdefault(ranks, number)]
        if _axes(stage) != _axes(other):
            raise ArgumentError(
                f"stages {earlier[ranks]} and {number} share ranks {stage.first_rank} to {stage.end_rank - 1}, but "
                f"have {other.choices[0]} and {stage.choices[0]}; they must divide layers alike"
            )
        layer, rank = stage.end_layer, max(rank, stage.end_rank)


def _axes(stage: StagePlan) -> set[tuple[int, tuple[int, ...]]]:
    """The division of the layers of a stage over its ranks."""
    return {(choice.tp, choice.grid) for choice in stage.choices}
