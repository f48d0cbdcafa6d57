"""Conversion of plans to and from JSON; ``docs/plan-json.md`` describes the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from reshard.errors import LayoutError, PlanError, ReshardError
from reshard.formatting import brief
from reshard.plan.formats.text_parser import parse_plan, read_plan_topology
from reshard.plan.value.messages import expand_messages
from reshard.plan.value.plan import Plan
from reshard.plan.value.rotation_plan import MAX_LISTED
from reshard.plan.value.text_writer import format_transfer
from reshard.sharding import (
    MAX_RANK,
    AnyLayout,
    Coding,
    Layout,
    Mesh,
    RegionLayout,
    TensorSpec,
    check_integer,
    read_spec,
    write_2023,
    write_axis_names,
)
from reshard.topology import topology_to_json


def plan_to_json(plan: Plan, rank: int | None = None) -> dict[str, Any]:
    """The plan as plain values with all messages, or with ``rank`` only the messages of that rank.

    A plan in closed form with more than 1,048,576 messages is written without them, unless ``rank`` is given.

    Raises:
        PlanError: the argument is not a plan. ArgumentError: ``rank`` is not the number of a rank.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan_to_json needs a Plan, not {type(plan).__name__}")
    if rank is not None:
        rank = check_integer(rank, "rank", 0, MAX_RANK)
    data: dict[str, Any] = {
        "tensors": [_tensor_to_json(spec) for spec in plan.tensors],
        "host_of_rank": list(plan.topology.host_of_rank),
        "topology": topology_to_json(plan.topology),
        "strategy": plan.strategy,
        "staging_bytes": plan.staging_bytes,
        "plan_hash": plan.plan_hash,
    }
    if plan.is_listed:
        data["transfers"] = [
            format_transfer(plan.tensors, plan.transfers, number) for number in range(len(plan.transfers))
        ]
    else:
        data["closed_form"] = f"closed form of {plan.num_messages} messages"
    if rank is not None or plan.is_listed or plan.num_messages <= MAX_LISTED:
        data["messages"] = list(_list_messages(plan, rank))
    return data


def _list_messages(plan: Plan, rank: int | None = None) -> Iterator[dict[str, Any]]:
    for message in expand_messages(plan, rank):
        for i, (tensor, start, stop) in enumerate(message.boxes):
            yield {
                "id": message.id + i,
                "tensor": tensor,
                "sender": message.sender,
                "receiver": message.receiver,
                "start": list(start),
                "stop": list(stop),
                "after": [*([] if message.source is None else [message.source + i]), *message.after],
                # each box of a message is listed on its own, so the window counts boxes
                "window": message.window * len(message.boxes),
            }


def _tensor_to_json(spec: TensorSpec) -> dict[str, Any]:
    data: dict[str, Any] = {"shape": list(spec.shape), "dtype": spec.dtype}
    if spec.name is not None:
        data["name"] = spec.name
    if spec.coding is not None:
        data["coding"] = {"shape": list(spec.coding.shape), "dtype": spec.coding.dtype}
    data["src"] = layout_to_json(spec.src, spec.ndim)
    data["dst"] = layout_to_json(spec.dst, spec.ndim)
    return data


def layout_to_json(layout: AnyLayout, ndim: int) -> dict[str, Any]:
    """``{"ranks": nested list, "axes": names, "spec": "S0 R"}``, or ``{"regions": ..., "join_dim": ...}``."""
    if isinstance(layout, RegionLayout):
        return {
            "ranks": list(layout.ranks),
            "ndim": layout.ndim,
            "join_dim": layout.join_dim,
            "regions": {str(rank): [[list(pair) for pair in box] for box in boxes] for rank, boxes in layout.boxes},
        }
    try:
        spec = write_2023(layout.mesh, layout.spec, ndim)
    except LayoutError:
        spec = write_axis_names(layout.spec)
    return {"ranks": layout.mesh.array.tolist(), "axes": list(layout.mesh.axes), "spec": spec}


def layout_from_json(data: Any) -> AnyLayout:
    """The inverse of :func:`layout_to_json`.

    Raises:
        PlanError, LayoutError, MeshError: ``data`` is not a layout.
    """
    if not isinstance(data, Mapping):
        raise PlanError(f"a layout must be an object, not {type(data).__name__}")
    if "regions" in data:
        if not isinstance(data["regions"], Mapping):
            raise PlanError("regions must be an object {rank: boxes}")
        regions = {}
        for rank, boxes in data["regions"].items():
            if not (isinstance(rank, str) and rank.isascii() and rank.isdigit() and len(rank) < 11):
                raise PlanError(f"{rank!r} is not a rank")
            regions[int(rank)] = boxes
        return RegionLayout(regions, join_dim=_integer(data, "join_dim"), ndim=_integer(data, "ndim"))
    if not isinstance(data.get("spec"), str):
        raise PlanError("a layout needs a spec such as 'S0 R'")
    ranks = data.get("ranks")
    axes = data.get("axes")
    if axes is not None and not (isinstance(axes, list) and all(isinstance(axis, str) for axis in axes)):
        raise PlanError("axes must be a list of names")
    _check_nested(ranks, 0)
    try:
        array = np.array(ranks, dtype=np.int64) if not isinstance(ranks, int) else ranks
    except (ValueError, OverflowError) as error:
        raise PlanError(f"ranks must be an array of integers with rows of equal length: {error}") from None
    mesh = Mesh.from_array(array, axes)
    spec = data["spec"]
    return Layout(mesh, read_spec(mesh, spec))


def _check_nested(ranks: Any, depth: int) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, (int, list)) or depth > 32:
        raise PlanError("ranks must be a nested list of integers")
    if isinstance(ranks, list):
        for inner in ranks:
            _check_nested(inner, depth + 1)


def _integer(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{key} must be an integer, not {brief(value)}")
    return value


def plan_from_json(data: Any) -> Plan:
    """The plan written by :func:`plan_to_json` (without ``rank``), checked against its hash and its messages.

    The first use of the plan, or :func:`reshard.check_plan`, checks that it delivers.

    Raises:
        PlanError: ``data`` is not a plan, ``plan_hash`` or ``messages`` do not match the transfers, or there are no
            transfers although a rank needs data.
    """
    try:
        if isinstance(data, str):
            raise PlanError("give the parsed object, json.loads(text), not the text")
        if not isinstance(data, Mapping) or not isinstance(data.get("tensors"), list):
            raise PlanError("a plan must be an object with tensors")
        tensors = []
        for entry in data["tensors"]:
            if not isinstance(entry, Mapping) or not isinstance(entry.get("shape"), list):
                raise PlanError("a tensor must be an object with shape, dtype, src and dst")
            if not all(isinstance(size, int) and not isinstance(size, bool) for size in entry["shape"]):
                raise PlanError("shape must be a list of integers")
            name = entry.get("name")
            if name is not None and not isinstance(name, str):
                raise PlanError("a tensor's name must be a string")
            src, dst = layout_from_json(entry.get("src")), layout_from_json(entry.get("dst"))
            dtype, coding = str(entry.get("dtype")), _read_coding(entry.get("coding"))
            tensors.append(TensorSpec(tuple(entry["shape"]), dtype, src, dst, name, coding))
        topology = read_plan_topology(data.get("topology"))
        lines = [data["closed_form"]] if "closed_form" in data else data.get("transfers")
        if not isinstance(lines, list) or not all(isinstance(line, str) and "\n" not in line for line in lines):
            raise PlanError("transfers must be a list of lines")
        strategy, staging_bytes = str(data.get("strategy")), _integer(data, "staging_bytes")
        if not 0 <= staging_bytes < 10**19:
            raise PlanError(f"staging_bytes is {staging_bytes}; it must be at least 0 and less than 10**19")
        if len(strategy.split()) != 1:
            raise PlanError(f"strategy is {brief(strategy)}; it must be a name without spaces")
        empty = Plan(tuple(tensors), topology, strategy, _no_transfers(), staging_bytes)
        topology.check_covers(empty.ranks)
        plan = parse_plan(str(empty) + "\n".join(lines))
    except ReshardError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PlanError(f"not a plan: {error}") from None
    if "plan_hash" in data and data["plan_hash"] != plan.plan_hash:
        raise PlanError(
            f"plan_hash is {data['plan_hash']}, but the hash of the plan is {plan.plan_hash}; omit plan_hash from an "
            "edited plan"
        )
    if "messages" in data:
        _check_messages(data["messages"], plan)
    return plan


def _read_coding(data: Any) -> Coding | None:
    if data is None:
        return None
    if not isinstance(data, Mapping) or not isinstance(data.get("shape"), list):
        raise PlanError("a coding must be an object with shape and dtype")
    return Coding(tuple(data["shape"]), str(data.get("dtype")))


def _equals(given: Any, made: Any) -> bool:
    """Whether two JSON values are equal. A value that is not JSON, such as a tensor, may refuse the comparison."""
    try:
        return bool(given == made)
    except Exception:
        return False


def _check_messages(listed: Any, plan: Plan) -> None:
    """Raise PlanError unless the listed messages are those of the plan. Edits of messages would have no effect."""
    if not isinstance(listed, list) or len(listed) != plan.num_messages:
        listing = f"lists {len(listed)}" if isinstance(listed, list) else "is not a list"
        transfers = plan.transfers
        num_messages = int((transfers.num_chunks * np.diff(transfers.edge_offsets)).sum())
        boxes = f" with {plan.num_messages} boxes, each listed on its own" if plan.num_messages > num_messages else ""
        raise PlanError(
            f"messages {listing}, but the transfers make {num_messages} messages{boxes}: list all, or omit the key"
        )
    for given, made in zip(listed, _list_messages(plan), strict=True):
        if not _equals(given, made):
            raise PlanError(
                f"messages lists {brief(given, 200)}, but the transfers make {made}: edit transfers and omit messages"
            )


def _no_transfers() -> Any:
    from reshard.plan.formats.text_parser import build_transfers

    return build_transfers([], 0)
