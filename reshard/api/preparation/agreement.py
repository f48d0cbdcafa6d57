"""The second step of a call: each rank checks its arguments, and the ranks agree on them."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace
from typing import Any

from reshard import __version__
from reshard.api.arguments.inputs import Inputs, Item
from reshard.api.arguments.option_checks import check_compression, check_on_loss, check_verify, needs_cpu
from reshard.api.arguments.options import TransferOptions, is_fault_tolerant
from reshard.api.arguments.transfer_arrays import copy_to_host
from reshard.api.arrays.casts import check_cast, warn_of_float8
from reshard.api.arrays.equal_shards import describe_equal_shards, digest_corners
from reshard.api.arrays.memory_in_use import check_unused
from reshard.api.arrays.tensor_checks import (
    check_base,
    check_movable,
    check_no_aliasing,
    detach_source,
    wait_for_collective,
)
from reshard.codecs import codec_name, find_codec, has_base, has_variable_size
from reshard.coordination import (
    CallGroup,
    Decision,
    RoundRequest,
    TensorRequest,
    check_inside,
    find_call_group,
    remaining_ranks,
    resolve_partial,
)
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, ReshardError
from reshard.formatting import brief
from reshard.planner import find_strategy
from reshard.public_api import caller_level
from reshard.runtime.array_bytes import digest_array
from reshard.runtime.cuda.device_encoding import check_device_codec
from reshard.runtime.cuda.host_copies import is_copied
from reshard.sharding import TensorSpec, check_shape
from reshard.topology import topology_to_json
from reshard.topology.topology import check_topology

#: Options that may differ between ranks, or are compared apart from the others.
LOCAL_OPTIONS = ("timeout_seconds", "topology")


@dataclass(frozen=True)
class Agreement:
    """The result of the second step: the inputs, options and lost ranks on which the ranks of a call have agreed.

    Attributes:
        inputs: inputs of this rank, checked. If the transfer runs on copies in host memory, they hold the copies.
        call_group: the ranks that called.
        round_number: number of the agreement's round, which tags the messages of the transfer.
        decision: its result, for the device type that the transfer runs on.
        arguments: ``(name, value)`` pairs that are equal on all ranks.
        lost: in a fault-tolerant call, the ranks that did not call.
        purpose: the purpose of further agreements of the call, which errors name.
    """

    inputs: Inputs
    call_group: CallGroup
    round_number: int
    decision: Decision
    arguments: list[tuple[str, str]]
    lost: frozenset[int]
    purpose: str

    @property
    def tensors(self) -> list[TensorSpec]:
        """The tensors in the dtypes of their sources."""
        shapes, dtypes = self.decision.shapes, self.decision.dtypes
        return [
            TensorSpec(tuple(shapes[item.name]), dtypes[item.name], item.src, item.dst, item.name or None)
            for item in self.inputs.items
        ]


def agree(inputs: Inputs, purpose: str) -> Agreement:
    """Agree with the other ranks of a call.

    Args:
        inputs: inputs of this rank.
        purpose: purpose of the call's agreements.

    Raises:
        ReshardError: the arguments of a rank are wrong, or ranks disagree; the same error on all ranks.
    """
    group, options = inputs.group, inputs.options
    called = tuple(rank for rank in inputs.members if rank < group.size)
    inside = remaining_ranks(group, called) if is_fault_tolerant(options) else called
    call_group = find_call_group(group, inside)
    request, items = _make_request(inputs, purpose)
    layouts = {item.name: (item.src, item.dst) for item in items}
    lost = set(called) - set(inside)
    while True:
        decide = functools.partial(resolve_partial, layouts=layouts, members=call_group.members)
        round_number, decision = call_group.agree(
            request, decide, options["timeout_seconds"], is_fault_tolerant(options)
        )
        lost |= set(decision.lost)
        if decision.dtypes:
            break
        # No agreement: the rank that decides the round was lost. Repeat the round without the lost ranks.
        call_group = find_call_group(group, tuple(rank for rank in inside if rank not in lost))
    if is_copied(decision.device_type, needs_cpu(options)):
        items, decision = copy_to_host(items, call_group, decision)
    checked = replace(inputs, items=items)
    for item in items:
        if item.name in decision.equal and item.tensor is not None:
            what = f"tensor {item.name!r}" if item.name else "the tensor"
            text = describe_equal_shards(what, item.src.ranks, item.tensor.shape, decision.shapes[item.name])
            warnings.warn(text, stacklevel=caller_level())
    return Agreement(checked, call_group, round_number, decision, request.arguments, frozenset(lost), purpose)


def _make_request(inputs: Inputs, purpose: str) -> tuple[RoundRequest, list[Item]]:
    """Check the arguments of this rank.

    Args:
        inputs: inputs of the call.
        purpose: purpose of the request.

    Returns:
        The request, with the local error if the arguments are wrong, and the items with detached source tensors and
        dtypes by name.
    """
    arguments: list[tuple[str, str]] = []
    tensors = {item.name: TensorRequest() for item in inputs.items}
    group, checked, error = inputs.group, inputs.items, None
    try:
        checked = _check_local(arguments, tensors, inputs)
    except ReshardError as known:
        error = (type(known).__name__, str(known))
    except Exception as other:  # a wrong argument may raise anything; the other ranks must receive it
        error = ("ArgumentError", f"{type(other).__name__}: {other}")
    return RoundRequest(group.rank, arguments, tensors, group.hostname, error=error, purpose=purpose), checked


def _check_local(arguments: list[tuple[str, str]], tensors: dict[str, TensorRequest], inputs: Inputs) -> list[Item]:
    """Fill ``arguments`` and ``tensors`` up to the first wrong argument; returns the items to move."""
    group, items, members, options = inputs.group, inputs.items, inputs.members, inputs.options
    topology = options["topology"]
    arguments.append(("the version of reshard", __version__))
    arguments.append(("the size of the group", str(group.size)))
    named = ", ".join(repr(item.name) for item in items if item.name)
    unnamed = "one without a name; a rank without shards of named tensors passes {name: None}"
    arguments.append(("the tensors", named or unnamed))
    arguments.extend(_describe_option(name, value) for name, value in options.items() if name not in LOCAL_OPTIONS)
    if topology is not None:
        check_topology(topology)
    _check_device("cpu", options)
    check_compression(options["compression"], options["max_error"], options["on_error"])
    arguments.append(("topology", "None" if topology is None else str(topology_to_json(topology))))
    for item in items:
        of = f" of {item.name!r}" if item.name else ""
        arguments.append((f"the source layout{of}", str(item.src)))
        arguments.append((f"the destination layout{of}", str(item.dst)))
    check_inside(group, members)
    if topology is not None:
        topology.check_covers(members)
    checked = []
    for item in items:
        if item.spec_error is not None:
            raise item.spec_error
        tensors[item.name], one = _check_item(item, group.rank, options)
        checked.append(one)
        arguments.append((f"the destination dtype{f' of {one.name!r}' if one.name else ''}", str(one.dst_dtype)))
    outs, names = [item.out for item in checked], [item.name for item in checked]
    check_no_aliasing([item.tensor for item in checked], outs, names)
    check_unused([item.tensor for item in checked], outs, names, bases=[item.base for item in checked])
    check_no_aliasing([item.base for item in checked], outs, names, "a base, which the transfer must not change")
    checked = [replace(item, tensor=detach_source(item.tensor), base=detach_source(item.base)) for item in checked]
    for item in checked:
        if item.is_assumed_replicated and item.tensor is not None and len(item.src.ranks) > 1:
            tensors[item.name] = replace(tensors[item.name], digest=digest_array(item.tensor))
        elif item.shape is None and item.src_dtensor is None and item.tensor is not None and len(item.src.ranks) > 1:
            tensors[item.name] = replace(tensors[item.name], corners=digest_corners(item.tensor))
    return checked


def _describe_option(name: str, value: Any) -> tuple[str, str]:
    """An option as the ranks compare it: ``(name, text)``."""
    if name == "strategy":
        return name, find_strategy(value)[0]
    return name, codec_name(value) if name == "compression" else str(value)


def _check_device(device_type: str, options: TransferOptions) -> None:
    check_verify(options["verify"])
    check_on_loss(options["on_loss"])
    if options["compression"] is not None and device_type != "cpu" and not needs_cpu(options):
        check_device_codec(find_codec(options["compression"]), device_type)


def _check_item(item: Item, rank: int, options: TransferOptions) -> tuple[TensorRequest, Item]:
    compression = options["compression"]
    what = f"tensor {item.name!r}" if item.name else "the tensor"
    tensor, base, dst_dtype = wait_for_collective(item.tensor), wait_for_collective(item.base), item.dst_dtype
    shape = local = out = None
    devices = []
    if item.shape is not None:
        shape = list(check_shape(item.shape))
        if any(size < 0 for size in shape):
            raise ArgumentError(f"{what}: shape {shape} has a negative size")
        for dtensor, role in ((item.src_dtensor, "the source DTensor"), (item.out_dtensor, "the out DTensor")):
            if dtensor is not None and list(dtensor.shape) != shape:
                raise ArgumentError(f"{what}: {role} has shape {list(dtensor.shape)}, but shape is {shape}")
    dtype = None if item.dtype is None else dtype_name(item.dtype)
    if dst_dtype is not None:
        dst_dtype = dtype_name(dst_dtype)
    if rank in item.src.ranks:
        if tensor is None:
            raise ArgumentError(f"{what}: rank {rank} is in the source layout, but passes None")
        check_movable(tensor, what, rank)
        local = (list(tensor.shape), dtype_name(tensor.dtype))
        devices.append(tensor.device.type)
        _check_device(tensor.device.type, options)
        if dst_dtype is not None:
            check_cast(local[1], dst_dtype, what)
            warn_of_float8(local[1], dst_dtype, what)
        if has_variable_size(compression) and dst_dtype not in (None, local[1]):
            raise ArgumentError(
                f"{what}: {compression} sends {local[1]} bit for bit, and cannot make {dst_dtype} of it; omit dst_dtype"
            )
    elif tensor is not None:
        if item.src_dtensor is None:
            raise ArgumentError(f"{what}: rank {rank} is not in the source layout and must pass None")
        tensor = None
    if item.out is not None:
        check_movable(item.out, f"out of {what}", rank)
        out = (list(item.out.shape), dtype_name(item.out.dtype))
        devices.append(item.out.device.type)
        _check_device(item.out.device.type, options)
    if base is not None:
        if not has_base(compression):
            raise ArgumentError(f"{what}: base= is for compression='delta', not {brief(compression)}")
        check_base(base, tensor, what, rank)
    request = TensorRequest(shape, dtype, dst_dtype, item.src_dtensor is not None, local, out, devices)
    return request, replace(item, tensor=tensor, base=base, dst_dtype=dst_dtype)
