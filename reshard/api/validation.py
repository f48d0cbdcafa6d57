"""What one rank of a call says of what it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from reshard.api.casts import check_cast
from reshard.api.inputs import Item
from reshard.api.options import check_on_loss, check_verify
from reshard.api.tensor_checks import as_plain, check_apart, check_movable, waited_for
from reshard.coordination.decide import Request, TensorRequest
from reshard.coordination.process_group import Group, check_inside
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, ReshardError
from reshard.planner.registry import find_strategy
from reshard.planner.strategies.problem import Strategy
from reshard.runtime.cpu.verification import digest_array
from reshard.sharding.dim_cuts import check_shape
from reshard.topology.files import topology_to_json
from reshard.topology.model import Topology
from reshard.version import __version__


class Options(NamedTuple):
    """How a call is made, as it was given: not checked yet."""

    strategy: str | Strategy | None
    topology: Topology | None
    staging_bytes: int
    verify: bool
    on_loss: Any

    @property
    def fault_tolerant(self) -> bool:
        """Whether ranks go on without those that are lost; what else ``on_loss`` may be is told in the round."""
        return isinstance(self.on_loss, str) and self.on_loss != "raise"


def make_request(group: Group, items: Sequence[Item], members: Sequence[int], options: Options) -> Request:
    """What a rank says when it calls, with its local error if it has one.

    Args:
        items: what it was given of each tensor; their tensors are made plain. members: who takes part.
    """
    request = Request(group.rank, hostname=group.hostname)
    for item in items:
        request.tensors[item.name] = TensorRequest()
    try:
        _check_local(request, group, items, members, options)
    except ReshardError as error:
        request.error = (type(error).__name__, str(error))
    except Exception as error:  # whatever a wrong argument does here, the other ranks must hear of it
        request.error = ("ArgumentError", f"{type(error).__name__}: {error}")
    return request


def _check_local(
    request: Request, group: Group, items: Sequence[Item], members: Sequence[int], options: Options
) -> None:
    said = request.arguments
    said.append(("the version of reshard", __version__))
    said.append(("the size of the group", str(group.size)))
    said.append(("the tensors", ", ".join(repr(item.name) for item in items)))
    said.append(("strategy", find_strategy(options.strategy)[0]))
    said.append(("staging_bytes", str(options.staging_bytes)))
    said.append(("verify", str(options.verify)))
    said.append(("on_loss", str(options.on_loss)))
    if options.topology is not None and not isinstance(options.topology, Topology):
        raise ArgumentError(f"topology must be a Topology, not {type(options.topology).__name__}")
    _check_device("cpu", options)
    said.append(("topology", "None" if options.topology is None else str(topology_to_json(options.topology))))
    for item in items:
        of = f" of {item.name!r}" if item.name else ""
        said.append((f"the source layout{of}", str(item.src)))
        said.append((f"the destination layout{of}", str(item.dst)))
    check_inside(group, members)
    if options.topology is not None:
        options.topology.check_covers(members)
    for item in items:
        if item.spec_error is not None:
            raise item.spec_error
        _check_item(request.tensors[item.name], item, group.rank, options)
        said.append((f"the destination dtype{f' of {item.name!r}' if item.name else ''}", str(item.dst_dtype)))
    check_apart([item.tensor for item in items], [item.out for item in items], [item.name for item in items])
    for item in items:
        item.tensor = as_plain(item.tensor)
        if item.is_assumed_replicated and item.tensor is not None and len(item.src.ranks) > 1:
            request.tensors[item.name].digest = digest_array(item.tensor)


def _check_device(device_type: str, options: Options) -> None:
    check_verify(options.verify, device_type)
    check_on_loss(options.on_loss, device_type)


def _check_item(request: TensorRequest, item: Item, rank: int, options: Options) -> None:
    request.is_dtensor, item.tensor = item.like is not None, waited_for(item.tensor)
    what = f"tensor {item.name!r}" if item.name else "the tensor"
    if item.shape is not None:
        request.shape = list(check_shape(item.shape))
        if any(size < 0 for size in request.shape):
            raise ArgumentError(f"{what}: shape {request.shape} has a negative size")
        for dtensor, role in ((item.like, "the source DTensor"), (item.out_like, "the out DTensor")):
            if dtensor is not None and list(dtensor.shape) != request.shape:
                raise ArgumentError(f"{what}: {role} has shape {list(dtensor.shape)}, but shape is {request.shape}")
    if item.dtype is not None:
        request.dtype = dtype_name(item.dtype)
    if item.dst_dtype is not None:
        request.dst_dtype = item.dst_dtype = dtype_name(item.dst_dtype)
    if rank in item.src.ranks:
        if item.tensor is None:
            raise ArgumentError(f"{what}: rank {rank} is in the source layout, but passes None")
        check_movable(item.tensor, what, rank)
        request.local = (list(item.tensor.shape), dtype_name(item.tensor.dtype))
        request.devices.append(item.tensor.device.type)
        _check_device(item.tensor.device.type, options)
        if item.dst_dtype is not None:
            check_cast(request.local[1], item.dst_dtype, what)
    elif item.tensor is not None:
        if item.like is None:
            raise ArgumentError(f"{what}: rank {rank} is not in the source layout and must pass None")
        item.tensor = None
    if item.out is not None:
        check_movable(item.out, what, rank)
        request.out = (list(item.out.shape), dtype_name(item.out.dtype))
        request.devices.append(item.out.device.type)
        _check_device(item.out.device.type, options)
