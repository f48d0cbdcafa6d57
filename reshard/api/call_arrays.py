"""The arrays that a call sends from and receives into, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from reshard.api.casts import finish_received, wire_source, wire_target
from reshard.api.inputs import Item
from reshard.api.mover_arrays import shard_shapes
from reshard.api.tensor_checks import check_array
from reshard.coordination import Channel, Decision
from reshard.plan import Plan
from reshard.runtime.cuda.stream import current_device


def find_target(item: Item, shape: tuple[int, ...] | None, decision: Decision, rank: int) -> torch.Tensor | None:
    """The array that receives a rank's destination shard of a call, allocated if the rank passes none.

    Args:
        shape: of the shard; None outside the destination.
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


def copy_to_host(items: Sequence[Item], channel: Channel, decision: Decision) -> tuple[list[Item], Decision]:
    """The items with host copies of their arrays, and the decision for a transfer between CPU tensors."""
    try:
        found = [item.on_host(current_device(decision.device_type)) for item in items]
    except Exception as error:  # for example out of memory; the other ranks wait for this one
        raise channel.fail(decision.generation, error) from error
    return found, replace(decision, device_type="cpu")


def finish_call(
    items: Sequence[Item], decision: Decision, dst: Sequence[Any], targets: Sequence[torch.Tensor | None]
) -> Any:
    """Complete the destination shards ``targets`` from what ``dst`` received; returns this rank's result."""
    finish_received(dst, targets)
    return wrap_results(items, targets, decision)


def wrap_results(items: Sequence[Item], targets: Sequence[torch.Tensor | None], decision: Decision) -> Any:
    """What a call returns: the destination shards, as DTensors where the caller uses those."""
    results = {}
    for item, target in zip(items, targets, strict=True):
        array = item.on_device(target)
        is_dtensor = item.name in decision.dtensors or item.out_dtensor is not None
        results[item.name] = item.wrap(array, decision.shapes[item.name]) if is_dtensor else array
    return results[""] if items[0].name == "" else {name: results[name] for name in items[0].names}
