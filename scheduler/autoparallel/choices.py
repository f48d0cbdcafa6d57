"""What may differ between layers: the degrees of parallelism, ZeRO and recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reshard.errors import ArgumentError

from .graph import Layer


@dataclass(frozen=True, order=True)
class Choice:
    """How the devices of a stage share one layer.

    Attributes:
        tp: ranks that divide the layer. The stage's devices divided by this are its replicas (dp).
        zero: stage of ZeRO over the replicas: 0 keeps all states, 1 shards those of the optimizer, 2 gradients too, and
            3 parameters too.
        recompute: whether the backward computes the forward again instead of keeping activations.
        kind: name of the tensor parallelism, a key of :data:`SHARDINGS`.
    """

    tp: int = 1
    zero: int = 0
    recompute: bool = False
    kind: str = "1d"

    def __str__(self) -> str:
        text = f"tp={self.tp}" + (f" ({self.kind})" if self.kind != "1d" else "")
        return text + (f" zero={self.zero}" if self.zero else "") + (" recompute" if self.recompute else "")


@dataclass(frozen=True)
class Sharding:
    """What one rank of a tensor-parallel group has of a layer.

    Attributes:
        compute: share of the computation. params: parameters. saved_bytes: bytes saved for the backward of one row.
        sums: ``((bytes for one row, passes of the data, ranks), ...)`` of the collectives in a forward; a backward has
            the same. An all-reduce passes the data twice, a gather or a scatter once.
    """

    compute: float
    params: float
    saved_bytes: float
    sums: tuple[tuple[float, float, int], ...] = ()


def shard_1d(layer: Layer, degree: int) -> Sharding:
    """Megatron's: column-wise and then row-wise products, with an all-reduce behind each pair.

    A layer that cannot be divided over so many ranks is computed whole by each.
    """
    if degree > layer.tp_limit:
        degree = 1
    return Sharding(
        1.0 / degree,
        layer.num_params - layer.tp_params * (1 - 1 / degree),
        layer.saved_bytes - layer.tp_saved_bytes * (1 - 1 / degree),
        ((layer.tp_sum_bytes, 2.0, degree),) * layer.tp_sums if degree > 1 else (),
    )


#: ``sharding(layer, degree)`` of each kind of tensor parallelism. Other grids, or sums that are compressed, are further
#: entries.
SHARDINGS: dict[str, Callable[[Layer, int], Sharding]] = {"1d": shard_1d}


@dataclass(frozen=True)
class ChoiceRules:
    """Which choices a search may use.

    Attributes:
        zero: stages of ZeRO. recompute: whether layers are recomputed.
        max_tp, least_tp: largest and smallest tensor-parallel degree.
        kinds: keys of :data:`SHARDINGS`.
        executable: only what ``Pipe`` runs: ZeRO 0 or 3, one tp and one ZeRO inside a stage, and ZeRO 3 wherever a
            stage has both replicas and tensor parallelism.
    """

    zero: tuple[int, ...] = (0, 3)
    recompute: tuple[bool, ...] = (False, True)
    max_tp: int = 1 << 30
    least_tp: int = 1
    kinds: tuple[str, ...] = ("1d",)
    executable: bool = True

    def __post_init__(self) -> None:
        for zero in self.zero:
            if zero not in (0, 1, 2, 3):
                raise ArgumentError(f"a stage of ZeRO is {zero!r}; it must be from 0 to 3")
        for kind in self.kinds:
            if kind not in SHARDINGS:
                raise ArgumentError(f"no tensor parallelism {kind!r}; there is {', '.join(SHARDINGS)}")

    def choices(self, num_devices: int, host_devices: int) -> tuple[Choice, ...]:
        """The leaves of the decision tree of a stage: all choices for its layers, in a fixed order.

        Galvatron-BMW draws a tree for each pipeline degree, with a level for each paradigm. On hosts of equal devices
        the order of the levels decides only which ranks are neighbours. Tensor parallelism always has the nearest ones
        here, so that each set of degrees is one leaf. Replicas that keep and replicas that shard states are never mixed
        in one layer, since sharding alone is as good.
        """
        found = []
        for tp, kind in itertools.product(_divisors(num_devices), self.kinds):
            if not self.least_tp <= tp <= min(self.max_tp, host_devices) or (tp == 1 and kind != self.kinds[0]):
                continue
            replicas = num_devices // tp
            for zero in self.zero if replicas > 1 else (0,):
                if self.executable and (zero in (1, 2) or (zero == 0 and tp > 1 and replicas > 1)):
                    continue
                found += [Choice(tp, zero, recompute, kind) for recompute in self.recompute]
        return tuple(found)

    def uniform(self, choices: Sequence[Choice]) -> tuple[tuple[Choice, ...], ...]:
        """Choices in groups that the layers of one stage may mix."""
        if not self.executable:
            return (tuple(choices),) if choices else ()
        groups: dict[tuple[int, int, str], list[Choice]] = {}
        for choice in choices:
            groups.setdefault((choice.tp, choice.zero, choice.kind), []).append(choice)
        return tuple(tuple(group) for group in groups.values())


def _divisors(number: int) -> list[int]:
    return [1 << power for power in range(number.bit_length()) if number % (1 << power) == 0]
