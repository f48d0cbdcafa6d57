"""The arrays that a rank passes to a Mover, checked against its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.api.dtensors import check_same_layout, is_dtensor, layout_of
from reshard.api.tensor_checks import check_array, wait_for_collective
from reshard.coordination import Group
from reshard.errors import ArgumentError
from reshard.plan import Plan
from reshard.runtime.cuda.stream import current_device
from reshard.runtime.program import RankProgram
from reshard.sharding import AnyLayout, TensorSpec


def shard_shapes(plan: Plan, rank: int, side: str) -> list[tuple[int, ...] | None]:
    """The shapes of a rank's shards on one side of a plan, of the plain values of coded tensors."""
    shards = [spec.plain.src_shards if side == "src" else spec.plain.dst_shards for spec in plan.tensors]
    return [one.local_shape(rank) if rank in one.layout.ranks else None for one in shards]


@dataclass(frozen=True)
class MoverArrays:
    """The arrays of one transfer of a Mover, one per tensor of the plan; None where this rank has none.

    Attributes:
        sources: source shards; copies in host memory if the transfer runs on such copies.
        bases: source shards of the earlier version that a difference refers to; in host memory as ``sources``.
        outs: what the caller passed as ``out``.
        results: destination shards, from ``out`` or new.
        targets: the arrays to write: ``results``, or copies of them in host memory.
    """

    sources: list[torch.Tensor | None]
    bases: list[torch.Tensor | None]
    outs: list[Any]
    results: list[torch.Tensor | None]
    targets: list[torch.Tensor | None]


class ArrayReader:
    """Reads and checks the arrays that a rank passes to a Mover.

    Args:
        plan, program: the Mover's plan and this rank's part of it.
        group: the group that the plan's ranks refer to.
        device_type: ``"cpu"`` or ``"cuda"``; the same for all arrays.
    """

    def __init__(self, plan: Plan, program: RankProgram, group: Group, device_type: str) -> None:
        self._plan, self._program, self._group, self.device_type = plan, program, group, device_type

    def sources(self, given: Sequence[Any]) -> list[torch.Tensor | None]:
        """The source shard of each tensor; None outside the source.

        Raises:
            ArgumentError: a shard is missing or does not fit the plan.
            PartialError: a DTensor has a pending reduction.
        """
        role = "the source"
        return [
            self._check(wait_for_collective(self._local_of(array, spec, spec.plain.src, role)), shape, spec, role)
            for array, shape, spec in zip(given, self._shapes("src"), self._plan.tensors, strict=True)
        ]

    def targets(self, given: Sequence[Any]) -> list[torch.Tensor | None]:
        """The destination shard of each tensor, allocated if not given; raises as :meth:`sources`."""
        return [
            self._check(
                self.empty(spec, shape) if array is None else self._local_of(array, spec, spec.plain.dst, "out"),
                shape,
                spec,
                "the destination",
            )
            for array, shape, spec in zip(given, self._shapes("dst"), self._plan.tensors, strict=True)
        ]

    def empty_targets(self) -> list[torch.Tensor | None]:
        """A new array for each destination shard; None outside the destination."""
        return [self.empty(spec, shape) for spec, shape in zip(self._plan.tensors, self._shapes("dst"), strict=True)]

    def empty(self, spec: TensorSpec, shape: Sequence[int] | None) -> torch.Tensor | None:
        """A new array for a destination shard; None if ``shape`` is None."""
        if shape is None:
            return None
        if spec.plain.codec is not None:
            raise ArgumentError(
                f"the plan moves elements of codec {spec.dtype}, but not the shape and dtype of the coded tensor"
            )
        dtype = getattr(torch, spec.plain.dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=current_device(self.device_type))

    def _shapes(self, side: str) -> list[tuple[int, ...] | None]:
        """The shape of each shard of this rank, of the plain values of coded tensors; None where it has none."""
        return shard_shapes(self._plan, self._program.rank, side)

    def _check(self, array: Any, shape: tuple[int, ...] | None, spec: TensorSpec, role: str) -> torch.Tensor | None:
        return check_array(array, shape, spec.plain.dtype, role, spec.name, self._program.rank, self.device_type)

    def _local_of(self, array: Any, spec: TensorSpec, layout: AnyLayout, role: str) -> Any:
        """The local tensor of a DTensor whose layout matches the plan; any other value unchanged."""
        if not is_dtensor(array):
            return array
        what = f"{role} DTensor{f' of {spec.name!r}' if spec.name is not None else ''}"
        shape = spec.plain.shape
        if tuple(array.shape) != shape:
            raise ArgumentError(f"{what} has shape {list(array.shape)}, but the plan moves {list(shape)}")
        check_same_layout(layout_of(array, self._group), layout, shape, self._group.rank, what, "the plan")
        return array.to_local()
