"""Checks one rank's arguments and builds the request that it brings to the agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from reshard import __version__
from reshard.api.casts import check_cast
from reshard.api.inputs import Item
from reshard.api.memory_in_use import check_unused
from reshard.api.option_checks import check_compression, check_on_loss, check_verify, codes_on_cpu
from reshard.api.tensor_checks import check_base, check_movable, check_no_aliasing, detach_source, wait_for_collective
from reshard.codecs import codec_name, find_codec, is_lossless
from reshard.coordination import Group, Request, TensorRequest, check_inside
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, ReshardError
from reshard.planner import Strategy, find_strategy
from reshard.runtime.array_bytes import digest_array
from reshard.runtime.cuda.coding import check_device_codec
from reshard.sharding import check_shape
from reshard.topology import Topology, topology_to_json


class Options(NamedTuple):
    """Keyword arguments of a call, not checked yet."""

    strategy: str | Strategy | None
    topology: Topology | None
    staging_bytes: int
    verify: bool
    on_loss: Any
    compression: Any = None
    max_error: Any = None
    on_error: Any = "raw"

    @property
    def needs_cpu(self) -> bool:
        """Whether a valid option is for transfers on the CPU only."""
        is_plain = not self.verify and self.on_loss == "raise" and self.max_error is None
        return not is_plain or codes_on_cpu(self.compression)

    @property
    def fault_tolerant(self) -> bool:
        """Whether surviving ranks continue without lost ones. An invalid ``on_loss`` is reported in the agreement."""
        return isinstance(self.on_loss, str) and self.on_loss != "raise"


def make_request(
    group: Group, items: Sequence[Item], members: Sequence[int], options: Options, purpose: str
) -> tuple[Request, list[Item]]:
    """Check the arguments of this rank.

    Args:
        items: one per tensor. members: the ranks of the call. purpose: of the request.

    Returns:
        The request, with the local error if the arguments are wrong, and the items with detached source tensors and
        dtypes by name.
    """
    arguments: list[tuple[str, str]] = []
    tensors = {item.name: TensorRequest() for item in items}
    checked, error = list(items), None
    try:
        checked = _check_local(arguments, tensors, group, items, members, options)
    except ReshardError as known:
        error = (type(known).__name__, str(known))
    except Exception as other:  # a wrong argument may raise anything; the other ranks must receive it
        error = ("ArgumentError", f"{type(other).__name__}: {other}")
    return Request(group.rank, arguments, tensors, group.hostname, error=error, purpose=purpose), checked


def _check_local(
    arguments: list[tuple[str, str]],
    tensors: dict[str, TensorRequest],
    group: Group,
    items: Sequence[Item],
    members: Sequence[int],
    options: Options,
) -> list[Item]:
    """Fill ``arguments`` and ``tensors`` up to the first wrong argument; returns the items to move."""
    arguments.append(("the version of reshard", __version__))
    arguments.append(("the size of the group", str(group.size)))
    arguments.append(("the tensors", ", ".join(repr(item.name) for item in items)))
    arguments.append(("strategy", find_strategy(options.strategy)[0]))
    arguments.append(("staging_bytes", str(options.staging_bytes)))
    arguments.append(("verify", str(options.verify)))
    arguments.append(("on_loss", str(options.on_loss)))
    arguments.append(("compression", codec_name(options.compression)))
    arguments.append(("max_error", str(options.max_error)))
    arguments.append(("on_error", str(options.on_error)))
    if options.topology is not None and not isinstance(options.topology, Topology):
        raise ArgumentError(f"topology must be a Topology, not {type(options.topology).__name__}")
    _check_device("cpu", options)
    check_compression(options.compression, options.max_error, options.on_error)
    arguments.append(("topology", "None" if options.topology is None else str(topology_to_json(options.topology))))
    for item in items:
        of = f" of {item.name!r}" if item.name else ""
        arguments.append((f"the source layout{of}", str(item.src)))
        arguments.append((f"the destination layout{of}", str(item.dst)))
    check_inside(group, members)
    if options.topology is not None:
        options.topology.check_covers(members)
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
    return checked


def _check_device(device_type: str, options: Options) -> None:
    check_verify(options.verify)
    check_on_loss(options.on_loss)
    if options.compression is not None and device_type != "cpu" and not options.needs_cpu:
        check_device_codec(find_codec(options.compression), device_type)


def _check_item(item: Item, rank: int, options: Options) -> tuple[TensorRequest, Item]:
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
        if is_lossless(options.compression) and dst_dtype not in (None, local[1]):
            raise ArgumentError(
                f"{what}: {options.compression} sends {local[1]} bit for bit, and cannot make {dst_dtype} of it; omit "
                "dst_dtype"
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
        if options.compression != "delta":
            raise ArgumentError(f"{what}: base= is for compression='delta', not {options.compression!r}")
        check_base(base, tensor, what, rank)
    request = TensorRequest(shape, dtype, dst_dtype, item.src_dtensor is not None, local, out, devices)
    return request, replace(item, tensor=tensor, base=base, dst_dtype=dst_dtype)
