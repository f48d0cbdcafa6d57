"""Choices of a layer: the degrees of parallelism, ZeRO and recomputation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.arguments import check_arguments, check_fields
from reshard.errors import ArgumentError
from reshard.formatting import brief

from .layer_graph import Layer

#: ``(rows, cols, depth)`` of a grid of :mod:`reshard.parallel`; empty: no grid.
GridShape = tuple[int, ...]
#: Largest number of ranks of a layer of a grid, if it is larger than a host.
MAX_GRID_RANKS = 16


@dataclass(frozen=True, order=True)
class LayerChoice:
    """The division of one layer over the devices of a stage.

    Attributes:
        tp: ranks that divide the layer. The stage's devices divided by this are its replicas (dp).
        zero: ZeRO stage over the replicas (on a grid, over its depth): 0 keeps all states, 1 shards those of the
            optimizer, 2 gradients too, and 3 parameters too.
        recompute: whether the backward computes the forward again instead of keeping activations.
        grid: ``(rows, cols, depth)`` of a grid of :mod:`reshard.parallel`, which then divides the layer over
            ``tp = rows * cols`` ranks, in ``depth`` replicas; empty: torch divides it.

    Raises:
        ArgumentError: the grid is malformed, or has another number of ranks in a layer.
    """

    tp: int = 1
    zero: int = 0
    recompute: bool = False
    grid: GridShape = ()

    def __post_init__(self) -> None:
        if isinstance(self.grid, str) or not isinstance(self.grid, Sequence):
            raise ArgumentError(f"grid {brief(self.grid)} must be (rows, cols, depth), three positive integers")
        object.__setattr__(self, "grid", tuple(self.grid))
        if self.grid and (len(self.grid) != 3 or not all(type(size) is int and size >= 1 for size in self.grid)):
            raise ArgumentError(f"grid {brief(self.grid)} must be (rows, cols, depth), three positive integers")
        if (
            type(self.tp) is not int
            or not 1 <= self.tp < 2**62
            or type(self.zero) is not int
            or not 0 <= self.zero <= 3
        ):
            raise ArgumentError(
                f"tp is {brief(self.tp)} and zero {brief(self.zero)}; tp must be a positive integer, and zero an "
                "integer from 0 to 3"
            )
        if not isinstance(self.recompute, bool):
            raise ArgumentError(f"recompute of a choice is {brief(self.recompute)}; it must be a bool")
        if not self.grid:
            return
        if self.tp != self.grid[0] * self.grid[1] or (self.zero and self.grid[2] == 1):
            raise ArgumentError(
                f"a layer on a grid of {self.grid[0]} x {self.grid[1]} x {self.grid[2]} has tp = rows * cols = "
                f"{self.grid[0] * self.grid[1]}, and ZeRO only over a depth of at least 2, not tp={self.tp} and "
                f"zero={self.zero}"
            )

    @classmethod
    @check_arguments(rows=(1, 2**20), cols=(1, 2**20), depth=(1, 2**20))
    def on_grid(cls, rows: int, cols: int, depth: int = 1, *, zero: int = 0, recompute: bool = False) -> LayerChoice:
        """A layer on a grid of ``rows * cols * depth`` ranks, with ZeRO over the depth."""
        return cls(rows * cols, zero, recompute, (rows, cols, depth))

    @property
    def stage_key(self) -> tuple[int, int, GridShape]:
        """The properties that ``Pipe`` needs to be equal for all layers of a stage."""
        return self.tp, self.zero, self.grid

    @property
    def cols(self) -> int:
        """Parts that features between layers are divided into."""
        return self.grid[1] if self.grid else 1

    @check_arguments(num_ranks=(1, 2**22))
    def sample_shards(self, num_ranks: int) -> int:
        """Parts that the samples of a microbatch are divided into, on a stage of some ranks."""
        return num_ranks // (self.grid[1] if self.grid else self.tp)

    @check_arguments(num_ranks=(1, 2**22))
    def fits(self, num_ranks: int) -> bool:
        """Whether a stage of so many ranks can have this choice."""
        return num_ranks == math.prod(self.grid) if self.grid else num_ranks % self.tp == 0

    @check_arguments(num_ranks=(1, 2**22))
    def describe(self, num_ranks: int) -> str:
        """A text, for a stage of some ranks."""
        return str(self) if self.grid else f"dp={num_ranks // self.tp} {self}"

    def __str__(self) -> str:
        text = f"grid={'x'.join(map(str, self.grid))}" if self.grid else f"tp={self.tp}"
        return text + (f" zero={self.zero}" if self.zero else "") + (" recompute" if self.recompute else "")


@dataclass(frozen=True)
class Sharding:
    """The share of a layer on one rank of a tensor-parallel group.

    Attributes:
        compute: share of the computation.
        params: parameters.
        saved_bytes: bytes saved for the backward of one sample.
        collectives: ``((bytes for one sample, passes of the data, ranks), ...)`` of each collective in a forward; a
            backward has the same. An all-reduce passes the data twice, an all-gather or a reduce-scatter once.
    """

    compute: float
    params: float
    saved_bytes: float
    collectives: tuple[tuple[float, float, int], ...] = ()


def shard_1d(layer: Layer, degree: int) -> Sharding:
    """Megatron's: column-wise and then row-wise products, with an all-reduce after each pair.

    If a layer cannot be sharded over so many ranks, every rank computes all of it.
    """
    if degree > layer.tp_limit:
        degree = 1
    return Sharding(
        1.0 / degree,
        layer.num_params - layer.tp_params * (1 - 1 / degree),
        layer.saved_bytes - layer.tp_saved_bytes * (1 - 1 / degree),
        ((layer.tp_all_reduce_bytes, 2.0, degree),) * layer.tp_all_reduces if degree > 1 else (),
    )


@dataclass(frozen=True)
class ChoiceRules:
    """The choices that a search may use.

    Attributes:
        zero: stages of ZeRO.
        recompute: whether layers are recomputed.
        max_tp, min_tp: largest and smallest tensor-parallel degree.
        grids: whether stages may be on grids of :mod:`reshard.parallel`, where it can cut all their layers.
        only_grid: the grid of every stage of more than one rank; empty: any, or none.
        executable: only what ``Pipe`` runs: ZeRO 0 or 3, one tp and one ZeRO inside a stage, and ZeRO 3 wherever a
            stage has both replicas and tensor parallelism.
        max_stages_per_rank: largest number of stages that share the same ranks, up to 4; 1: none share them.
    """

    zero: tuple[int, ...] = (0, 3)
    recompute: tuple[bool, ...] = (False, True)
    max_tp: int = 1 << 30
    min_tp: int = 1
    grids: bool = True
    only_grid: GridShape = ()
    executable: bool = True
    max_stages_per_rank: int = 4

    def __post_init__(self) -> None:
        for name in ("zero", "recompute"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not values:
                raise ArgumentError(f"{name} of ChoiceRules is {brief(values)}; it must be a tuple of what is allowed")
        if not all(isinstance(recompute, bool) for recompute in self.recompute):
            raise ArgumentError(f"recompute of ChoiceRules is {brief(self.recompute)}; it has True, False or both")
        degrees = (self.min_tp, self.max_tp)
        if not all(type(tp) is int for tp in degrees) or not 1 <= self.min_tp <= self.max_tp:
            raise ArgumentError(
                f"min_tp is {brief(self.min_tp)} and max_tp {brief(self.max_tp)}; they must be integers, "
                "1 <= least <= max"
            )
        for name in ("grids", "executable"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} of ChoiceRules is {brief(getattr(self, name))}; it must be True or False")
        if type(self.max_stages_per_rank) is not int or self.max_stages_per_rank < 1:
            raise ArgumentError(
                f"max_stages_per_rank of ChoiceRules is {brief(self.max_stages_per_rank)}; it must be at least 1"
            )
        for zero in self.zero:
            if type(zero) is not int or not 0 <= zero <= 3:
                raise ArgumentError(f"the ZeRO stage is {brief(zero)}; it must be from 0 to 3")
        if self.executable and not {0, 3} & set(self.zero):
            raise ArgumentError(
                f"the search may use only ZeRO {', '.join(map(str, self.zero))}, which Pipe does not run; it runs "
                "ZeRO 0 and 3: to price others, search with ChoiceRules(executable=False)"
            )
        check_fields(self)
        if self.only_grid:
            LayerChoice(math.prod(self.only_grid[:2]), grid=self.only_grid)
            if not self.grids:
                raise ArgumentError(f"ChoiceRules has only_grid={self.only_grid}, but grids=False allows none")

    @check_arguments(num_devices=(1, 2**22), host_devices=(1, 2**22))
    def choices(self, num_devices: int, host_devices: int) -> tuple[LayerChoice, ...]:
        """The leaves of the decision tree of a stage: all choices for its layers, in a fixed order.

        Galvatron-BMW draws a tree for each pipeline degree, with a level for each paradigm. On hosts of equal devices
        the order of the levels decides only which ranks are neighbours. Here, tensor parallelism always takes the
        nearest ranks, so each set of degrees is one leaf. All replicas of a layer keep states, or all shard them: a
        mixture is no better than sharding alone.
        """
        choices = []
        for tp in _divisors(num_devices):
            if not self.min_tp <= tp <= min(self.max_tp, host_devices) or (self.only_grid and num_devices > 1):
                continue
            replicas = num_devices // tp
            for zero in self.zero if replicas > 1 else (0,):
                if self.executable and (zero in (1, 2) or (zero == 0 and tp > 1 and replicas > 1)):
                    continue
                choices += [LayerChoice(tp, zero, recompute) for recompute in self.recompute]
        return tuple(choices)

    @check_arguments(num_devices=(1, 2**22), host_devices=(1, 2**22))
    def grid_shapes(self, num_devices: int, host_devices: int) -> tuple[GridShape, ...]:
        """``(rows, cols, depth)`` of all grids of a stage, in a fixed order. Grids of replicas alone are none."""
        if self.only_grid:
            return (self.only_grid,) if math.prod(self.only_grid) == num_devices > 1 else ()
        if not self.grids:
            return ()
        max_ranks = min(self.max_tp, max(host_devices, MAX_GRID_RANKS))
        sizes = [size for size in range(1, min(max_ranks, num_devices) + 1) if num_devices % size == 0]
        return tuple(
            (rows, cols, num_devices // (rows * cols))
            for rows, cols in itertools.product(sizes, sizes)
            if num_devices % (rows * cols) == 0 and max(2, self.min_tp) <= rows * cols <= max_ranks
        )

    @check_arguments()
    def grid_zeros(self, shape: GridShape) -> tuple[int, ...]:
        """Stages of ZeRO over the depth of a grid."""
        return tuple(
            zero for zero in self.zero if zero == 0 or (shape[2] > 1 and not (self.executable and zero in (1, 2)))
        )

    @check_arguments()
    def uniform(self, choices: Sequence[LayerChoice]) -> tuple[tuple[LayerChoice, ...], ...]:
        """Choices in groups that the layers of one stage may mix. Layers on a grid are never mixed with others."""
        groups: dict[object, list[LayerChoice]] = {}
        for choice in choices:
            groups.setdefault(choice.stage_key if self.executable or choice.grid else (), []).append(choice)
        return tuple(tuple(group) for group in groups.values())


def _divisors(number: int) -> list[int]:
    return [1 << power for power in range(number.bit_length()) if number % (1 << power) == 0]
