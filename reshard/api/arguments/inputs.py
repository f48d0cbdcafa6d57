"""The first step of a call: read its arguments, in any notation, into one item per tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.api.arguments.options import TransferOptions, is_fault_tolerant
from reshard.api.arrays.dtensors import check_same_layout, is_device_mesh, is_dtensor, mesh_of
from reshard.coordination import (
    Group,
    RoundRequest,
    count_call,
    describe_error,
    find_call_group,
    find_group,
    leave_interrupted,
    remaining_ranks,
    report_error,
    resolve,
)
from reshard.errors import ArgumentError, ReshardError
from reshard.formatting import compare_names
from reshard.runtime.cuda.host_copies import to_device, to_host
from reshard.runtime.cuda.stream import refuse_capture
from reshard.sharding import AnyLayout, Layout, Mesh, RegionLayout
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout


@dataclass(frozen=True)
class Item:
    """One tensor of a call, with the arguments that this rank passes for it."""

    name: str
    src: AnyLayout
    dst: AnyLayout
    tensor: Any
    out: Any
    base: Any
    shape: Any
    dtype: Any
    dst_dtype: Any
    src_dtensor: Any  # the DTensor that was passed as the source, or None
    out_dtensor: Any  # the DTensor that was passed as out, or None
    is_assumed_replicated: bool  # a plain tensor without a spec: ranks compare their replicas
    dst_device_mesh: Any
    dst_placements: Any
    names: list[str]  # names of all tensors, in the order of this rank's arguments
    spec_error: ReshardError | None  # a spec does not fit its mesh; raised on all ranks in the agreement
    device: Any = None  # of the result, if the transfer runs on host copies of the arrays
    device_out: Any = None  # the ``out`` of which ``out`` is a host copy

    def on_host(self, device: Any) -> Item:
        """The item with host copies of its arrays, whose result belongs on ``device``."""
        copies = {name: to_host(getattr(self, name)) for name in ("tensor", "base", "out")}
        return replace(self, **copies, device=device, device_out=self.out)

    def on_device(self, array: Any) -> Any:
        """A destination shard, copied to where it belongs if the transfer ran on host copies."""
        return array if self.device is None or array is None else to_device(array, self.device, self.device_out)

    def wrap(self, array: Any, shape: Sequence[int]) -> Any:
        """A destination shard as a DTensor if the destination is a DeviceMesh; else unchanged."""
        if self.out_dtensor is not None:
            return self.out_dtensor
        if self.dst_device_mesh is None or array is None:
            return array
        import torch
        from torch.distributed.tensor import DTensor

        stride = torch.empty(list(shape), device="meta").stride()
        placements = self.dst_placements or self.dst.to_placements()  # type: ignore[union-attr]
        return DTensor.from_local(
            array, self.dst_device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call on one rank.

    Attributes:
        group: the group that ranks refer to.
        items: one per tensor.
        members: the ranks of the call, ascending; some may be outside the group.
        options: all options. Only ``timeout_seconds`` is checked.
    """

    group: Group
    items: list[Item]
    members: tuple[int, ...]
    options: TransferOptions


def read_inputs(group: Group, given: Mapping[str, Any], options: TransferOptions) -> Inputs:
    """Read the arguments of a call.

    Args:
        group: the group that ranks refer to.
        given: see :func:`read_items`.
        options: all options, not checked.

    Raises:
        ReshardError: an argument is wrong. The other ranks of the call get this error too.
    """
    try:
        refuse_capture()
        items = read_items(given, group)
        members = tuple(sorted({rank for item in items for side in (item.src, item.dst) for rank in side.ranks}))
        outside = not any(rank < group.size for rank in members)
        if outside or group.rank not in members:
            find_call_group(group, members)  # raises
        options = {**options, "timeout_seconds": check_timeout(options["timeout_seconds"])}
        return Inputs(group, items, members, options)
    except ReshardError as error:
        _report_bad_arguments(group, error, given, options)
        raise
    except Exception as error:  # a wrong argument may raise anything; the other ranks must receive it
        known = ArgumentError(f"{type(error).__name__}: {error}")
        _report_bad_arguments(group, known, given, options)
        raise known from error


def read_items(given: Mapping[str, Any], group: Group) -> list[Item]:
    """One item per tensor, sorted by name; a single unnamed tensor has the name ``""``.

    Args:
        given: the arguments of a call that may differ between tensors: ``tensor``, ``src_mesh``, ``dst_mesh``,
            ``src_spec``, ``dst_spec``, ``shape``, ``dtype``, ``dst_dtype``, ``out`` and ``base``.
    """
    tensor, out = given["tensor"], given["out"]
    names: list[str] | None = None
    ordered: list[str] = []
    for what, value in given.items():
        if isinstance(value, Mapping):
            if not value or not all(isinstance(name, str) and name for name in value):
                raise ArgumentError(f"{what} is a dict and needs non-empty strings as keys, not {list(value)[:8]}")
            if names is not None and sorted(value) != names:
                raise ArgumentError(f"{what} {compare_names(value, names)}; all dict arguments need the same names")
            names = sorted(value)
            ordered = ordered or list(value)
    if names is None:
        return [_read_item("", [""], given, group)]
    if tensor is not None and not isinstance(tensor, Mapping):
        raise ArgumentError("another argument is a dict, so the tensor must be one too: {name: tensor}")
    if out is not None and not isinstance(out, Mapping):
        raise ArgumentError("another argument is a dict, so out must be one too: {name: array}")
    return [
        _read_item(name, ordered, {what: v[name] if isinstance(v, Mapping) else v for what, v in given.items()}, group)
        for name in names
    ]


def _report_bad_arguments(
    group: Group, error: ReshardError, given: Mapping[str, Any], options: TransferOptions
) -> None:
    """Report an error in this rank's arguments to the other ranks of the call.

    If the meshes can be read, this rank joins the call's agreement round with the error. Otherwise it publishes the
    error in the store, which waiting ranks poll.

    Raises:
        ReshardError: the error that all ranks of the round raise. Without a round the function returns.
    """
    try:
        members = find_members(given["tensor"], given["src_mesh"], given["dst_mesh"], group)
    except Exception:  # the meshes themselves are wrong
        report_error(group, error)
        return
    inside = remaining_ranks(group, [rank for rank in members if rank < group.size])
    if group.rank not in inside:  # no rank waits for this one
        return
    try:
        seconds = check_timeout(options["timeout_seconds"])
    except Exception:  # the timeout itself is wrong
        seconds = DEFAULT_TIMEOUT_SECONDS
    fault_tolerant = is_fault_tolerant(options)
    with count_call(group, members, fault_tolerant) as purpose:
        request = RoundRequest(group.rank, hostname=group.hostname, error=describe_error(error), purpose=purpose)
        while group.rank in inside:  # agree raises the error once every surviving rank has it
            find_call_group(group, inside).agree(
                request, lambda requests: resolve(requests, {}), seconds, fault_tolerant
            )
            inside = remaining_ranks(group, inside)


def leave_call_of_arguments(error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count and publish a call of these arguments that an exception ended before its group knew of it."""
    group = find_group(kwargs.get("group"))
    names = ("tensor", "src_mesh", "dst_mesh")
    given = dict.fromkeys(names) | dict(zip(names, args, strict=False))
    given |= {name: kwargs[name] for name in names if name in kwargs}
    tensor, src_mesh, dst_mesh = given.values()
    leave_interrupted(error, group, lambda: find_members(tensor, src_mesh, dst_mesh, group))


def find_members(tensor: Any, src_mesh: Any, dst_mesh: Any, group: Group) -> tuple[int, ...]:
    """The ranks of the source and destination meshes, ignoring all other arguments."""
    if src_mesh is None:
        tensors = tensor.values() if isinstance(tensor, Mapping) else [tensor]
        src_mesh = dict(enumerate(item.device_mesh for item in tensors))
    ranks: set[int] = set()
    for given in (src_mesh, dst_mesh):
        for mesh in given.values() if isinstance(given, Mapping) else [given]:
            ranks.update(_read_layout(mesh, None, group, "a mesh")[0].ranks)
    return tuple(sorted(ranks))


def _read_item(name: str, names: list[str], given: Mapping[str, Any], group: Group) -> Item:
    tensor, shape, dtype, out = given["tensor"], given["shape"], given["dtype"], given["out"]
    src_dtensor = tensor if is_dtensor(tensor) else None
    out_dtensor = out if is_dtensor(out) else None
    what = f" of {name!r}" if name else ""
    src, src_error = _read_side("src", given, src_dtensor, group, what)
    dst, dst_error = _read_side("dst", given, out_dtensor, group, what)
    if src_dtensor is not None:
        dtype = src_dtensor.dtype if dtype is None else dtype
        tensor = src_dtensor.to_local().detach()
    either = out_dtensor if src_dtensor is None else src_dtensor
    if shape is None and either is not None:
        shape = list(either.shape)
    dst_mesh = given["dst_mesh"] if out_dtensor is None else out_dtensor.device_mesh
    placements = given["dst_spec"] if out_dtensor is None else out_dtensor.placements
    return Item(
        name=name,
        names=names,
        src=src,
        dst=dst,
        tensor=tensor,
        out=out if out_dtensor is None else out_dtensor.to_local(),
        base=given["base"].to_local() if is_dtensor(given["base"]) else given["base"],
        shape=shape,
        dtype=dtype,
        dst_dtype=given["dst_dtype"],
        src_dtensor=src_dtensor,
        out_dtensor=out_dtensor,
        is_assumed_replicated=src_dtensor is None
        and given["src_spec"] is None
        and isinstance(src, Layout)
        and not src.spec
        and not isinstance(given["src_mesh"], Layout),
        dst_device_mesh=dst_mesh if is_device_mesh(dst_mesh) else None,
        dst_placements=list(placements) if _are_placements(placements) else None,
        spec_error=src_error or dst_error,
    )


def _are_placements(spec: Any) -> bool:
    return isinstance(spec, (list, tuple)) and bool(spec) and all(hasattr(axis, "is_partial") for axis in spec)


def _read_side(
    side: str, given: Mapping[str, Any], dtensor: Any, group: Group, what: str
) -> tuple[AnyLayout, ReshardError | None]:
    """The source or destination layout, from a DTensor or from the arguments; if both give one, they must match."""
    mesh, spec = given[f"{side}_mesh"], given[f"{side}_spec"]
    if dtensor is None:
        if mesh is None:
            other = ", or pass a DTensor" if side == "src" else ""
            raise ArgumentError(f"{side}_mesh{what} is missing: pass a Mesh, a DeviceMesh or a Layout{other}")
        return _read_layout(mesh, spec, group, f"{side}_mesh{what}", _find_ndim(given))
    own, error = _read_layout(dtensor.device_mesh, list(dtensor.placements), group, f"{side}_mesh{what}", dtensor.dim())
    if error is not None or (mesh is None and spec is None):
        return own, error
    given_mesh = dtensor.device_mesh if mesh is None else mesh
    asked, error = _read_layout(given_mesh, spec, group, f"{side}_mesh{what}", dtensor.dim())
    if error is not None:
        return asked, error
    is_mesh_alone = spec is None and not isinstance(mesh, (Layout, RegionLayout))
    if is_mesh_alone and isinstance(asked, Layout) and own.mesh.array.tolist() == asked.mesh.array.tolist():  # type: ignore[union-attr]
        return (own if own.spec else asked), None  # type: ignore[union-attr]
    try:
        role = f"the {'source' if side == 'src' else 'out'} DTensor{what}"
        source = f"{side}_mesh" if spec is None else f"{side}_spec"
        check_same_layout(own, asked, tuple(dtensor.shape), group.rank, role, source)  # type: ignore[arg-type]
    except ReshardError as mismatch:
        return asked, mismatch
    return asked, None


def _find_ndim(given: Mapping[str, Any]) -> int | None:
    """The number of tensor dims, or None if this rank's arguments do not give it."""
    if isinstance(given["shape"], Sequence):
        return len(given["shape"])
    for array in (given["tensor"], given["out"]):
        if hasattr(array, "ndim"):
            return int(array.ndim)
    return None


def _read_layout(
    mesh: Any, spec: Any, group: Group, what: str, ndim: int | None = None
) -> tuple[AnyLayout, ReshardError | None]:
    """A layout, and the error if the spec does not fit.

    The error is returned, not raised: the mesh still gives the ranks that must receive it.
    """
    if isinstance(mesh, (Layout, RegionLayout)):
        error = (
            ArgumentError(f"{what} is a layout, which already has a spec; omit the spec") if spec is not None else None
        )
        return mesh, error
    if isinstance(mesh, Mesh):
        converted = mesh
    elif is_device_mesh(mesh):
        converted = mesh_of(mesh, group)
    elif hasattr(mesh, "axis_names") and hasattr(mesh, "devices"):
        converted = Mesh.from_jax(mesh)
    else:
        raise ArgumentError(f"{what} must be a Mesh, a DeviceMesh, a jax Mesh or a Layout, not {type(mesh).__name__}")
    try:
        return Layout(converted, spec, ndim=ndim), None
    except ReshardError as error:
        return Layout(converted), error
