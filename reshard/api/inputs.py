"""What a call is given, read into one item per tensor, whatever notation it came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.api.dtensors import check_same_layout, is_device_mesh, is_dtensor, mesh_of
from reshard.coordination.communicator import find_channel
from reshard.coordination.decide import Request, describe_error, resolve
from reshard.coordination.liveness.call_sequence import report_error
from reshard.coordination.liveness.membership import counting, those_left
from reshard.coordination.process_group import Group
from reshard.errors import ArgumentError, ReshardError
from reshard.formatting import compare_names
from reshard.sharding.layout import AnyLayout, Layout, RegionLayout
from reshard.sharding.mesh import Mesh
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout


@dataclass
class Item:
    """One tensor of a call, as this rank passes it."""

    name: str
    src: AnyLayout
    dst: AnyLayout
    tensor: Any
    out: Any
    shape: Any
    dtype: Any
    dst_dtype: Any
    like: Any  # the DTensor that came in
    out_like: Any  # the DTensor to fill
    is_assumed_replicated: bool  # no spec was given for a plain tensor: the ranks compare their replicas
    dst_device_mesh: Any
    dst_placements: Any
    names: list[str]  # of all tensors, in the order in which this rank passes them
    spec_error: ReshardError | None  # a spec that does not fit its mesh, told once ranks meet

    def wrap(self, array: Any, shape: Sequence[int]) -> Any:
        """A destination shard as a DTensor if the destination is a DeviceMesh."""
        if self.out_like is not None:
            return self.out_like
        if self.dst_device_mesh is None or array is None:
            return array
        import torch
        from torch.distributed.tensor import DTensor

        stride = torch.empty(list(shape), device="meta").stride()
        placements = self.dst_placements or self.dst.to_placements()  # type: ignore[union-attr]
        return DTensor.from_local(
            array, self.dst_device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


def read_items(
    tensor: Any,
    src_mesh: Any,
    dst_mesh: Any,
    src_spec: Any,
    dst_spec: Any,
    shape: Any,
    dtype: Any,
    dst_dtype: Any,
    out: Any,
    group: Group,
) -> list[Item]:
    """One item per tensor, sorted by name; a single tensor has the name ''."""
    given = {
        "tensor": tensor,
        "src_mesh": src_mesh,
        "dst_mesh": dst_mesh,
        "src_spec": src_spec,
        "dst_spec": dst_spec,
        "shape": shape,
        "dtype": dtype,
        "dst_dtype": dst_dtype,
        "out": out,
    }
    names: list[str] | None = None
    ordered: list[str] = []
    for what, value in given.items():
        if isinstance(value, Mapping):
            if not value or not all(isinstance(name, str) and name for name in value):
                raise ArgumentError(f"{what} as a dict needs names that are strings, not {list(value)[:8]}")
            if names is not None and sorted(value) != names:
                raise ArgumentError(f"{what} {compare_names(value, names)}; all arguments given by name need the same")
            names = sorted(value)
            ordered = ordered or list(value)
    if names is None:
        return [_read_item("", [""], given, group)]
    if tensor is not None and not isinstance(tensor, Mapping):
        raise ArgumentError("arguments are given by name, so the tensor must be too: {name: tensor}")
    if out is not None and not isinstance(out, Mapping):
        raise ArgumentError("arguments are given by name, so out must be too: {name: array}")
    return [
        _read_item(name, ordered, {what: v[name] if isinstance(v, Mapping) else v for what, v in given.items()}, group)
        for name in names
    ]


def refuse(
    group: Group,
    error: ReshardError,
    tensor: Any,
    src_mesh: Any,
    dst_mesh: Any,
    timeout_seconds: Any,
    fault_tolerant: bool,
) -> None:
    """Let the other ranks of a call hear of an error in what this one was given.

    In their round, where the meshes say who they are; else in the store, where they find it when they wait for long.

    Raises:
        ReshardError: what all ranks of the round raise. Returns where there was none.
    """
    try:
        members = _find_members(tensor, src_mesh, dst_mesh, group)
    except Exception:  # that is what is wrong, then
        report_error(group, error)
        return
    inside = those_left(group, [rank for rank in members if rank < group.size])
    if group.rank not in inside:  # nobody waits for it
        return
    try:
        seconds = check_timeout(timeout_seconds)
    except Exception:  # that is what is wrong, then
        seconds = DEFAULT_TIMEOUT_SECONDS
    with counting(group, members, fault_tolerant) as place:
        request = Request(group.rank, hostname=group.hostname, error=describe_error(error), place=place)
        while group.rank in inside:  # until the error is told to all that are left
            find_channel(group, inside).agree(request, lambda requests: resolve(requests, {}), seconds, fault_tolerant)
            inside = those_left(group, inside)


def _find_members(tensor: Any, src_mesh: Any, dst_mesh: Any, group: Group) -> tuple[int, ...]:
    """The ranks that meshes name, whatever else is wrong."""
    if src_mesh is None:
        tensors = tensor.values() if isinstance(tensor, Mapping) else [tensor]
        src_mesh = dict(enumerate(one.device_mesh for one in tensors))
    ranks: set[int] = set()
    for given in (src_mesh, dst_mesh):
        for mesh in given.values() if isinstance(given, Mapping) else [given]:
            ranks.update(_read_layout(mesh, None, group, "a mesh")[0].ranks)
    return tuple(sorted(ranks))


def _read_item(name: str, names: list[str], given: Mapping[str, Any], group: Group) -> Item:
    tensor, shape, dtype, out = given["tensor"], given["shape"], given["dtype"], given["out"]
    like = tensor if is_dtensor(tensor) else None
    out_like = out if is_dtensor(out) else None
    what = f" of {name!r}" if name else ""
    src, src_error = _read_side("src", given, like, group, what)
    dst, dst_error = _read_side("dst", given, out_like, group, what)
    if like is not None:
        dtype = like.dtype if dtype is None else dtype
        tensor = like.to_local().detach()
    either = out_like if like is None else like
    if shape is None and either is not None:
        shape = list(either.shape)
    dst_mesh = given["dst_mesh"] if out_like is None else out_like.device_mesh
    placements = given["dst_spec"] if out_like is None else out_like.placements
    return Item(
        name=name,
        names=names,
        src=src,
        dst=dst,
        tensor=tensor,
        out=out if out_like is None else out_like.to_local(),
        shape=shape,
        dtype=dtype,
        dst_dtype=given["dst_dtype"],
        like=like,
        out_like=out_like,
        is_assumed_replicated=like is None
        and given["src_spec"] is None
        and isinstance(src, Layout)
        and not src.spec
        and not isinstance(given["src_mesh"], Layout),
        dst_device_mesh=dst_mesh if is_device_mesh(dst_mesh) else None,
        dst_placements=list(placements) if _are_placements(placements) else None,
        spec_error=src_error or dst_error,
    )


def _are_placements(spec: Any) -> bool:
    return isinstance(spec, (list, tuple)) and bool(spec) and all(hasattr(one, "is_partial") for one in spec)


def _read_side(
    side: str, given: Mapping[str, Any], dtensor: Any, group: Group, what: str
) -> tuple[AnyLayout, ReshardError | None]:
    """The source or the destination layout: what a DTensor says of itself, or what the arguments say, or both alike."""
    mesh, spec = given[f"{side}_mesh"], given[f"{side}_spec"]
    if dtensor is None:
        if mesh is None:
            other = ", or pass a DTensor" if side == "src" else ""
            raise ArgumentError(f"{side}_mesh{what} is missing: give a Mesh, a DeviceMesh or a Layout{other}")
        return _read_layout(mesh, spec, group, f"{side}_mesh{what}", _find_ndim(given))
    own, error = _read_layout(dtensor.device_mesh, list(dtensor.placements), group, f"{side}_mesh{what}", dtensor.dim())
    if error is not None or (mesh is None and spec is None):
        return own, error
    given_mesh = dtensor.device_mesh if mesh is None else mesh
    said, error = _read_layout(given_mesh, spec, group, f"{side}_mesh{what}", dtensor.dim())
    if error is not None:
        return said, error
    is_mesh_alone = spec is None and not isinstance(mesh, (Layout, RegionLayout))
    if is_mesh_alone and isinstance(said, Layout) and own.mesh.array.tolist() == said.mesh.array.tolist():  # type: ignore[union-attr]
        return (own if own.spec else said), None  # type: ignore[union-attr]
    try:
        role = f"the {'source' if side == 'src' else 'out'} DTensor{what}"
        source = f"{side}_mesh" if spec is None else f"{side}_spec"
        check_same_layout(own, said, tuple(dtensor.shape), group.rank, role, source)  # type: ignore[arg-type]
    except ReshardError as contradiction:
        return said, contradiction
    return said, None


def _find_ndim(given: Mapping[str, Any]) -> int | None:
    """The number of tensor dims as far as this rank knows it."""
    if isinstance(given["shape"], Sequence):
        return len(given["shape"])
    for array in (given["tensor"], given["out"]):
        if hasattr(array, "ndim"):
            return int(array.ndim)
    return None


def _read_layout(
    mesh: Any, spec: Any, group: Group, what: str, ndim: int | None = None
) -> tuple[AnyLayout, ReshardError | None]:
    """A layout; a spec that does not fit is an error for later, since its mesh says which ranks must hear of it."""
    if isinstance(mesh, (Layout, RegionLayout)):
        error = ArgumentError(f"{what} is a layout and has a spec already") if spec is not None else None
        return mesh, error
    if isinstance(mesh, Mesh):
        ours = mesh
    elif is_device_mesh(mesh):
        ours = mesh_of(mesh, group)
    elif hasattr(mesh, "axis_names") and hasattr(mesh, "devices"):
        ours = Mesh.from_jax(mesh)
    else:
        raise ArgumentError(f"{what} must be a Mesh, a DeviceMesh, a jax Mesh or a Layout, not {type(mesh).__name__}")
    try:
        return Layout(ours, spec, ndim=ndim), None
    except ReshardError as error:
        return Layout(ours), error
