"""The arrays that a call or a Mover sends from and receives into, checked against its plan, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reshard.api.arguments.inputs import Item
from reshard.api.arrays.casts import finish_received, wire_source, wire_target
from reshard.api.arrays.dtensors import check_same_layout, is_dtensor, layout_of
from reshard.api.arrays.tensor_checks import check_array, wait_for_collective
from reshard.coordination import CallGroup, Decision, Group
from reshard.errors import ArgumentError
from reshard.plan import Plan
from reshard.runtime.cuda.stream import current_device
from reshard.runtime.program import RankProgram
from reshard.sharding import AnyLayout, TensorSpec


def shard_shapes(plan: Plan, rank: int, side: str) -> list[tuple[int, ...] | None]:
    """The shapes of a rank's shards on one side of a plan, of the plain values of encoded tensors."""
    shards = [spec.plain.src_tiles if side == "src" else spec.plain.dst_tiles for spec in plan.tensors]
    return [shard.local_shape(rank) if rank in shard.layout.ranks else None for shard in shards]


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
        self._shapes = {side: shard_shapes(plan, program.rank, side) for side in ("src", "dst")}

    def sources(self, given: Sequence[Any]) -> list[torch.Tensor | None]:
        """The source shard of each tensor; None outside the source.

        Raises:
            ArgumentError: a shard is missing or does not fit the plan.
            PartialError: a DTensor has a pending reduction.
        """
        role = "the source"
        return [
            self._check(wait_for_collective(self._local_of(array, spec, spec.plain.src, role)), shape, spec, role)
            for array, shape, spec in zip(given, self._shapes["src"], self._plan.tensors, strict=True)
        ]

    def dst_shards(self, given: Sequence[Any]) -> list[torch.Tensor | None]:
        """The destination shard of each tensor, allocated if not given; raises as :meth:`sources`."""
        return [
            self._check(
                self.empty(spec, shape) if array is None else self._local_of(array, spec, spec.plain.dst, "out"),
                shape,
                spec,
                "the destination",
            )
            for array, shape, spec in zip(given, self._shapes["dst"], self._plan.tensors, strict=True)
        ]

    def empty_targets(self) -> list[torch.Tensor | None]:
        """A new array for each destination shard; None outside the destination."""
        return [self.empty(spec, shape) for spec, shape in zip(self._plan.tensors, self._shapes["dst"], strict=True)]

    def empty(self, spec: TensorSpec, shape: Sequence[int] | None) -> torch.Tensor | None:
        """A new array for a destination shard; None if ``shape`` is None."""
        if shape is None:
            return None
        if spec.plain.codec is not None:
            raise ArgumentError(
                f"the plan moves elements of codec {spec.dtype}, but not the shape and dtype of the encoded tensor"
            )
        dtype = getattr(torch, spec.plain.dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=current_device(self.device_type))

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


def find_target(item: Item, shape: tuple[int, ...] | None, decision: Decision, rank: int) -> torch.Tensor | None:
    """The array that receives a rank's destination shard of a call, allocated if the rank passes none.

    Args:
        shape: shape of the shard; None outside the destination.
    """
    dtype = decision.dtypes[item.name] if item.dst_dtype is None else item.dst_dtype
    out = item.out
    if out is None and shape is not None:
        device = current_device(decision.device_type) if item.tensor is None else item.tensor.device
        out = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    return check_array(out, shape, dtype, "the destination", item.name or None, rank, decision.device_type)


def call_arrays(
    items: Sequence[Item], plan: Plan, decision: Decision, rank: int, encoded: Mapping[str, torch.Tensor | None]
) -> tuple[list[Any], list[Any], list[torch.Tensor | None]]:
    """The arrays to send, the arrays to receive into, and this rank's destination shards.

    Args:
        encoded: source shards that are encoded already, by tensor.
    """
    device, shapes = decision.device_type, shard_shapes(plan, rank, "dst")
    targets = [find_target(item, shape, decision, rank) for item, shape in zip(items, shapes, strict=True)]
    src = [
        encoded.get(item.name) if spec.codec and item.name in encoded else wire_source(item.tensor, spec, device)
        for item, spec in zip(items, plan.tensors, strict=True)
    ]
    dst = [wire_target(target, spec, device) for target, spec in zip(targets, plan.tensors, strict=True)]
    return src, dst, targets


def copy_to_host(items: Sequence[Item], call_group: CallGroup, decision: Decision) -> tuple[list[Item], Decision]:
    """The items with host copies of their arrays, and the decision for a transfer between CPU tensors."""
    try:
        on_host = [item.on_host(current_device(decision.device_type)) for item in items]
    except Exception as error:  # for example out of memory; the other ranks wait for this one
        raise call_group.fail(decision.generation, error) from error
    return on_host, replace(decision, device_type="cpu")


def finish_call(
    items: Sequence[Item], decision: Decision, dst: Sequence[Any], targets: Sequence[torch.Tensor | None]
) -> Any:
    """Complete the destination shards ``targets`` from what ``dst`` received; returns this rank's result."""
    finish_received(dst, targets)
    return wrap_results(items, targets, decision)


def wrap_results(items: Sequence[Item], targets: Sequence[torch.Tensor | None], decision: Decision) -> Any:
    """The results of a call: the destination shards, as DTensors where the caller uses DTensors."""
    results = {}
    for item, target in zip(items, targets, strict=True):
        array = item.on_device(target)
        is_dtensor = item.name in decision.dtensors or item.out_dtensor is not None
        results[item.name] = item.wrap(array, decision.shapes[item.name]) if is_dtensor else array
    return results[""] if items[0].name == "" else {name: results[name] for name in items[0].names}
