"""Checks the arrays of a Mover's transfer against its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reshard.api.dtensors import check_same_layout, is_dtensor, layout_of
from reshard.api.tensor_checks import check_array, wait_for_collective
from reshard.coordination import Group
from reshard.errors import ArgumentError
from reshard.plan import Plan
from reshard.runtime.cuda.stream import current_device
from reshard.runtime.program import Program
from reshard.sharding import AnyLayout, TensorSpec


class MoverArrays:
    """Reads and checks the arrays that a rank passes to a Mover.

    Args:
        plan, program: the Mover's plan and this rank's part of it.
        group: the group that the plan's ranks refer to.
        device_type: ``"cpu"`` or ``"cuda"``; the same for all arrays.
    """

    def __init__(self, plan: Plan, program: Program, group: Group, device_type: str) -> None:
        self._plan, self._program, self._group, self._device_type = plan, program, group, device_type

    def sources(self, given: Sequence[Any]) -> list[torch.Tensor | None]:
        """The source shard of each tensor; None outside the source.

        Raises:
            ArgumentError: a shard is missing or does not fit the plan.
            PartialError: a DTensor has a pending reduction.
        """
        return [
            self._check(
                wait_for_collective(self._local_of(array, spec, spec.src, "the source")), shape, spec, "the source"
            )
            for array, shape, spec in zip(given, self._program.src_shapes, self._plan.tensors, strict=True)
        ]

    def targets(self, given: Sequence[Any]) -> list[torch.Tensor | None]:
        """The destination shard of each tensor, allocated if not given; raises as :meth:`sources`."""
        return [
            self._check(
                self.empty(spec, shape) if array is None else self._local_of(array, spec, spec.dst, "out"),
                shape,
                spec,
                "the destination",
            )
            for array, shape, spec in zip(given, self._program.dst_shapes, self._plan.tensors, strict=True)
        ]

    def empty(self, spec: TensorSpec, shape: Sequence[int] | None) -> torch.Tensor | None:
        """A new array for a destination shard; None if ``shape`` is None."""
        if shape is None:
            return None
        return torch.empty(tuple(shape), dtype=getattr(torch, spec.dtype), device=current_device(self._device_type))

    def _check(self, array: Any, shape: tuple[int, ...] | None, spec: TensorSpec, role: str) -> torch.Tensor | None:
        return check_array(array, shape, spec.dtype, role, spec.name, self._program.rank, self._device_type)

    def _local_of(self, array: Any, spec: TensorSpec, layout: AnyLayout, role: str) -> Any:
        """The local tensor of a DTensor whose layout matches the plan; any other value unchanged."""
        if not is_dtensor(array):
            return array
        what = f"{role} DTensor{f' of {spec.name!r}' if spec.name is not None else ''}"
        if tuple(array.shape) != spec.shape:
            raise ArgumentError(f"{what} has shape {list(array.shape)}, but the plan moves {list(spec.shape)}")
        check_same_layout(layout_of(array, self._group), layout, spec.shape, self._group.rank, what, "the plan")
        return array.to_local()
