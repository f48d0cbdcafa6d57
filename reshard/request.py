"""What a call is given, read into one item per tensor, whatever notation it came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.agreement import Record, describe_error, resolve
from reshard.channel import find_channel
from reshard.errors import ArgumentError, ReshardError
from reshard.failures import tell_error
from reshard.group import Group
from reshard.layout import AnyLayout, Layout, RegionLayout
from reshard.mesh import Mesh
from reshard.options import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.outcasts import counting, those_left


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
    dst_device_mesh: Any
    dst_spec: Any
    names: list[str]  # of all tensors, in the order in which this rank passes them
    spec_error: ReshardError | None  # a spec that does not fit its mesh, told once ranks meet

    def wrap(self, array: Any, shape: Sequence[int]) -> Any:
        """A destination shard as a DTensor if the destination is a DeviceMesh."""
        if self.dst_device_mesh is None or array is None:
            return array
        import torch
        from torch.distributed.tensor import DTensor

        stride = torch.empty(list(shape), device="meta").stride()
        placements = self.dst_spec if self.dst_spec is not None else self.dst.to_placements()  # type: ignore[union-attr]
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
                raise ArgumentError(f"{what} is given for {sorted(value)}, but other arguments for {names}")
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
    bears_loss: bool,
) -> None:
    """Let the other ranks of a call hear of an error in what this one was given.

    In their round, where the meshes say who they are; else in the store, where they find it when they wait for long.

    Raises:
        ReshardError: what all ranks of the round raise. Returns where there was none.
    """
    try:
        members = _find_members(tensor, src_mesh, dst_mesh, group)
    except Exception:  # that is what is wrong, then
        tell_error(group, error)
        return
    inside = those_left(group, [rank for rank in members if rank < group.size])
    if group.rank not in inside:  # nobody waits for it
        return
    try:
        seconds = check_timeout(timeout_seconds)
    except Exception:  # that is what is wrong, then
        seconds = DEFAULT_TIMEOUT_SECONDS
    with counting(group, members, bears_loss) as place:
        record = Record(group.rank, hostname=group.hostname, error=describe_error(error), place=place)
        while group.rank in inside:  # until the error is told to all that are left
            find_channel(group, inside).agree(record, lambda records: resolve(records, {}), seconds, bears_loss)
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


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def _read_item(name: str, names: list[str], given: Mapping[str, Any], group: Group) -> Item:
    tensor, src_mesh, src_spec = given["tensor"], given["src_mesh"], given["src_spec"]
    dst_mesh, shape, dtype, out = given["dst_mesh"], given["shape"], given["dtype"], given["out"]
    like = None
    if _is_dtensor(tensor):
        like = tensor
        if src_mesh is None:
            if src_spec is not None:
                raise ArgumentError("src_spec is given, but the DTensor brings its own placements")
            src_mesh, src_spec = tensor.device_mesh, list(tensor.placements)
        shape = list(tensor.shape) if shape is None else shape
        dtype = tensor.dtype if dtype is None else dtype
        tensor = tensor.to_local().detach()
    if _is_dtensor(out):
        out = out.to_local()
    what = f" of {name!r}" if name else ""
    if src_mesh is None:
        raise ArgumentError(f"src_mesh{what} is missing: give a Mesh, a DeviceMesh or a Layout, or pass a DTensor")
    if dst_mesh is None:
        raise ArgumentError(f"dst_mesh{what} is missing: give a Mesh, a DeviceMesh or a Layout")
    src, src_error = _read_layout(src_mesh, src_spec, group, f"src_mesh{what}")
    dst, dst_error = _read_layout(dst_mesh, given["dst_spec"], group, f"dst_mesh{what}")
    return Item(
        name=name,
        names=names,
        src=src,
        dst=dst,
        tensor=tensor,
        out=out,
        shape=shape,
        dtype=dtype,
        dst_dtype=given["dst_dtype"],
        like=like,
        dst_device_mesh=dst_mesh if _is_device_mesh(dst_mesh) else None,
        dst_spec=given["dst_spec"] if isinstance(given["dst_spec"], (list, tuple)) else None,
        spec_error=src_error or dst_error,
    )


def _is_device_mesh(mesh: Any) -> bool:
    return hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "mesh")


def _read_layout(mesh: Any, spec: Any, group: Group, what: str) -> tuple[AnyLayout, ReshardError | None]:
    """A layout; a spec that does not fit is an error for later, since its mesh says which ranks must hear of it."""
    if isinstance(mesh, (Layout, RegionLayout)):
        error = ArgumentError(f"{what} is a layout and has a spec already") if spec is not None else None
        return mesh, error
    if isinstance(mesh, Mesh):
        ours = mesh
    elif _is_device_mesh(mesh):
        ours = Mesh.from_device_mesh(mesh)
        ours = ours.with_ranks({rank: group.translate(rank) for rank in ours.ranks})
    elif hasattr(mesh, "axis_names") and hasattr(mesh, "devices"):
        ours = Mesh.from_jax(mesh)
    else:
        raise ArgumentError(f"{what} must be a Mesh, a DeviceMesh, a jax Mesh or a Layout, not {type(mesh).__name__}")
    try:
        return Layout(ours, spec), None
    except ReshardError as error:
        return Layout(ours), error
